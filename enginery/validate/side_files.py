"""Compare the files beside an artifact's graphs with the source's: equal in content or in effect.

An answer depends on the tokenizer and its settings, the processor, labels, pooling, prompts and
options of generation as much as on the graph. Most of these files were copied byte for byte.

- A tokenizer has to be the one that transformers builds from the source's files, state for state
  (`runtime/text/tokenizer_comparison.py`). If its files were changed, transformers also has to make
  the same of them.
- config.json, generation_config.json and preprocessor_config.json are compared by what
  transformers reads from them, with all defaults, because Optimum saves the first two anew.
- All other files are compared by content.

A reference that is an .onnx file has its files beside it. They are compared by content, where
transformers is not installed or cannot read them.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.errors import ArtifactError, EngineryError, SourceError, raise_system_error
from enginery.core.json_file import load_json
from enginery.core.model.files import (
    ModelConfig,
    PreprocessorConfig,
    SentenceBertConfig,
    side_files,
)
from enginery.reports.validation import SideFileDifference, SideFileMetrics
from enginery.runtime.pytorch.reference import SideFileQuestion, describe_side_files
from enginery.runtime.tasks import is_generating
from enginery.runtime.text.tokenizer import TextTokenizer
from enginery.runtime.text.tokenizer_comparison import (
    TokenizerDescription,
    compare_tokenizer,
    equal_parts,
)
from enginery.validate.reference import Reference

_CONFIG, _GENERATION = ModelConfig.FILE, "generation_config.json"
_DESCRIBED = (_CONFIG, _GENERATION, PreprocessorConfig.FILE)
"""The files that are compared by what transformers reads from them."""
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_SENTENCEPIECE = (".model", ".spm")
_READ_BY_LOADERS = (
    *_DESCRIBED,
    *_TOKENIZER,
    *_VOCABULARIES,
    "modules.json",
    *SentenceBertConfig.FILES,
    "config_sentence_transformers.json",
    "processor_config.json",
)
"""Files that have an effect although the source has none of their name."""
_IGNORED: Mapping[str, frozenset[str]] = {
    # What `export` and Optimum set, and what only says where a model comes from.
    _CONFIG: frozenset(
        (
            "_name_or_path",
            "_attn_implementation_autoset",
            "transformers_version",
            "dtype",
            "torch_dtype",
            "use_cache",
        )
    ),
    # Tokens do not depend on the cache.
    _GENERATION: frozenset(("transformers_version", "_from_model_config", "use_cache")),
    PreprocessorConfig.FILE: frozenset(
        ("processor_class", "_processor_class", "image_processor_type", "feature_extractor_type")
    ),
    "config_sentence_transformers.json": frozenset(("__version__",)),
}
_PATHS = {"name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"}
"""Keys of tokenizer_config.json that say where the files were."""
_SPANS = ("token-classification", "question-answering")
"""Tasks whose answers are spans of a text."""
_MAX_COPIED_BYTES = 2**28
"""Size of the largest file of an artifact that is copied for transformers."""


_Result = SideFileDifference | str


def compare_side_files(reference: Reference, scratch: Path) -> SideFileMetrics:
    """Compare an artifact's files beside its graphs with those of its reference.

    Args:
        reference: the reference.
        scratch: a directory for copies of files.
    """
    files = _SideFiles(reference, scratch)
    results = list(files.compare())
    differences = [result for result in results if isinstance(result, SideFileDifference)]
    not_compared = [result for result in results if isinstance(result, str)]
    compared = sorted(
        (files.own & files.sources)
        - {difference.file for difference in differences}
        - {reason.partition(":")[0] for reason in not_compared}
    )
    return SideFileMetrics(compared, differences, not_compared)


class _SideFiles:
    """The files of both sides.

    Comparisons yield differences, and reasons in words why a file was not compared.
    """

    def __init__(self, reference: Reference, scratch: Path) -> None:
        self.reference, self.scratch = reference, scratch
        artifact, source = reference.artifact, reference.source
        self.theirs = source.path.parent if self.reference.is_onnx else source.path
        self.mine = artifact.path
        code = artifact.manifest.trust_remote_code
        self.own = _read_names(self.mine, code=code) & set(artifact.side_files())
        self.sources = _read_names(self.theirs, code=code)
        if not (self.mine / _CONFIG).is_file() and not self.own:
            self.sources = set()  # a file that was imported without the files beside it
        if self.reference.is_onnx and source.record.id != artifact.manifest.source.id:
            # A graph from elsewhere, or one that was moved, may lie without the files beside it.
            self.own &= self.sources
        self.changed = {
            name
            for name in self.own & self.sources
            if not filecmp.cmp(self.mine / name, self.theirs / name, shallow=False)
        }
        self.written = _written_by_export(self.reference)
        self.generates = is_generating(artifact.manifest.task)

    def compare(self) -> Iterator[_Result]:
        """Compare all files."""
        differing = self.changed | (self.own ^ self.sources)
        tokenizer = {name for name in self.own | self.sources if _is_tokenizer(name)}
        source, mine = self._describe(tokenizer & differing)
        if tokenizer:
            yield from self._compare_tokenizer(tokenizer & differing, source, mine)
        others = sorted((self.own | self.sources) - tokenizer)
        results = [item for name in others for item in self._compare_file(name, source, mine)]
        yield from results
        for name in sorted(self.reference.artifact.side_files()):
            if name.endswith(".safetensors"):
                yield from self._compare_module(name)
        problem = mine.get("processor", "")
        named = {item.file for item in results if isinstance(item, SideFileDifference)}
        if problem and PreprocessorConfig.FILE not in named:
            problem = f"inputs are not those of transformers: {problem}"
            yield SideFileDifference(PreprocessorConfig.FILE, "", problem)

    def _describe(self, tokenizer: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what transformers reads from the source and from the artifact.

        Args:
            tokenizer: the files of the tokenizer that differ.
        """
        nothing: dict[str, Any] = {"errors": {}}
        if not self.reference.process.python and find_spec("transformers") is None:
            return nothing, nothing
        keys = {
            key.partition(".")[0]
            for name in tokenizer
            for key, _ in self._different_keys(name)
            if name == "tokenizer_config.json"
        }
        limit = self._limit()
        copies = self.scratch / "side-files"
        for name in self.own:
            if (self.mine / name).stat().st_size <= _MAX_COPIED_BYTES:
                (copies / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.mine / name, copies / name)
        described = []
        task = self.reference.artifact.manifest.task
        for directory, length in ((self.theirs, limit), (copies, limit if tokenizer else 0)):
            if not directory.is_dir():
                described.append(nothing)
                continue
            described.append(
                describe_side_files(
                    directory,
                    SideFileQuestion(
                        limit=length,
                        task=task if directory == self.theirs else "",
                        keys=sorted(keys - _PATHS),
                        processor=directory == copies
                        and PreprocessorConfig.FILE not in self.written,
                    ),
                    process=self.reference.process,
                )
            )
        shutil.rmtree(copies, ignore_errors=True)
        return described[0], described[1]

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        """The artifact's tokenizer; ArtifactError if it cannot be opened."""
        return TextTokenizer.open(self.mine)

    def _limit(self) -> int:
        """Return the tokenizer's limit in tokens; 0 if it cannot be opened."""
        try:
            return self._tokenizer.limit
        except ArtifactError as error:
            raise_system_error(error)
            # Words and letters of some models are in vocab.json alone.
            return 16 if "tokenizer_config.json" in self.own & self.sources else 0

    def _compare_tokenizer(
        self, differing: set[str], source: Mapping[str, Any], mine: Mapping[str, Any]
    ) -> Iterator[_Result]:
        """Compare the tokenizer with that which transformers builds from the source's files."""
        if "tokenizer" not in source:
            reason = source["errors"].get("tokenizer", "transformers cannot open one")
            yield f"tokenizer: only by content: {reason}"
            yield from self._name_keys(differing - self.written)
            return
        expected = TokenizerDescription.from_json(source["tokenizer"])
        problem = ""
        if "tokenizer.json" in self.own:
            try:
                differences = compare_tokenizer(self.mine, self._tokenizer, expected)
                problem = differences.problem or ", ".join(differences.state)
                if problem and (version := self.reference.other_transformers):
                    spans = self.reference.artifact.manifest.task in _SPANS
                    problem = differences.problem_of_version(spans=spans)
                    compared = "with offsets" if spans else "without offsets"
                    yield (
                        f"tokenizer.json: only its tokens, {compared}: {version} makes another "
                        "state of it"
                    )
            except ArtifactError as error:
                raise_system_error(error)
                problem = error.message
        elif "tokenizer.json" in self.sources:
            problem = "is missing"
        if not problem and not self._same_effect(differing, source, mine):
            problem = "transformers makes another tokenizer of it than of the source's"
        # Vocabularies beside tokenizer.json are read by slow tokenizers, which ask nothing here.
        vocabularies = {name for name in differing if _is_vocabulary(name)} - self.written
        if not problem:
            yield from self._name_keys(vocabularies)
            return
        named = list(self._name_keys(differing - self.written))
        yield from named or [SideFileDifference("tokenizer.json", "", problem)]

    def _same_effect(
        self, differing: set[str], source: Mapping[str, Any], mine: Mapping[str, Any]
    ) -> bool:
        """Return True if transformers makes the same tokenizer of the artifact's files."""
        if not differing - self.written:
            return True
        if "tokenizer" not in mine or source["attributes"] != mine["attributes"]:
            return False
        theirs, own = dict(source["tokenizer"]), dict(mine["tokenizer"])
        # transformers may read the same state from another file.
        states = [json.loads(described.pop("backend") or "{}") for described in (theirs, own)]
        parts = states[0].keys() | states[1].keys()
        return theirs == own and all(
            equal_parts(states[0].get(part), states[1].get(part)) for part in parts
        )

    def _name_keys(self, names: set[str]) -> Iterator[SideFileDifference]:
        """Yield a difference for each key of these files that has another value."""
        for name in sorted(names):
            for key, problem in self._different_keys(name):
                yield SideFileDifference(name, key, problem)

    def _different_keys(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield each key of a file whose value is not the source's, and how they differ."""
        if name not in self.own:
            yield "", "is missing"
        elif name not in self.sources:
            yield "", "is there, but the source has none"
        elif name.endswith(".json"):
            documents = []
            for directory, error in ((self.theirs, SourceError), (self.mine, ArtifactError)):
                try:
                    documents.append(load_json(directory / name, error=error))
                except EngineryError as problem:
                    raise_system_error(problem)
                    yield "", problem.message
                    return
            yield from _differing(documents[0], documents[1], _IGNORED.get(name, frozenset()))
        elif name in self.changed and not self._same_lines(name):
            yield "", "its content is not the source's"

    def _same_lines(self, name: str) -> bool:
        """Return True if two lists of merges differ in their first line alone, a comment."""
        if name != "merges.txt":
            return False
        lines = [
            [line for line in (path / name).read_text("utf-8").splitlines() if line]
            for path in (self.mine, self.theirs)
        ]
        return [x for x in lines[0] if not x.startswith("#version")] == [
            x for x in lines[1] if not x.startswith("#version")
        ]

    def _compare_file(
        self, name: str, source: Mapping[str, Any], mine: Mapping[str, Any]
    ) -> Iterator[_Result]:
        """Compare a file that is no part of the tokenizer."""
        if name in self.written:
            yield f"{name}: written by export, from options or from other files"
            return
        if name not in self.sources and name not in _READ_BY_LOADERS:
            return
        if name == _GENERATION and name not in self.sources:
            return  # the model's own options; those of generated texts are compared with them
        if name == _GENERATION and name not in self.own and not self.generates:
            return  # a language model that was exported as an embedder or a classifier
        if name in source and name in mine:
            ignored = _IGNORED[name]
            both = (source[name], mine[name])
            if self.reference.other_transformers:
                # Each family writes other defaults into the file, and reads others where it has
                # none: what is off in one is missing in the other.
                both = (_without_what_is_off(both[0]), _without_what_is_off(both[1]))
            differences = [*_differing(*both, ignored)]
            if name == _CONFIG and source[name].get("pad_token_id") is None:
                # Export names the tokenizer's, which classifiers need.
                differences = [item for item in differences if item[0] != "pad_token_id"]
            for key, problem in differences:
                yield SideFileDifference(name, key, problem)
            return
        if name == _CONFIG and self.mine.joinpath(name).is_file() and name in self.sources:
            reason = source["errors"].get(name) or mine["errors"].get(name, "")
            if reason and name not in source:
                yield f"{name}: transformers cannot read the source's: {reason}"
                return
        yield from self._name_keys({name})

    def _compare_module(self, name: str) -> Iterator[_Result]:
        """Compare the weights of a module of sentence-transformers, which export writes in FP32."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        source = self.theirs / name
        if not source.is_file():
            yield f"{name}: the source has no file of this name"
            return
        try:
            mine, theirs = load_file(self.mine / name), load_file(source)
        except (SafetensorError, TypeError, KeyError, OSError) as error:
            raise_system_error(error)
            yield f"{name}: numpy cannot read it: {error}"
            return
        for key in sorted(mine.keys() | theirs.keys()):
            own, expected = (
                tensors.get(key, np.empty(0)).astype(np.float32) for tensors in (mine, theirs)
            )
            if not np.array_equal(own, expected):
                yield SideFileDifference(name, key, "its values are not the source's")


def _read_names(directory: Path, *, code: bool) -> set[str]:
    return set(side_files(directory, code=code)) if directory.is_dir() else set()


def _is_tokenizer(name: str) -> bool:
    return name in _TOKENIZER or _is_vocabulary(name)


def _is_vocabulary(name: str) -> bool:
    return name in _VOCABULARIES or ("/" not in name and name.endswith(_SENTENCEPIECE))


def _written_by_export(reference: Reference) -> set[str]:
    """Return the side files that export does not copy, but writes.

    tokenizer.json, if transformers makes another of all files, or there was none; the processor of
    a model of timm, and of an .onnx file with options for images.
    """
    manifest = reference.artifact.manifest
    written: set[str] = set()
    notes = [note for stage in manifest.stages if stage.stage == "export" for note in stage.notes]
    directory = reference.source.path
    if manifest.source.kind != "onnx" and not (directory / "tokenizer.json").is_file():
        written |= {"tokenizer.json", "special_tokens_map.json"}
    if any(note.startswith("tokenizer.json is that of ") for note in notes):
        written.add("tokenizer.json")
    if manifest.library in ("timm", "onnx"):
        file = PreprocessorConfig.FILE
        export = next((stage for stage in manifest.stages if stage.stage == "export"), None)
        options = export.options if export else {}
        images = ("resize", "rescale", "mean", "std", "channel_order")
        settings = (options.get(name, "") not in ("", "auto") for name in images)
        if manifest.library == "timm" or any(settings):
            written.add(file)
    return written


def _differing(
    source: Any, mine: Any, ignored: frozenset[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the keys at which two JSON values differ, and how; objects are compared key by key."""
    if isinstance(source, dict) and isinstance(mine, dict):
        for key in dict.fromkeys([*source, *mine]):
            if key not in ignored:
                path = f"{prefix}.{key}" if prefix else key
                yield from _differing(source.get(key), mine.get(key), ignored, path)
    elif source != mine:
        yield prefix, f"{_shown(mine)}, but {_shown(source)} in the source"


def _without_what_is_off(value: Any) -> Any:
    """Return JSON data without the keys whose value is null or false."""
    if not isinstance(value, dict):
        return value
    return {
        key: _without_what_is_off(item)
        for key, item in value.items()
        if item is not None and item is not False
    }


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"
