"""`mlflow:/name`: publish to and pull from an MLflow model registry, with MLflow's client.

Publishing creates a run, a logged model, and a registered version that points to it:

    $ export MLFLOW_TRACKING_URI=https://mlflow.example.com
    $ enginery publish minilm mlflow:/minilm

Address and credentials of the server are in MLflow's environment variables.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from enginery.core.errors import OptionError, RegistryError
from enginery.core.extras import require_packages
from enginery.core.home import file_lock
from enginery.core.paths import is_portable_name
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import CONTENT, Package
from enginery.publish.targets.mlflow.model import ARTIFACT
from enginery.publish.targets.mlflow.upload import ignore_existing, upload_version

_ADDRESS = re.compile(
    r"mlflow:/{1,3}(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))?", re.IGNORECASE
)
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""Schemes of MLflow's own stores in a database; one of a driver follows a plus sign."""
_PING_SECONDS = 10
_CHECK_SERVER = "Check MLFLOW_TRACKING_URI and the log of the MLflow server."


class MlflowRegistry:
    """A registered model of an MLflow server."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Parse the address, without connecting to the server.

        Raises:
            OptionError: the address is not `mlflow:/name`, `mlflow:/name/3` or
                `mlflow:/name@alias`, or no tracking server is named.
            MissingPackageError: mlflow is not installed.
        """
        match = _ADDRESS.fullmatch(url)
        if not match or not is_portable_name(match["name"]):
            raise OptionError(
                f"address '{url}': expected mlflow:/name, mlflow:/name/3 or mlflow:/name@alias, "
                "with letters, digits, '.', '_' and '-' in the name."
            )
        self.name, self.version, self.alias = match["name"], match["version"], match["alias"]
        self.url = url
        if config.name and config.name != self.name:
            raise OptionError(
                f"option 'name' is '{config.name}', but the address has the name '{self.name}'."
            )
        require_packages(url, "mlflow", "pandas", extra="mlflow")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        import mlflow

        with warnings.catch_warnings():
            # MLflow's modules warn about their own type hints.
            warnings.simplefilter("ignore")
            import mlflow.pyfunc  # needs pandas
        if not os.environ.get("MLFLOW_TRACKING_URI") and not mlflow.is_tracking_uri_set():
            raise OptionError(
                f"{url} needs a tracking server, but MLFLOW_TRACKING_URI is not set.",
                do="Set it to the address of a server, such as http://127.0.0.1:5000.",
            )
        self.server = str(mlflow.get_tracking_uri())
        check_database(self.server)

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Create the next version, unless a version has the same content.

        Raises:
            RegistryError: the server cannot be reached or rejects the request.
            OptionError: a version is named, but MLflow numbers versions itself.
        """
        if config.version or self.version or self.alias:
            raise OptionError(
                f"{self.url}: found the version or alias "
                f"'{config.version or self.version or self.alias}', but MLflow numbers versions "
                "itself.",
                do=f"Publish to mlflow:/{self.name}, and set an alias with --alias.",
            )
        if re.fullmatch(r"v\d+", config.alias, re.IGNORECASE):
            raise OptionError(
                f"alias '{config.alias}' has the form of a version, v and a number, which MLflow "
                "reserves.",
                do="Choose another --alias.",
            )
        # So two processes of this machine do not create two versions with the same content.
        server = hashlib.sha256(self.server.encode()).hexdigest()
        with (
            file_lock(f"mlflow-{server[:16]}-{package.content_sha256[:16]}"),
            self._mlflow_errors(),
        ):
            client = self._client()
            with ignore_existing():
                client.create_registered_model(self.name)
            existing = self._find_version(client, package)
            is_new = not existing
            version = existing or upload_version(client, package, self.name, progress)
            if config.alias:
                client.set_registered_model_alias(self.name, config.alias, version)
        return Published(f"mlflow:/{self.name}/{version}", version, is_new)

    @property
    def remedy(self) -> str:
        """Remedy for a damaged version; publishing again would not read its files."""
        return (
            f"It cannot be trusted: delete this version of {self.name} and its logged model in "
            "MLflow, and publish it again from an undamaged artifact."
        )

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download the artifact of a version, of an alias, or of the newest version.

        Raises:
            RegistryError: the server cannot be reached, or has no such version.
        """
        from mlflow.artifacts import download_artifacts

        with self._mlflow_errors():
            client = self._client()
            version = self._resolve_version(client)
            source = client.get_model_version_download_uri(self.name, version)
            with (
                progress.task(f"downloading mlflow:/{self.name}/{version}"),
                tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as scratch,
            ):
                downloaded = Path(
                    download_artifacts(artifact_uri=f"{source}/{ARTIFACT}", dst_path=scratch)
                )
                for path in downloaded.iterdir():
                    shutil.move(path, out / path.name)
        return out

    def _client(self) -> Any:
        from mlflow import MlflowClient

        self._ping()
        return MlflowClient(self.server)

    def _ping(self) -> None:
        """Raise RegistryError if the server is down; MLflow itself would retry for minutes."""
        if not self.server.lower().startswith(("http:", "https:")):
            return
        import requests  # MLflow's own client

        try:
            requests.get(f"{self.server.rstrip('/')}/health", timeout=_PING_SECONDS)
        except requests.exceptions.SSLError:  # MLflow has options for certificates
            return
        except requests.RequestException as error:
            raise RegistryError(
                f"the MLflow server {without_password(self.server)} cannot be reached: "
                f"{redacted_message(error, self.server)}.",
                do="Check MLFLOW_TRACKING_URI, https://mlflow.example.com, and the network. In a "
                "user name or password, write %2F for / and %40 for @.",
            ) from error

    @contextmanager
    def _mlflow_errors(self) -> Iterator[None]:
        """Raise RegistryError for MLflow's errors."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise self._to_registry_error(error) from error
        except OSError as error:  # includes the errors of requests
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise RegistryError(
                f"{self.url}: {redacted_message(error, self.server)}.",
                do="Free disk space, or set TMPDIR to a directory on another disk."
                if is_full
                else _CHECK_SERVER,
            ) from error

    def _to_registry_error(self, error: Any) -> RegistryError:
        first_line = next(iter(str(error).splitlines()), "").rstrip(".")
        message = redacted_message(first_line.partition("Response body:")[0].strip(), self.server)
        status = int(error.get_http_status_code())
        code = str(getattr(error, "error_code", ""))
        # For some responses only MLflow's message has the status.
        if status in (401, 403) or re.search(r"error code 40[13]\b", message):
            return RegistryError(
                f"the MLflow server {without_password(self.server)} denies access to {self.url}: "
                f"{message}.",
                do="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN.",
            )
        if code == "RESOURCE_DOES_NOT_EXIST":
            return RegistryError(
                f"{self.url}: {message}.", do="Check the list of registered models."
            )
        return RegistryError(f"{self.url}: MLflow reports: {message}.", do=_CHECK_SERVER)

    def _find_version(self, client: Any, package: Package) -> str:
        """Return the newest version with the same content; empty if there is none."""
        numbers = [
            int(version.version)
            for version in self._versions(client)
            if version.tags.get(CONTENT) == package.content_sha256
        ]
        return str(max(numbers)) if numbers else ""

    def _versions(self, client: Any) -> list[Any]:
        versions: list[Any] = []
        token = None
        while True:
            page = client.search_model_versions(f"name = '{self.name}'", page_token=token)
            versions += [version for version in page if version.status == "READY"]
            token = page.token
            if not token:
                return versions

    def _resolve_version(self, client: Any) -> str:
        if self.version:
            return str(client.get_model_version(self.name, self.version).version)
        if self.alias and self.alias != LATEST:
            return str(client.get_model_version_by_alias(self.name, self.alias).version)
        numbers = [int(version.version) for version in self._versions(client)]
        if not numbers:
            raise RegistryError(f"{self.url}: {self.name} has no versions.")
        return str(max(numbers))


def check_database(server: str) -> None:
    """Raise OptionError if the address is a database that the installed MLflow cannot open."""
    scheme = server.lower().partition(":")[0].partition("+")[0]
    if scheme in _DATABASES and importlib.util.find_spec("sqlalchemy") is None:
        raise OptionError(
            f"MLFLOW_TRACKING_URI is {without_password(server)!r}, a database, but mlflow-skinny "
            "is installed, which opens none.",
            do="Install the whole package, pip install mlflow, or start its server on the database "
            "and name the server: mlflow server --backend-store-uri URI --port 5000",
        )


def without_password(server: str) -> str:
    """Return a server's address without user and password."""
    return re.sub(r"//.*@", "//", server, flags=re.DOTALL)


def redacted_message(error: object, server: str) -> str:
    """Return the message of an error without the login of the server's address."""
    message = str(error)
    login = server.partition("//")[2].rpartition("@")[0]
    _, _, password = login.partition(":")
    for secret in (login, unquote(login), password, unquote(password)):
        if secret:
            message = message.replace(secret, "***")
    return re.sub(r"//[^/\s]*@", "//", message)
