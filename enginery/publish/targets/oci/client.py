"""Requests to an OCI registry, through oras: its login, tokens and URLs.

Takes a host and a repository; leaves blobs and manifests there, or on the local disk.

    >>> client = OciClient("ghcr.io", "org/minilm", insecure=False)
    >>> client.has_blob("sha256:9c1f…")
    False

Two things are done here rather than by oras 0.2, which reads a blob into memory whole before it is
sent, and tries a registry that is down, or that refuses a login, for two minutes.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from enginery.core.errors import ArtifactError, RegistryError
from enginery.publish.targets.oci.answers import Body, bound_answer, tail, words

_TIMEOUT_SECONDS = (10, 300)
"""To connect, and between two answers: a registry hashes what it got before it answers."""
_ATTEMPTS = 4
_WAIT_SECONDS = 1.0
_PIECE = 1 << 20
_BUSY = (429, 500, 502, 503, 504)
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_DOCKER_HUB_API, _DOCKER_HUB_LOGIN = "registry-1.docker.io", "https://index.docker.io/v1/"


class OciClient:
    """One repository of a registry."""

    def __init__(self, host: str, repository: str, *, insecure: bool) -> None:
        """Asks the registry how it wants to be asked.

        Raises:
            RegistryError: it cannot be reached, or is no OCI registry.
        """
        from oras.container import Container
        from oras.provider import Registry

        self.host, self.repository = host, repository
        self._api = _DOCKER_HUB_API if host in _DOCKER_HUB else host
        self._base = f"{'http' if insecure else 'https'}://{self._api}/v2/"
        self._insecure = insecure
        backend = "basic" if self._challenge().lower().startswith("basic") else "token"
        self._registry: Any = Registry(self._api, insecure=insecure, auth_backend=backend)
        self._registry.session.request = functools.partial(
            self._registry.session.request, timeout=_TIMEOUT_SECONDS
        )
        # A compressed answer would be larger than what came over the network.
        self._registry.session.headers["Accept-Encoding"] = "identity"
        self._registry.session.hooks["response"].append(bound_answer)
        # oras's own decorator waits 3, 5, 11, 29 and 83 seconds, whatever the error.
        self._unretried: Any = functools.partial(Registry.do_request.__wrapped__, self._registry)
        login: Any = Container(f"{self._api}/{repository}")
        login.registry = _DOCKER_HUB_LOGIN if self._api == _DOCKER_HUB_API else self._api
        self._registry.auth.load_configs(login)
        self._basic = ""
        if backend == "basic":
            try:
                self._basic = self._registry.auth.get_auth_header()["Authorization"]
            except AttributeError:
                raise self._refused(401, "there is no login for it") from None

    def manifest(self, reference: str) -> tuple[bytes, str, str]:
        """A manifest or an index by tag or digest: its bytes, media type and digest.

        Raises:
            RegistryError: there is none, or it is not what the digest says.
        """
        accept = ", ".join(f"application/vnd.oci.image.{kind}.v1+json"
                           for kind in ("index", "manifest"))  # fmt: skip
        answer = self._ask("GET", f"manifests/{reference}", headers={"Accept": accept})
        if answer.status_code == 404:
            raise RegistryError(
                f"the registry {self.host} has no {self.repository} with {reference}.",
                do="See its tags, and check the spelling.",
            )
        self._check(answer)
        digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
        if reference.startswith("sha256:") and reference != digest:
            raise RegistryError(f"{self.host}/{self.repository}@{reference} was altered.")
        return answer.content, answer.headers.get("Content-Type", "").partition(";")[0], digest

    def has_manifest(self, reference: str) -> bool:
        """Whether there is something by this tag or digest."""
        accept = (
            "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"
        )
        answer = self._ask("HEAD", f"manifests/{reference}", headers={"Accept": accept})
        if answer.status_code == 404:
            return False
        self._check(answer)
        return True

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has it already."""
        answer = self._ask("HEAD", f"blobs/{digest}")
        if answer.status_code == 404:
            return False
        self._check(answer)
        return True

    def upload(self, digest: str, size_bytes: int, pieces: Callable[[], Iterator[bytes]]) -> None:
        """Sends a blob as it is read; again from its start where the connection breaks.

        Args:
            digest: `sha256:…`, which the registry checks.
            size_bytes: of all pieces together.
            pieces: gives the content from its start, each time it is called.

        Raises:
            RegistryError: the registry refuses it, or the connection breaks again and again.
        """

        def send() -> Any:
            begun = self._once("POST", f"{self._base}{self.repository}/blobs/uploads/")
            if begun.status_code >= 300:
                return begun
            place = begun.headers.get("Location", "")
            if place.startswith("/"):
                parts = urlsplit(begun.url)
                place = f"{parts.scheme}://{parts.netloc}{place}"
            place += f"{'&' if '?' in place else '?'}digest={digest}"
            return self._once(
                "PUT", place, data=Body(size_bytes, pieces),
                headers={"Content-Type": "application/octet-stream",
                         "Content-Length": str(size_bytes)},
            )  # fmt: skip

        self._check(self._retried(send))

    def put_manifest(self, reference: str, media_type: str, content: bytes) -> None:
        """Stores a manifest or an index under a tag or its digest; all that it names is there."""
        headers = {"Content-Type": media_type}
        self._check(self._ask("PUT", f"manifests/{reference}", data=content, headers=headers))

    def tags(self) -> list[str]:
        """The tags of the repository, at most the first hundred; none where it cannot list them."""
        answer = self._ask("GET", "tags/list?n=100")
        try:
            return [str(tag) for tag in answer.json()["tags"]]
        except (ValueError, KeyError, TypeError):
            return []

    def download(self, digest: str, path: Path, size_bytes: int) -> None:
        """Writes a blob to `path`, from where an earlier try has left it.

        Args:
            digest: `sha256:…`.
            path: where it goes.
            size_bytes: what the manifest says; not a byte more is written. Whether the digest is
                right is the caller's to see.

        Raises:
            RegistryError: it is not there, or the connection breaks again and again.
            ArtifactError: the registry sends more than its manifest says.
        """

        def receive() -> Any:
            done = path.stat().st_size if path.is_file() else 0
            if done >= size_bytes:  # whole, or of no use: its digest will tell
                return None
            # A proxy must not compress: the digest is over the bytes as they are.
            headers = {"Accept-Encoding": "identity"} | (
                {"Range": f"bytes={done}-"} if done else {}
            )
            answer = self._once("GET", f"{self._base}{self.repository}/blobs/{digest}",
                                headers=headers, stream=True)  # fmt: skip
            with answer:
                if answer.status_code in (200, 206):
                    is_rest = answer.status_code == 206
                    left = size_bytes - (done if is_rest else 0)
                    with path.open("ab" if is_rest else "wb") as stream:
                        for piece in answer.iter_content(_PIECE):
                            left -= len(piece)
                            if left < 0:
                                break
                            stream.write(piece)
                    if left < 0:
                        path.unlink(missing_ok=True)
                        raise ArtifactError(
                            f"the registry {self.host} sends more than the {size_bytes} bytes that "
                            f"its manifest says of {digest}."
                        )
            return answer

        self._check(self._retried(receive))

    def _challenge(self) -> str:
        """What a registry asks of somebody unknown: `Bearer realm=…`, `Basic …`, nothing."""
        import requests

        try:
            answer = requests.get(
                self._base,
                headers={"Accept-Encoding": "identity"},
                hooks={"response": bound_answer},
                timeout=_TIMEOUT_SECONDS[0],
            )
        except requests.RequestException as error:
            raise self._unreachable(error) from error
        if answer.status_code in (200, 401, 403, *_BUSY):
            return str(answer.headers.get("Www-Authenticate", ""))
        raise RegistryError(
            f"{self._base} answers {answer.status_code}, so {self.host} is no OCI registry.",
            do="Check the address: oci://registry/name:tag.",
        )

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        url = f"{self._base}{self.repository}/{path}"
        return self._retried(lambda: self._once(method, url, **options))

    def _once(self, method: str, url: str, **options: Any) -> Any:
        """One request; a token that has run out meanwhile is asked for again."""
        headers = dict(options.pop("headers", {}))
        if (
            urlsplit(url).netloc != self._api
        ):  # some registries keep blobs elsewhere: no login there
            return self._registry.session.request(method, url, headers=headers, **options)
        if self._basic:
            headers["Authorization"] = self._basic
        try:
            answer = self._unretried(url, method, headers=headers, **options)
            if answer.status_code == 401 and getattr(self._registry.auth, "token", None):
                self._registry.auth.token = None
                answer = self._unretried(url, method, headers=headers, **options)
        except ValueError as error:  # oras: "Cannot respond to request for authentication."
            raise self._refused(401, "it takes no login that is known here") from error
        return answer

    def _retried(self, ask: Callable[[], Any]) -> Any:
        """Asks again where the connection broke or the registry was busy; waits 1, 2, 4 seconds."""
        import requests

        for attempt in range(_ATTEMPTS):
            is_last = attempt == _ATTEMPTS - 1
            try:
                answer = ask()
            except (requests.exceptions.SSLError, requests.exceptions.InvalidURL) as error:
                raise self._unreachable(error) from error
            except requests.RequestException as error:
                if is_last:
                    raise self._unreachable(error) from error
            else:
                if is_last or answer is None or answer.status_code not in _BUSY:
                    return answer
            time.sleep(_WAIT_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _check(self, answer: Any) -> None:
        """Raises RegistryError for an answer that is no success, with the registry's own words."""
        if answer is None or answer.status_code < 300:
            return
        said = words(answer)
        if answer.status_code in (401, 403):
            raise self._refused(answer.status_code, said)
        is_full = re.search("quota|limit", said, re.IGNORECASE)
        quota = answer.status_code in (413, 429, 507) or is_full
        raise RegistryError(
            f"the registry {self.host} answers {answer.status_code} for {self.repository}: {said}.",
            do="It is full, or wants fewer requests: see its limits." if quota else
            "What was sent stays there: the same command goes on.",
        )  # fmt: skip

    def _refused(self, status: int, said: str) -> RegistryError:
        return RegistryError(
            f"the registry {self.host} refuses {self.repository} ({status}): {said}.",
            do=f"Log in with: docker login {self.host}",
        )

    def _unreachable(self, error: Exception) -> RegistryError:
        reason = str(getattr(error.args[0] if error.args else error, "reason", error))
        remedy = "Check the address and the network."
        if not self._insecure and re.search("SSL|wrong version|record layer", reason):
            remedy = "Where the registry speaks plain HTTP, pass --insecure."
        return RegistryError(
            f"the registry {self.host} cannot be reached: {tail(reason)}.", do=remedy
        )
