"""SlotFile: KV blocks in slots of one size in one file, and an index of the slots.

    slots.idx    slot i: its record (record.py), 512 bytes for blocks of 16 tokens
    blocks.bin   slot i: the bytes of the block, at i × slot size

A write voids the record, writes the bytes, and writes the record. So a process that is killed at any point leaves the
old block, no block, or the new block. After a power failure the two files can be of different ages; the record's
checksum of the bytes detects that, and the block is a miss. Blocks are not flushed: a cache may forget, and must not
lie. There is no journal, because slots are independent.

A store that is opened voids the records that lead to no root, and flushes the index. An engine counts its serials from
the highest that is left, so a record that stayed could later name another block as its parent.

Files are read and written by system calls, not mapped: truncating a mapped file kills the process.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from quire.compute.worker.store.checksum import crc32
from quire.compute.worker.store.file_calls import FileCalls
from quire.compute.worker.store.folder import MARK, StoreFolder
from quire.compute.worker.store.record import FoundRecord, read_record, write_record
from quire.core.kept_block import MAX_SLOTS, KeptBlock, record_bytes, slot_bytes

EXTENT_SLOTS: Final = 64
READ_AT_ONCE: Final = 4 << 20
MAX_META_BYTES: Final = 1 << 20


class DamagedBlockError(Exception):
    """The bytes of a slot are not as written."""


class FullStoreError(Exception):
    """The disk has no room for another slot."""


class StoreForm(NamedTuple):
    """The form of all blocks in a store. `model`: its name, for display only."""

    identity: Mapping[str, object]
    block_size: int
    block_bytes: int
    model: str = ""


class SlotFile:
    """The slots of one store. Belongs to one thread at a time; the module describes the files."""

    def __init__(self, folder: StoreFolder, form: StoreForm, *, num_slots: int, calls: FileCalls | None = None) -> None:
        """Open the files and read the index; a store of another form is emptied.

        Raises `OSError` or `InvalidConfigError` if that fails; the folder is closed then.
        """
        self.num_slots = min(num_slots, MAX_SLOTS)
        self.block_bytes = form.block_bytes
        self.block_size = form.block_size
        self._folder = folder
        self._record_size = record_bytes(form.block_size)
        self._slot_bytes = slot_bytes(form.block_bytes)
        self._calls = calls or FileCalls()
        self._checksums: dict[int, int] = {}  # of the bytes, for each slot with a record
        self._index = self._blocks = -1
        self._num_reserved = 0  # slots for which the disk has room
        self.last_serial = 0
        try:
            self._index = folder.file("slots.idx")
            self._blocks = folder.file("blocks.bin")
            self._prepare(form)
            self.kept = self._read_index()
        except BaseException:
            self.close()
            raise

    def _prepare(self, form: StoreForm) -> None:
        """Empty a store whose `meta.json` is not ours, and truncate one that is too long."""
        sizes = {"block_size": self.block_size, "block_bytes": self.block_bytes, "record_bytes": self._record_size}
        meta = {"store": MARK, **sizes, "identity": dict(form.identity)}
        descriptor = self._folder.file("meta.json")
        try:
            if not _says_the_same(os.pread(descriptor, MAX_META_BYTES, 0), meta):
                os.ftruncate(self._index, 0)
                os.ftruncate(self._blocks, 0)
                os.ftruncate(descriptor, 0)
                self._calls.write(descriptor, json.dumps(meta | {"model": form.model}, indent=1).encode(), 0)
        finally:
            os.close(descriptor)
        for file, size in ((self._index, self._record_size), (self._blocks, self._slot_bytes)):
            if os.fstat(file).st_size > self.num_slots * size:
                os.ftruncate(file, self.num_slots * size)

    def _read_index(self) -> list[KeptBlock]:
        """Return the blocks in the slots, parents first: those with valid records that lead to a root.

        Mutates: voids all other records.
        """
        size, found = self._record_size, list[FoundRecord]()
        length = os.fstat(self._index).st_size // size * size
        step = max(READ_AT_ONCE // size, 1) * size
        for start in range(0, length, step):
            data = bytearray(min(step, length - start))
            self._calls.read(self._index, memoryview(data), start)
            for at in range(0, len(data), size):
                if not data[at]:
                    continue
                record = read_record(bytes(data[at : at + size]), (start + at) // size, self.block_size)
                if record is not None:
                    found.append(record)
        self.last_serial = max((record.block.serial for record in found), default=0)
        reached, names, kept = {0}, set[tuple[int, int]](), list[KeptBlock]()
        for block, checksum in sorted(found, key=lambda record: (record.block.serial, record.block.group)):
            if block.parent not in reached or (block.serial, block.group) in names:
                self._void_record(block.slot)
                continue
            reached.add(block.serial)
            names.add((block.serial, block.group))
            kept.append(block)
            self._checksums[block.slot] = checksum
        os.fsync(self._index)
        self._num_reserved = min(os.fstat(self._blocks).st_size // self._slot_bytes, self.num_slots)
        return kept

    @property
    def path(self) -> str:
        """The folder."""
        return str(self._folder.path)

    def write(self, block: KeptBlock, data: memoryview) -> None:
        """Put a block into a slot, and replace the block in it.

        Raises `FullStoreError` if the disk is full, and `OSError`; the slot is void then.
        """
        self._require(block.slot, data)
        self.void(block.slot)
        self._reserve(block.slot)
        checksum = crc32(data)
        try:
            self._calls.write(self._blocks, data, block.slot * self._slot_bytes)
            record = write_record(block, checksum, self.block_size)
            self._calls.write(self._index, record, block.slot * self._record_size)
        except OSError as error:
            # A partial record is not valid, but a complete one whose write was reported as failed would be.
            with suppress(OSError):
                self._void_record(block.slot)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FullStoreError(str(error)) from error
            raise
        self._checksums[block.slot] = checksum

    def _reserve(self, slot: int) -> None:
        if slot < self._num_reserved:
            return
        end = min(-(-(slot + 1) // EXTENT_SLOTS) * EXTENT_SLOTS, self.num_slots)
        start = self._num_reserved
        try:
            self._calls.reserve(self._blocks, start * self._slot_bytes, (end - start) * self._slot_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise FullStoreError(str(error)) from error
            raise
        self._num_reserved = end

    def read(self, slot: int, buffer: memoryview) -> None:
        """Fill `buffer` with the block in a slot. Raises `DamagedBlockError` unless it is as written, and `OSError`."""
        self._require(slot, buffer)
        checksum = self._checksums.get(slot)
        if checksum is None:
            raise DamagedBlockError(f"slot {slot} holds no block")
        try:
            self._calls.read(self._blocks, buffer, slot * self._slot_bytes)
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise DamagedBlockError(f"slot {slot} is cut off") from error
            raise
        if crc32(buffer) != checksum:
            raise DamagedBlockError(f"the bytes of slot {slot} are not those that were written")

    def void(self, slot: int) -> None:
        """Forget the block in a slot. Raises `OSError`; the block may then reappear when the store is reopened."""
        if self._checksums.pop(slot, None) is not None:
            self._void_record(slot)

    def erase_free(self) -> None:
        """Overwrite the bytes of all slots that hold no block. Raises `OSError`."""
        for slot in range(self._num_reserved):
            if slot not in self._checksums:
                self._calls.write(self._blocks, bytes(self.block_bytes), slot * self._slot_bytes)

    def _void_record(self, slot: int) -> None:
        self._calls.write(self._index, bytes(self._record_size), slot * self._record_size)

    def close(self) -> None:
        """Close the files and unlock the folder; may be called twice."""
        for descriptor in (self._index, self._blocks):
            if descriptor >= 0:
                os.close(descriptor)
        self._index = self._blocks = -1
        self._folder.close()

    def _require(self, slot: int, data: memoryview) -> None:
        if not 0 <= slot < self.num_slots or data.nbytes != self.block_bytes:
            raise ValueError(f"slot {slot}, {data.nbytes} bytes; allowed: {self.num_slots} of {self.block_bytes} bytes")


def _says_the_same(data: bytes, meta: Mapping[str, object]) -> bool:
    """Whether a `meta.json` belongs to a store of this form; ignores the model's name."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or "model" not in found:
        return False
    del found["model"]
    return bool(found == json.loads(json.dumps(meta)))
