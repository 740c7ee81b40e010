"""MemoryChanges: the changes of tables and the moves of bytes that the next plan reports to the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.core.request import Request
from quire.core.step import BlockCopy, BlockMove
from quire.core.transfers import NO_TRANSFERS, Transfers
from quire.memory.sequence import SequenceMemory

if TYPE_CHECKING:
    from quire.memory.journal import MemoryJournal


@dataclass(slots=True)
class MemoryChanges:
    """Collected by the code that changes a table; taken once per plan."""

    table_entries: list[tuple[Request, int, int, int]] = field(default_factory=list)  # group, index, block
    moves_out: list[BlockMove] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    moves_in: list[BlockMove] = field(default_factory=list)
    copies_down: deque[BlockMove] = field(default_factory=deque)  # to the host, with the next plan
    transfers: Transfers = NO_TRANSFERS
    journal: MemoryJournal | None = None  # records who holds which block, while a client watches

    @property
    def has_moves(self) -> bool:
        """Whether there are bytes to copy or move."""
        return bool(self.moves_out or self.copies or self.moves_in)

    def set_entry(self, request: Request, memory: SequenceMemory, place: tuple[int, int], block_id: int) -> None:
        """Put a block into a table, at `place` = (group, index), or at its end. Mutates."""
        group, index = place
        block_ids = memory.tables[group].block_ids
        if index == len(block_ids):
            block_ids.append(block_id)
        else:
            block_ids[index] = block_id
        self.table_entries.append((request, group, index, block_id))
        if self.journal is not None:
            self.journal.note_holder(request, place, block_id)

    def append_entries(self, request: Request, memory: SequenceMemory, group: int, blocks: list[int]) -> None:
        """Append blocks to a table. Mutates."""
        block_ids = memory.tables[group].block_ids
        first = len(block_ids)
        block_ids += blocks
        self.table_entries += [(request, group, index, block_id) for index, block_id in enumerate(blocks, start=first)]
        if self.journal is not None:
            for index, block_id in enumerate(blocks, start=first):
                self.journal.note_holder(request, (group, index), block_id)

    def forget_copies(self, block_ids: Iterable[int]) -> dict[int, int]:
        """Cancel the copies into blocks that a sequence frees before the plan with the copies is sent. Mutates.

        Returns where the bytes of these blocks still are: destination → source.
        """
        if not self.copies:
            return {}
        gone = set(block_ids)
        sources = {copy.destination: copy.source for copy in self.copies if copy.destination in gone}
        self.copies = [copy for copy in self.copies if copy.destination not in gone]
        return sources

    def take(self) -> MemoryChanges:
        """Return the collected changes, and start an empty collection. Mutates."""
        taken = MemoryChanges(self.table_entries, [*self.moves_out, *self.copies_down], self.copies, self.moves_in)
        self.table_entries, self.moves_out, self.copies, self.moves_in = [], [], [], []
        self.copies_down.clear()
        return taken
