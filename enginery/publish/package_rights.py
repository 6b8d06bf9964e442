"""Whose rights a package's card states: the source's own card, what was published, the options.

Takes an artifact; reads the source's card where the source lies, else the artifact's own listing.

    >>> rights = resolve_rights(Artifact.open("pulled"), PublishConfig())
    >>> rights.license, rights.notes[-1]
    ('apache-2.0', 'licence and limitations are those that it was published with')

A pulled artifact is often published again from a machine that never saw its source.
"""

from __future__ import annotations

from dataclasses import replace

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError
from enginery.publish.card.source import SourceCard, read_source_card
from enginery.publish.config import PublishConfig
from enginery.publish.publication import Publication, Rights


def resolve_rights(artifact: Artifact, config: PublishConfig) -> SourceCard:
    """What the card has to state; `is_read` is False where nobody can say."""
    found = read_source_card(artifact.manifest.source)
    if not found.is_read and (published := _published_rights(artifact)):
        said = "licence and limitations are those that it was published with"
        notes = (*found.notes, said)
        found = replace(found, **published.model_dump(), is_read=True, notes=notes)
    return found.with_options(config)


def rights_record(rights: SourceCard) -> Rights | None:
    """The rights as the listing has them; None where they could not be read."""
    if not rights.is_read:
        return None
    return Rights(**{name: getattr(rights, name) for name in Rights.model_fields})


def _published_rights(artifact: Artifact) -> Rights | None:
    """The rights in the listing that the artifact was pulled with, if it is of these very files."""
    try:
        listing = Publication.read(artifact.path, str(artifact.path))
    except EngineryError:  # never published, or a listing that says nothing reliable
        return None
    # Engines that were built since have the rights of their graphs.
    model = {
        n: r.sha256 for n, r in artifact.manifest.files.items() if not n.startswith("engines/")
    }
    is_same = all(listing.content.get(name) == digest for name, digest in model.items())
    return listing.rights if is_same else None
