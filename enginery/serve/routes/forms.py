r"""Images out of forms and out of base64.

    >>> parse_form(content_type, body).files
    [b'\x89PNG…']

Takes multipart/form-data as browsers and curl send it (RFC 7578), whole and in memory: the body is
bounded already.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass, field

from enginery.serve.reading import EmptyInputError, FieldError, shown
from enginery.serve.refusals import InvalidBodyError

_MOST_PARTS = 4096
_LONGEST_BOUNDARY = 70  # RFC 2046, section 5.1.1


@dataclass
class Form:
    """The parts of a form."""

    files: list[bytes] = field(default_factory=list)
    """In their order, whatever their fields are called."""
    fields: dict[str, bytes] = field(default_factory=dict)
    """The parts that are not files, by name."""


def parse_form(content_type: str, body: bytes) -> Form:
    """The parts of a form.

    Raises:
        InvalidBodyError: the body is not a whole form.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        raise InvalidBodyError(
            "the content type multipart/form-data names no boundary.",
            do="Let the client library set the content type.",
        )
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidBodyError(f"the form cannot be read: {error}.") from None
    if not parts.ended:
        raise InvalidBodyError("the form ends before its closing boundary.")
    return parts.form


class _Parts:
    """Puts together what the parser finds."""

    def __init__(self) -> None:
        self.form = Form()
        self.ended = False
        self._count = 0
        self._data = bytearray()
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > _MOST_PARTS:
            raise InvalidBodyError(f"the form has more than {_MOST_PARTS} parts.")
        self._data, self._headers = bytearray(), {}

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _end_part(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise InvalidBodyError(
                f"part {shown(name)} is encoded with {encoding[:40].decode('latin-1')}, "
                "expected binary."
            )
        if b"filename" in options or b"filename*" in options or self._is_image():
            if not self._data:
                raise EmptyInputError(f"the file in part {shown(name)} is empty.", field="inputs")
            self.form.files.append(bytes(self._data))
        elif not name:
            raise InvalidBodyError("a part of the form has no name.")
        else:
            self.form.fields[name] = bytes(self._data)

    def _is_image(self) -> bool:
        return self._headers.get(b"content-type", b"").startswith(b"image/")

    def _end(self) -> None:
        self.ended = True


def image_from_base64(text: str, name: str) -> bytes:
    """The bytes of an image in base64, or in a data URL.

    Raises:
        FieldError: it is neither.
    """
    data = text.strip()
    if data.startswith("data:"):
        header, comma, data = data.partition(",")
        if not comma or not header.endswith(";base64"):
            raise FieldError(f"{name} is a data URL without base64.", field=name)
    elif data[:8].lower().startswith(("http://", "https://")):
        raise FieldError(
            f"{name} is an address, expected an image in base64.",
            field=name,
            do="This server fetches nothing; send the image itself.",
        )
    try:
        # Lines of base64 are usual; strict mode refuses their ends, and all other strangers.
        found = binascii.a2b_base64("".join(data.split()), strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise FieldError(
            f"{name} is not base64: {str(error)[:80]}.", field=name, do="Encode the image's file."
        ) from None
    if not found:
        raise EmptyInputError(f"{name} is empty, expected an image.", field=name)
    return found
