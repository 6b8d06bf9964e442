r"""Read the source model's card: licence, base model, languages, limitations.

>>> card = parse_card("---\nlicense: apache-2.0\n---\n## Limitations\nEnglish only.\n")
>>> card.rights.license, card.rights.sections
('apache-2.0', (('Limitations', 'English only.'),))

A card is a README.md with YAML metadata. It is read from the source; for a model of the Hub, at the
commit that was exported. If it cannot be read, the licence is reported as unknown, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.manifest import SourceRecord
from enginery.core.errors import SourceError
from enginery.core.model.hub import HubUnreachableError, hub_requests
from enginery.core.model.source import resolve_record
from enginery.publish.config import PublishConfig
from enginery.publish.publication import CARD, Rights

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HEADING = re.compile(r"^(#{1,6})[ \t]+(.+?)[ \t#]*$")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")
_CARRIED_HEADINGS = (
    "limitation",
    "bias",
    "risk",
    "intended use",
    "out-of-scope",
    "out of scope",
    "misuse",
    "license",
    "licence",
    "ethical",
)
"""Words in headings of the sections that a derived model's card has to repeat."""
_SECTION_CHARACTERS = 20_000
_NO_CARD = "the source has no card (README.md), so its licence is not known"


@dataclass(frozen=True)
class SourceCard:
    """What a source's card, or the options in its place, say."""

    rights: Rights
    notes: tuple[str, ...] = ()
    """Problems while reading the card."""
    is_read: bool = True
    """False if the card could not be read, so that the licence is not known."""

    def with_options(self, config: PublishConfig) -> SourceCard:
        """Return a copy in which the options replace licence and base model."""
        changes: dict[str, str] = {}
        if config.license:
            changes = {"license": config.license, "license_name": "", "license_link": ""}
        if config.base_model:
            changes["base_model"] = config.base_model
        rights = self.rights.model_copy(update=changes)
        return replace(self, rights=rights, is_read=self.is_read or bool(changes))


def read_source_card(source: SourceRecord) -> SourceCard:
    """Return the card of the model that an artifact was made from; empty if it has none."""
    base_model = source.id.partition("@")[0] if source.kind == "hub" else ""
    path, problem = _find_card(source)
    if path is None:
        is_read = problem == _NO_CARD
        return SourceCard(Rights(base_model=base_model), (problem,), is_read=is_read)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        note = f"the source's card cannot be read: {error.strerror}; the licence is not known"
        return SourceCard(Rights(base_model=base_model), (note,), is_read=False)
    return parse_card(text, base_model)


def parse_card(text: str, base_model: str = "") -> SourceCard:
    """Parse a card.

    Args:
        text: text of the README.md.
        base_model: Hub id of the card's model. If it is empty, because the model is not on the
            Hub, the `base_model` in the card's metadata is used.
    """
    from huggingface_hub import RepoCard

    text = text.removeprefix("\ufeff")
    body, notes, data = text, tuple[str, ...](), dict[str, Any]()
    if text.startswith("---"):
        # RepoCard, because ModelCard splits `tags: word` into letters.
        try:
            card = RepoCard(text)
            body, data = card.text, card.data.to_dict()
        except Exception as error:  # any error of the YAML parser or the library
            first = str(error).partition("\n")[0]
            notes = (f"the metadata of the source's card cannot be read: {first}",)
    license_id = _text(data.get("license"))
    if not license_id and not notes:
        notes = ("the source's card states no licence",)
    own_base = next(iter(_texts(data.get("base_model"))), "")
    rights = Rights(
        license=license_id,
        license_name=_text(data.get("license_name")),
        license_link=_text(data.get("license_link")),
        base_model=base_model or (own_base if _HUB_ID.fullmatch(own_base) else ""),
        language=_texts(data.get("language")),
        tags=_texts(data.get("tags")),
        sections=tuple(_carried_sections(body)),
    )
    return SourceCard(rights, notes)


def _find_card(source: SourceRecord) -> tuple[Path | None, str]:
    """Return the path of the source's card, or None and the reason."""
    if source.kind == "hub":
        return _hub_card(source)
    try:
        # No weights are read, only the card.
        location = resolve_record(source, allow_pickle=True).path
    except SourceError as error:
        return None, f"the source's card cannot be read: {error.message} The licence is not known"
    path = (location if location.is_dir() else location.parent) / CARD
    return (path, "") if path.is_file() else (None, _NO_CARD)


def _hub_card(source: SourceRecord) -> tuple[Path | None, str]:
    """Return the path of a Hub model's card at the exported commit, from the cache or the Hub."""
    unknown = f"the card of {source.id} cannot be downloaded, so the licence is not known"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        name = source.id.partition("@")[0]
        with hub_requests():
            return Path(hf_hub_download(name, CARD, revision=source.revision or None)), ""
    except (LocalEntryNotFoundError, HubUnreachableError):  # an EntryNotFoundError as well
        return None, f"{unknown}: the Hub cannot be reached"
    except EntryNotFoundError:
        return None, _NO_CARD
    except (OSError, ValueError) as error:  # every error of the library
        return None, f"{unknown}: {type(error).__name__}"


def _carried_sections(body: str) -> Iterator[tuple[str, str]]:
    """Yield the sections under a heading with one of the words, with their subsections."""
    heading, level, lines, fenced = "", 0, list[str](), False
    for line in body.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        match = None if fenced else _HEADING.match(line)
        if match and (not heading or len(match[1]) <= level):
            if heading:
                yield heading, _section(lines)
            title = match[2].strip()
            is_carried = any(word in title.lower() for word in _CARRIED_HEADINGS)
            heading, level, lines = (title if is_carried else ""), len(match[1]), []
        elif heading:
            # Headings inside the section become smaller than its heading in the new card.
            lines.append(f"####{'#' if len(match[1]) > 4 else ''} {match[2]}" if match else line)
    if heading:
        yield heading, _section(lines)


def _section(lines: list[str]) -> str:
    text = "\n".join(lines).strip()
    if len(text) <= _SECTION_CHARACTERS:
        return text
    return f"{text[:_SECTION_CHARACTERS].rpartition(chr(10))[0]}\n\n(Shortened.)"


def _text(value: Any) -> str:
    """Return a scalar, or the first of a list, as one line of text."""
    if isinstance(value, list):
        value = value[0] if value else ""
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else ""


def _texts(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    texts = (
        "no" if item is False else _text(item) for item in items
    )  # YAML 1.1 reads `no` (Norwegian) as False
    return tuple(text for text in texts if text)
