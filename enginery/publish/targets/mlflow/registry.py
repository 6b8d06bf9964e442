"""`mlflow:/name`: a version in an MLflow model registry, through MLflow's own client.

Publishing makes a logged model with its run, and a registered version that points to it:

    $ export MLFLOW_TRACKING_URI=https://mlflow.example.com
    $ enginery publish minilm mlflow:/minilm

The server's address and credentials are MLflow's own variables.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from enginery.core.errors import MissingPackageError, OptionError, RegistryError
from enginery.core.home import file_lock
from enginery.core.paths import is_portable_name
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.targets.mlflow.model import ARTIFACT, CONTENT_TAG, WITHOUT_RIGHTS_TAG
from enginery.publish.targets.mlflow.upload import mend_version, suppress_exists, upload_version

_ADDRESS = re.compile(
    r"mlflow:/{1,3}(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))?", re.IGNORECASE
)
_PING_SECONDS = 10
_REMEDY = "Check MLFLOW_TRACKING_URI, and MLflow's log of the server."


class MlflowRegistry:
    """A registered model of an MLflow server."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Read the address; nothing is sent yet.

        Raises:
            OptionError: the address is not `mlflow:/name`, `mlflow:/name/3` or
                `mlflow:/name@alias`, or no tracking server is named.
            MissingPackageError: mlflow is not installed.
        """
        found = _ADDRESS.fullmatch(url)
        if not found or not is_portable_name(found["name"]):
            raise OptionError(
                f"address '{url}': expected mlflow:/name, mlflow:/name/3 or mlflow:/name@alias, "
                "the name of letters, digits, '.', '_' and '-'."
            )
        self.name, self.version, self.alias = found["name"], found["version"], found["alias"]
        self.url = url
        if config.name and config.name != self.name:
            raise OptionError(
                f"option 'name' is '{config.name}', but the address says {self.name}."
            )
        try:
            import mlflow

            with warnings.catch_warnings():
                # Its own modules warn of their own type hints, whoever imports them.
                warnings.simplefilter("ignore")
                import mlflow.pyfunc  # needs pandas
        except ImportError as error:
            package = error.name or "mlflow"
            raise MissingPackageError(package, extra="mlflow", purpose=url) from error
        if not os.environ.get("MLFLOW_TRACKING_URI") and not mlflow.is_tracking_uri_set():
            raise OptionError(
                f"{url} names a model, and no tracking server is named.",
                do="Set MLFLOW_TRACKING_URI, to https://mlflow.example.com or sqlite:///mlflow.db.",
            )
        self.server = str(mlflow.get_tracking_uri())
        require_server(self.server)

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Make the next version, or find the one of the same content.

        Raises:
            RegistryError: the server cannot be reached or refuses.
            OptionError: a version was named, which MLflow numbers by itself.
        """
        if config.version or self.version or self.alias:
            raise OptionError(
                f"{self.url}: MLflow numbers versions by itself, found "
                f"{config.version or self.version or self.alias}.",
                do=f"Publish to mlflow:/{self.name}, with --alias for a name that points to it.",
            )
        if re.fullmatch(r"v\d+", config.alias, re.IGNORECASE):
            raise OptionError(
                f"alias '{config.alias}': MLflow keeps v and a number for versions.",
                do="Name another --alias.",
            )
        # Two processes of this machine do not make two versions of one content.
        server = hashlib.sha256(self.server.encode()).hexdigest()
        with (
            file_lock(f"mlflow-{server[:16]}-{package.content_sha256[:16]}"),
            self._mlflow_errors(),
        ):
            client = self._client()
            with suppress_exists():
                client.create_registered_model(self.name)
            found = self._existing(client, package)
            is_new = found is None
            if found is None:
                version = upload_version(client, package, self.name, progress)
            else:
                version = str(found.version)
                mend_version(client, package, found, progress)
            if config.alias:
                client.set_registered_model_alias(self.name, config.alias, version)
        notes = tuple(f"{r.directory_name} is {r.hardware_target}" for r in package.engines)
        return Published(f"mlflow:/{self.name}/{version}", version, is_new, notes)

    @property
    def remedy(self) -> str:
        """Say what to do about a damaged version: publishing again does not read its files."""
        return (
            f"It cannot be trusted: delete this version of {self.name} and its logged model in "
            "MLflow, and publish it again from a whole artifact."
        )

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download the artifact of a version, of an alias, or of the newest version.

        Raises:
            RegistryError: the server cannot be reached, or has no such version.
        """
        from mlflow.artifacts import download_artifacts

        with self._mlflow_errors():
            client = self._client()
            version = self._wanted(client)
            source = client.get_model_version_download_uri(self.name, version)
            with (
                progress.task(f"downloading mlflow:/{self.name}/{version}"),
                tempfile.TemporaryDirectory(prefix=".tmp-", dir=out) as scratch,
            ):
                found = Path(
                    download_artifacts(artifact_uri=f"{source}/{ARTIFACT}", dst_path=scratch)
                )
                for path in found.iterdir():
                    shutil.move(path, out / path.name)
        return out

    def _client(self) -> Any:
        from mlflow import MlflowClient

        self._ping()
        return MlflowClient(self.server)

    def _ping(self) -> None:
        """Ask once, whatever the answer: MLflow itself tries a dead server for two minutes."""
        if not self.server.startswith(("http://", "https://")):
            return
        server = without_password(self.server)
        try:
            address = f"{server.rstrip('/')}/health"
            urllib.request.urlopen(address, timeout=_PING_SECONDS).close()  # noqa: S310 - http(s)
        except urllib.error.HTTPError:
            return
        except urllib.error.URLError as error:
            if isinstance(error.reason, OSError) and "CERTIFICATE" not in str(error.reason):
                raise RegistryError(
                    f"the MLflow server {server} cannot be reached: {error.reason}.",
                    do="Check MLFLOW_TRACKING_URI and the network.",
                ) from error
        except (http.client.HTTPException, ValueError) as error:  # another protocol
            raise RegistryError(
                f"the MLflow server {server} does not speak HTTP: {error}.", do=_REMEDY
            ) from error
        except TimeoutError as error:
            raise RegistryError(
                f"the MLflow server {server} does not answer within {_PING_SECONDS} seconds.",
                do="Check MLFLOW_TRACKING_URI and the network.",
            ) from error

    @contextmanager
    def _mlflow_errors(self) -> Iterator[None]:
        """Turn MLflow's errors into a RegistryError."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise self._refused(error) from error
        except OSError as error:  # requests' own errors are, too
            raise RegistryError(
                f"{self.url}: {said_by(error, self.server)}.", do=_REMEDY
            ) from error

    def _refused(self, error: Any) -> RegistryError:
        first_line = next(iter(str(error).splitlines()), "").rstrip(".")
        said = said_by(first_line.partition("Response body:")[0].strip(), self.server)
        status = int(error.get_http_status_code())
        code = str(getattr(error, "error_code", ""))
        # MLflow names such an answer as its body does; only the words have the number.
        if status in (401, 403) or re.search(r"error code 40[13]\b", said):
            return RegistryError(
                f"the MLflow server {without_password(self.server)} refuses {self.url}: {said}.",
                do="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN.",
            )
        if code == "RESOURCE_DOES_NOT_EXIST":
            return RegistryError(f"{self.url}: {said}.", do="See the registry's list of models.")
        return RegistryError(f"{self.url}: MLflow says: {said}.", do=_REMEDY)

    def _existing(self, client: Any, package: Package) -> Any:
        """Return the newest version of this content, or None if there is none."""
        found = [
            version
            for version in self._versions(client)
            if package.is_same(
                version.tags.get(CONTENT_TAG, ""), version.tags.get(WITHOUT_RIGHTS_TAG, "")
            )
        ]
        return max(found, key=lambda version: int(version.version), default=None)

    def _versions(self, client: Any) -> list[Any]:
        versions: list[Any] = []
        token = None
        while True:
            page = client.search_model_versions(f"name = '{self.name}'", page_token=token)
            versions += [version for version in page if version.status == "READY"]
            token = page.token
            if not token:
                return versions

    def _wanted(self, client: Any) -> str:
        if self.version:
            return str(client.get_model_version(self.name, self.version).version)
        if self.alias and self.alias != LATEST:
            return str(client.get_model_version_by_alias(self.name, self.alias).version)
        numbers = [int(version.version) for version in self._versions(client)]
        if not numbers:
            raise RegistryError(f"{self.url}: the registry has no version of {self.name}.")
        return str(max(numbers))


def require_server(server: str) -> None:
    """Raise OptionError, without the password, for an http address without a host or a port."""
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
    """Return a server's address without what is before its last @."""
    return re.sub(r"//.*@", "//", server, flags=re.DOTALL)


def said_by(error: object, server: str) -> str:
    """Return what an error says without the login in the server's address, however quoted."""
    said = str(error)
    login = server.partition("//")[2].rpartition("@")[0]
    _, _, password = login.partition(":")
    for secret in (login, unquote(login), password, unquote(password)):
        if secret:
            said = said.replace(secret, "***")
    return re.sub(r"//[^/\s]*@", "//", said)
