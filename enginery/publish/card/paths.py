"""What a card says without the paths of the machine that published.

>>> without_path("read /home/ada/minilm, as asked", source)
'read minilm, as asked'

Only sentences that a stage wrote go through it: a path in code or in a table is part of what is
said, and a short one, `/model`, may stand in it by chance.
"""

from __future__ import annotations

import re

from enginery.core.manifest import SourceRecord


def without_path(text: str, source: SourceRecord) -> str:
    """The text with the source's name in place of its path; another path that has it stays."""
    if source.kind not in ("directory", "onnx"):
        return text
    # `/model` is no part of `minilm/model.onnx`, of `/model-2` and of `/srv/model`.
    whole = rf"(?<![\w./-]){re.escape(source.id)}(?![\w-]|\.\w)"
    return re.sub(whole, lambda _: source.name, text)
