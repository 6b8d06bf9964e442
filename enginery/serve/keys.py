"""API keys. Imports nothing heavy."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from enginery.core.errors import OptionError
from enginery.serve.config import ServeConfig

KEY_VARIABLE = "ENGINERY_API_KEY"


@dataclass(frozen=True)
class ApiKeys:
    """The API keys of a server. Without keys every request is authorized.

    Clients send a key as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`.
    """

    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def from_config(cls, config: ServeConfig, environment: Mapping[str, str]) -> ApiKeys:
        """Read the keys from `api_key`, else from `api_key_file`, else from ENGINERY_API_KEY.

        Raises:
            OptionError: the file cannot be read or has no key, or a key has invalid characters.
        """
        if config.api_key:
            return cls((_checked(config.api_key, "option 'api_key'"),))
        if config.api_key_file:
            return cls(_read(Path(config.api_key_file)))
        key = environment.get(KEY_VARIABLE, "")
        return cls((_checked(key, KEY_VARIABLE),) if key else ())

    def __bool__(self) -> bool:
        return bool(self.keys)

    def accept(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request with these headers is authorized."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        return (
            not self.keys
            or self._are_known(bearer)
            or self._are_known(headers.get("x-api-key", ""))
        )

    def _are_known(self, candidate: str) -> bool:
        encoded = candidate.encode("utf-8", "surrogateescape")
        # Compare with all keys every time, so that the timing reveals nothing.
        matches = [hmac.compare_digest(encoded, key) for key in self.keys]
        return any(matches)


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"option 'api_key_file': {path} cannot be read: {reason}.") from error
    keys = tuple(
        _checked(line.strip(), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not keys:
        raise OptionError(
            f"option 'api_key_file': {path} has no key.", do="Write one key per line."
        )
    return keys


def _checked(key: str, where: str) -> bytes:
    # Never put the key itself into a message, because messages are logged.
    if not all("!" <= letter <= "~" for letter in key):
        raise OptionError(
            f"{where}: the key contains a space or a character outside ASCII, which HTTP headers "
            "do not allow.",
            do="Use letters, digits and punctuation, for example `openssl rand -hex 32`.",
        )
    return key.encode("ascii")
