"""Spool: holds an incoming bundle in a private file next to the stores.

    body ──► Intake: beginning, records, checksums, tokens ──► spool: record │ bytes, at place i ──► store's thread

The server writes the file and deletes it. Nothing of a bundle reaches the engine before its last byte is checked. Then
the engine gets the numbers of places, not bytes. If a server is killed, its file is no longer locked, and the next
start removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from quire.compute.worker.store.checksum import crc32
from quire.compute.worker.store.portable import HEAD_BYTES, beginning_size, form_of, read_beginning
from quire.compute.worker.store.record import FoundRecord, read_record
from quire.compute.worker.store.slot_file import DamagedBlockError
from quire.core.errors import InvalidRequestError
from quire.core.kept_block import TOKEN_BYTES, KeptBlock, record_bytes
from quire.core.request import CacheScope
from quire.core.transfers import BlockStore

NAME: Final = "incoming-"
WHOLE: Final = "a complete bundle from POST /cache/export or quire cache export; export it again"


class Spool:
    """An open, locked file for a bundle."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{NAME}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags, 0o600)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Delete the file; may be called twice."""
        if self.descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self.descriptor)
        self.descriptor = -1


def remove_abandoned(parent: Path) -> None:
    """Remove the spools of servers that were killed."""
    for path in parent.glob(f"{NAME}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """The limits of a bundle: for a store with this meta, at most `max_blocks` blocks, only tokens of the model."""

    meta: Mapping[str, Any]
    max_blocks: int
    vocab_size: int

    @property
    def entry_bytes(self) -> int:
        """The bytes of a block with its record."""
        return record_bytes(self.meta["block_size"]) + int(self.meta["block_bytes"])


class Intake:
    """Takes the bytes of a bundle as they arrive, and writes complete blocks to a spool. For one thread at a time."""

    def __init__(self, spool: Spool, limits: IntakeLimits) -> None:
        self.spool = spool
        self._limits = limits
        self._rest = bytearray()
        self._num_announced: int | None = None
        self.num_blocks = 0
        self._serials = {0}
        self._last = (0, 0, b"")  # serial, parent and tokens of the block before

    def feed(self, data: bytes) -> None:
        """Take the next bytes; raises `InvalidRequestError` if they cannot be of a bundle for this store. Mutates."""
        self._rest += data
        if self._num_announced is None:
            self._begin()
        if self._num_announced is None:
            return
        size = self._limits.entry_bytes
        end = len(self._rest) // size * size
        if self.num_blocks + -(-len(self._rest) // size) > self._num_announced:
            raise _refused(f"longer than the {self._num_announced} blocks that it announces")
        view = memoryview(bytes(self._rest[:end]))
        for at in range(0, end, size):
            self._take(view[at : at + size])
        del self._rest[:end]

    def _begin(self) -> None:
        if len(self._rest) < HEAD_BYTES:
            return
        num_bytes = beginning_size(bytes(self._rest[:HEAD_BYTES]))
        if num_bytes is None:
            raise _refused("not a bundle")
        if len(self._rest) < num_bytes:
            return
        found = read_beginning(BytesIO(bytes(self._rest[:num_bytes])).read)
        if found is None:
            raise _refused("a bundle whose beginning is damaged")
        meta, count = found
        if form_of(meta) != form_of(self._limits.meta):
            allowed = "one of the same weights, settings, instruction set and version as this engine"
            raise InvalidRequestError("body", "a bundle of another engine", allowed)
        if count > self._limits.max_blocks:
            allowed = f"at most {self._limits.max_blocks:,}: raise --disk-cache-size"
            raise InvalidRequestError("body", f"a bundle of {count:,} blocks", allowed)
        self._num_announced = count
        del self._rest[:num_bytes]

    def _take(self, entry: memoryview) -> None:
        block_size, where = self._limits.meta["block_size"], f"a bundle whose block {self.num_blocks}"
        head = record_bytes(block_size)
        record, data = read_record(bytes(entry[:head]), self.num_blocks, block_size), entry[head:]
        if record is None or crc32(data) != record.checksum:
            raise _refused(f"{where} is damaged")
        block = record.block
        if block.parent not in self._serials or block.group >= len(self._limits.meta["identity"]["kv"]["groups"]):
            raise _refused(f"{where} has no parent before it")
        this = block.serial, block.parent, block.tokens
        if block.serial < self._last[0] or (block.serial == self._last[0] and this != self._last):
            raise _refused(f"{where} has the number of another block")
        self._last = this
        tokens = array("i", block.tokens)
        if max(tokens) >= self._limits.vocab_size:  # those below 0 are names of tokens in images
            raise _refused(f"{where} has a token that the model does not have")
        if block.scope is not None and replace(block.scope, adapter="") != CacheScope():
            allowed = "one of POST /cache/export: stop the engine and import this file with quire cache import"
            raise InvalidRequestError("body", f"{where} belongs to a tenant", allowed)
        self._serials.add(block.serial)
        position = self.num_blocks * len(entry)
        while entry:
            count = os.pwrite(self.spool.descriptor, entry, position)
            entry, position = entry[count:], position + count
        self.num_blocks += 1

    def finish(self) -> None:
        """Raise `InvalidRequestError` unless the bundle is complete. Does not mutate."""
        if self._num_announced is None or self._rest or self.num_blocks < self._num_announced:
            raise _refused(f"a bundle that ends within block {self.num_blocks}")

    def blocks(self, first: int, end: int, scope: CacheScope) -> tuple[KeptBlock, ...]:
        """Return some blocks, for requests of a scope; the `slot` of each is its place. Does not mutate."""
        block_size, found = self._limits.meta["block_size"], []
        for place in range(first, min(end, self.num_blocks)):
            data = os.pread(self.spool.descriptor, record_bytes(block_size), place * self._limits.entry_bytes)
            record = read_record(data, place, block_size)
            if record is None:
                raise OSError(f"block {place} of {self.spool.path} was changed")
            block = record.block
            own = None if block.scope is None else replace(scope, adapter=block.scope.adapter)
            found.append(replace(block, scope=own))
        return tuple(found)


def _refused(found: str) -> InvalidRequestError:
    return InvalidRequestError("body", found, WHOLE)


def read_spooled(store: BlockStore, block_bytes: int) -> bytes:
    """Return the bytes of a block in a spool; raises `DamagedBlockError` if they are no longer there."""
    block_size = len(store.kept.tokens) // TOKEN_BYTES
    head = record_bytes(block_size)
    try:
        descriptor = os.open(store.bundle, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            entry = os.pread(descriptor, head + block_bytes, store.block * (head + block_bytes))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamagedBlockError(str(error)) from error
    record, data = read_record(entry[:head], store.block, block_size), entry[head:]
    if record is None or not _is_same(record, store.kept) or crc32(data) != record.checksum:
        raise DamagedBlockError(f"block {store.block} of {store.bundle} has changed since it was checked")
    return data


def _is_same(record: FoundRecord, kept: KeptBlock) -> bool:
    return (record.block.tokens, record.block.group) == (kept.tokens, kept.group)
