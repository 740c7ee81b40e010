"""Transfers: how plans and results describe blocks that move between the device and the disk.

Each load and each store has a **ticket**. A plan issues tickets; a later result reports each ticket as done, or as
undone with the reason. Transfers end whenever the disk is ready, in any order, so a ticket may be open for many steps.

    plan     stores: block → slot, copied when the plan takes effect, written later
             loads:  slot → block, which no step reads until the ticket is done
             voids:  slots to forget         drops: tickets of abandoned loads; their blocks may be overwritten at once
    result   done, undone
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quire.core.errors import StepLogError
from quire.core.kept_block import KeptBlock, read_scope, scope_bytes
from quire.core.wire import WireReader, WireWriter

UNDONE: Final = ("damaged", "failed", "full", "late")
"""Why a transfer was not done: wrong bytes, a disk error, a full disk, too slow."""


class BlockLoad(NamedTuple):
    """Load the bytes of a slot into a block of the device."""

    ticket: int
    slot: int
    block: int
    group: int


class BlockStore(NamedTuple):
    """Write the bytes of a block of the device to a slot; with a `bundle`, the bytes of entry `block` of that file."""

    ticket: int
    block: int
    kept: KeptBlock
    bundle: str = ""


def _column() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class Transfers:
    """The disk transfers of one plan. `patience_us`: the time after which its loads are abandoned.

    `is_waiting`: the plan computes nothing, and its result may wait a moment for tickets to end.
    """

    loads: tuple[BlockLoad, ...] = ()
    stores: tuple[BlockStore, ...] = ()
    voids: array[int] = field(default_factory=_column)
    drops: array[int] = field(default_factory=_column)
    patience_us: int = 0
    is_waiting: bool = False

    def __bool__(self) -> bool:
        """Return whether the plan has transfers, or waits for some."""
        return bool(self.loads or self.stores or self.voids or self.drops or self.is_waiting)

    def write(self, writer: WireWriter) -> None:
        """Write the binary form. Does not mutate."""
        writer.integer(bool(self))
        if not self:
            return
        writer.integer(self.patience_us)
        writer.integer(self.is_waiting)
        writer.column(self.voids)
        writer.column(self.drops)
        writer.column(array("i", [number for load in self.loads for number in load]))
        writer.integer(len(self.stores))
        for ticket, block, kept, bundle in self.stores:
            writer.column(array("i", [ticket, block]))
            write_kept_block(writer, kept)
            writer.text(bundle)

    @classmethod
    def read(cls, reader: WireReader) -> Transfers:
        """Read the binary form back."""
        if not reader.integer():
            return NO_TRANSFERS
        patience_us, is_waiting = reader.integer(), bool(reader.integer())
        voids, drops, numbers = (reader.column() for _ in range(3))
        if len(numbers) % 4:
            raise StepLogError("a column of loads has a length that is not a multiple of four")
        loads = tuple(BlockLoad(*numbers[at : at + 4]) for at in range(0, len(numbers), 4))
        stores = tuple(_read_store(reader) for _ in range(reader.integer()))
        return cls(loads, stores, voids, drops, patience_us, is_waiting)


NO_TRANSFERS: Final = Transfers()


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """Tickets that ended. `undone` maps a ticket to its reason, one of `UNDONE`; `load_us`: time spent reading."""

    done: array[int] = field(default_factory=_column)
    undone: dict[int, str] = field(default_factory=dict)
    load_us: int = field(default=0, compare=False)

    def __bool__(self) -> bool:
        """Return whether a ticket ended."""
        return bool(self.done or self.undone)

    def write(self, writer: WireWriter) -> None:
        """Write the binary form. Does not mutate."""
        writer.integer(bool(self))
        if not self:
            return
        writer.column(self.done)
        reasons = [number for ticket, why in sorted(self.undone.items()) for number in (ticket, UNDONE.index(why))]
        writer.column(array("i", reasons))
        writer.integer(self.load_us)

    @classmethod
    def read(cls, reader: WireReader) -> TransferOutcome:
        """Read the binary form back."""
        if not reader.integer():
            return NO_OUTCOME
        done, reasons, load_us = reader.column(), reader.column(), reader.integer()
        if len(reasons) % 2 or not all(0 <= reason < len(UNDONE) for reason in reasons[1::2]):
            raise StepLogError("a result has an unknown reason for an undone transfer")
        undone = {ticket: UNDONE[reason] for ticket, reason in zip(reasons[::2], reasons[1::2], strict=True)}
        return cls(done, undone, load_us)


NO_OUTCOME: Final = TransferOutcome()


def write_kept_block(writer: WireWriter, kept: KeptBlock) -> None:
    """Write the binary form of a kept block. Does not mutate it."""
    for number in (kept.slot, kept.serial, kept.parent, kept.group):
        writer.integer(number)
    writer.raw(kept.tokens)
    writer.raw(b"" if kept.scope is None else scope_bytes(kept.scope))


def _read_store(reader: WireReader) -> BlockStore:
    ticket, block = reader.column(2)
    return BlockStore(ticket, block, read_kept_block(reader), reader.text())


def read_kept_block(reader: WireReader) -> KeptBlock:
    """Read the binary form of a kept block back."""
    slot, serial, parent, group = (reader.integer() for _ in range(4))
    tokens, scope = reader.raw(), reader.raw()
    return KeptBlock(slot, serial, parent, group, tokens, read_scope(scope) if scope else None)
