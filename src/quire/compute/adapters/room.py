"""AdapterRoom: the slots of an engine that keeps adapters in fixed memory, each with room for the largest adapter.

adapter_memory   as many slots as fit, for any matrix and the highest rank allowed
otherwise        a slot for each named adapter, for their matrices and their highest rank
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from quire.compute.adapters.folder import Adapter, padded
from quire.compute.adapters.places import ADAPTED, OF_EXPERTS, places_of
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.core.byte_sizes import format_bytes
from quire.core.config import ResolvedConfig
from quire.core.errors import CheckpointError, InvalidConfigError

MOST_SLOTS: Final = 64
MOST_MATRICES: Final = 1024
"""The most matrices of one part in one layer, over all slots: sorting rows by matrix counts the rows of each."""


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """`count` slots, each for an adapter of up to this rank for these parts of a model."""

    count: int
    rank: int
    parts: frozenset[Part]
    slot_bytes: int

    @classmethod
    def of(
        cls, spec: DecoderSpec, rank: int, parts: Collection[Part], dtype_bytes: int, *, count: int = MOST_SLOTS
    ) -> AdapterRoom:
        """Return the room of up to `count` slots."""
        places = [place for _, place in places_of(spec) if place.part in parts]
        sizes = sum(place.num_inputs + place.num_outputs for place in places)
        num_experts = 1 + max((place.expert for place in places), default=0)
        count = min(count, MOST_SLOTS, max(1, MOST_MATRICES // num_experts))
        return cls(count, padded(rank), frozenset(parts), dtype_bytes * padded(rank) * sizes)

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return self.count * self.slot_bytes

    def require(self, adapter: Adapter) -> None:
        """Raise `CheckpointError` unless an adapter fits into a slot."""
        found = {each.place.part for each in adapter.matrices}
        more = "start the engine with adapter_memory, or with a larger one"
        if found - self.parts:
            names = ", ".join(sorted(part.value for part in found - self.parts))
            raise CheckpointError(str(adapter.folder), f"matrices for {names}", f"none for these here; {more}")
        if padded(adapter.rank) > self.rank:
            raise CheckpointError(str(adapter.folder), f"rank {adapter.rank}", f"at most {self.rank} here; {more}")


def room_for(model: ModelDescription, config: ResolvedConfig, dtype_bytes: int) -> AdapterRoom | None:
    """Return the room that the settings specify; None: no adapters. Does not mutate.

    Includes the matrices of experts only if the memory suffices. Raises `InvalidConfigError` if the memory is too small
    for one slot.
    """
    spec, memory = model.spec, config.adapter_memory
    if memory is None:
        named = {adapter.digest: adapter for adapter in model.adapters.values()}
        used = {each.place.part for adapter in named.values() for each in adapter.matrices}
        rank = max((adapter.rank for adapter in named.values()), default=0)
        return AdapterRoom.of(spec, rank, used, dtype_bytes, count=len(named)) if named else None
    if not int(memory):
        return None
    for parts in (ADAPTED, ADAPTED - OF_EXPERTS):
        one = AdapterRoom.of(spec, config.max_adapter_rank, parts, dtype_bytes, count=1)
        if one.slot_bytes <= int(memory):
            count = int(memory) // one.slot_bytes
            return AdapterRoom.of(spec, config.max_adapter_rank, parts, dtype_bytes, count=count)
    allowed = f"at least {format_bytes(one.slot_bytes)}, for one adapter; a lower max_adapter_rank needs less"
    raise InvalidConfigError("adapter_memory", format_bytes(int(memory)), allowed)
