"""Load a model's tokenizer and apply the settings of its config files, as transformers does.

transformers reads tokenizer.json, and lets the class of the tokenizer change it: by settings in
tokenizer_config.json, by special tokens in three files, by defaults. `tokenizer_classes.json` has
what each class of transformers 4.57 changes; `python -m tests.runtime.text.tokenizer_classes`
writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.json_file import read_json
from enginery.core.model.files import (
    AddedTokenValue,
    ModelConfig,
    SentenceBertConfig,
    SpecialTokens,
    SpecialTokensMap,
    TokenizerConfig,
)
from enginery.core.trust.bounds import MAX_COUNT

HIDDEN = " "
"""First character of the tokens in tokenizer.json that texts are not segmented into. No normalized
text contains it. `enginery.export.sentencepiece_tokenizers` writes such tokens."""

LENGTH_LIMIT = "the length_limit of manifest.json, beyond which the graph answers otherwise"
"""Source of a limit that is the graph's own: the model itself takes longer texts."""

_MAX_REASON_CHARACTERS = 300
"""Maximum length of a reason in an error message: a panic may quote the whole text."""


def load_tokenizer(directory: Path) -> tuple[Any, dict[str, Any]]:
    """Load tokenizer.json as a `tokenizers.Tokenizer`, without its padding and truncation.

    Returns:
        The tokenizer, and the settings that the file has for what the other files do not say:
        `pad_token`, `padding_side` and `truncation_side`.

    Raises:
        ArtifactError: the file is missing or cannot be read.
    """
    import tokenizers

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ArtifactError(
            f"{directory} has no tokenizer.json, which is needed to tokenize texts.",
            do="If the model has a tokenizer, enginery inspect shows why. "
            "Save one in the model's directory and export again: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL).",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except BaseException as error:
        reason = failure_reason(error)
        raise ArtifactError(f"{file} cannot be read by tokenizers: {reason}.") from error
    stored = {
        "pad_token": padding.get("pad_token"),
        "padding_side": padding.get("direction"),
        "truncation_side": truncation.get("direction"),
    }
    return tokenizer, {key: value for key, value in stored.items() if value is not None}


def is_panic(error: BaseException) -> bool:
    """Return True if `error` is a panic of Rust code.

    PyO3 raises panics as `PanicException`, which derives from BaseException. Every extension module
    has its own class of that name, and none exports it.
    """
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def failure_reason(error: BaseException) -> str:
    """Return the message of an error from `tokenizers`, without a full stop.

    `tokenizers` raises bare `Exception`s, and panics.

    Raises:
        BaseException: `error` itself, if it is an interrupt, an exit or an EngineryError.
    """
    if isinstance(error, EngineryError) or not (isinstance(error, Exception) or is_panic(error)):
        raise error
    reason = str(error).strip().rstrip(".")[:_MAX_REASON_CHARACTERS]
    return reason or type(error).__name__


@dataclass(frozen=True)
class TokenizerClass:
    """What a class of transformers does with a model's files."""

    name: str
    """Its name without `Fast`."""
    tokens: Mapping[str, str | None]
    """Special tokens by role, for roles that no file names."""
    additional_special_tokens: tuple[str, ...] = ()
    """Special tokens without a role, if no file names others."""
    own_special_tokens: tuple[str, ...] = ()
    flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Flags of the tokens of roles, which replace those of tokenizer.json."""
    padding_side: str = "right"
    pad_token_type_id: int = 0
    normalizer: tuple[str, ...] = ()
    """The settings that replace those of BERT's normalizer in tokenizer.json."""
    template: Mapping[str, bool] | None = None
    """Defaults of `add_bos_token` and `add_eos_token`, which replace the template for special
    tokens in tokenizer.json; None if the class keeps that."""
    trim_offsets: bool | None = None
    """Default of the setting that replaces tokenizer.json's; None if the class keeps that."""
    add_prefix_space: bool | None = False
    """Default of the setting that replaces tokenizer.json's; None if the class keeps that."""
    nested_prefix_space: bool = False
    """`add_prefix_space` is also set in a sequence of pre-tokenizers."""
    library: str = ""
    """A package that finds the words of a text, which `tokenizers` cannot."""
    converted: tuple[str, ...] = ()
    """The settings with which transformers makes another tokenizer.json of the vocabulary."""

    @classmethod
    def of(cls, settings: TokenizerConfig, config: ModelConfig) -> TokenizerClass:
        """Return the class that `AutoTokenizer` chooses; a class without changes if unknown."""
        name = (settings.tokenizer_class or config.tokenizer_class).removesuffix("Fast")
        if not name:
            kind = config.encoder.model_type if config.encoder else config.model_type
            name = _read_classes()["by_model_type"].get(kind, "")
        # Of a class that transformers 4.57 does not have, tokenizer.json says everything.
        unknown: dict[str, Any] = {"tokens": {}, "add_prefix_space": None}
        described = _read_classes()["classes"].get(name, unknown)
        return cls(name=name, **{key: described[key] for key in described if key != "model_types"})


@cache
def _read_classes() -> dict[str, Any]:
    """Return tokenizer_classes.json, and the names of its classes by model type."""
    file = resources.files("enginery.runtime.text").joinpath("tokenizer_classes.json")
    classes: dict[str, Any] = json.loads(file.read_text("utf-8"))["classes"]
    by_model_type = {kind: name for name, row in classes.items() for kind in row["model_types"]}
    return {"classes": classes, "by_model_type": by_model_type}


@dataclass(frozen=True)
class TokenizerFiles:
    """The settings of a model's tokenizer, from all files beside tokenizer.json."""

    directory: Path
    settings: TokenizerConfig
    config: ModelConfig
    kind: TokenizerClass
    special: SpecialTokens
    """The special tokens by role, with the defaults of the class."""
    more_special: tuple[AddedTokenValue, ...]
    """Special tokens without a role."""
    with_flags: tuple[AddedTokenValue, ...]
    """Special tokens with a role whose flags a file names."""

    @classmethod
    def read(
        cls, directory: Path, stored: Mapping[str, Any] = MappingProxyType({})
    ) -> TokenizerFiles:
        """Read the files in a model's directory.

        Args:
            directory: the directory.
            stored: the settings of tokenizer.json, from `load_tokenizer`.

        Raises:
            ArtifactError: a file cannot be read.
        """
        settings = TokenizerConfig.read(directory)
        config = ModelConfig.read(directory)
        kind = TokenizerClass.of(settings, config)
        token_map = SpecialTokensMap.read(directory)
        tokens = settings.with_map(token_map).model_dump(exclude_none=True)
        # A role that is null in the file has no token; one that is missing has the class's.
        nulls = [
            key for key, value in read_json(directory / settings.FILE).items() if value is None
        ]
        defaults = dict(kind.tokens)
        if "pad_token" not in defaults:
            defaults["pad_token"] = stored.get("pad_token")
        tokens = {role: token for role, token in defaults.items() if role not in nulls} | tokens
        additional = list(settings.additional_special_tokens)
        if not settings.lists_added_tokens:
            additional += token_map.additional_special_tokens
        names = list(kind.own_special_tokens)
        if "additional_special_tokens" not in settings.model_fields_set and not additional:
            names = [*kind.additional_special_tokens, *names]
        more = [
            *additional,
            *(AddedTokenValue(content=name, special=True) for name in names),
            *settings.extra_special_tokens,
        ]
        # transformers reads from tokenizer.json what tokenizer_config.json does not say.
        sides = {
            "padding_side": stored.get("padding_side", kind.padding_side),
            "truncation_side": stored.get("truncation_side", "right"),
        }
        sides = {key: value for key, value in sides.items() if key not in settings.model_fields_set}
        settings = settings.model_copy(update=sides)
        objects = settings.objects
        if not settings.lists_added_tokens:
            objects = objects | token_map.objects
        special = SpecialTokens(**tokens)
        with_flags = tuple(t for role, t in objects.items() if t.content == getattr(special, role))
        return cls(directory, settings, config, kind, special, tuple(more), with_flags)

    def configure(self, tokenizer: Any) -> None:
        """Apply the settings to a `tokenizers.Tokenizer`, in place, as transformers' class does.

        Raises:
            ArtifactError: tokenizer.json contradicts a setting, or lacks a token that one needs;
                or the class needs another library.
        """
        if self.kind.library:
            raise ArtifactError(
                f"{self.directory}: {self.kind.name} finds the words of a text with the package "
                f"{self.kind.library}, which tokenizer.json does not hold, so texts would get "
                "other token ids.",
                do="Send token ids in place of texts.",
            )
        self._add_tokens(tokenizer)
        tokenizer.encode_special_tokens = self.settings.split_special_tokens
        self._set_prefix_space(tokenizer)
        self._set_normalizer(tokenizer)
        self._set_template(tokenizer)
        self._set_offsets(tokenizer)

    def _add_tokens(self, tokenizer: Any) -> None:
        """Add the tokens that the files name; `tokenizers` ignores those that were added before."""
        from tokenizers import AddedToken

        stored = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        special = [token for token in self.special.model_dump().values() if token]
        special += [token.content for token in self.more_special]
        listed = dict(self.settings.added_tokens_decoder)
        if not self.settings.lists_added_tokens:
            for content, token_id in read_json(self.directory / "added_tokens.json").items():
                if isinstance(token_id, int) and not isinstance(token_id, bool):
                    listed[token_id] = AddedTokenValue(
                        content=content, normalized=content not in special
                    )
        tokens = [token for _, token in sorted(listed.items())]
        known = {token.content for token in tokens}
        by_class = {getattr(self.special, role): flags for role, flags in self.kind.flags.items()}
        more = {
            content: AddedTokenValue(content=content, **flags)
            for content, flags in by_class.items()
            if content
        }
        more |= {token.content: token for token in self.with_flags}
        replacing = set(more)
        more |= {token.content: token for token in self.more_special}
        for content in dict.fromkeys(special):
            # Flags of a class or file replace those of tokenizer.json, unless transformers has read
            # these.
            is_replaced = content in replacing and self.settings.lists_added_tokens
            if content not in known and (is_replaced or content not in stored):
                tokens.append(more.get(content, AddedTokenValue(content=content)))
        flags = [token.model_dump(exclude_none=True) for token in tokens]
        for token in flags:
            token["special"] = token["special"] or token["content"] in special
        tokenizer.add_tokens([AddedToken(**token) for token in flags])

    @property
    def _prefix_space(self) -> bool | None:
        """Whether a space is put before a text; None for what tokenizer.json says."""
        setting = self.settings.add_prefix_space
        return self.kind.add_prefix_space if setting is None else setting

    def _set_prefix_space(self, tokenizer: Any) -> None:
        wanted = self._prefix_space
        if wanted is None:
            return
        if "add_prefix_space" in self.kind.converted:
            self._require_prefix_space(tokenizer, wanted=wanted)
            return
        state = _state(tokenizer.pre_tokenizer)
        _set_in(state, "add_prefix_space", wanted, deep=self.kind.nested_prefix_space and wanted)
        _replace(tokenizer, "pre_tokenizer", state)
        if self.kind.nested_prefix_space and wanted:
            state = _state(tokenizer.decoder)
            _set_in(state, "add_prefix_space", wanted, deep=True)
            _replace(tokenizer, "decoder", state)

    def _require_prefix_space(self, tokenizer: Any, *, wanted: bool) -> None:
        """Raise ArtifactError unless tokenizer.json was made with this `add_prefix_space`."""
        (encoding,) = tokenizer.encode_batch(["a"], add_special_tokens=False)
        if encoding.tokens and encoding.tokens[0].startswith(("▁", "Ġ")) == wanted:
            return
        raise ArtifactError(
            f"{self.directory / TokenizerConfig.FILE} sets add_prefix_space to "
            f"{str(wanted).lower()}, with which transformers makes another tokenizer than that of "
            "tokenizer.json.",
            do="Save both together, AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL), "
            "and export the model again.",
        )

    def _set_normalizer(self, tokenizer: Any) -> None:
        if not self.kind.normalizer:
            return
        state = _state(tokenizer.normalizer)
        names = {
            "do_lower_case": "lowercase",
            "strip_accents": "strip_accents",
            "tokenize_chinese_chars": "handle_chinese_chars",
        }
        wanted = {names[key]: getattr(self.settings, key) for key in self.kind.normalizer}
        # transformers changes all of them as soon as one differs, and none in a sequence.
        if any(state.get(key, value) != value for key, value in wanted.items()):
            _replace(tokenizer, "normalizer", state | wanted)

    def _set_template(self, tokenizer: Any) -> None:
        """Put the tokens for beginning and end around texts, as add_bos_token and add_eos_token."""
        if self.kind.template is None:
            return
        from tokenizers import processors

        around = []
        for key, role in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
            setting = getattr(self.settings, key)
            is_added = self.kind.template[key] if setting is None else setting
            token = getattr(self.special, role)
            if is_added and (token is None or tokenizer.token_to_id(token) is None):
                raise ArtifactError(
                    f"{self.directory / TokenizerConfig.FILE}: {key} is true, but the tokenizer "
                    f"has no {role}.",
                    do=f"Set {key} to false, or name a {role} of the vocabulary.",
                )
            around.append(token if is_added else None)
        bos, eos = around
        single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
        pair = single + [f"{bos}:1"] * bool(bos) + ["$B:1"] + [f"{eos}:1"] * bool(eos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=pair,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in around if token],
        )

    def _set_offsets(self, tokenizer: Any) -> None:
        if self.kind.trim_offsets is None:
            return
        setting = self.settings.trim_offsets
        state = _state(tokenizer.post_processor)
        _set_in(state, "trim_offsets", self.kind.trim_offsets if setting is None else setting)
        _set_in(state, "add_prefix_space", bool(self._prefix_space))
        _replace(tokenizer, "post_processor", state)


def _state(component: Any) -> dict[str, Any]:
    """Return a component of a tokenizer as in tokenizer.json; empty if there is none."""
    state: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return state


def _set_in(state: dict[str, Any], key: str, value: Any, *, deep: bool = False) -> None:
    """Set a key that a component has; with `deep`, in the components of a sequence, too."""
    if key in state:
        state[key] = value
    if deep:
        for name in ("pretokenizers", "decoders"):
            for part in state.get(name, ()):
                _set_in(part, key, value, deep=True)


def _replace(tokenizer: Any, name: str, state: Mapping[str, Any]) -> None:
    """Replace a component by one of another state, if that differs."""
    if state == _state(getattr(tokenizer, name)):
        return
    # A component is built only as a part of a tokenizer: all types have the same notation there.
    other = type(tokenizer).from_str(json.dumps({**_EMPTY, name: state}))
    setattr(tokenizer, name, getattr(other, name))


_EMPTY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    **dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    ),
}
"""The smallest tokenizer."""


def length_limit(
    config: ModelConfig,
    settings: TokenizerConfig,
    sentence: SentenceBertConfig,
    compared: int | None = None,
) -> tuple[int, str]:
    """Return the smallest of the model's limits on tokens per input, and where it comes from.

    Args:
        config: config.json.
        settings: tokenizer_config.json.
        sentence: sentence_bert_config.json.
        compared: `length_limit` of manifest.json, up to which the graph was compared.
    """
    # sentence-transformers sets the tokenizer's limit to its own.
    if sentence.max_seq_length:
        limits = [(sentence.max_seq_length, f"max_seq_length of {sentence.file_name}")]
    else:
        tokens = int(settings.model_max_length or settings.max_len)
        limits = [(tokens, "model_max_length of tokenizer_config.json")]
    if config.positions:
        limits.append((config.position_limit(), "the positions of config.json"))
    # transformers writes 1e30 if a tokenizer has no limit.
    usable = [(n, name) for n, name in limits if 0 < n <= MAX_COUNT]
    # Nearly every text encoder is trained with 512 positions.
    limit = min(usable, default=(512, "default, because no file has a limit"))
    if compared is not None and compared < limit[0]:
        return compared, LENGTH_LIMIT
    return limit


def special_token_id(tokenizer: Any, token: str | None) -> int | None:
    """Return the id of a special token; None if the tokenizer does not have it."""
    token_id: int | None = tokenizer.token_to_id(token) if token else None
    return token_id
