"""StepGraphs: records steps once and replays them, so that the host launches a step and not each kernel.

    sizes 1, 2, 4, 8, …    a step of 5 tokens is replayed in the graph of 8: its rows, and 3 unused rows

    tokens, positions, slots ─► where the recording reads them ─┐
    work of attention, block tables ─► `StandingPlan` ──────────┴─► replay: embed … all layers … rows

Some recordings are for short queries alone (decodes, their draft tokens, the ends of prompts), others for steps with
prompts, in which attention has launches for both. The latter exist up to the size that takes longer to compute than to
launch. Both are recorded for each place of a standing plan: with few programs for attention, and with more for many
decodes in a step with prompts, and for contexts that are cut into many tasks.

A recording repeats the same computation at the same addresses, for the same number of rows. So everything that differs
between steps is copied from the host to the addresses that it reads, and the resulting rows stay at their address until
the next replay. Unused rows have slot -1 and no work in attention: they store nothing, and no row reads another. The
head follows separately, with the draws (`draw_graphs.py`) or launched. A step whose work does not fit into the
recording is launched without it. Rejected: a graph for each piece between two attentions. It would work with every
attention, but the host would still launch each layer, and recording would take longer by the number of layers.

If the engine has slots for adapters, each size has a second graph, which reads the slot of each row and the adapter
that the slot holds at replay. So adapters that are loaded later need no recording.

If the positions of a model have axes, all recordings read coordinates, so that texts behind images are replayed too. A
step with rows of images, or with tokens that see later ones, is launched.

The recorder is a parameter: `CudaRecorder` on CUDA; without a GPU, tests pass a recorder that computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.models.sublayers import MAX_AXES
from quire.compute.torch.adapters import AdaptedStep, AdapterSlots
from quire.compute.torch.attention.base import KVPair, StandingPlan, StepBatch, StepShape
from quire.compute.torch.decoder import DecoderOutputs, Rows, TorchDecoder
from quire.compute.torch.last_tokens import LastTokens, coded_ids
from quire.compute.torch.upload import apart, fill, joined, num_joined, on_device
from quire.compute.worker.model_runner import StepInputs
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
Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], Tensors]) -> tuple[Tensors, Replay]:
        """Return the result of the work, and a function that repeats it at the same addresses."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory; implements `Recorder`. Each may overwrite the results of others."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensors]) -> tuple[Tensors, Replay]:
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
    """A recorded step of some rows. `columns`: the token ids, positions, slots and coordinates, joined."""

    columns: torch.Tensor
    batch: StepBatch  # read by the recordings
    attention: StandingPlan
    recordings: Sequence[tuple[Rows, Replay]]  # of each place

    def fill(self, inputs: StepInputs, adapted: AdaptedStep | None) -> None:
        """Copy a step to the first rows; the other rows store nothing. Mutates; does not wait."""
        count, size = len(inputs.token_ids), len(self.batch.token_ids)
        slots = [np.concatenate((each, np.full(size - count, -1))) for each in inputs.slots]
        columns = [coded_ids(inputs), inputs.positions, *slots]
        if self.batch.coordinates is not None:
            columns += list(inputs.coordinates) if len(inputs.coordinates) else [inputs.positions] * MAX_AXES
        fill(self.columns, joined(columns, [(size,)] * len(columns)))
        if self.batch.adapted is not None and adapted is not None:
            self.batch.adapted.slot_ids[:count].copy_(adapted.slot_ids)
            self.batch.adapted.slot_ids[count:].fill_(-1)


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
        self.recorder = recorder
        self._note_loaded = note_loaded
        self._sizes = {False: up_to(max_short, SIZES), True: up_to(max_tokens, PROMPT_SIZES)}  # by has_prompts
        self._graphs: dict[tuple[Kind, int], Graph] = {}
        self._num_wanted = 0

    def record(self, pairs: Mapping[int, KVPair], last_tokens: LastTokens, slots: AdapterSlots | None = None) -> None:
        """Record all sizes, the largest first, whose memory the others reuse; with `slots`, again with adapters.

        Mutates. Calls `note_loaded` after each with the number of graphs. Records none if attention cannot be recorded.
        """
        kinds = [Kind(*each) for each in product((True, False), (False,) if slots is None else (False, True))]
        self._num_wanted = sum(len(self._sizes[kind.has_prompts]) for kind in kinds)
        max_blocks = -(-self._decoder.spec.context_length // pairs[0].keys.shape[2])
        largest_short = self._sizes[False][-1]
        num_ids = min(largest_short * max_blocks, MOST_TABLE_IDS)
        largest = max([largest_short, *self._sizes[True]])
        memory = _Memory.of(largest, num_ids, pairs, slots, has_axes=self._decoder.has_axes)
        with torch.inference_mode():
            for kind in kinds:
                for size in reversed(self._sizes[kind.has_prompts]):
                    columns, batch = memory.first_rows(size, kind)
                    shape = replace(batch.shape, num_short=min(size, largest_short))
                    batch = replace(batch, shape=shape, last_tokens=last_tokens)
                    attention = self._decoder.reserve(batch)
                    if attention is None:
                        return
                    self._note()
                    self._graphs[kind, size] = Graph(columns, batch, attention, self._recorded(batch, attention, pairs))
        self._note()

    def run(self, inputs: StepInputs, shape: StepShape, adapted: AdaptedStep | None) -> DecoderOutputs | None:
        """Replay a step, with the results of `TorchDecoder.run`; None if it does not fit into a recording.

        Mutates the slots of its tokens. The results stay valid until the next replay.
        """
        kind = Kind(shape.num_short < shape.num_sequences, adapted is not None)
        size = next((each for each in self._sizes[kind.has_prompts] if each >= shape.num_tokens), 0)
        graph = self._graphs.get((kind, size))
        if graph is None:
            return None
        with torch.inference_mode():
            place = graph.attention.plan(shape)
            if place is None:
                return None
            numbers, finite = graph.recordings[place][0]
            graph.fill(inputs, adapted)
            graph.recordings[place][1]()
            states = None
            if len(inputs.state_indices):
                states = numbers[on_device(inputs.state_indices, numbers.device)].to(torch.float32)
            return DecoderOutputs(_at(numbers, inputs.logit_indices), finite[: shape.num_tokens], states)

    def _note(self) -> None:
        if self._note_loaded is not None:
            self._note_loaded(len(self._graphs), self._num_wanted, "graphs")

    def _recorded(
        self, batch: StepBatch, attention: StandingPlan, pairs: Mapping[int, KVPair]
    ) -> list[tuple[Rows, Replay]]:
        """Record a size for each place, after computing it once. Does not mutate: its rows have no slots."""
        recordings = []
        for planned in attention.planned:
            work = partial(self._decoder.rows, batch, pairs, planned)
            work()
            recordings.append(self.recorder.record(work))
        return recordings


def up_to(most: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes to record for steps of up to `most` tokens; none if `most` is below the smallest size.

    >>> up_to(5, (1, 2, 4, 8)), up_to(20, (1, 2, 4, 8)), up_to(20, (32, 64))
    ([1, 2, 4, 5], [1, 2, 4, 8], [])
    """
    largest = min(most, sizes[-1])
    return [size for size in sizes if size < largest] + [largest] * (largest >= sizes[0])


def _at(rows: torch.Tensor, indices: IntArray) -> torch.Tensor:
    """Return some rows; the first ones, as of decodes, as a view."""
    count = len(indices)
    return rows[:count] if np.array_equal(indices, np.arange(count)) else rows[on_device(indices, rows.device)]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What recordings of all sizes read, at the same addresses."""

    columns: torch.Tensor  # of the largest size: token ids, positions, slots of each KV group, coordinates
    num_columns: int
    block_tables: tuple[torch.Tensor, ...]
    adapted: AdaptedStep | None

    @classmethod
    def of(
        cls,
        largest: int,
        num_ids: int,
        pairs: Mapping[int, KVPair],
        slots: AdapterSlots | None,
        *,
        has_axes: bool,
    ) -> _Memory:
        """Return memory for this many tokens, and for block tables of this many ids."""
        device, num_groups = pairs[0].keys.device, 1 + max(pair.group for pair in pairs.values())
        num_columns = 2 + num_groups + (MAX_AXES if has_axes else 0)
        columns = torch.zeros(num_joined([(largest,)] * num_columns), dtype=torch.int32, device=device)
        tables = tuple(torch.zeros(num_ids, dtype=torch.int32, device=device) for _ in range(num_groups))
        return cls(columns, num_columns, tables, None if slots is None else slots.nothing(largest))

    def first_rows(self, size: int, kind: Kind) -> tuple[torch.Tensor, StepBatch]:
        """Return the columns of a step of this many tokens that store nothing, and the step. Mutates the columns."""
        shapes = [(size,)] * self.num_columns
        columns = self.columns[: num_joined(shapes)]
        token_ids, positions, *rest = apart(columns, shapes)
        slots, axes = rest[: len(self.block_tables)], rest[len(self.block_tables) :]
        for each in (token_ids, positions, *axes):
            each.zero_()
        for each in slots:
            each.fill_(-1)
        nothing, adapted = columns[:0], None
        if kind.has_adapters and self.adapted is not None:
            adapted = replace(self.adapted, slot_ids=self.adapted.slot_ids[:size])
        no_sequence = np.zeros(0, np.int64)
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            query_starts=nothing,
            lengths=nothing,
            slots=tuple(slots),
            block_tables=self.block_tables,
            logit_indices=nothing,
            shape=StepShape(size, size, size if kind.has_prompts else 1, no_sequence, no_sequence, ()),
            adapted=adapted,
            coordinates=tuple(axes) or None,
        )
        return columns, batch
