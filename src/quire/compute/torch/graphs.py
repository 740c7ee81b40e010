"""StepGraphs: records steps once and replays them, so that the host launches a step and not each kernel.

    sizes 1, 2, 4, 8, …    a step of 5 tokens is replayed in the graph of 8: its rows, and 3 unused rows

    tokens, positions, slots ─► where the recording reads them ─┐
    work of attention, block tables ─► `StandingPlan` ──────────┴─► replay: embed … all layers … rows ─► head

Some recordings are for short queries alone (decodes, their draft tokens, the ends of prompts), others for steps with
prompts, in which attention has launches for both. The latter exist up to the size that takes longer to compute than to
launch. Both are recorded for each place of a standing plan: with few programs for attention, and with more for many
decodes in a step with prompts, and for contexts that are cut into many tasks.

A recording repeats the same computation at the same addresses, for the same number of rows. So everything that differs
between steps is copied to the addresses that it reads, and the resulting rows stay at their address until the next
replay. Unused rows have slot -1 and no work in attention: they store nothing, and no row reads another. The head is
launched separately, because otherwise every size would keep memory for its logits. A step whose work does not fit into
the recording is launched without it. Rejected: a graph for each piece between two attentions. It would work with every
attention, but the host would still launch each layer, and recording would take longer by the number of layers.

If the engine has slots for adapters, each size has a second graph, which reads the slot of each row and the adapter
that the slot holds at replay. So adapters that are loaded later need no recording.

The recorder is a parameter: `CudaRecorder` on CUDA; without a GPU, tests pass a recorder that computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple, Protocol

import torch

from quire.compute.torch.adapters import AdapterSlots
from quire.compute.torch.attention.base import KVPair, StandingPlan, StepBatch, StepShape
from quire.compute.torch.decoder import DecoderOutputs, Rows, TorchDecoder
from quire.core.executor import NoteLoaded

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
PROMPT_SIZES: Final = (
    32,
    *range(64, 513, 64),
    *range(640, 1025, 128),
    *range(1280, 2049, 256),
    *range(2560, 4097, 512),
)
MOST_TABLE_IDS: Final = 1 << 22
"""The most block ids in the tables of a replayed step, for each KV group."""

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], Rows]) -> tuple[Rows, Replay]:
        """Return the result of the work, and a function that repeats it at the same addresses."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory; implements `Recorder`. Each may overwrite the results of others."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Rows]) -> tuple[Rows, Replay]:
        """Return the result of the work, and a function that repeats it. Its kernels must be compiled already."""
        graph = torch.cuda.CUDAGraph()
        # Work of other threads of this process on the GPU is not recorded, and does not break the recording.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


class Kind(NamedTuple):
    """The kind of a recorded step."""

    has_prompts: bool
    has_adapters: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded step of some rows."""

    batch: StepBatch  # read by the recordings
    attention: StandingPlan
    recordings: Sequence[tuple[Rows, Replay]]  # of each place


class StepGraphs:
    """The graphs of a decoder, by kind and size. They belong to one KV memory, and are valid as long as it exists.

    `max_short`: the most tokens of a step of short queries; `max_tokens`: of a step with prompts, 0: record none.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        recorder: Recorder,
        max_short: int,
        max_tokens: int = 0,
        *,
        note_loaded: NoteLoaded | None = None,
    ) -> None:
        self._decoder = decoder
        self._recorder = recorder
        self._note_loaded = note_loaded
        self._sizes = {False: _up_to(max_short, SIZES), True: _up_to(max_tokens, PROMPT_SIZES)}  # by has_prompts
        self._graphs: dict[tuple[Kind, int], Graph] = {}
        self._num_wanted = 0

    def record(self, pairs: Sequence[KVPair], device: torch.device, slots: AdapterSlots | None = None) -> None:
        """Record all sizes, the largest first, whose memory the others reuse; with `slots`, again with adapters.

        Mutates. Calls `note_loaded` after each with the number of graphs. Records none if attention cannot be recorded.
        """
        kinds = [Kind(*each) for each in product((True, False), (False,) if slots is None else (False, True))]
        self._num_wanted = sum(len(self._sizes[kind.has_prompts]) for kind in kinds)
        max_blocks = -(-self._decoder.spec.context_length // pairs[0].keys.shape[2])
        largest_short = self._sizes[False][-1]
        num_ids = min(largest_short * max_blocks, MOST_TABLE_IDS)
        largest = max([largest_short, *self._sizes[True]])
        batch = _blank(largest, num_ids, 1 + max(pair.group for pair in pairs), device)
        adapted = batch if slots is None else replace(batch, adapted=slots.nothing(largest))
        with torch.inference_mode():
            for kind in kinds:
                for size in reversed(self._sizes[kind.has_prompts]):
                    rows = _first_rows(adapted if kind.has_adapters else batch, size)
                    longest = size if kind.has_prompts else 1
                    shape = replace(rows.shape, num_short=min(size, largest_short), longest_query=longest)
                    rows = replace(rows, shape=shape)
                    attention = self._decoder.reserve(rows)
                    if attention is None:
                        return
                    self._note()
                    self._graphs[kind, size] = self._graph(rows, attention, pairs)
        self._note()

    def takes(self, batch: StepBatch) -> bool:
        """Return whether a step has few enough tokens to be replayed. Does not mutate."""
        sizes = self._sizes[_has_prompts(batch)]
        return bool(self._graphs) and bool(sizes) and batch.shape.num_tokens <= sizes[-1]

    def run(self, batch: StepBatch, pairs: Sequence[KVPair]) -> DecoderOutputs:
        """Replay a step, with the results of `TorchDecoder.run`. Mutates the slots of its tokens."""
        count, kind = batch.shape.num_tokens, Kind(_has_prompts(batch), batch.adapted is not None)
        graph = self._graphs[kind, next(size for size in self._sizes[kind.has_prompts] if size >= count)]
        with torch.inference_mode():
            place = graph.attention.plan(batch)
            if place is None:
                return self._decoder.run(batch, pairs)
            rows, replay = graph.recordings[place]
            _fill(graph.batch, batch, count)
            replay()
            return self._decoder.outputs(rows.first(count), batch)

    def _note(self) -> None:
        if self._note_loaded is not None:
            self._note_loaded(len(self._graphs), self._num_wanted, "graphs")

    def _graph(self, batch: StepBatch, attention: StandingPlan, pairs: Sequence[KVPair]) -> Graph:
        """Record a size for each place, after computing it once. Does not mutate: its rows have no slots."""
        recordings = []
        for planned in attention.planned:
            work = partial(self._decoder.rows, batch, pairs, planned)
            work()
            recordings.append(self._recorder.record(work))
        return Graph(batch, attention, recordings)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes to record for steps of up to `most` tokens; none if `most` is below the smallest size.

    >>> _up_to(5, (1, 2, 4, 8)), _up_to(20, (1, 2, 4, 8)), _up_to(20, (32, 64))
    ([1, 2, 4, 5], [1, 2, 4, 8], [])
    """
    largest = min(most, sizes[-1])
    return [size for size in sizes if size < largest] + [largest] * (largest >= sizes[0])


def _has_prompts(batch: StepBatch) -> bool:
    return batch.shape.num_short < batch.shape.num_sequences


def _blank(size: int, num_ids: int, num_groups: int, device: torch.device) -> StepBatch:
    """Return a step of this many tokens that store nothing, with room for block tables of this many ids."""

    def column(length: int, value: int) -> torch.Tensor:
        return torch.full((length,), value, dtype=torch.int32, device=device)

    nothing = column(0, 0)
    no_shape = StepShape(size, size, 1, 1, *(2 * (nothing.cpu().numpy(),)), ())
    return StepBatch(
        token_ids=column(size, 0),
        positions=column(size, 0),
        query_starts=nothing,
        lengths=nothing,
        slots=tuple(column(size, -1) for _ in range(num_groups)),
        block_tables=tuple(column(num_ids, 0) for _ in range(num_groups)),
        logit_indices=nothing,
        shape=no_shape,
    )


def _first_rows(batch: StepBatch, size: int) -> StepBatch:
    """Return the first rows of a blank step: views, so that all sizes share the same memory."""
    return replace(
        batch,
        token_ids=batch.token_ids[:size],
        positions=batch.positions[:size],
        slots=tuple(slots[:size] for slots in batch.slots),
        adapted=None if batch.adapted is None else replace(batch.adapted, slot_ids=batch.adapted.slot_ids[:size]),
    )


def _fill(blank: StepBatch, batch: StepBatch, count: int) -> None:
    """Copy a step to the first rows of a recorded one; the other rows store nothing. Mutates the recorded one."""
    blank.token_ids[:count].copy_(batch.token_ids)
    blank.positions[:count].copy_(batch.positions)
    for slots, given in zip(blank.slots, batch.slots, strict=True):
        slots[:count].copy_(given)
        slots[count:].fill_(-1)
    if blank.adapted is not None and batch.adapted is not None:
        blank.adapted.slot_ids[:count].copy_(batch.adapted.slot_ids)
        blank.adapted.slot_ids[count:].fill_(-1)
