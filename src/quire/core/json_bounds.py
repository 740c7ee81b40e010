r"""JsonBounds: limits on the values in a JSON text, which are counted before it is parsed.

    bytes ── require_bounded ──► json.loads
               stops at the first value too many

A parser makes an object of each value, and three bytes are enough for one: 30 MiB of `[],` become 10 million lists and
800 MB, in seconds during which Python runs nothing else. Counting allocates no objects, runs in short calls, so that
other threads continue meanwhile, and stops at the limit. The parser finds out whether the text is JSON at all.

Rejected: a limit on bytes alone, because text needs many bytes and few values; a parser with a callback for each
object, which has made the values in the object by then; a count in native code, which a server on a GPU may lack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from quire.core.errors import InvalidRequestError

# All repeats are bounded and none backtracks, so that no call holds the interpreter for more than a millisecond. Groups
# need no possessive repeats for that, because all that follows is optional; Python 3.11 before .5 gets those wrong.
_PIECE: Final = rb"(?:[^\"\\]{0,1024}+(?:\\.)?){0,64}"
_NUMBER: Final = rb"[^\s\"\[\]{},:]{1,1024}+"
_TOKEN: Final = re.compile(
    rb"[\s,:]{0,4096}+(?:"
    rb"(?P<torn>\"" + _PIECE + rb")(?:(?P<text>\")(?P<key>\s{0,64}+:)?)?|(?P<begin>[\[{])|(?P<end>[\]}])|"
    rb"(?P<numbers>" + _NUMBER + rb"(?:\s{0,64}+,\s{0,64}+" + _NUMBER + rb"){0,64})|(?P<blank>[\s,:]))",
    re.DOTALL,
)
_REST: Final = re.compile(_PIECE + rb"(?P<text>\")?", re.DOTALL)

MAX_DEPTH: Final = 512


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """The most values and numbers. Texts, keys, lists and objects are values; all else (true and null too), numbers."""

    max_values: int = 1 << 15
    max_numbers: int = 1 << 16


DEFAULT_BOUNDS: Final = JsonBounds()


def require_bounded(text: bytes | bytearray, bounds: JsonBounds, where: str = "") -> int:
    """Return how many values and numbers a JSON text has; raises `InvalidRequestError` above the bounds.

    The error names `where`, or the field of the outermost object that has too many. Raises `RecursionError` if the text
    nests deeper than parsers follow. Does not mutate.

    >>> require_bounded(b'{"prompt": [5, 6], "user": "you"}', JsonBounds())
    7
    >>> require_bounded(b'{"prompt": [5, 6], "user": "you"}', JsonBounds(max_numbers=1))
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidRequestError: prompt is 'over 1 numbers'; allowed: at most 1 in one request
    """
    num_values = num_numbers = depth = place = 0
    key, match_token = b"", _TOKEN.match
    while token := match_token(text, place):
        place = token.end()
        kind = token.lastgroup
        if kind == "numbers":
            num_numbers += 1 + text.count(b",", *token.span("numbers"))
            if num_numbers > bounds.max_numbers:
                raise _too_many(where, key, bounds.max_numbers, "numbers")
        elif kind == "end":
            depth -= 1
        elif kind != "blank":
            num_values += 1
            if kind == "begin":
                depth += 1
                if depth > MAX_DEPTH:
                    raise RecursionError
            elif kind == "key" and depth == 1:
                key = token["torn"][1:]
            elif kind == "torn":
                place = _end_of_text(text, place)
            if num_values > bounds.max_values:
                raise _too_many(where, key, bounds.max_values, "texts, lists and objects")
    return num_values + num_numbers


def _end_of_text(text: bytes | bytearray, place: int) -> int:
    """Return the end of a string that has been read up to `place`; the end of the data if the string is torn."""
    while (piece := _REST.match(text, place)) and piece.end() > place:
        place = piece.end()
        if piece["text"]:
            break
    return place


def _too_many(where: str, key: bytes, limit: int, what: str) -> InvalidRequestError:
    name = where or key.decode("utf-8", "replace") or "body"
    return InvalidRequestError(name, f"over {limit} {what}", f"at most {limit} in one request")
