"""A disk under a `ShadowCache`: it keeps what slots stand for. Tickets end late, out of order, undone, or never."""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass, field, replace

from quire.core.kept_block import KeptBlock
from quire.core.step import StepPlan
from quire.core.transfers import UNDONE, BlockLoad, TransferOutcome
from support.shadow import Content, ShadowCache, ShadowError

MOST_COLLECTS = 6
"""After this many results a load that has not ended is late."""


@dataclass(frozen=True)
class DiskChaos:
    """How likely each thing is, for each ticket and result. `hangs`: a load never ends, until it is late."""

    delay: float = 0.3
    undone: float = 0.0
    hangs: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random) -> DiskChaos:
        """A third of the disks are without fault."""
        return cls(rng.choice([0.0, 0.3, 0.8]), rng.choice([0.0, 0.1, 0.5]), rng.choice([0.0, 0.1, 1.0]))


Block = dict[int, Content]


@dataclass
class ShadowDisk:
    """Slots that outlive a `ShadowExecutor`."""

    seed: int = 0
    chaos: DiskChaos = field(default_factory=DiskChaos)
    slots: dict[int, tuple[KeptBlock, Block]] = field(default_factory=dict)
    bundles: dict[str, list[tuple[KeptBlock, Block]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.restart()

    def restart(self) -> list[KeptBlock]:
        """Forget what is under way, as a process that is killed does; return what is kept, parents first."""
        self._loads: dict[int, tuple[BlockLoad, int]] = {}  # and how many results have come since
        self._writes: deque[tuple[int, KeptBlock, Block] | int] = deque()
        self.slots = {block.slot: (block, content) for block, content in self._reached()}
        return [block for block, _ in self._reached()]

    def _reached(self) -> list[tuple[KeptBlock, Block]]:
        reached, kept = {0}, []
        for block, content in sorted(self.slots.values(), key=lambda slot: (slot[0].serial, slot[0].group)):
            if block.parent in reached:
                reached.add(block.serial)
                kept.append((block, content))
        return kept

    def pack(self) -> tuple[str, tuple[KeptBlock, ...]]:
        """Return the name of a new bundle of all that is kept, and its blocks with their places in it."""
        name = str(len(self.bundles))
        self.bundles[name] = self._reached()
        return name, self.packed(name)

    def packed(self, name: str) -> tuple[KeptBlock, ...]:
        """Return the blocks of a bundle with their places in it."""
        return tuple(replace(block, slot=place) for place, (block, _) in enumerate(self.bundles[name]))

    def apply(self, plan: StepPlan, cache: ShadowCache) -> None:
        """Take what a plan asks for; what it stores is copied now."""
        transfers = plan.transfers
        for ticket in transfers.drops:
            self._loads.pop(ticket, None)
        self._writes.extend(transfers.voids)
        for ticket, block, kept, bundle in transfers.stores:
            self._writes.append((ticket, kept, self.bundles[bundle][block][1] if bundle else cache.block(block)))
        for load in transfers.loads:
            if load.ticket in self._loads:
                raise ShadowError(f"ticket {load.ticket} is given twice")
            self._loads[load.ticket] = load, 0

    def collect(self, cache: ShadowCache) -> TransferOutcome:
        """End some tickets: stores in their order, loads in any."""
        done, undone, rng = array("i"), {}, self._rng
        while self._writes and rng.random() >= self.chaos.delay:
            write = self._writes.popleft()
            if isinstance(write, int):
                self.slots.pop(write, None)
                continue
            ticket, kept, content = write
            self.slots.pop(kept.slot, None)
            if rng.random() < self.chaos.undone:
                undone[ticket] = rng.choice(["failed", "full", "damaged"])
            else:
                self.slots[kept.slot] = kept, content
                done.append(ticket)
        tickets = list(self._loads)
        rng.shuffle(tickets)
        for ticket in tickets:
            load, age = self._loads[ticket]
            self._loads[ticket] = load, age + 1
            if age == MOST_COLLECTS:
                undone[ticket] = "late"
            elif rng.random() < self.chaos.delay or rng.random() < self.chaos.hangs:
                continue
            elif load.slot not in self.slots:
                raise ShadowError(f"slot {load.slot} is loaded, and holds nothing")
            elif rng.random() < self.chaos.undone:
                undone[ticket] = rng.choice(UNDONE[:2])
            else:
                cache.put(load.block, self.slots[load.slot][1])
                done.append(ticket)
            del self._loads[ticket]
        return TransferOutcome(done, undone, 100 * len(done))
