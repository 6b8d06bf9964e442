"""Read the source's own card: licence, base model, languages, limitations.

Takes where a model came from; leaves what a card of something made from it has to carry over.

    >>> rights = read_source_card(artifact.manifest.source)
    >>> rights.license, rights.limitations[:1]
    ('apache-2.0', ('Intended uses',))

A card of the Hub is a README.md with YAML on top. The source's is read where the source lies now;
of a model of the Hub, at the commit that was exported. What cannot be read is said, never
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.manifest import SourceRecord
from enginery.core.errors import SourceError
from enginery.core.model.source import resolve_record
from enginery.publish.config import PublishConfig

CARD = "README.md"
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
"""Words of headings whose sections a derived model's card must not lose."""
_SECTION_CHARACTERS = 20_000
_NO_CARD = "the source has no card (README.md), so its licence is not known"


@dataclass(frozen=True)
class SourceCard:
    """What is taken over from a source's card, and what the options say instead."""

    license: str = ""
    """The Hub's identifier, `apache-2.0`; empty where nobody says."""
    license_name: str = ""
    """Of a licence that is `other`."""
    license_link: str = ""
    base_model: str = ""
    """A Hub id; empty for a model that is not on the Hub."""
    language: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    """Heading and text of what is said about limitations, bias, intended uses and the licence."""
    notes: tuple[str, ...] = ()
    """What could not be read."""
    is_read: bool = True
    """False where there may be a card that could not be read: its licence is not known then."""

    @property
    def limitations(self) -> tuple[str, ...]:
        """Return the headings of what is carried over."""
        return tuple(heading for heading, _ in self.sections)

    def with_options(self, config: PublishConfig) -> SourceCard:
        """Return the same with what the options say, which is then what is known."""
        found = replace(self, is_read=True) if config.license or config.base_model else self
        if config.license:
            found = replace(found, license=config.license, license_name="", license_link="")
        if config.base_model:
            found = replace(found, base_model=config.base_model)
        return found


def read_source_card(source: SourceRecord) -> SourceCard:
    """Read the card of the model that an artifact was made from, where there is one."""
    base_model = source.id.partition("@")[0] if source.kind == "hub" else ""
    path, problem = _find_card(source)
    if path is None:
        is_read = problem == _NO_CARD
        return SourceCard(base_model=base_model, notes=(problem,), is_read=is_read)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        note = f"the source's card cannot be read: {error.strerror}; its licence is not known"
        return SourceCard(base_model=base_model, notes=(note,), is_read=False)
    return parse_card(text, base_model)


def parse_card(text: str, base_model: str = "") -> SourceCard:
    """Return what a card says.

    Args:
        text: of the README.md.
        base_model: the Hub id of the model that the card is about; empty where it is not on the
            Hub, and then the card's own `base_model`, if it names one, is the nearest there is.
    """
    from huggingface_hub import RepoCard

    text = text.removeprefix("\ufeff")
    body, notes, data = text, tuple[str, ...](), dict[str, Any]()
    if text.startswith("---"):
        # RepoCard and not ModelCard, which takes the letters of `tags: word` for tags.
        try:
            card = RepoCard(text)
            body, data = card.text, card.data.to_dict()
        except Exception as error:  # what YAML or the library raises for a stranger's metadata
            first = str(error).partition("\n")[0]
            notes = (f"the metadata of the source's card cannot be read: {first}",)
    license_id = _text(data.get("license"))
    if not license_id and not notes:
        notes = ("the source's card states no licence",)
    own_base = next(iter(_texts(data.get("base_model"))), "")
    return SourceCard(
        license=license_id,
        license_name=_text(data.get("license_name")),
        license_link=_text(data.get("license_link")),
        base_model=base_model or (own_base if _HUB_ID.fullmatch(own_base) else ""),
        language=_texts(data.get("language")),
        tags=_texts(data.get("tags")),
        sections=tuple(_carried_sections(body)),
        notes=notes,
    )


def _find_card(source: SourceRecord) -> tuple[Path | None, str]:
    """Return the path of the source's card, or None and why there is none."""
    if source.kind == "hub":
        return _hub_card(source)
    try:
        # Only its card is read; no weights are.
        place = resolve_record(source, allow_pickle=True).path
    except SourceError as error:
        return None, f"the source's card cannot be read: {error.message} Its licence is not known"
    path = (place if place.is_dir() else place.parent) / CARD
    return (path, "") if path.is_file() else (None, _NO_CARD)


def _hub_card(source: SourceRecord) -> tuple[Path | None, str]:
    """Return the card of a Hub model at its commit: from the library's cache, or the Hub."""
    unknown = f"the card of {source.id} cannot be had from the Hub, so its licence is not known"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        name = source.id.partition("@")[0]
        return Path(hf_hub_download(name, CARD, revision=source.revision or None)), ""
    except LocalEntryNotFoundError:  # an EntryNotFoundError as well
        return None, f"{unknown}: it cannot be reached"
    except EntryNotFoundError:
        return None, _NO_CARD
    except (OSError, ValueError) as error:  # every error of the library and of its HTTP client
        return None, f"{unknown}: {type(error).__name__}"


def _carried_sections(body: str) -> Iterator[tuple[str, str]]:
    """Yield the sections under a heading with one of the words, with their subsections."""
    heading, level, lines, fenced = "", 0, list[str](), False
    for line in body.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        found = None if fenced else _HEADING.match(line)
        if found and (not heading or len(found[1]) <= level):
            if heading:
                yield heading, _section(lines)
            title = found[2].strip()
            is_carried = any(word in title.lower() for word in _CARRIED_HEADINGS)
            heading, level, lines = (title if is_carried else ""), len(found[1]), []
        elif heading:
            # Headings inside it go below the one that the new card has for all of them.
            lines.append(f"####{'#' if len(found[1]) > 4 else ''} {found[2]}" if found else line)
    if heading:
        yield heading, _section(lines)


def _section(lines: list[str]) -> str:
    text = "\n".join(lines).strip()
    if len(text) <= _SECTION_CHARACTERS:
        return text
    return f"{text[:_SECTION_CHARACTERS].rpartition(chr(10))[0]}\n\n(The source's card goes on.)"


def _text(value: Any) -> str:
    """Return a plain value as one line; of a list, its first."""
    if isinstance(value, list):
        value = value[0] if value else ""
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else ""


def _texts(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    found = ("no" if item is False else _text(item) for item in items)  # Norwegian, to YAML 1.1
    return tuple(text for text in found if text)
