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
    """A text that must follow a grammar: its `tokens`, without the end, and the masks requested last.

    `masks`: for the next token, after each draft, and after each of the tokens `forced` after the drafts; None while
    they are awaited. `failure`: the reason why there will be no more masks; `is_engine_fault`: any grammar would fail.
    """

    grammar: Grammar
    number: int
    tokens: list[int] = field(default_factory=list)
    drafts: Sequence[int] = ()
    masks: list[bytes] | None = None
    forced: Sequence[int] = ()
    failure: str = ""
    is_engine_fault: bool = False
    spent_s: float = 0.0  # processor time of its present worker
    asked: tuple[int, tuple[int, ...]] | None = None  # the number of tokens, and the drafts
    job: int = BEGUN
    limit_s: float = 0.0  # processor time that this job may take
    num_deaths: int = 0  # of slow workers in its jobs
    worker: MaskWorker | None = None
    num_sent: int = 0  # tokens that the worker knows

    def has_asked(self, drafts: Sequence[int]) -> bool:
        """Return whether the masks for its present tokens and after some drafts were requested. Does not mutate."""
        num_tokens, asked = self.asked or (-1, ())
        return num_tokens == len(self.tokens) and asked[: len(drafts)] == tuple(drafts)

    @property
    def is_awaited(self) -> bool:
        """Whether an answer is pending."""
        return self.asked is not None and self.masks is None and not self.failure


class MaskWorker:
    """Sends jobs, and receives answers in the same order. `now` of methods: the time in seconds.

    `is_expensive`: for texts with slow masks. `since_s`: the time when the oldest job became the oldest.
    """

    def __init__(self, connection: socket.socket, *, is_expensive: bool, now: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._outgoing = bytearray()
        self._received = bytearray()
        self.is_expensive = is_expensive
        self.has_begun = False
        self.since_s = now
        self.jobs: dict[int, HeldText] = {}  # sent and unanswered, the oldest first
        self.texts: set[HeldText] = set()

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether a job is unanswered."""
        return bool(self.jobs) or not self.has_begun

    @property
    def has_outgoing(self) -> bool:
        """Whether frames remain to be sent."""
        return bool(self._outgoing)

    def send(self, frame: bytes) -> None:
        """Queue a frame for the next `flush`. Mutates."""
        self._outgoing += frame

    def flush(self) -> None:
        """Send as much as the connection accepts now. If the process has ended, `receive` reports it. Mutates."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except OSError:
            return

    def receive(self) -> tuple[list[MaskAnswer], bool]:
        """Return the answers received, and whether the process is still alive. Mutates."""
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
        """Close the connection: the process ends after its current job; may be called twice."""
        self._connection.close()
