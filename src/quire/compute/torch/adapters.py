"""LoRA adapters on a device: their memory, and their part in the products of a step's rows.

    slot        fixed memory for A and B of every matrix, of one rank; a load fills it with an adapter, zeros the rest
    output += B (scale * (A rows))    for rows with an adapter, with A and B of the row's slot

The slots of a matrix are stacked like experts, and each row is multiplied by A and B of its slot as by an expert: two
products for each matrix, for any number of adapters in a step. Rows without an adapter use a slot of other rows, which
reads no additional matrix, and a mask discards their products, so their bits do not change. If the matrix belongs to
experts, a slot has A and B for each of them. Everything is on the device, so one recording (graphs.py) is valid for any
adapters, including those loaded later. A step with adapters is not launched ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch

from quire.compute.adapters.folder import Adapter, LowRank
from quire.compute.adapters.places import OF_EXPERTS, places_of
from quire.compute.adapters.room import AdapterRoom
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.torch.products import Matrix
from quire.compute.torch.upload import on_device
from quire.compute.worker.model_runner import StepInputs
from quire.core.errors import ExecutionError

SLOT_WAIT_S: Final = 30.0
"""How long a load waits for a slot: the engine frees one soon after the last request with its adapter."""


@dataclass(frozen=True, slots=True)
class LowRankMatrices:
    """A and B of a matrix, slot by slot; for experts, each slot has those of every expert. A has the scale of B A."""

    a: Matrix  # [num_slots × num_experts, rank, in], with scales
    b: Matrix  # [num_slots × num_experts, out, rank]


Layers = Sequence[Mapping[Part, LowRankMatrices]]
"""For each layer, the A and B of each matrix."""


@dataclass(frozen=True, slots=True)
class AdaptedStep:
    """The slots of adapters, and the slot of each row of a step; -1: no adapter."""

    layers: Layers
    num_slots: int
    slot_ids: torch.Tensor  # int32 [num_rows]


class AdapterSlots:
    """The slots of a device. Mutable; a load may run in another thread than the steps."""

    def __init__(self, spec: DecoderSpec, room: AdapterRoom, dtype: torch.dtype, device: torch.device) -> None:
        self._room = room
        self._device = device
        self._slots: dict[str, int] = {}
        self._free = list(range(room.count))
        self._changed = threading.Condition()
        self.layers: list[dict[Part, LowRankMatrices]] = [{} for _ in spec.layers]
        counts: dict[tuple[int, Part], tuple[int, int, int]] = {}
        for _, place in places_of(spec):
            if place.part in room.parts:
                counts[place.layer, place.part] = (place.expert + 1, place.num_outputs, place.num_inputs)
        for (layer, part), (num_experts, outputs, inputs) in counts.items():
            count = room.count * num_experts
            a, b = (
                torch.zeros((count, *shape), dtype=dtype, device=device)
                for shape in ((room.rank, inputs), (outputs, room.rank))
            )
            scales = torch.zeros((count, room.rank), dtype=torch.float32, device=device)
            self.layers[layer][part] = LowRankMatrices(Matrix(a, scales=scales), Matrix(b))

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return self._room.num_bytes

    def has(self, digest: str) -> bool:
        """Return whether a slot has an adapter. Does not mutate."""
        return digest in self._slots

    def load(self, adapter: Adapter) -> None:
        """Read an adapter and copy it into a free slot, unless a slot has it already. Mutates.

        Raises `CheckpointError` for files that have changed or do not fit, `ExecutionError` if no slot becomes free.
        """
        if self.has(adapter.digest):
            return
        self._room.require(adapter)
        matrices = list(adapter.read())  # before it takes a slot, because a disk can hang
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, SLOT_WAIT_S):
                raise ExecutionError("running requests use all adapter slots; try again when one has ended")
            slot = self._free.pop(0)
        try:
            self._fill(slot, matrices)
        except BaseException:
            self._give_back(slot)
            raise
        self._slots[adapter.digest] = slot

    def drop(self, digest: str) -> None:
        """Free the slot of an adapter. Mutates."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def step(self, inputs: StepInputs) -> AdaptedStep | None:
        """Return the slots of the rows of a step; None: no row has an adapter. Does not mutate."""
        if not any(inputs.adapters):
            return None
        slots = [self._slots[digest] if digest else -1 for digest in inputs.adapters]
        ids = np.repeat(np.array(slots, np.int32), np.diff(inputs.query_starts))
        return AdaptedStep(self.layers, self._room.count, on_device(ids, self._device))

    def nothing(self, num_rows: int) -> AdaptedStep:
        """Return a step whose rows have no adapters."""
        ids = torch.full((num_rows,), -1, dtype=torch.int32, device=self._device)
        return AdaptedStep(self.layers, self._room.count, ids)

    def _fill(self, slot: int, matrices: Sequence[LowRank]) -> None:
        """Copy an adapter into a slot that no step uses; matrices that the adapter lacks become zero. Mutates."""
        for parts in self.layers:
            for each in parts.values():
                for numbers in (each.a.weight, each.b.weight):
                    numbers[self._indices(slot, each)].zero_()
        for low_rank in matrices:
            place = self.layers[low_rank.layer][low_rank.part]
            index = self._indices(slot, place).start + low_rank.expert
            place.a.weight[index, : len(low_rank.a)] = torch.from_numpy(low_rank.a)
            place.b.weight[index, :, : len(low_rank.a)] = torch.from_numpy(low_rank.b)
            assert place.a.scales is not None
            place.a.scales[index] = low_rank.scale

    def _indices(self, slot: int, matrices: LowRankMatrices) -> slice:
        count = len(matrices.a.weight) // self._room.count
        return slice(slot * count, (slot + 1) * count)


def part_sizes(spec: DecoderSpec) -> Sequence[Mapping[Part, int]]:
    """Return the number of outputs of each matrix that can have an adapter, layer by layer."""
    sizes: list[dict[Part, int]] = [{} for _ in spec.layers]
    for _, place in places_of(spec):
        sizes[place.layer][place.part] = place.num_outputs
    return sizes


class GroupedProducts(Protocol):
    """Products of rows, each with one of several matrices; `ExpertOperations` includes them."""

    def known(self, ids: torch.Tensor, num_experts: int) -> Any:
        """Return the routing of rows whose experts are known, int32 `[num_rows, choices]`. Does not mutate."""
        ...

    def ids(self, routing: Any) -> torch.Tensor:
        """Return the experts of the rows of a routing, int32 `[num_rows, choices]`."""
        ...

    def product(self, rows: torch.Tensor, experts: Matrix, routing: Any) -> torch.Tensor:
        """Return the product of each pair with the matrix of its expert: `[num_pairs, out]`."""
        ...


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The matrix of each row, or of each pair of a row and an expert, and which of them have an adapter."""

    routing: Any
    mask: torch.Tensor  # bool [num_pairs, 1]


@dataclass(frozen=True, slots=True)
class LowRankSums:
    """The operations for adapters' products. `sizes`: the number of outputs of each matrix of each layer."""

    products: GroupedProducts
    sizes: Sequence[Mapping[Part, int]]

    def pairs(self, step: AdaptedStep, routing: Any = None, num_experts: int = 1) -> _Pairs:
        """Return the matrix of each row, by its slot; with a routing, of each pair of a row and an expert."""
        slots = torch.where(step.slot_ids < 0, step.slot_ids.max().clamp(min=0), step.slot_ids)[:, None]
        ids = slots if routing is None else slots * num_experts + self.products.ids(routing)
        ids = ids.to(torch.int32).contiguous()
        mask = (step.slot_ids >= 0)[:, None].expand(ids.shape).reshape(-1, 1)
        return _Pairs(self.products.known(ids, step.num_slots * num_experts), mask)


@dataclass(frozen=True, slots=True)
class Add:
    """Adds the adapters' part to the products of a layer, matrix by matrix; without a step, adds nothing."""

    sums: LowRankSums
    step: AdaptedStep | None = None
    rows: _Pairs | None = None
    layer: int = 0

    @classmethod
    def to(cls, step: AdaptedStep | None, sums: LowRankSums) -> Add:
        """Return the `Add` for the rows of a step."""
        return cls(sums) if step is None else cls(sums, step, sums.pairs(step))

    def of(self, layer: int) -> Add:
        """Return the `Add` for a layer. Does not mutate."""
        return replace(self, layer=layer)

    def with_experts(self, routing: Any, num_experts: int) -> Add:
        """Return the `Add` for pairs of rows and experts in this layer. Does not mutate."""
        if self.step is None or not OF_EXPERTS & self.step.layers[self.layer].keys():
            return Add(self.sums)
        return replace(self, rows=self.sums.pairs(self.step, routing, num_experts))

    def __call__(self, output: torch.Tensor, rows: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        """Return the product of rows with the fused matrices of `parts`, plus the adapters' part. May mutate it.

        Parts that the layer lacks are not in the product.
        """
        if self.step is None or self.rows is None:
            return output
        first, products, sizes = 0, self.sums.products, self.sums.sizes[self.layer]
        for part in parts:
            low_rank, end = self.step.layers[self.layer].get(part), first + sizes.get(part, 0)
            if low_rank is not None:
                reduced = products.product(rows, low_rank.a, self.rows.routing)
                added = products.product(reduced, low_rank.b, self.rows.routing)
                mine = output[:, first:end]
                mine.copy_(torch.where(self.rows.mask, mine + added, mine))
            first = end
        return output
