"""Events of a stream, as bytes.

Most of an event is the same for every token, so an `Envelope` encodes that part once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.serve.errors import ApiError, ErrorBody
from quire.serve.json_line import encode
from quire.serve.schemas.common import Usage

DONE: Final = b"data: [DONE]\n\n"
NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


class Envelope:
    r"""Writes the events of one stream of chunks, which differ only in a choice, and the usage if requested. Mutable.

    `once`: more fields of the first event.

    >>> envelope = Envelope({"id": "cmpl-1"}, tells_usage=True)
    >>> envelope.chunk({"index": 0})
    b'data: {"id":"cmpl-1","choices":[{"index":0}],"usage":null}\n\n'
    """

    def __init__(self, fixed: Mapping[str, object], *, tells_usage: bool, once: Mapping[str, object] = NOTHING) -> None:
        self._head = _head(fixed)
        self._first_head = _head({**fixed, **once}) if once else b""
        self._tail = b'],"usage":null}\n\n' if tells_usage else b"]}\n\n"

    def chunk(self, choice: object, usage: Usage | None = None) -> bytes:
        """Return the event of a text's new part. Mutates: the next event is not the first one."""
        tail = self._tail if usage is None else _usage_tail(usage)
        head, self._first_head = self._first_head or self._head, b""
        return head + encode(choice) + tail

    def usage(self, usage: Usage) -> bytes:
        """Return the event with only the usage of the call. Does not mutate."""
        return self._head + _usage_tail(usage)


def _head(fixed: Mapping[str, object]) -> bytes:
    return b"data: " + encode(fixed)[:-1] + b',"choices":['


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + encode(usage) + b"}\n\n"


def named_event(name: str, data: object) -> bytes:
    r"""Return an event with a name.

    >>> named_event("response.created", {"sequence_number": 0})
    b'event: response.created\ndata: {"sequence_number":0}\n\n'
    """
    return b"event: " + name.encode() + b"\ndata: " + encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a failed stream: the body of an error answer."""
    return b"data: " + encode(ErrorBody(error.detail)) + b"\n\n"
