"""The files beside a model that its answers depend on: tokenizer, image processor, pooling.

They are copied byte for byte. Saving them again through transformers would rewrite a tokenizer's
padding or drop what only sentence-transformers reads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_COPIED = (".json", ".txt", ".model", ".jinja")
# The exporter writes these itself, as Optimum's loaders want them.
_LEFT_OUT = ("config.json", "generation_config.json")


def copy_side_files(source: Path, out: Path, *, code: bool) -> None:
    """Copies preprocessor files of the model directory `source`, and its Python code if allowed.

    sentence-transformers keeps its modules in numbered folders (`1_Pooling/config.json`).
    """
    suffixes = (*_COPIED, ".py") if code else _COPIED
    folders = [path for path in source.iterdir() if path.is_dir() and path.name[0].isdigit()]
    for folder in (source, *folders):
        for path in sorted(folder.iterdir()):
            name = path.relative_to(source).as_posix()
            wanted = path.is_file() and path.suffix in suffixes and name not in _LEFT_OUT
            if wanted and not path.name.endswith(".index.json"):
                (out / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, out / name)
