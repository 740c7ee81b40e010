"""The messages between an engine and its mask workers: length-prefixed frames over a stream."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from quire.core.grammar import GRAMMAR_KINDS, Grammar
from quire.core.wire import WireReader, WireWriter

BEGUN: Final = -1
"""The job number of a worker's first answer; its failure is the reason why the worker cannot make masks."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class MaskJob:
    """A job: advance a text by some tokens, then make the next mask and the masks after drafts.

    If the grammar forces tokens after the drafts, up to `most_forced` of them are returned, with their masks.

    `grammar` is sent if the worker does not know the text. A job that takes more than `limit_s` of processor time,
    without compiling, ends the worker.
    """

    job: int
    text: int
    limit_s: float
    grammar: Grammar | None
    tokens: Sequence[int]
    drafts: Sequence[int]
    most_forced: int = 0

    def to_bytes(self) -> bytes:
        """Return the frame of the job."""
        writer = WireWriter()
        writer.integer(self.job)
        writer.integer(self.text)
        writer.number(self.limit_s)
        writer.integer(-1 if self.grammar is None else GRAMMAR_KINDS.index(self.grammar.kind))
        writer.text("" if self.grammar is None else self.grammar.text)
        writer.column(array("i", self.tokens))
        writer.column(array("i", self.drafts))
        writer.integer(self.most_forced)
        return _framed(writer.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> MaskJob:
        """Read a frame back, without its length."""
        reader = WireReader(data)
        job, text, limit_s, kind = reader.integer(), reader.integer(), reader.number(), reader.integer()
        grammar = reader.text()
        tokens, drafts = reader.column(), reader.column()
        known = None if kind < 0 else Grammar(GRAMMAR_KINDS[kind], grammar)
        return cls(job, text, limit_s, known, tokens.tolist(), drafts.tolist(), reader.integer())


@dataclass(frozen=True, slots=True)
class MaskAnswer:
    """The result of a job: its concatenated masks, or the reason why the text cannot continue; and the CPU time.

    `forced`: the tokens after the drafts that the grammar forces.
    """

    job: int
    spent_s: float
    failure: str = ""
    masks: bytes = b""
    forced: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """Return the frame of the answer."""
        writer = WireWriter()
        writer.integer(self.job)
        writer.number(self.spent_s)
        writer.text(self.failure)
        writer.raw(self.masks)
        writer.column(array("i", self.forced))
        return _framed(writer.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> MaskAnswer:
        """Read a frame back, without its length."""
        reader = WireReader(data)
        return cls(reader.integer(), reader.number(), reader.text(), reader.raw(), reader.column().tolist())


def forget_frame(text: int) -> bytes:
    """Return the frame that makes a worker forget a text: an empty job."""
    return MaskJob(BEGUN, text, 0.0, None, (), ()).to_bytes()


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Remove the complete frames at the front of `received`, and yield them. Mutates."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        yield bytes(received[_LENGTH.size : end])
        del received[:end]


def _framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload
