"""`hf://org/name`: publish to and pull from the Hugging Face Hub, with huggingface_hub.

Publishing creates one commit, and a tag for a version or an alias:

    HubRegistry("hf://org/minilm-onnx", config).publish(package, config, SILENT).url
    'hf://org/minilm-onnx@0d5c8f…'

The token is the library's (HF_TOKEN, or `hf auth login`), and it is never in a message. The library
uploads large files before the commit, and the Hub keeps them, so that a killed run does not upload
them again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import MANIFEST, REPORTS
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    OptionError,
    RegistryError,
)
from enginery.core.model.hub import hub_requests
from enginery.core.progress import Progress
from enginery.core.scratch import temporary_directory
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.package import Package
from enginery.publish.publication import CARD, LISTING, Publication

_ADDRESS = re.compile(r"hf://(?P<repo>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>\S+))?", re.IGNORECASE)
_MAIN = "main"
# Files that the Hub adds to a new repository.
_HUB_FILES = (".gitattributes", CARD)


class HubRegistry:
    """A repository on the Hub."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Parse the address, without connecting to the Hub.

        Raises:
            OptionError: the address is not `hf://org/name` or `hf://org/name@revision`.
        """
        match = _ADDRESS.fullmatch(url)
        if not match:
            raise OptionError(f"address '{url}': expected hf://org/name or hf://org/name@revision.")
        self.url, self.repo = url, match["repo"]
        self.revision = _MAIN if match["revision"] in (None, LATEST) else match["revision"]
        if config.name and config.name != self.repo.partition("/")[2]:
            raise OptionError(
                f"option 'name' is '{config.name}', but the address has the name '{self.repo}'."
            )
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise OptionError(f"address '{url}': {_first_line(error)}.") from error
        self._api: Any = HfApi(library_name="enginery")

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Commit the changes to the branch, unless its head has the same content.

        Raises:
            RegistryError: the Hub cannot be reached or rejects a request; the repository has
                another model, or the version exists with other content.
            OptionError: alias and version have the same name.
        """
        with _hub_calls(self.url):
            self._api.create_repo(self.repo, private=config.private, exist_ok=True)
            head = self._head(self.revision)
            # A new branch starts with the files of main, so these are checked first.
            base = head or self._head(_MAIN)
            before = {} if base is None else self._files(base)
            listing = self._listing(before, base)
            self._check_alias(config)
            tagged = self._tag_commit(config.version) if config.version else ""
            if tagged:
                return self._existing_version(tagged, package, config)
            if head is None:
                self._api.create_branch(self.repo, branch=self.revision, exist_ok=True)
                head = self._head(self.revision)
            is_new = head is None or not package.matches(listing)
            if head and listing and not is_new and self._is_current(before, listing, package):
                commit = head
            else:
                commit = self._commit(package, before, listing, head, progress)
            if config.version:
                self._api.create_tag(self.repo, tag=config.version, revision=commit)
            self._set_alias(config.alias, commit)
        version = config.version or commit
        return Published(f"hf://{self.repo}@{version}", version, is_new)

    @property
    def remedy(self) -> str:
        """Remedy for a damaged version."""
        return (
            "It cannot be trusted: publish it again from an undamaged artifact; a tag needs "
            "another --version."
        )

    def pull(self, out: Path, progress: Progress) -> Path:
        """Download a revision, using the library's cache.

        Raises:
            RegistryError: the Hub cannot be reached, rejects the request, or has no such revision.
        """
        task = progress.task(f"downloading {self.url}")
        with _hub_calls(self.url), task:
            commit = self._api.model_info(self.repo, revision=self.revision).sha
            snapshot = self._api.snapshot_download(self.repo, revision=commit)
            # Links into the library's cache are followed, so that edits do not change the cache.
            shutil.copytree(
                snapshot,
                out,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns(".gitattributes"),
                copy_function=shutil.copyfile,
            )
        return out

    def _head(self, branch: str) -> str | None:
        """Return the newest commit of a branch; None if the branch does not exist."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            return str(self._api.model_info(self.repo, revision=branch).sha)
        except RevisionNotFoundError:
            return None

    def _files(self, commit: str) -> dict[str, tuple[str, int]]:
        """Return name -> (digest, size): sha256 for large files, git's blob id for others."""
        info = self._api.model_info(self.repo, revision=commit, files_metadata=True)
        return {
            file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id or "", file.size or 0)
            for file in info.siblings or []
        }

    def _listing(self, files: dict[str, tuple[str, int]], commit: str | None) -> Publication | None:
        """Return the listing of the published package; None if nothing is published.

        Raises:
            RegistryError: the repository has files that enginery did not publish.
        """
        if LISTING in files and commit:
            with temporary_directory("hub") as scratch:
                self._api.hf_hub_download(
                    self.repo, LISTING, revision=commit, local_dir=scratch, cache_dir=scratch
                )
                try:
                    return Publication.read(scratch, self.url)
                except ArtifactError:  # changed, or from a newer enginery: other content
                    return None
        foreign = sorted(set(files) - set(_HUB_FILES))
        if foreign and not {MANIFEST, LISTING} & set(files):
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            raise RegistryError(
                f"{self.url} contains a model that enginery did not publish: "
                f"{', '.join(foreign[:3])}{more}.",
                do="Use another repository; a new branch of this one would have these files, too.",
            )
        return None

    def _is_current(
        self, before: dict[str, tuple[str, int]], listing: Publication, package: Package
    ) -> bool:
        """Return True if a branch with the same content needs no commit."""
        local = {file.sha256: file.path for file in package.files}
        for name, record in listing.files.items():
            digest, size_bytes = before.get(name, ("", -1))
            if len(digest) == 64:
                is_same = digest == record.sha256
            elif record.sha256 in local and size_bytes == record.size_bytes:
                is_same = digest == _git_blob_id(local[record.sha256])
            else:  # a card with other wording: git's blob id cannot be compared with a sha256
                is_same = size_bytes == record.size_bytes
            if not is_same:
                return False
        return package.publication.version in ("", listing.version)

    def _commit(
        self,
        package: Package,
        before: dict[str, tuple[str, int]],
        listing: Publication | None,
        head: str | None,
        progress: Progress,
    ) -> str:
        """Upload and commit all changes at once; return the id of the commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        names = {file.name for file in package.files}
        ours = set(listing.files) | {LISTING} if listing else set()
        operations: list[Any] = [
            CommitOperationDelete(path_in_repo=name)
            for name in set(before) - names
            if name in ours or name.startswith((f"{ENGINES}/", f"{REPORTS}/"))
        ]
        operations += [
            CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file.path))
            for file in package.files
        ]
        with progress.task(f"uploading {package.name}"):
            # `upload_folder` calls this, too, but a package is not one folder: card and listing
            # are outside the artifact. `upload_large_folder` makes several partial commits.
            commit = self._api.create_commit(
                self.repo,
                operations,
                commit_message=f"Publish {package.name} {package.content_sha256[:12]}",
                commit_description="\n".join(f"{n}: {v}" for n, v in package.tags.items()),
                revision=self.revision,
                parent_commit=head,  # fail if another writer has committed in between
            )
        return str(commit.oid)

    def _tag_commit(self, name: str) -> str:
        """Return the commit that a tag points to; empty if the tag does not exist."""
        refs = self._api.list_repo_refs(self.repo)
        return next((str(tag.target_commit) for tag in refs.tags if tag.name == name), "")

    def _existing_version(self, commit: str, package: Package, config: PublishConfig) -> Published:
        """Return the existing version; raise RegistryError if it has other content."""
        existing = self._listing(self._files(commit), commit)
        if not package.matches(existing):
            digest = existing.content_sha256[:12] if existing else "no listing"
            raise RegistryError(
                f"hf://{self.repo}@{config.version} exists with other content than "
                f"{package.name}: found {digest}, expected {package.content_sha256[:12]}.",
                do="Choose another --version.",
            )
        self._set_alias(config.alias, commit)
        return Published(f"hf://{self.repo}@{config.version}", config.version, is_new=False)

    def _check_alias(self, config: PublishConfig) -> None:
        """Raise an error if the alias is the name of a version, as the tag's listing tells."""
        if not config.alias:
            return
        if config.alias == config.version:
            raise OptionError(
                f"options 'alias' and 'version' are both '{config.alias}'.", do="Leave one out."
            )
        commit = self._tag_commit(config.alias)
        listing = self._listing(self._files(commit), commit) if commit else None
        if listing and listing.version == config.alias:
            raise RegistryError(
                f"alias '{config.alias}' is the name of a version of {self.repo}.",
                do="Choose another --alias: a version is never moved.",
            )

    def _set_alias(self, alias: str, commit: str) -> None:
        """Move the alias, a tag, to a commit."""
        if not alias or self._tag_commit(alias) == commit:
            return
        if self._tag_commit(alias):
            self._api.delete_tag(self.repo, tag=alias)
        self._api.create_tag(self.repo, tag=alias, revision=commit)


def _git_blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False).hexdigest()


@contextmanager
def _hub_calls(url: str) -> Iterator[None]:
    """Raise RegistryError, without the token, for errors of the library; hide its progress bars."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shows_bars = not are_progress_bars_disabled()
    try:
        if shows_bars:
            disable_progress_bars()
        with hub_requests():
            yield
    except EngineryError:
        raise
    except (OSError, ValueError) as error:  # all errors of the library
        # Not `from error`: the error may contain a request with the token.
        raise _to_registry_error(url, error) from None
    finally:
        if shows_bars:
            enable_progress_bars()


def _first_line(error: Exception) -> str:
    """Return the server's message, or the first line of the library's message."""
    server = str(getattr(error, "server_message", None) or "")
    lines = [line.strip() for line in (server or str(error)).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _to_registry_error(url: str, error: Exception) -> RegistryError:
    from huggingface_hub import errors, get_token

    status = getattr(getattr(error, "response", None), "status_code", 0)
    message = _first_line(error)
    if token := get_token():
        message = message.replace(token, "***")
    if not status:
        return RegistryError(
            f"the Hub cannot be reached for {url}: {message}.",
            do="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE. Uploaded files are kept.",
        )
    login = "Set HF_TOKEN to a token with write access, or log in with: hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return RegistryError(
            f"{url}: the revision does not exist.", do="Check the branches and tags."
        )
    if isinstance(error, errors.RepositoryNotFoundError):  # or a gated one
        return RegistryError(f"{url} does not exist, is private or gated: {message}.", do=login)
    if status == 412:
        return RegistryError(f"{url} was changed by another writer.", do="Publish again.")
    remedies = {401: login, 403: login, 429: "Its rate limit is reached: try again later."}
    return RegistryError(
        f"the Hub answered {status} for {url}: {message}.", do=remedies.get(status, "")
    )
