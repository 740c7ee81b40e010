"""EventReader: reads the data of server-sent events from pieces of any size."""

from __future__ import annotations

DONE = b"[DONE]"
"""The data of the event that ends a stream of the OpenAI API."""


class EventReader:
    r"""Reads one stream. Ignores comments and all fields except `data`, as the format requires.

    >>> reader = EventReader()
    >>> reader.feed(b'data: {"a": 1}\n'), reader.feed(b'\n: a comment\n\ndata: [DO'), reader.feed(b'NE]\r\n\r\n')
    ([], [b'{"a": 1}'], [b'[DONE]'])
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes. Mutates."""
        text = self._rest + piece
        if b"\r" in text:  # a final one waits for its line feed
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all events
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
