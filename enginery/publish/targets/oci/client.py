"""Upload and download blobs and manifests of a repository in an OCI registry.

oras handles the login (Docker's, with its credential helpers), the tokens and the session. The
requests are made here, because `Registry.do_request` of oras 0.2, which all its calls use, has no
timeout and retries for two minutes after any error, even a wrong password. Besides, `put_upload`
reads a whole blob into memory, `chunked_upload` needs a file and sends chunks, which Google's
Artifact Registry rejects, and `download_blob` checks neither digest nor size and does not resume.
"""

from __future__ import annotations

import functools
import io
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from oras.container import Container
from oras.provider import Registry

from enginery.core.errors import ArtifactError, RegistryError, printable
from enginery.publish.targets.oci.image import MANIFEST, Blob, PackedLayer, digest_of

MAX_RESPONSE_BYTES = 4 * 2**20
"""Maximum size of any response except a blob. The distribution specification requires registries to
accept manifests of this size and allows them to reject larger ones."""
_TIMEOUT_SECONDS = (10, 300)
"""Time to connect and time to wait for data: a registry hashes an upload before it responds."""
_ATTEMPTS = 4
_WAIT_SECONDS = 1.0
_PIECE = 1 << 20
_MESSAGE_CHARACTERS = 300
_BUSY = (429, 500, 502, 503, 504)
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_INDEX = "application/vnd.oci.image.index.v1+json"
"""Images of several platforms, which enginery does not make, may be under a tag."""
_DOCKER_HUB_API, _DOCKER_HUB_LOGIN = "registry-1.docker.io", "https://index.docker.io/v1/"


class OciClient:
    """A client for one repository of a registry."""

    def __init__(self, host: str, repository: str, *, insecure: bool) -> None:
        """Probe `/v2/` for the registry's authentication scheme, and load the credentials.

        Raises:
            RegistryError: the registry cannot be reached, is not an OCI registry, or requires
                credentials that are missing.
        """
        self.host, self.repository, self._insecure = host, repository, insecure
        self._api = _DOCKER_HUB_API if host in _DOCKER_HUB else host
        self._v2 = f"{'http' if insecure else 'https'}://{self._api}/v2/"
        self._base = f"{self._v2}{repository}"
        is_basic = self._challenge().lower().startswith("basic")
        registry: Any = Registry(
            self._api, insecure=insecure, auth_backend="basic" if is_basic else "token"
        )
        self._session, self._auth = registry.session, registry.auth
        # This sets a timeout for oras's own requests for tokens, too.
        self._session.request = functools.partial(self._session.request, timeout=_TIMEOUT_SECONDS)
        # Size limits count the bytes on the network, so responses must not be compressed.
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.hooks["response"].append(_limit_response)
        login: Any = Container(f"{self._api}/{repository}")
        login.registry = _DOCKER_HUB_LOGIN if self._api == _DOCKER_HUB_API else self._api
        self._auth.load_configs(login)
        try:
            self._auth.get_auth_header()
        except AttributeError:  # oras raises it for basic authentication without a user
            raise self._access_denied(401, "there are no credentials for it") from None

    def manifest(self, reference: str) -> bytes | None:
        """Return a manifest by tag or digest; None if it does not exist.

        Raises:
            RegistryError: it does not match the digest.
        """
        return self._document("manifests", reference)

    def config(self, digest: str) -> bytes:
        """Return an image's config; raise RegistryError if it is missing or was altered."""
        content = self._document("blobs", digest)
        if content is None:
            raise RegistryError(
                f"the registry {self.host} has lost {self.repository}@{digest}.",
                do="Publish the artifact again.",
            )
        return content

    def has_blob(self, digest: str) -> bool:
        """Return True if the repository has this blob."""
        response = self._call("HEAD", f"blobs/{digest}")
        if response.status_code == 404:
            return False
        self._check(response)
        return True

    def upload(self, blob: Blob | PackedLayer) -> None:
        """Upload a blob as a stream; start again if the connection breaks.

        Raises:
            RegistryError: the registry rejects it, or the connection breaks repeatedly.
        """

        def send() -> Any:
            begun = self._request("POST", f"{self._base}/blobs/uploads/")
            if begun.status_code >= 300:
                return begun
            location = urljoin(begun.url, begun.headers.get("Location", ""))
            location += f"{'&' if '?' in location else '?'}digest={blob.digest}"
            kind = {"Content-Type": "application/octet-stream"}
            return self._request("PUT", location, data=blob, headers=kind)

        self._check(self._with_retries(send))

    def put_manifest(self, tag: str, content: bytes) -> None:
        """Upload a manifest under a tag, after the blobs it refers to."""
        headers = {"Content-Type": MANIFEST}
        self._check(self._call("PUT", f"manifests/{tag}", data=content, headers=headers))

    def tags(self) -> list[str]:
        """Return at most a hundred tags of the repository; none if the registry cannot list."""
        response = self._call("GET", "tags/list?n=100")
        try:
            return [str(tag) for tag in response.json()["tags"]]
        except (ValueError, KeyError, TypeError):
            return []

    def download(
        self, digest: str, path: Path, size_bytes: int, *, deadline: float = math.inf
    ) -> None:
        """Download a blob to `path`; resume after a broken connection.

        Args:
            digest: `sha256:…`. The caller has to verify it.
            path: path of the file.
            size_bytes: size in the manifest; no more bytes are written.
            deadline: `time.monotonic()` at which the pull has to end.

        Raises:
            RegistryError: the blob does not exist, the connection breaks repeatedly, or the time
                is over.
            ArtifactError: the registry sends more bytes than `size_bytes`.
        """

        def receive() -> Any:
            done = path.stat().st_size if path.is_file() else 0
            if done >= size_bytes:  # complete or invalid; the caller checks the digest
                return None
            headers = {"Range": f"bytes={done}-"} if done else {}
            url = f"{self._base}/blobs/{digest}"
            with self._request("GET", url, headers=headers, stream=True) as response:
                if response.status_code in (200, 206):
                    is_rest = response.status_code == 206
                    remaining = size_bytes - (done if is_rest else 0)
                    with path.open("ab" if is_rest else "wb") as stream:
                        for piece in _pieces(response):
                            remaining -= len(piece)
                            if remaining < 0:
                                break
                            stream.write(piece)
                            if time.monotonic() > deadline:
                                raise self._too_slow(size_bytes)
                    if remaining < 0:
                        path.unlink(missing_ok=True)
                        raise ArtifactError(
                            f"the registry {self.host} sent more than {size_bytes} bytes for "
                            f"{digest}, expected {size_bytes} as in its manifest."
                        )
            return response

        self._check(self._with_retries(receive))

    def _too_slow(self, size_bytes: int) -> RegistryError:
        return RegistryError(
            f"the registry {self.host} is too slow: a blob of {size_bytes} bytes was not complete "
            "when the time for the pull was over.",
            do="ENGINERY_TIME_LIMIT_SECONDS sets the time (0 is no limit).",
        )

    def _challenge(self) -> str:
        """Return the registry's `Www-Authenticate` header; empty if it requires no login."""
        try:
            response = requests.get(
                self._v2,
                headers={"Accept-Encoding": "identity"},
                hooks={"response": _limit_response},
                timeout=_TIMEOUT_SECONDS[0],
            )
        except requests.RequestException as error:
            raise self._unreachable(error) from error
        if response.status_code in (200, 401, 403, *_BUSY):
            return str(response.headers.get("Www-Authenticate", ""))
        raise RegistryError(
            f"{self.host} is not an OCI registry: {self._v2} answered {response.status_code}.",
            do="Check the address: oci://registry/name:tag.",
        )

    def _document(self, kind: str, reference: str) -> bytes | None:
        """Return a manifest or a blob of at most 4 MiB; None if it does not exist."""
        response = self._call("GET", f"{kind}/{reference}")
        if response.status_code == 404:
            return None
        self._check(response)
        digest = digest_of(response.content)
        if reference.startswith("sha256:") and reference != digest:
            raise RegistryError(
                f"{self.host}/{self.repository}@{reference} was altered: its digest is {digest}."
            )
        return bytes(response.content)

    def _call(self, method: str, path: str, **options: Any) -> Any:
        headers = {"Accept": f"{MANIFEST}, {_INDEX}", **options.pop("headers", {})}
        url = f"{self._base}/{path}"
        return self._with_retries(lambda: self._request(method, url, headers=headers, **options))

    def _request(self, method: str, url: str, **options: Any) -> Any:
        """Send a request with credentials; if they are rejected, send it again with a new token."""
        send = functools.partial(self._session.request, method, url)
        headers = dict(options.pop("headers", {}))
        if urlsplit(url).netloc != self._api:
            # Some registries store blobs on other hosts, which must not get the credentials.
            return send(headers=headers, **options)
        headers |= self._auth.get_auth_header()
        response = send(headers=headers, **options)
        if response.status_code in (401, 403):
            try:
                renewed, _ = self._auth.authenticate_request(response, dict(headers), refresh=True)
            except (AttributeError, TypeError) as error:  # oras raises them for malformed tokens
                raise self._access_denied(response.status_code, "its token is malformed") from error
            if renewed != headers:
                response.close()
                response = send(headers=renewed, **options)
        return response

    def _with_retries(self, ask: Callable[[], Any]) -> Any:
        """Retry after 1, 2 and 4 seconds if the connection broke or the registry is busy."""
        for attempt in range(_ATTEMPTS):
            is_last = attempt == _ATTEMPTS - 1
            try:
                response = ask()
            except (requests.exceptions.SSLError, requests.exceptions.InvalidURL) as error:
                raise self._unreachable(error) from error
            except requests.RequestException as error:
                if is_last:
                    raise self._unreachable(error) from error
            else:
                if is_last or response is None or response.status_code not in _BUSY:
                    return response
            time.sleep(_WAIT_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _check(self, response: Any) -> None:
        """Raise RegistryError, with the registry's message, unless the request succeeded."""
        if response is None or response.status_code < 300:
            return
        try:
            first = response.json()["errors"][0]  # the format of the distribution specification
            message = str(first.get("message") or first.get("code") or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            message = ""
        # One line of printable text, since it is the registry's own.
        message = " ".join(printable(message or str(response.reason)).split())
        message = message[:_MESSAGE_CHARACTERS].rstrip(".") or "no reason"
        if response.status_code in (401, 403):
            raise self._access_denied(response.status_code, message)
        is_full = re.search("quota|limit", message, re.IGNORECASE)
        raise RegistryError(
            f"the registry {self.host} answered {response.status_code} for {self.repository}: "
            f"{message}.",
            do="The registry's storage is full, or it limits requests: check its limits."
            if response.status_code in (413, 429, 507) or is_full
            else "Run the same command again; what is uploaded is not sent again.",
        )

    def _access_denied(self, status: int, message: str) -> RegistryError:
        return RegistryError(
            f"the registry {self.host} denies access to {self.repository} ({status}): {message}.",
            do=f"Log in with: docker login {self.host}",
        )

    def _unreachable(self, error: Exception) -> RegistryError:
        reason = str(getattr(error.args[0] if error.args else error, "reason", error))
        remedy = "Check the address and the network."
        if not self._insecure and re.search("SSL|wrong version|record layer", reason):
            remedy = "If the registry uses plain HTTP, pass --insecure."
        # requests' message is long; its end is `[Errno 111] Connection refused`.
        message = reason.rpartition(": ")[2].strip(" .()'\"") or "no reason"
        return RegistryError(f"the registry {self.host} cannot be reached: {message}.", do=remedy)


def _pieces(response: Any) -> Iterator[bytes]:
    """Yield a blob as it arrives; requests would wait for whole pieces of a slow registry."""
    try:
        while piece := response.raw.read1(_PIECE, decode_content=True):
            yield piece
        if response.raw.length_remaining:
            raise requests.ConnectionError("the blob ended early")
    except urllib3.exceptions.HTTPError as error:  # requests converts it in the same way
        raise requests.ConnectionError(error) from error


def _limit_response(response: Any, *_args: Any, stream: bool = False, **_options: Any) -> Any:
    """Read a response of at most 4 MiB, as requests' hook `response`; blobs are streamed.

    requests also calls the hook for redirects and tokens, before it reads the body.
    """
    if stream and response.status_code in (200, 206):
        return response
    try:
        content = response.raw.read(MAX_RESPONSE_BYTES + 1, decode_content=True)
    except urllib3.exceptions.HTTPError as error:  # requests converts it in the same way
        raise requests.ConnectionError(error) from error
    if len(content) > MAX_RESPONSE_BYTES:
        response.close()
        raise RegistryError(
            f"the registry {urlsplit(response.url).netloc} sent more than {MAX_RESPONSE_BYTES} "
            "bytes, expected a manifest or a message.",
            do="Check the address.",
        )
    response.raw = io.BytesIO(content)
    return response
