"""`hf://org/name`: a model repository on the Hugging Face Hub, through huggingface_hub.

Takes a package; leaves one commit, with a tag where a version or an alias is named.

    >>> HubRegistry("hf://org/minilm-onnx", config).publish(package, config, SILENT).url
    'hf://org/minilm-onnx@0d5c8f…'

The token is the library's own (HF_TOKEN, or `hf auth login`) and is never part of a message. Large
files go up one by one before the commit and stay there: a run that was killed does not send them
again. Which files are large is the Hub's to say.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginery.core.artifact import MANIFEST, REPORTS
from enginery.core.engine_record import ENGINES
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    MissingPackageError,
    OptionError,
    RegistryError,
)
from enginery.core.progress import Progress
from enginery.publish.config import LATEST, PublishConfig
from enginery.publish.destination import Published
from enginery.publish.engine_bond import bound_to
from enginery.publish.package import Package
from enginery.publish.publication import CARD, LISTING, Publication

_ADDRESS = re.compile(r"hf://(?P<repo>[^/@\s]+/[^/@\s]+)(?:@(?P<revision>\S+))?", re.IGNORECASE)
_LARGE_BYTES = 1 << 20
_MAIN = "main"
# What the Hub itself puts into a new repository.
_HUB_FILES = (".gitattributes", CARD)


class HubRegistry:
    """A repository of the Hub."""

    def __init__(self, url: str, config: PublishConfig) -> None:
        """Reads the address; nothing is sent yet.

        Raises:
            OptionError: the address is not `hf://org/name` or `hf://org/name@revision`.
            MissingPackageError: huggingface_hub is not installed.
        """
        found = _ADDRESS.fullmatch(url)
        if not found:
            raise OptionError(f"address '{url}': expected hf://org/name or hf://org/name@revision.")
        self.url, self.repo = url, found["repo"]
        self.revision = _MAIN if found["revision"] in (None, LATEST) else found["revision"]
        if config.name and config.name != self.repo.partition("/")[2]:
            raise OptionError(
                f"option 'name' is '{config.name}', but the address says {self.repo}."
            )
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HFValidationError
            from huggingface_hub.utils import validate_repo_id
        except ImportError as error:
            raise MissingPackageError("huggingface_hub", extra="export", purpose=url) from error
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise OptionError(f"address '{url}': {_first_line(error)}.") from error
        self._api: Any = HfApi(library_name="enginery")

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Commits what has changed to the branch; nothing where the same content is its head.

        Raises:
            RegistryError: the Hub cannot be reached or refuses; the repository holds another
                model, or the version's name another content.
        """
        with self._spoken(), _without_bars():
            self._api.create_repo(self.repo, private=config.private, exist_ok=True)
            head = self._head()
            if head is None:
                self._api.create_branch(self.repo, branch=self.revision, exist_ok=True)
                head = self._head()
            before = {} if head is None else self._files(head)
            listing = self._listing(before, head)
            taken = self._tag(config.version) if config.version else ""
            if taken:
                return self._same_version(taken, package, config)
            notes = [f"{r.directory_name} is {bound_to(r)}" for r in package.engines]
            if head and _has_content(listing, package) and not self._damaged(before, package):
                commit, is_new = head, False
            else:
                commit = self._commit(package, before, listing, head, progress)
                is_new = commit != head
            if config.version:
                self._api.create_tag(self.repo, tag=config.version, revision=commit)
            self._move_alias(config.alias, commit)
        version = config.version or commit
        return Published(f"hf://{self.repo}@{version}", version, is_new, tuple(notes))

    def pull(self, out: Path, progress: Progress) -> Path:
        """Downloads a revision; what was downloaded before is in the library's own cache.

        Raises:
            RegistryError: the Hub cannot be reached, refuses, or has no such revision.
        """
        with self._spoken(), _without_bars(), progress.task(f"downloading {self.url}"):
            commit = self._api.model_info(self.repo, revision=self.revision).sha
            snapshot = Path(self._api.snapshot_download(self.repo, revision=commit))
            for path in sorted(snapshot.rglob("*")):
                if path.is_file() and path.name != ".gitattributes":
                    target = out / path.relative_to(snapshot)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # The cache is another tool's: a link would let an edit here reach it.
                    shutil.copyfile(path.resolve(), target)
        return out

    def _head(self) -> str | None:
        """The branch's newest commit; None where there is no such branch."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            return str(self._api.model_info(self.repo, revision=self.revision).sha)
        except RevisionNotFoundError:
            return None

    def _files(self, commit: str) -> dict[str, tuple[str, int]]:
        """sha256 of large files, git's blob id of the others, and the size, by name."""
        info = self._api.model_info(self.repo, revision=commit, files_metadata=True)
        return {
            file.rfilename: (file.lfs.sha256 if file.lfs else file.blob_id or "", file.size or 0)
            for file in info.siblings or []
        }

    def _listing(self, files: dict[str, tuple[str, int]], commit: str | None) -> Publication | None:
        """What was published to the branch; None where nothing was.

        Raises:
            RegistryError: the repository holds something that enginery did not publish.
        """
        if LISTING in files and commit:
            with tempfile.TemporaryDirectory(prefix="enginery-hub-") as scratch:
                self._api.hf_hub_download(
                    self.repo, LISTING, revision=commit, local_dir=scratch, cache_dir=scratch
                )
                try:
                    return Publication.read(Path(scratch), self.url)
                except ArtifactError:  # altered, or of a newer enginery: another content
                    return None
        foreign = sorted(set(files) - set(_HUB_FILES))
        if foreign and not {MANIFEST, LISTING} & set(files):
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            raise RegistryError(
                f"{self.url} holds a model that enginery did not publish: "
                f"{', '.join(foreign[:3])}{more}.",
                do="Name a repository, or a new branch after '@', that has none.",
            )
        return None

    def _damaged(self, before: dict[str, tuple[str, int]], package: Package) -> bool:
        """Whether the branch has the package's own listing and a file that is not as it says."""
        local = {file.name: file for file in package.files}
        if not _is_same(before.get(LISTING), local[LISTING].path, local[LISTING].sha256):
            return False  # the same content with a card in other words
        return any(
            not _is_same(before.get(name), file.path, file.sha256) for name, file in local.items()
        )

    def _commit(
        self,
        package: Package,
        before: dict[str, tuple[str, int]],
        listing: Publication | None,
        head: str | None,
        progress: Progress,
    ) -> str:
        """Sends large files one by one, then commits all; returns the commit's id."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changed = [f for f in package.files if not _is_same(before.get(f.name), f.path, f.sha256)]
        names = {file.name for file in package.files}
        ours = set(listing.files) | {LISTING} if listing else set()
        gone = [
            name
            for name in before
            if name not in names
            and (name in ours or name.startswith((f"{ENGINES}/", f"{REPORTS}/")))
        ]
        operations: list[Any] = [CommitOperationDelete(path_in_repo=name) for name in gone]
        with progress.task(f"uploading {package.name}", len(changed)) as advance:
            for file in changed:
                added = CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file.path))
                if file.size_bytes >= _LARGE_BYTES:
                    self._api.preupload_lfs_files(
                        self.repo, [added], revision=self.revision, num_threads=1
                    )
                operations.append(added)
                advance()
        if not operations and head:
            return head
        made = self._api.create_commit(
            self.repo,
            operations,
            commit_message=f"Publish {package.name} {package.content_sha256[:12]}",
            commit_description=_description(package),
            revision=self.revision,
            parent_commit=head,  # another writer's commit in between is an error, not lost
        )
        return str(made.oid)

    def _tag(self, name: str) -> str:
        """The commit that a tag points to; empty where there is no such tag."""
        refs = self._api.list_repo_refs(self.repo)
        return next((str(tag.target_commit) for tag in refs.tags if tag.name == name), "")

    def _same_version(self, commit: str, package: Package, config: PublishConfig) -> Published:
        """The version that is there already under this name."""
        found = self._listing(self._files(commit), commit)
        if not _has_content(found, package):
            raise RegistryError(
                f"hf://{self.repo}@{config.version} is another content than {package.name}: "
                f"{found.content_sha256[:12] if found else 'unknown'}, found "
                f"{package.content_sha256[:12]}.",
                do="Name another --version.",
            )
        self._move_alias(config.alias, commit)
        return Published(f"hf://{self.repo}@{config.version}", config.version, is_new=False)

    def _move_alias(self, alias: str, commit: str) -> None:
        """A tag that points to `commit` from now on."""
        if not alias or self._tag(alias) == commit:
            return
        if self._tag(alias):
            self._api.delete_tag(self.repo, tag=alias)
        self._api.create_tag(self.repo, tag=alias, revision=commit)

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        """The Hub's errors as one of ours, without the token."""
        try:
            yield
        except EngineryError:
            raise
        except (OSError, ValueError) as error:  # every error of the library's and of its client's
            # Not `from error`: what is chained may hold a request, and that the token.
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> RegistryError:
        from huggingface_hub import errors, get_token

        status = getattr(getattr(error, "response", None), "status_code", 0)
        said = _first_line(error)
        if token := get_token():
            said = said.replace(token, "***")
        login = "Set HF_TOKEN to a token that may write there, or log in with: hf auth login"
        if isinstance(error, errors.GatedRepoError):
            return RegistryError(f"{self.url}: its authors grant access on request.", do=login)
        if isinstance(error, errors.RevisionNotFoundError):
            return RegistryError(f"{self.url}: there is no such revision.", do="See its branches.")
        if isinstance(error, errors.RepositoryNotFoundError):
            return RegistryError(f"{self.url}: there is none, or it is private.", do=login)
        if status in (401, 403):
            why = "the token may not do that" if token else "there is no token"
            return RegistryError(f"the Hub refuses {self.url} ({status}): {why}: {said}.", do=login)
        if status == 412:
            return RegistryError(f"{self.url} was changed meanwhile.", do="Publish again.")
        if status == 429:
            return RegistryError(f"the Hub refuses more requests for now: {said}.", do="Try later.")
        if status:
            return RegistryError(f"the Hub answers {status} for {self.url}: {said}.")
        return RegistryError(
            f"the Hub cannot be reached for {self.url}: {said}.",
            do="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE. What was sent stays there.",
        )


def _has_content(listing: Publication | None, package: Package) -> bool:
    return listing is not None and listing.content_sha256 == package.content_sha256


def _is_same(remote: tuple[str, int] | None, path: Path, sha256: str) -> bool:
    """Whether the Hub has this file: by sha256 for a large one, else by git's blob id."""
    if remote is None:
        return False
    digest, _ = remote
    if len(digest) == 64:
        return digest == sha256
    from huggingface_hub.utils import sha

    return bool(digest == sha.git_hash(path.read_bytes()))


def _description(package: Package) -> str:
    manifest = package.artifact.manifest
    lines = [f"content sha256 {package.content_sha256}", f"{manifest.task}, {manifest.precision}"]
    return "\n".join([*lines, *(f"{r.directory_name}: {bound_to(r)}" for r in package.engines)])


def _first_line(error: Exception) -> str:
    """The part of the library's message that says something: it opens with request ids."""
    server = str(getattr(error, "server_message", None) or "")
    lines = [line.strip() for line in (server or str(error)).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@contextmanager
def _without_bars() -> Iterator[None]:
    """One display of progress, ours."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
