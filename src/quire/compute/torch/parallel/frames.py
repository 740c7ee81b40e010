"""What the leading rank tells the others, over a pair of sockets: a frame before each thing that they do together.

    leader                                             follower
      Begin ───────────────────────────────────────►         once: the model and the group to join
      Allocate, Moves, Step ───────────────────────►         in the order in which the leader does it itself
      the end of the connection ───────────────────►         it ends

A frame is its length in four bytes and its fields in MessagePack. The columns of a step are bytes of 32-bit integers.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from quire.compute.torch.attention.base import StepBatch, StepShape
from quire.compute.torch.settings import TorchSettings
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


class Allocate(Frame, frozen=True):
    """Allocate the KV memory."""

    num_blocks: int
    num_host_blocks: int


class Moves(Frame, frozen=True):
    """Copy and move blocks: pairs of block ids."""

    moves_out: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    moves_in: list[tuple[int, int]]

    @classmethod
    def of(cls, plan: StepPlan) -> Moves:
        """Return those of a plan."""
        return cls(*([(pair[0], pair[1]) for pair in pairs] for pairs in (plan.moves_out, plan.copies, plan.moves_in)))

    def to_plan(self) -> StepPlan:
        """Return a plan that does nothing else."""
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
    def of(cls, tensor: torch.Tensor) -> Column:
        """Return the numbers of a tensor."""
        return cls(tensor.cpu().numpy().astype(np.int32, copy=False).tobytes(), tuple(tensor.shape))

    def to_tensor(self) -> torch.Tensor:
        """Return the tensor."""
        if not self.data:  # torch makes no tensor of an empty buffer
            return torch.empty(self.shape, dtype=torch.int32)
        return torch.frombuffer(bytearray(self.data), dtype=torch.int32).view(self.shape)


class Step(Frame, frozen=True):
    """Compute a step: the columns of a `StepBatch`."""

    columns: list[Column]  # tokens, positions, starts of queries, lengths, logits
    slots: list[Column]
    block_tables: list[Column]
    num_decodes: int
    num_short: int
    longest_query: int
    longest_context: int

    @classmethod
    def of(cls, batch: StepBatch) -> Step:
        """Return the frame of a step. Does not mutate."""
        shape = batch.shape
        columns = (batch.token_ids, batch.positions, batch.query_starts, batch.lengths, batch.logit_indices)
        return cls(
            [Column.of(tensor) for tensor in columns],
            [Column.of(tensor) for tensor in batch.slots],
            [Column.of(tensor) for tensor in batch.block_tables],
            shape.num_decodes,
            shape.num_short,
            shape.longest_query,
            shape.longest_context,
        )

    def to_batch(self) -> StepBatch:
        """Return the step."""
        token_ids, positions, query_starts, lengths, logit_indices = (each.to_tensor() for each in self.columns)
        slots, tables = (tuple(each.to_tensor() for each in some) for some in (self.slots, self.block_tables))
        shape = StepShape(
            self.num_decodes,
            self.num_short,
            self.longest_query,
            self.longest_context,
            query_starts.numpy().astype(np.int64),
            lengths.numpy().astype(np.int64),
            tuple(table.numpy().astype(np.int64) for table in tables),
        )
        return StepBatch(token_ids, positions, query_starts, lengths, slots, tables, logit_indices, shape)


AnyFrame = Begin | Allocate | Moves | Step
_DECODER: Final[msgspec.msgpack.Decoder[AnyFrame]] = msgspec.msgpack.Decoder(AnyFrame)


def send_frame(to: Sequence[socket.socket], frame: Frame) -> None:
    """Send a frame to some followers; raises `OSError` if one of them is gone."""
    body: Any = msgspec.msgpack.encode(frame)
    for connection in to:
        connection.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)


def receive_frame(connection: socket.socket) -> AnyFrame | None:
    """Wait for a frame; None when the leader is gone."""
    head = _read(connection, LENGTH_BYTES)
    body = None if head is None else _read(connection, int.from_bytes(head, "little"))
    return None if body is None else _DECODER.decode(body)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
