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
from pathlib import Path
from typing import Any

from enginery.core.artifact import MANIFEST, REPORTS
from enginery.core.engine_record import ENGINES
from enginery.core.errors import (
    ArtifactError,
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
from enginery.publish.targets.hub_errors import first_line, told, without_bars

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
            raise OptionError(f"address '{url}': {first_line(error)}.") from error
        self._api: Any = HfApi(library_name="enginery")

    def publish(self, package: Package, config: PublishConfig, progress: Progress) -> Published:
        """Commits what has changed to the branch; nothing where the same content is its head.

        Raises:
            RegistryError: the Hub cannot be reached or refuses; the repository holds another
                model, or the version's name another content.
        """
        with told(self.url), without_bars():
            self._api.create_repo(self.repo, private=config.private, exist_ok=True)
            head = self._head(self.revision)
            # A new branch begins with the files of main; one that cannot be used is not made.
            base = head or self._head(_MAIN)
            before = {} if base is None else self._files(base)
            listing = self._listing(before, base)
            self._require_alias(config)
            taken = self._tag(config.version) if config.version else ""
            if taken:
                return self._same_version(taken, package, config)
            if head is None:
                self._api.create_branch(self.repo, branch=self.revision, exist_ok=True)
                head = self._head(self.revision)
            notes = [f"{r.directory_name} is {bound_to(r)}" for r in package.engines]
            is_same = head is not None and package.is_version(listing)
            if head and listing and is_same and self._is_whole(before, listing, package):
                commit = head
            else:
                commit = self._commit(package, before, listing, head, progress)
            is_new = not is_same
            if config.version:
                self._api.create_tag(self.repo, tag=config.version, revision=commit)
            self._move_alias(config.alias, commit)
        version = config.version or commit
        return Published(f"hf://{self.repo}@{version}", version, is_new, tuple(notes))

    @property
    def remedy(self) -> str:
        """What to do about a damaged version."""
        return (
            "It cannot be trusted: publish it again from a whole artifact, what a tag names under "
            "another --version."
        )

    def pull(self, out: Path, progress: Progress) -> Path:
        """Downloads a revision; what was downloaded before is in the library's own cache.

        Raises:
            RegistryError: the Hub cannot be reached, refuses, or has no such revision.
        """
        with told(self.url), without_bars(), progress.task(f"downloading {self.url}"):
            commit = self._api.model_info(self.repo, revision=self.revision).sha
            snapshot = Path(self._api.snapshot_download(self.repo, revision=commit))
            for path in sorted(snapshot.rglob("*")):
                if path.is_file() and path.name != ".gitattributes":
                    target = out / path.relative_to(snapshot)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # The cache is another tool's: a link would let an edit here reach it.
                    shutil.copyfile(path.resolve(), target)
        return out

    def _head(self, branch: str) -> str | None:
        """A branch's newest commit; None where there is no such branch."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            return str(self._api.model_info(self.repo, revision=branch).sha)
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
                do="Name another repository: a new branch of this one begins with these files.",
            )
        return None

    def _is_whole(
        self, before: dict[str, tuple[str, int]], listing: Publication, package: Package
    ) -> bool:
        """Whether a branch of the same content needs no commit: it is undamaged, and is marked.

        Raises:
            RegistryError: it is damaged, and the rights that it stated cannot be read here.
        """
        local = {file.name: file for file in package.files}
        if _is_same(before.get(LISTING), local[LISTING].path, local[LISTING].sha256):
            return all(_is_same(before.get(n), f.path, f.sha256) for n, f in local.items())
        # The same content with a card in other words: git's ids say nothing of sha256.
        for name, record in listing.files.items():
            digest, size_bytes = before.get(name, ("", -1))
            is_other = len(digest) == 64 and digest != record.sha256
            if is_other or size_bytes != record.size_bytes:
                damage = f"{self.url}: {name} is not as {LISTING} says"
                package.require_rights(damage, listing.content_sha256)
                return False
        is_marked = listing.version == package.version
        return not package.version or is_marked or not package.knows_rights

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
        if not package.is_version(found):
            raise RegistryError(
                f"hf://{self.repo}@{config.version} is another content than {package.name}: "
                f"{found.content_sha256[:12] if found else 'unknown'}, found "
                f"{package.content_sha256[:12]}.",
                do="Name another --version.",
            )
        self._move_alias(config.alias, commit)
        return Published(f"hf://{self.repo}@{config.version}", config.version, is_new=False)

    def _require_alias(self, config: PublishConfig) -> None:
        """Raises where --alias is a version's name: the listing at a version's tag has it."""
        if not config.alias:
            return
        if config.alias == config.version:
            raise OptionError(f"alias and version are both '{config.alias}'.", do="Leave one out.")
        commit = self._tag(config.alias)
        listing = self._listing(self._files(commit), commit) if commit else None
        if listing and listing.version == config.alias:
            raise RegistryError(
                f"alias '{config.alias}' is the name of a version of {self.repo}.",
                do="Name another --alias: a version is never moved.",
            )

    def _move_alias(self, alias: str, commit: str) -> None:
        """A tag that points to `commit` from now on."""
        if not alias or self._tag(alias) == commit:
            return
        if self._tag(alias):
            self._api.delete_tag(self.repo, tag=alias)
        self._api.create_tag(self.repo, tag=alias, revision=commit)


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
