"""The files beside a model that its answers depend on: tokenizer, image processor, pooling.

They are copied byte for byte. Saving them again through transformers would rewrite a tokenizer's
padding or drop what only sentence-transformers reads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from enginery.core.errors import UntrustedModelError
from enginery.core.paths import is_inside
from enginery.core.screening import refuse_linked_out

_COPIED = (".json", ".txt", ".model", ".jinja")
# The exporter writes these itself, as Optimum's loaders want them.
_LEFT_OUT = ("config.json", "generation_config.json")


def copy_side_files(source: Path, out: Path, *, code: bool) -> None:
    """Copies preprocessor files of the model directory `source`, and its Python code if allowed.

    sentence-transformers keeps its modules in numbered folders (`1_Pooling/config.json`).

    Raises:
        UntrustedModelError: a file lies elsewhere, behind a link, or its name is none for a
            manifest. Copied, it would be published.
    """
    suffixes = (*_COPIED, ".py") if code else _COPIED
    folders = [path for path in source.iterdir() if path.is_dir() and path.name[0].isdigit()]
    for folder in (source, *folders):
        refuse_linked_out(folder, source)
        for path in sorted(folder.iterdir()):
            name = path.relative_to(source).as_posix()
            wanted = path.is_file() and path.suffix in suffixes and name not in _LEFT_OUT
            if wanted and not path.name.endswith(".index.json"):
                copy_side_file(source, name, out)


def copy_side_file(source: Path, name: str, out: Path) -> None:
    """Copies one file of the model directory `source`; raises what `copy_side_files` raises."""
    if not is_inside(name):
        raise UntrustedModelError(
            f"{source} holds the file {name!r}, whose name has a backslash or control characters.",
            do="Rename it, or remove it if the model does not need it.",
        )
    refuse_linked_out(source / name, source)
    (out / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(source / name, out / name)
