"""The messages of ranks, over a pair of sockets: a frame before each action that they take together.

    leader                                             follower
      Begin ───────────────────────────────────────►         once: the model and the group to join
                  ◄─────────────────────────────── Ready      it has started: the leader never waits for a dead one
      Measure ─────────────────────────────────────►         on a GPU: load, compute the largest steps
                  ◄──────────────────────────── Measured      the memory that they take there
      Allocate, Prepare, Moves, Step ──────────────►         in the order of the leader's own actions
      the end of the connection ───────────────────►         the follower ends

A frame is its length in four bytes and its fields in MessagePack. The columns of a step are bytes of 32-bit integers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import msgspec
import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.torch.footprint import Footprint
from quire.compute.torch.settings import TorchSettings
from quire.compute.worker.model_runner import StepInputs
from quire.core.step import BlockCopy, BlockMove, StepPlan, column

LENGTH_BYTES: Final = 4


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all frames."""


class Begin(Frame, frozen=True):
    """Load a shard of the model at a path, and join the group that meets at a file."""

    model: str
    settings: TorchSettings
    rank: int
    meeting: str


class Ready(Frame, frozen=True):
    """A follower has started."""


class Measure(Frame, frozen=True):
    """Compute the largest steps with all ranks, and report their memory."""


class Measured(Frame, frozen=True):
    """The memory of a follower's device."""

    footprint: Footprint


class Allocate(Frame, frozen=True):
    """Allocate the KV memory."""

    num_blocks: int
    num_host_blocks: int


class Prepare(Frame, frozen=True):
    """Compute the largest steps, and record others."""


class Moves(Frame, frozen=True):
    """Copy and move blocks: pairs of block ids."""

    moves_out: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    moves_in: list[tuple[int, int]]

    @classmethod
    def of(cls, plan: StepPlan) -> Moves:
        """Return the moves and copies of a plan."""
        return cls(*([(pair[0], pair[1]) for pair in pairs] for pairs in (plan.moves_out, plan.copies, plan.moves_in)))

    def to_plan(self) -> StepPlan:
        """Return a plan with only these moves and copies."""
        return StepPlan(
            0,
            column(),
            column(),
            column(),
            column(),
            moves_out=tuple(BlockMove(*pair) for pair in self.moves_out),
            copies=tuple(BlockCopy(*pair) for pair in self.copies),
            moves_in=tuple(BlockMove(*pair) for pair in self.moves_in),
        )


class Column(msgspec.Struct, frozen=True, array_like=True):
    """An array of 32-bit integers."""

    data: bytes
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: IntArray) -> Column:
        """Return an array as a column."""
        return cls(array.astype(np.int32).tobytes(), array.shape)

    def to_array(self) -> IntArray:
        """Return the array."""
        return np.frombuffer(self.data, np.int32).reshape(self.shape).astype(np.int64)


class Step(Frame, frozen=True):
    """Compute a step: the columns of `StepInputs`. Tables are cut to the longest context."""

    columns: list[Column]  # starts of queries, tokens, positions, starts of logits, logits, rows, states
    slots: list[Column]
    block_tables: list[Column]
    images: list[Column]  # given, coordinates, ends, and the rows as bits; empty without images

    @classmethod
    def of(cls, inputs: StepInputs, block_size: int) -> Step:
        """Return the frame of a step. Does not mutate."""
        most = int(inputs.positions.max()) // block_size + 1
        bits = inputs.given_rows.view(np.int32).astype(np.int64)
        of_images: list[IntArray] = [inputs.given, inputs.coordinates, inputs.ends_seen, bits]
        columns = (inputs.query_starts, inputs.token_ids, inputs.positions, inputs.logit_starts, inputs.logit_indices)
        return cls(
            [Column.of(each) for each in (*columns, inputs.rows, inputs.state_indices)],
            [Column.of(each) for each in inputs.slots],
            [Column.of(each[:, :most]) for each in inputs.block_tables],
            [Column.of(each) for each in of_images] if any(len(each) for each in of_images) else [],
        )

    def to_inputs(self) -> StepInputs:
        """Return the step."""
        query_starts, token_ids, positions, logit_starts, logits, rows, states = (
            each.to_array() for each in self.columns
        )
        inputs = StepInputs(
            entries=tuple(range(len(rows))),
            query_starts=query_starts,
            token_ids=token_ids,
            positions=positions,
            slots=tuple(each.to_array() for each in self.slots),
            block_tables=tuple(each.to_array() for each in self.block_tables),
            logit_starts=logit_starts,
            logit_indices=logits,
            rows=rows,
            state_indices=states,
        )
        if not self.images:
            return inputs
        given, coordinates, ends_seen, bits = (each.to_array() for each in self.images)
        given_rows = bits.astype(np.int32).view(np.float32)
        return replace(inputs, given=given, given_rows=given_rows, coordinates=coordinates, ends_seen=ends_seen)


AnyFrame = Begin | Ready | Measure | Measured | Allocate | Prepare | Moves | Step
_DECODER: Final[msgspec.msgpack.Decoder[AnyFrame]] = msgspec.msgpack.Decoder(AnyFrame)


def send_frame(to: Sequence[socket.socket], frame: Frame) -> None:
    """Send a frame to some ranks; raises `OSError` if a rank is gone."""
    body: Any = msgspec.msgpack.encode(frame)
    for connection in to:
        connection.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)


class Inbox:
    """Receives frames in a separate thread, so that it notices a lost connection while a device computes."""

    def __init__(self, connection: socket.socket, note_end: Callable[[], None]) -> None:
        self._connection = connection
        self._note_end = note_end
        self._frames: SimpleQueue[AnyFrame | None] = SimpleQueue()
        Thread(target=self._read_all, name="frames of a rank", daemon=True).start()

    def take(self) -> AnyFrame | None:
        """Wait for a frame; None when the other end is gone, after all frames."""
        return self._frames.get()

    def _read_all(self) -> None:
        while (frame := _receive_frame(self._connection)) is not None:
            self._frames.put(frame)
        self._frames.put(None)
        self._note_end()


def _receive_frame(connection: socket.socket) -> AnyFrame | None:
    """Wait for a frame; None when the other end is gone."""
    try:
        head = _read(connection, LENGTH_BYTES)
        body = None if head is None else _read(connection, int.from_bytes(head, "little"))
    except OSError:
        return None
    return None if body is None else _DECODER.decode(body)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
