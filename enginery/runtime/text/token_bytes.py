"""The bytes of single tokens, which together are those of a text.

    token_bytes = TokenBytes(tokenizer.backend)
    b"".join(map(token_bytes, ids)).decode()

A tokenizer decodes whole texts: of a single token it drops the space in front, and what is only a
part of a character it replaces.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import chain
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of a vocabulary."""

    def __init__(self, backend: Any) -> None:
        """Take a `tokenizers.Tokenizer`."""
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._steps: dict[str, dict[str, Any]] = {}
        """The steps of the tokenizer's decoder, by type."""
        if backend.decoder is not None:
            state = json.loads(backend.decoder.__getstate__())
            steps = state["decoders"] if state["type"] == "Sequence" else [state]
            self._steps = {step["type"]: step for step in steps}
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token, in UTF-8; a token may be a part of a character."""
        if token_id not in self._known:
            self._known[token_id] = self._bytes_of(token_id)
        return self._known[token_id]

    def is_special(self, token_id: int) -> bool:
        """Return True for a token that decoding leaves out, such as the one that ends a text."""
        return token_id in self._added and bool(self._added[token_id].special)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return bytes(self._added[token_id].content.encode())
        token = self._backend.id_to_token(token_id) or ""
        steps = self._steps
        if "ByteLevel" in steps:
            byte_of = _byte_level()
            if all(character in byte_of for character in token):
                return bytes([byte_of[character] for character in token])
            return token.encode()
        if "ByteFallback" in steps and (match := _FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if "WordPiece" in steps:
            inner = token.removeprefix(steps["WordPiece"]["prefix"])
            return (inner if inner != token else f" {token}").encode()
        if "BPEDecoder" in steps:
            return token.replace(steps["BPEDecoder"]["suffix"], " ").encode()
        if "Metaspace" in steps:
            return token.replace(steps["Metaspace"]["replacement"], " ").encode()
        return token.replace("▁", " ").encode() if "Replace" in steps else token.encode()


@cache
def _byte_level() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet of GPT-2's `encoder.py`."""
    shown = list(chain(range(33, 127), range(161, 173), range(174, 256)))
    others = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}
