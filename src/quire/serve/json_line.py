"""JSON on one line, for streams."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode
_LINE_END: Final = re.compile("[\x85\u2028\u2029]")


def encode(value: object) -> bytes:
    r"""Return a value as JSON on one line, whatever a client counts as a line end.

    Some clients end lines at Unicode's line ends, not only at those of event streams, and JSON allows such characters
    in a text. So they are escaped.

    >>> encode({"text": "é\u2028"})
    b'{"text":"\xc3\xa9\\u2028"}'
    """
    data = _encode(value)
    if data.isascii():
        return data
    return _LINE_END.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()
