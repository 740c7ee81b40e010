"""MaskWorker: the engine's end of the connection to one process that makes masks. Nothing here waits."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.compute.grammar.mask_messages import BEGUN, MaskAnswer, take_frames
from quire.core.grammar import Grammar

CHUNK_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class HeldText:
    """A text that is held to a grammar: `tokens` of it, before its end, and the masks asked for last.

    `masks` are what comes next and what comes behind drafts; None while they are awaited. `failure`: why there will
    be none any more.
    """

    grammar: Grammar
    number: int
    tokens: list[int] = field(default_factory=list)
    drafts: Sequence[int] = ()
    masks: list[bytes] | None = None
    failure: str = ""
    spent_s: float = 0.0  # of processor time, by the worker that it is with
    asked: tuple[int, tuple[int, ...]] | None = None  # for how many tokens, and behind which drafts
    job: int = BEGUN
    worker: MaskWorker | None = None
    num_sent: int = 0  # tokens that the worker knows

    @property
    def is_awaited(self) -> bool:
        """Whether an answer is to come."""
        return self.asked is not None and self.masks is None and not self.failure


class MaskWorker:
    """Jobs go out, answers come back in the same order. `now` of methods is a clock's seconds.

    `is_dear`: for texts whose masks take long. `since_s`: when the job in front of all others became so.
    """

    def __init__(self, connection: socket.socket, *, is_dear: bool, now: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._outgoing = bytearray()
        self._received = bytearray()
        self.is_dear = is_dear
        self.has_begun = False
        self.since_s = now
        self.jobs: dict[int, HeldText] = {}  # sent and unanswered, the oldest first
        self.texts: set[HeldText] = set()

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether an answer from it is pending."""
        return bool(self.jobs) or not self.has_begun

    @property
    def has_outgoing(self) -> bool:
        """Whether the connection could not take all that was sent."""
        return bool(self._outgoing)

    def send(self, frame: bytes) -> None:
        """Have a frame sent by the next `flush`. Mutates."""
        self._outgoing += frame

    def flush(self) -> None:
        """Send what the connection takes now. A process that is gone is found out by `receive`. Mutates."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except OSError:
            return

    def receive(self) -> tuple[list[MaskAnswer], bool]:
        """Return the answers that have come, and whether the process is still there. Mutates."""
        is_alive = True
        try:
            while piece := self._connection.recv(CHUNK_BYTES):
                self._received += piece
                if len(piece) < CHUNK_BYTES:
                    break
            else:
                is_alive = False
        except BlockingIOError:
            pass
        except OSError:
            is_alive = False
        return [MaskAnswer.from_bytes(frame) for frame in take_frames(self._received)], is_alive

    def close(self) -> None:
        """Let the process go: it ends when it has done the job that it is at. May be called twice."""
        self._connection.close()
