"""RunningStore: blocks of a store that an engine is using, read from its files by another process.

The engine can write at any time, and there is no lock. So everything is checked: a record must be valid and have the
expected tokens and parent, and the bytes must match its checksum. A block that changes meanwhile is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from quire.compute.worker.store.checksum import crc32
from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.portable import beginning_bytes
from quire.compute.worker.store.record import FoundRecord, read_record, write_record
from quire.compute.worker.store.slot_file import DamagedBlockError
from quire.core.kept_block import TOKEN_BYTES, KeptBlock, record_bytes, slot_bytes
from quire.core.request import CacheScope

PIECE_BYTES: Final = 1 << 18


class RunningStore:
    """The files of a store, for reading."""

    def __init__(self, path: Path) -> None:
        self.meta = meta_of(path)
        self._block_size, self._block_bytes = int(self.meta["block_size"]), int(self.meta["block_bytes"])
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._index, self._blocks = -1, -1
        try:
            self._index = os.open(path / "slots.idx", flags)
            self._blocks = os.open(path / "blocks.bin", flags)
        except OSError:
            self.close()
            raise

    def chain(self, slots: Sequence[int], tokens: bytes, scope: CacheScope) -> list[KeptBlock]:
        """Return the blocks in some slots, in a bundle's form; they must be those of these tokens in this scope.

        Serials count from 1, and no block has a scope: the importer decides whose blocks they become. Reads all
        bytes. Raises `DamagedBlockError` for a slot with any other content.
        """
        found, serial, index = list[KeptBlock](), 0, -1
        for slot in slots:
            block = self._read(slot)[0].block
            if block.serial != serial:
                is_next = block.parent == serial and (index >= 0 or _is_of(block, scope))
                serial, index = block.serial, index + 1
                if not is_next:
                    raise DamagedBlockError(f"slot {slot} holds another block")
            if block.tokens != self._tokens(tokens, index):
                raise DamagedBlockError(f"slot {slot} holds other tokens")
            own = None if index else CacheScope(adapter=scope.adapter)
            found.append(KeptBlock(slot, index + 1, index, block.group, block.tokens, own))
        return found

    def bundle_bytes(self, count: int) -> int:
        """Return the length of a bundle of this many blocks."""
        return len(beginning_bytes(self.meta, count)) + count * (record_bytes(self._block_size) + self._block_bytes)

    def pieces(self, blocks: Sequence[KeptBlock]) -> Iterator[bytes]:
        """Yield a bundle of blocks, piece by piece; raises `DamagedBlockError` if a slot has changed."""
        piece = bytearray(beginning_bytes(self.meta, len(blocks)))
        for block in blocks:
            record, data = self._read(block.slot)
            if (record.block.tokens, record.block.group) != (block.tokens, block.group):
                raise DamagedBlockError(f"slot {block.slot} holds another block by now")
            piece += write_record(block, record.checksum, self._block_size) + data
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        if piece:
            yield bytes(piece)

    def _read(self, slot: int) -> tuple[FoundRecord, bytes]:
        size = record_bytes(self._block_size)
        record = read_record(os.pread(self._index, size, slot * size), slot, self._block_size)
        data = os.pread(self._blocks, self._block_bytes, slot * slot_bytes(self._block_bytes))
        if record is None or len(data) < self._block_bytes or crc32(data) != record.checksum:
            raise DamagedBlockError(f"slot {slot} holds no complete block")
        return record, data

    def _tokens(self, tokens: bytes, index: int) -> bytes:
        size = TOKEN_BYTES * self._block_size
        return tokens[index * size : (index + 1) * size]

    def close(self) -> None:
        """Close the files; may be called twice."""
        for descriptor in (self._index, self._blocks):
            if descriptor >= 0:
                os.close(descriptor)
        self._index = self._blocks = -1


def _is_of(block: KeptBlock, scope: CacheScope) -> bool:
    found = block.scope
    return found is not None and (found.salt, found.extra_keys, found.adapter) == (
        scope.salt,
        scope.extra_keys,
        scope.adapter,
    )
