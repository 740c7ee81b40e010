"""JSON on one line, for streams."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode
_LINE_END: Final = re.compile("[\x85\u2028\u2029]")


def encode(value: object) -> bytes:
    r"""Return a value as JSON on one line, for every client's idea of a line.

    Some clients end lines where Unicode does, not only where the rules of event streams do, and JSON allows a text to
    have these characters as they are. So they are escaped.

    >>> encode({"text": "é\u2028"})
    b'{"text":"\xc3\xa9\\u2028"}'
    """
    data = _encode(value)
    if data.isascii():
        return data
    return _LINE_END.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()
