"""Make the prompt of Whisper's decoder: the language, the task, and no time stamps.

    prompts = WhisperPrompts.read(artifact.path)
    prompts.after_start(language="french", task="transcribe")    # ((50265,), (50359,), (50363,))

The rules are those of `generate` of Whisper in transformers 4.57.
"""

from __future__ import annotations

import difflib
import reprlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.json_file import read_json
from enginery.runtime.generation.options import FILE, MAX_TOKEN_ID, TokenId, validated

TASKS = ("transcribe", "translate")

Places = tuple[tuple[int, ...], ...]
"""The tokens of each place of a prompt; where there are several, the model chooses one."""

# Codes and English names of the languages; the first name of a code is the usual one.
LANGUAGES = {
    "af": ("afrikaans",),
    "am": ("amharic",),
    "ar": ("arabic",),
    "as": ("assamese",),
    "az": ("azerbaijani",),
    "ba": ("bashkir",),
    "be": ("belarusian",),
    "bg": ("bulgarian",),
    "bn": ("bengali",),
    "bo": ("tibetan",),
    "br": ("breton",),
    "bs": ("bosnian",),
    "ca": ("catalan", "valencian"),
    "cs": ("czech",),
    "cy": ("welsh",),
    "da": ("danish",),
    "de": ("german",),
    "el": ("greek",),
    "en": ("english",),
    "es": ("spanish", "castilian"),
    "et": ("estonian",),
    "eu": ("basque",),
    "fa": ("persian",),
    "fi": ("finnish",),
    "fo": ("faroese",),
    "fr": ("french",),
    "gl": ("galician",),
    "gu": ("gujarati",),
    "ha": ("hausa",),
    "haw": ("hawaiian",),
    "he": ("hebrew",),
    "hi": ("hindi",),
    "hr": ("croatian",),
    "ht": ("haitian creole", "haitian"),
    "hu": ("hungarian",),
    "hy": ("armenian",),
    "id": ("indonesian",),
    "is": ("icelandic",),
    "it": ("italian",),
    "ja": ("japanese",),
    "jw": ("javanese",),
    "ka": ("georgian",),
    "kk": ("kazakh",),
    "km": ("khmer",),
    "kn": ("kannada",),
    "ko": ("korean",),
    "la": ("latin",),
    "lb": ("luxembourgish", "letzeburgesch"),
    "ln": ("lingala",),
    "lo": ("lao",),
    "lt": ("lithuanian",),
    "lv": ("latvian",),
    "mg": ("malagasy",),
    "mi": ("maori",),
    "mk": ("macedonian",),
    "ml": ("malayalam",),
    "mn": ("mongolian",),
    "mr": ("marathi",),
    "ms": ("malay",),
    "mt": ("maltese",),
    "my": ("myanmar", "burmese"),
    "ne": ("nepali",),
    "nl": ("dutch", "flemish"),
    "nn": ("nynorsk",),
    "no": ("norwegian",),
    "oc": ("occitan",),
    "pa": ("punjabi", "panjabi"),
    "pl": ("polish",),
    "ps": ("pashto", "pushto"),
    "pt": ("portuguese",),
    "ro": ("romanian", "moldavian", "moldovan"),
    "ru": ("russian",),
    "sa": ("sanskrit",),
    "sd": ("sindhi",),
    "si": ("sinhala", "sinhalese"),
    "sk": ("slovak",),
    "sl": ("slovenian",),
    "sn": ("shona",),
    "so": ("somali",),
    "sq": ("albanian",),
    "sr": ("serbian",),
    "su": ("sundanese",),
    "sv": ("swedish",),
    "sw": ("swahili",),
    "ta": ("tamil",),
    "te": ("telugu",),
    "tg": ("tajik",),
    "th": ("thai",),
    "tk": ("turkmen",),
    "tl": ("tagalog",),
    "tr": ("turkish",),
    "tt": ("tatar",),
    "uk": ("ukrainian",),
    "ur": ("urdu",),
    "uz": ("uzbek",),
    "vi": ("vietnamese",),
    "yi": ("yiddish",),
    "yo": ("yoruba",),
    "yue": ("cantonese",),
    "zh": ("chinese", "mandarin"),
}
_CODES = {name: code for code, names in LANGUAGES.items() for name in names}

_LONGEST_NAME = 32
"""Characters of an unknown language that are compared with the known ones."""


class WhisperPrompts(BaseModel):
    """The fields of generation_config.json that are about the prompt."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    is_multilingual: bool = True
    lang_to_id: dict[str, TokenId] = {}
    """`<|fr|>` -> token id; empty for a model without languages."""
    task_to_id: dict[str, TokenId] = {}
    no_timestamps_token_id: TokenId | None = None
    """The tokens behind it are time stamps; None if the model has none."""
    forced_decoder_ids: tuple[tuple[int, TokenId | None], ...] = ()
    """Of older models: place in the prompt -> token, or None for the detected language."""
    language: str = ""
    """The language if none is given; empty to detect it."""
    task: str = ""
    return_timestamps: bool = False
    max_initial_timestamp_index: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    """The largest position of the first time stamp."""
    no_speech_threshold: float | None = None
    condition_on_prev_tokens: bool = False

    @classmethod
    def read(cls, directory: Path) -> WhisperPrompts:
        """Read generation_config.json; `forced_decoder_ids` may also be in config.json.

        Raises:
            ArtifactError: a file is malformed, or asks for what is not supported.
        """
        file = directory / FILE
        document: dict[str, Any] = read_json(file, error=ArtifactError)
        older: dict[str, Any] = read_json(directory / "config.json", error=ArtifactError)
        values = {"forced_decoder_ids": older.get("forced_decoder_ids"), **document}
        if values["forced_decoder_ids"] is None:
            # A null in the newer file does not hide the value of the older one.
            values["forced_decoder_ids"] = older.get("forced_decoder_ids")
        present = {name: value for name, value in values.items() if value is not None}
        prompts = validated(cls, present, ArtifactError, f"{file}: ")
        for name, supported in (
            ("return_timestamps", False),
            ("no_speech_threshold", None),
            ("condition_on_prev_tokens", False),
        ):
            if getattr(prompts, name) != supported:
                raise ArtifactError(
                    f"{file}: {name} is {getattr(prompts, name)!r}, which is not supported.",
                    do="Remove the field to transcribe without it.",
                )
        positions = [position for position, _ in prompts.forced_decoder_ids]
        if positions and positions[0] == 1 and positions != list(range(1, len(positions) + 1)):
            raise ArtifactError(
                f"{file}: forced_decoder_ids has tokens for the places {positions}, "
                "expected 1, 2, …"
            )
        return prompts

    @property
    def time_stamps(self) -> range:
        """The tokens of time stamps, which the text leaves out."""
        last = self.no_timestamps_token_id
        # All tokens behind it, whatever the size of the vocabulary.
        return range(0) if last is None else range(last + 1, 2**31)

    @property
    def languages(self) -> dict[int, str]:
        """The code of the language of each token."""
        return {token: name.strip("<|>") for name, token in self.lang_to_id.items()}

    def after_start(
        self,
        *,
        language: str | None = None,
        task: str | None = None,
        has_time_stamps: bool = False,
    ) -> Places:
        """Return the prompt behind the start token.

        Args:
            language: a code such as `fr`, or a name such as `french`; None for the model's own, or
                to detect it.
            task: `transcribe`, or `translate` into English; None for the model's own.
            has_time_stamps: the text has time stamps.

        Raises:
            InputError: the model does not have the language or the task.
        """
        if not self.is_multilingual and (language is not None or task is not None):
            name = "task" if language is None else "language"
            raise InputError(
                f"{name} is given, but the model knows English only.", do=f"Leave {name} out."
            )
        language = self.language or None if language is None else language
        task = self.task or None if task is None else task
        places: list[tuple[int, ...]] = []
        if language is None and task is None:
            places = self._forced()
        if language is not None:
            places = [(self._language_id(language),)]
        elif self.lang_to_id and (not places or not places[0]):
            # All languages stand at this place: the model detects the one that is spoken.
            places[:1] = [tuple(sorted(self.lang_to_id.values()))]
        if task is not None:
            places.append((self._task_id(task),))
        elif language is not None and self.task_to_id:
            # As in transformers, a language alone means to transcribe.
            places.append((self._task_id("transcribe"),))
        silent = self.no_timestamps_token_id
        is_silent = silent is not None and bool(places) and places[-1] == (silent,)
        if has_time_stamps and is_silent:  # of a file that forces it
            del places[-1]
        elif silent is not None and not has_time_stamps and not is_silent:
            # The text is returned without time stamps, so the model must not write them.
            places.append((silent,))
        return tuple(tokens for tokens in places if tokens)

    def _forced(self) -> list[tuple[int, ...]]:
        """Return the tokens of `forced_decoder_ids`; an empty place is for the language."""
        if not self.forced_decoder_ids or self.forced_decoder_ids[0][0] != 1:
            return []
        return [() if token is None else (token,) for _, token in self.forced_decoder_ids]

    def _language_id(self, language: str) -> int:
        if not isinstance(language, str):
            raise InputError(
                f"language is a {type(language).__name__}, expected a code such as 'fr' or a name "
                "such as 'french'."
            )
        if not self.lang_to_id:
            raise InputError(
                f"language is given, but {FILE} has no lang_to_id.",
                do="Leave it out, or export the model with the generation_config.json of its "
                "present version.",
            )
        lowered = language.lower()
        token = lowered if lowered in self.lang_to_id else f"<|{_CODES.get(lowered, lowered)}|>"
        if token in self.lang_to_id:
            return self.lang_to_id[token]
        codes = [token.removeprefix("<|").removesuffix("|>") for token in self.lang_to_id]
        names = [name for code in codes for name in LANGUAGES.get(code, ())]
        # A word longer than every code is the name of a language.
        choices = codes if len(language) <= max(map(len, codes)) else names
        closest = difflib.get_close_matches(lowered[:_LONGEST_NAME], choices, n=3, cutoff=0.0)
        raise InputError(
            f"language {reprlib.repr(language)} is not one of the model's {len(codes)}; the "
            f"nearest are {', '.join(closest)}."
        )

    def _task_id(self, task: str) -> int:
        tasks = [name for name in TASKS if name in self.task_to_id]
        if not tasks:
            raise InputError(
                f"task is given, but {FILE} has no task_to_id.",
                do="Leave it out, or export the model with the generation_config.json of its "
                "present version.",
            )
        if task not in tasks:
            raise InputError(
                f"task {reprlib.repr(task)} is unknown{nearest(str(task)[:_LONGEST_NAME], tasks)}",
                do=f"Tasks: {', '.join(tasks)}.",
            )
        return self.task_to_id[task]
