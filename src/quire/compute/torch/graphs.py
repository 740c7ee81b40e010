"""DecodeGraphs: a step of decodes as recorded pieces, replayed; the host then launches a piece and not its kernels.

    sizes 1, 2, 4, 8, …    a step of 5 decodes is replayed in the graph of 8: its rows, and 3 that count for nothing

    piece 0          attention 0          piece 1               attention 1        …    piece n       head
    embed … queries  launched as it is    output … MLP … next   launched as it is       output …      launched as it is

A recorded piece computes what it computed, at the addresses where it did, for as many rows. So tokens, positions and
slots are copied to where the recording read them, and results lie where it left them, until the next replay. Rows that
count for nothing have slot -1: they store nothing, and no row reads another. Attention is shaped by contexts, which
differ from step to step; it is launched between the pieces, over the rows that count. So is the head, whose logits
every size would keep a place for. Rejected: the whole step in one graph. Its attention would have to be launched for
the longest context that there may be, and its work list (parts, shared prefixes) could not follow the batch.

What records is handed in: on CUDA `CudaRecorder`; without a GPU, tests hand in one that computes anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch

from quire.compute.torch.attention.base import KVPair, StepBatch, StepShape
from quire.compute.torch.decoder import DecoderOutputs, Stream, TorchDecoder
from quire.core.executor import NoteLoaded

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)

Result = TypeVar("Result")
Replay = Callable[[], None]


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
        """Return what the work results in, and how to do it again in the same places."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory; implements `Recorder`. They must be replayed in their order."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
        """Return what the work results in, and how to do it again. It has been done before, so all is compiled."""
        graph = torch.cuda.CUDAGraph()
        # What other threads of this process do on the GPU meanwhile is no part of it, and does not spoil it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


class Piece(NamedTuple):
    """What lies between two attentions, recorded: the queries that it brings about."""

    queries: torch.Tensor
    replay: Replay


@dataclass(frozen=True, slots=True)
class Graph:
    """A step of so many rows."""

    batch: StepBatch  # what the recording reads
    attended: torch.Tensor  # [size, num_heads × head_dim]
    pieces: tuple[Piece, ...]  # one for each layer
    finish: Replay
    rows: torch.Tensor  # [size, hidden_size], before the head


class DecodeGraphs:
    """The graphs of a decoder, by size. They are recorded over one KV memory, and good as long as that is there."""

    def __init__(
        self, decoder: TorchDecoder, recorder: Recorder, max_size: int, note_loaded: NoteLoaded | None = None
    ) -> None:
        self._decoder = decoder
        self._recorder = recorder
        self._note_loaded = note_loaded
        largest = min(max_size, SIZES[-1])
        self._sizes = [size for size in SIZES if size < largest] + [largest]
        self._graphs: dict[int, Graph] = {}

    def record(self, pairs: Sequence[KVPair], device: torch.device) -> None:
        """Record all sizes, the largest first: what it takes, the others take again. Mutates.

        `note_loaded` is told each time how many there are.
        """
        num_groups = 1 + max(pair.group for pair in pairs)
        batch = _blank(self._sizes[-1], num_groups, device)
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._note()
                self._graphs[size] = self._graph(_first_rows(batch, size), pairs)
        self._note()

    def takes(self, batch: StepBatch) -> bool:
        """Return whether a step can be replayed: one token of each sequence, and not too many. Does not mutate."""
        num_tokens = batch.shape.num_tokens
        return batch.shape.num_decodes == num_tokens <= self._sizes[-1] and bool(self._graphs)

    def run(self, batch: StepBatch, pairs: Sequence[KVPair]) -> DecoderOutputs:
        """Replay a step, as `TorchDecoder.run` would compute it. Mutates the slots of its tokens."""
        count = batch.shape.num_tokens
        graph = self._graphs[next(size for size in self._sizes if size >= count)]
        with torch.inference_mode():
            _fill(graph.batch, batch, count)
            planned = self._decoder.plan(batch)
            for index, (piece, pair) in enumerate(zip(graph.pieces, pairs, strict=True)):
                piece.replay()
                attended = self._decoder.attend(index, piece.queries[:count], pair, planned)
                graph.attended[:count].copy_(attended)
            graph.finish()
            return self._decoder.outputs(graph.rows[:count], batch)

    def _note(self) -> None:
        if self._note_loaded is not None:
            self._note_loaded(len(self._graphs), len(self._sizes), "graphs")

    def _graph(self, batch: StepBatch, pairs: Sequence[KVPair]) -> Graph:
        """Record a size, after it was computed once. Mutates nothing: no row of it has a slot."""
        decoder, record = self._decoder, self._recorder.record
        stream = decoder.begin(batch, pairs[0])
        attended = torch.zeros_like(stream.queries.flatten(1))
        for index, pair in enumerate(pairs[1:]):
            stream = decoder.advance(index, stream, attended, batch, pair)
        decoder.finish(stream, attended)
        stream, replay = record(lambda: decoder.begin(batch, pairs[0]))
        pieces = [Piece(stream.queries, replay)]
        for index, pair in enumerate(pairs[1:]):
            stream, replay = record(_advance(decoder, index, stream, attended, (batch, pair)))
            pieces.append(Piece(stream.queries, replay))
        rows, finish = record(lambda: decoder.finish(stream, attended))
        return Graph(batch, attended, tuple(pieces), finish, rows)


def _advance(
    decoder: TorchDecoder, index: int, stream: Stream, attended: torch.Tensor, where: tuple[StepBatch, KVPair]
) -> Callable[[], Stream]:
    """Return the work between two attentions: of this stream, whatever the variable of the caller becomes."""
    return lambda: decoder.advance(index, stream, attended, *where)


def _blank(size: int, num_groups: int, device: torch.device) -> StepBatch:
    """Return a step of so many decodes that store nothing."""

    def column(value: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    nothing = torch.empty(0, dtype=torch.int32, device=device)
    no_shape = StepShape(size, 1, 1, *(2 * (nothing.cpu().numpy(),)), ())
    return StepBatch(
        token_ids=column(0),
        positions=column(0),
        query_starts=nothing,
        lengths=nothing,
        slots=tuple(column(-1) for _ in range(num_groups)),
        block_tables=(),
        logit_indices=nothing,
        shape=no_shape,
    )


def _first_rows(batch: StepBatch, size: int) -> StepBatch:
    """Return the first rows of a blank step: views, so that all sizes are filled in the same places."""
    return replace(
        batch,
        token_ids=batch.token_ids[:size],
        positions=batch.positions[:size],
        slots=tuple(slots[:size] for slots in batch.slots),
    )


def _fill(blank: StepBatch, batch: StepBatch, count: int) -> None:
    """Put a step into the first rows of a recorded one; the others store nothing. Mutates the recorded one."""
    blank.token_ids[:count].copy_(batch.token_ids)
    blank.positions[:count].copy_(batch.positions)
    for slots, given in zip(blank.slots, batch.slots, strict=True):
        slots[:count].copy_(given)
        slots[count:].fill_(-1)
