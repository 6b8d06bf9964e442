"""The address of an MLflow server, checked before it is asked, and without its password in words.

>>> without_password("https://ada:p@ss@mlflow.example.com/api")
'https://mlflow.example.com/api'

MLflow takes an address without a host, and waits for minutes; urllib takes a port that is none, and
fails with words of its own.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from enginery.core.errors import OptionError


def require_server(server: str) -> None:
    """Raises OptionError, without the password, for an http address without a host or a port."""
    if not server.lower().startswith(("http:", "https:")):
        return
    try:
        parts = urlsplit(server)
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number, a bracket that does not end
        is_whole = False
    if not is_whole or re.search(r"[\s\0]", server):
        raise OptionError(
            f"MLFLOW_TRACKING_URI is {without_password(server)!r}, expected "
            "https://mlflow.example.com, or with a port: http://127.0.0.1:5000.",
            do="In a user name or password, write %2F for / and %40 for @.",
        )


def without_password(server: str) -> str:
    """A server's address without what is before its last @."""
    return re.sub(r"//.*@", "//", server, flags=re.DOTALL)


def said_by(error: object, server: str) -> str:
    """What an error says, without the login that is in the server's address, however quoted."""
    said = str(error)
    login = server.partition("//")[2].rpartition("@")[0]
    _, _, password = login.partition(":")
    for secret in (login, unquote(login), password, unquote(password)):
        if secret:
            said = said.replace(secret, "***")
    return re.sub(r"//[^/\s]*@", "//", said)
