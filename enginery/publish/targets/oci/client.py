"""Requests to one repository of an OCI registry: blobs and manifests, there and back.

oras keeps the login (Docker's, with its credential helpers), the tokens and the session. The
requests are made here, because oras 0.2 cannot do what they need:

- `Registry.push` makes one manifest of single files or of gzipped directories, and no index for two
  architectures; `upload_manifest` takes no index either.
- `put_upload` reads a blob into memory whole. `chunked_upload` wants it in a file, and some
  registries refuse its chunks: Google's Artifact Registry all of them, Amazon's ECR the empty last.
- `Registry.pull` and `download_blob` check no digest and no size, and begin anew each time.
- `do_request`, which all of them call, tries again for two minutes, whatever the error: a wrong
  password, too. It has no timeout.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from oras.container import Container
from oras.provider import Registry

from enginery.core.errors import ArtifactError, RegistryError
from enginery.publish.targets.oci.image import INDEX, MANIFEST, Blob, ImageLayer

MAX_RESPONSE_BYTES = 4 * 2**20
"""Of everything but a blob. The distribution specification wants registries to take manifests up to
this size, and lets them refuse larger ones."""
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
        """Ask the registry for its kind of login, and read the login.

        Raises:
            RegistryError: it cannot be reached, is no OCI registry, or wants a login that is not
                there.
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
        # The requests for tokens, which oras makes itself, end as well.
        self._session.request = functools.partial(self._session.request, timeout=_TIMEOUT_SECONDS)
        # A compressed answer would be larger than what came over the network.
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.hooks["response"].append(_limit_response)
        login: Any = Container(f"{self._api}/{repository}")
        login.registry = _DOCKER_HUB_LOGIN if self._api == _DOCKER_HUB_API else self._api
        self._auth.load_configs(login)
        try:
            self._auth.get_auth_header()
        except AttributeError:  # of oras's basic login without a user
            raise self._refused(401, "there is no login for it") from None

    def manifest(self, reference: str) -> tuple[bytes, str, str]:
        """Return the bytes, media type and digest of a manifest or an index, by tag or digest.

        Raises:
            RegistryError: there is none, or it is not what the digest says.
        """
        answer = self._call("GET", f"manifests/{reference}")
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
        """Whether there is a manifest or an index with this tag or digest."""
        return self._has(f"manifests/{reference}")

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has this blob."""
        return self._has(f"blobs/{digest}")

    def upload(self, blob: Blob | ImageLayer) -> None:
        """Upload a blob piece by piece; again from its start if the connection breaks.

        Raises:
            RegistryError: the registry refuses it, or the connection breaks again and again.
        """

        def send() -> Any:
            begun = self._request("POST", f"{self._base}/blobs/uploads/")
            if begun.status_code >= 300:
                return begun
            place = urljoin(begun.url, begun.headers.get("Location", ""))
            place += f"{'&' if '?' in place else '?'}digest={blob.digest}"
            kind = {"Content-Type": "application/octet-stream"}
            return self._request("PUT", place, data=blob, headers=kind)

        self._check(self._with_retries(send))

    def put_manifest(self, reference: str, media_type: str, content: bytes) -> None:
        """Store a manifest or an index under a tag or its digest; all that it names is there."""
        headers = {"Content-Type": media_type}
        self._check(self._call("PUT", f"manifests/{reference}", data=content, headers=headers))

    def tags(self) -> list[str]:
        """Return at most a hundred tags of the repository; none if it cannot list them."""
        answer = self._call("GET", "tags/list?n=100")
        try:
            return [str(tag) for tag in answer.json()["tags"]]
        except (ValueError, KeyError, TypeError):
            return []

    def download(self, digest: str, path: Path, size_bytes: int) -> None:
        """Write a blob to `path`, from where an earlier try has left it.

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
            headers = {"Range": f"bytes={done}-"} if done else {}
            url = f"{self._base}/blobs/{digest}"
            with self._request("GET", url, headers=headers, stream=True) as answer:
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

        self._check(self._with_retries(receive))

    def _challenge(self) -> str:
        """Return the login that a registry wants: `Bearer realm=…`, `Basic …`; empty for none."""
        try:
            answer = requests.get(
                self._v2,
                headers={"Accept-Encoding": "identity"},
                hooks={"response": _limit_response},
                timeout=_TIMEOUT_SECONDS[0],
            )
        except requests.RequestException as error:
            raise self._unreachable(error) from error
        if answer.status_code in (200, 401, 403, *_BUSY):
            return str(answer.headers.get("Www-Authenticate", ""))
        raise RegistryError(
            f"{self._v2} answers {answer.status_code}, so {self.host} is no OCI registry.",
            do="Check the address: oci://registry/name:tag.",
        )

    def _has(self, path: str) -> bool:
        answer = self._call("HEAD", path)
        if answer.status_code == 404:
            return False
        self._check(answer)
        return True

    def _call(self, method: str, path: str, **options: Any) -> Any:
        headers = {"Accept": f"{INDEX}, {MANIFEST}", **options.pop("headers", {})}
        url = f"{self._base}/{path}"
        return self._with_retries(lambda: self._request(method, url, headers=headers, **options))

    def _request(self, method: str, url: str, **options: Any) -> Any:
        """Send one request with the login, and once more with a new token if that is refused."""
        send = functools.partial(self._session.request, method, url)
        headers = dict(options.pop("headers", {}))
        if urlsplit(url).netloc != self._api:
            # Some registries keep blobs elsewhere: no login there.
            return send(headers=headers, **options)
        headers |= self._auth.get_auth_header()
        answer = send(headers=headers, **options)
        if answer.status_code in (401, 403):
            try:
                renewed, _ = self._auth.authenticate_request(answer, dict(headers), refresh=True)
            except (AttributeError, TypeError) as error:  # of oras, for answers that are no tokens
                raise self._refused(answer.status_code, "its token cannot be read") from error
            if renewed != headers:
                answer.close()
                answer = send(headers=renewed, **options)
        return answer

    def _with_retries(self, ask: Callable[[], Any]) -> Any:
        """Ask again if the connection broke or the registry is busy; wait 1, 2, 4 seconds."""
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
        """Raise RegistryError for an answer that is no success, with the registry's own words."""
        if answer is None or answer.status_code < 300:
            return
        try:
            first = answer.json()["errors"][0]  # as the distribution specification has it
            said = str(first.get("message") or first.get("code") or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            said = ""
        said = (said or str(answer.reason)).strip().rstrip(".") or "no reason"
        if answer.status_code in (401, 403):
            raise self._refused(answer.status_code, said)
        is_full = re.search("quota|limit", said, re.IGNORECASE)
        raise RegistryError(
            f"the registry {self.host} answers {answer.status_code} for {self.repository}: {said}.",
            do="It is full, or wants fewer requests: see its limits."
            if answer.status_code in (413, 429, 507) or is_full
            else "What was sent stays there: the same command goes on.",
        )

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
        # `[Errno 111] Connection refused` of the client's own long sentence.
        said = reason.rpartition(": ")[2].strip(" .()'\"") or "no reason"
        return RegistryError(f"the registry {self.host} cannot be reached: {said}.", do=remedy)


def _limit_response(answer: Any, *_args: Any, stream: bool = False, **_options: Any) -> Any:
    """Read an answer of at most 4 MiB, as requests' hook `response`; blobs are streamed.

    requests calls the hook for redirects and tokens too, before it reads anything of a body.
    """
    if stream and answer.status_code in (200, 206):
        return answer
    try:
        content = answer.raw.read(MAX_RESPONSE_BYTES + 1, decode_content=True)
    except urllib3.exceptions.HTTPError as error:  # as requests itself would have it
        raise requests.ConnectionError(error) from error
    if len(content) > MAX_RESPONSE_BYTES:
        answer.close()
        raise RegistryError(
            f"the registry {urlsplit(answer.url).netloc} sent more than {MAX_RESPONSE_BYTES} "
            "bytes where a manifest or a message was expected.",
            do="Check the address; this registry cannot be used.",
        )
    answer.raw = io.BytesIO(content)
    return answer
