"""Options of generation, with the names and defaults of transformers 4.57.

    defaults = read_generation_config(artifact.path)
    options = defaults.with_arguments(max_new_tokens=64, num_beams=4)

They come from `generation_config.json` and from the caller, whose values win. A field of
transformers that is not supported, and is set to something else than its default, is an error:
ignoring it would give other tokens. Options that only sampling reads may have any value without it,
as in transformers.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from enginery.core.errors import ArtifactError, EngineryError, InputError, nearest
from enginery.core.json_file import read_json
from enginery.core.trust.bounds import expected_by

FILE = "generation_config.json"

Values = TypeVar("Values", bound=BaseModel)

DEFAULT_NEW_TOKENS = 20
"""New tokens if nothing sets their number, as in transformers."""
_MAX_SHOWN = 60
"""Characters of a value that a message shows."""
MAX_BEAMS = 64
MAX_NEW_TOKENS = 2**20

MAX_TOKEN_ID = 2**31 - 1
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_SCHEMA_CHARACTERS = 65_536


MAX_ITEMS: Mapping[str, int] = {
    "begin_suppress_tokens": 2048,
    "bad_words_ids": 1000,
    "eos_token_id": 1024,
    "logit_bias": MAX_BIASES,
    "forced_eos_token_id": 1024,
    "suppress_tokens": 2048,
    "stop_strings": 16,
}
"""The largest lists and objects of a caller, items of items counted together: the thread that all
requests share goes through them. A model's own file may have longer lists."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[
    tuple[TokenId, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, int) else value),
]

UNSUPPORTED: dict[str, Any] = {
    "assistant_early_exit": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": None,
    "max_time": None,
    "min_p": None,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "token_healing": False,
    "top_h": None,  # of transformers 5
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Fields of transformers' GenerationConfig that change the tokens and are not supported, with their
defaults."""

_OF_SAMPLING = frozenset({"epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "typical_p"})
"""Those of them that only sampling reads."""

_DRAWS: Mapping[str, tuple[float, float]] = {
    "temperature": (1e-5, 1e5),
    "top_k": (0, MAX_TOKEN_ID),
    "top_p": (1e-6, 1),
}
"""Supported options that only sampling reads, with the bounds of a caller's values, beyond which
float32 overflows."""

_OFF: dict[str, Any] = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
}
"""Values beside the default that change no token."""


_NOT_OF_FILES = frozenset(
    {"frequency_penalty", "json_schema", "logit_bias", "presence_penalty", "seed", "top_logprobs"}
)
"""Options that transformers does not have, so that they mean nothing in generation_config.json."""


def _require_small(schema: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if a JSON schema is too large to be compiled for a request."""
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if size > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"expected at most {MAX_SCHEMA_CHARACTERS} characters of JSON")
    return schema


_POSITIVE: dict[str, Any] = {"exclusiveMinimum": 0}


class GenerationOptions(BaseModel):
    """How tokens are chosen, and when generation ends."""

    # Extras are options of sampling that are not supported: they count once sampling is on.
    model_config = ConfigDict(extra="allow", frozen=True)

    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    """Largest number of tokens to generate; null for `max_length`."""
    max_length: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    """Largest number of tokens with the decoder's prompt; null for 20 new ones."""
    min_new_tokens: Annotated[int, Field(ge=0, le=MAX_NEW_TOKENS)] | None = None
    """Number of tokens before which generation does not end."""
    min_length: Annotated[int, Field(ge=0, le=MAX_NEW_TOKENS)] = 0
    """The same, with the decoder's prompt."""
    stop_strings: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ] = ()
    """Texts at whose end generation ends."""
    do_sample: bool = False
    """Draw tokens by their probabilities, in place of the most probable ones."""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    """Seed of the draws; null for another one each time."""
    temperature: Annotated[float, Field(allow_inf_nan=False, json_schema_extra=_POSITIVE)] = 1.0
    """Divides the logits before a draw."""
    top_k: Annotated[int, Field(json_schema_extra={"minimum": 0})] = 50
    """Draw from this many most probable tokens; 0 for all."""
    top_p: Annotated[float, Field(json_schema_extra={**_POSITIVE, "maximum": 1})] = 1.0
    """Draw from the most probable tokens whose probabilities reach this sum."""
    num_beams: Annotated[int, Field(ge=1, le=MAX_BEAMS)] = 1
    """Number of sequences that beam search keeps; 1 for no beam search."""
    num_return_sequences: Annotated[int, Field(ge=1, le=MAX_BEAMS)] = 1
    """Number of results of each input."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    """Exponent of the length that a beam's score is divided by."""
    early_stopping: bool | Literal["never"] = False
    """When beam search ends: with enough finished beams (true), when none is likely to improve
    (false), or when none can (`never`)."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides positive logits of tokens that occurred, and multiplies negative ones."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from a token's logit for each time that it was generated, as OpenAI defines it."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted once from the logit of each token that was generated, as OpenAI defines it."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
    ] = {}
    """What is added to the logits of tokens, by their ids."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Return the log-probability of each token, and those of this many most probable tokens; null
    for none."""
    json_schema: Annotated[dict[str, Any], AfterValidator(_require_small)] | None = None
    """The text is JSON of this schema (json-schema.org), and nothing else; null for any text."""
    renormalize_logits: bool = False
    """Take the log-softmax of the scores after all other changes, which changes the scores of beams
    whose tokens were banned."""
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=1024)] = 0
    """No sequence of this many tokens occurs twice; 0 for no such limit."""
    bad_words_ids: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] = ()
    """Sequences of tokens that are not generated."""
    suppress_tokens: TokenIds = ()
    """Tokens that are not generated."""
    begin_suppress_tokens: TokenIds = ()
    """Tokens that are not generated first."""
    forced_bos_token_id: TokenId | None = None
    """The token after the decoder's start token, such as a language."""
    forced_eos_token_id: TokenIds = ()
    """The token at the largest length."""
    eos_token_id: TokenIds = ()
    """Tokens that end a sequence."""
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    decoder_start_token_id: TokenId | None = None
    """The first token of an encoder-decoder's decoder."""

    def with_arguments(self, **arguments: Any) -> GenerationOptions:
        """Return the options with a caller's values in place of those of the file; None is unset.

        Raises:
            InputError: an argument is unknown, has an invalid value or contradicts another one.
        """
        passed = {name: value for name, value in arguments.items() if value is not None}
        fields = GenerationOptions.model_fields
        for name, value in passed.items():
            if name in UNSUPPORTED:
                if name not in _OF_SAMPLING and not _is_off(name, value):
                    raise InputError(f"{name}: {short(value)} is not supported.")
            elif name not in fields:
                shown = name[:_MAX_SHOWN]
                raise InputError(f"unknown option '{shown}'{nearest(shown, fields)}.")
            elif name in MAX_ITEMS:
                check_items(name, value)
        if "max_length" in passed and "max_new_tokens" not in passed:
            passed["max_new_tokens"] = None  # the file's would take precedence
        merged = {**self.model_dump(exclude_unset=True), **passed}
        options = validated(GenerationOptions, merged, InputError, "")
        options.check()
        for name, (least, most) in _DRAWS.items():
            if options.do_sample and name in passed and not least <= getattr(options, name) <= most:
                raise InputError(
                    f"{name}: found {short(passed[name])}, expected a number from {least:.12g} to "
                    f"{most:.12g}."
                )
        return options

    def check(self) -> None:
        """Raise InputError for options that contradict each other."""
        self.check_sampling()
        if self.num_beams == 1 and not self.do_sample and self.num_return_sequences > 1:
            raise InputError(
                f"num_return_sequences is {self.num_return_sequences}, but greedy search has one "
                "result.",
                do="Set num_beams or do_sample.",
            )
        if self.num_beams > 1 and self.top_logprobs is not None:
            raise InputError(
                f"num_beams is {self.num_beams}, but beam search has no log-probabilities of "
                "tokens.",
                do="Set num_beams to 1, or leave out top_logprobs or logprobs.",
            )
        if self.num_beams > 1 and self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences is {self.num_return_sequences}, expected at most num_beams, "
                f"{self.num_beams}."
            )

    def check_sampling(self) -> None:
        """Raise InputError for values that only matter to sampling, if it is on."""
        if not self.do_sample:
            return
        for name, value in (self.model_extra or {}).items():
            if not _is_off(name, value):
                off = f", or send {name}={_OFF[name]}" if name in _OFF else ""
                raise InputError(
                    f"{name}: {short(value)} is not supported for sampling.",
                    do=f"Leave it out{off}.",
                )
        bounds = (
            ("temperature", self.temperature > 0, "a number above 0"),
            ("top_k", self.top_k >= 0, "a whole number of 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
        )
        for name, fits, expected in bounds:
            if not fits:
                raise InputError(
                    f"{name}: found {getattr(self, name)}; expected {expected} for sampling.",
                    do="Set do_sample to false for the most probable tokens.",
                )

    def longest(self, prompt: int, positions: int | None) -> int:
        """Return the largest length of a sequence, with its prompt.

        Args:
            prompt: number of the decoder's prompt tokens.
            positions: the model's limit; None if it has none.

        Raises:
            InputError: the prompt alone reaches that length.
        """
        if self.max_new_tokens is not None:
            longest = prompt + self.max_new_tokens
        else:
            longest = self.max_length or prompt + DEFAULT_NEW_TOKENS
        if positions is not None:
            longest = min(longest, positions)
        if longest <= prompt:
            limit = "max_length" if positions != longest else "the model's limit"
            raise InputError(
                f"the prompt has {prompt} tokens, and {limit} is {longest} with the new ones.",
                do="Shorten the prompt, or set max_new_tokens.",
            )
        return longest

    def shortest(self, prompt: int) -> int:
        """Return the length before which no sequence ends, with its prompt."""
        return self.min_length if self.min_new_tokens is None else prompt + self.min_new_tokens


def read_generation_config(directory: Path) -> GenerationOptions:
    """Read `generation_config.json`; without the file, the options are transformers' defaults.

    Raises:
        ArtifactError: a value is invalid, or a field is set that is not supported.
    """
    file = directory / FILE
    return parse_generation_config(read_json(file, error=ArtifactError), str(file))


def parse_generation_config(document: Mapping[str, Any], name: str) -> GenerationOptions:
    """Return the options of a document like `generation_config.json`.

    Args:
        document: the content.
        name: name of the document in messages.

    Raises:
        ArtifactError: a value is invalid, or a field is set that is not supported.
    """
    known = (GenerationOptions.model_fields.keys() - _NOT_OF_FILES) | UNSUPPORTED.keys()
    values = {
        field: value for field, value in document.items() if value is not None and field in known
    }
    # To transformers, null is no limit here; in other fields it is the default.
    if "top_k" in document and document["top_k"] is None:
        values["top_k"] = 0
    for field in UNSUPPORTED.keys() & values.keys():
        if _is_off(field, values[field]):
            del values[field]
        elif field not in _OF_SAMPLING or values.get("do_sample"):
            raise ArtifactError(
                f"{name}: {field} is {short(values[field])}, which is not supported.",
                do="Remove the field to generate without it.",
            )
    if values.get("max_length") == DEFAULT_NEW_TOKENS:
        del values["max_length"]  # transformers writes its default
    options = validated(GenerationOptions, values, ArtifactError, f"{name}: ")
    try:
        options.check_sampling()
    except InputError as error:
        raise ArtifactError(f"{name}: {error.message}", do=error.do) from error
    return options


def _is_off(name: str, value: Any) -> bool:
    """Return True if a value of an unsupported field changes no token."""
    return value is None or value == UNSUPPORTED[name] or value == _OFF.get(name)


def validated(
    model: type[Values], values: Mapping[str, Any], error: type[EngineryError], where: str
) -> Values:
    """Return values as an instance of `model`; raise `error` for an invalid one."""
    try:
        return model.model_validate(values)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        value = short(first["input"])
        raise error(f"{where}{name}: found {value}, expected {expected_by(first)}.") from None


def check_items(name: str, value: Any) -> None:
    """Raise InputError for a caller's list or object that is longer than `MAX_ITEMS`."""
    values, most = value if isinstance(value, list | tuple | dict) else [value], MAX_ITEMS[name]
    count = len(values)
    if count <= most:
        count = sum(len(item) if isinstance(item, list | tuple) else 1 for item in values)
    if count > most:
        raise InputError(f"{name}: found {count} items, expected at most {most}.")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_SHOWN


def short(value: Any) -> str:
    """Return what a message shows of a value, which may be large."""
    return _SHORT.repr(value)
