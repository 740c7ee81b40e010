"""KeptBlock: the identity of the block in a slot of the disk cache, used by both planes and the file.

A block on disk is identified like a block in memory: by its tokens and everything before them. A record names its
*parent* by serial. Serials only grow, so a parent is always older than its children. A record whose parent is gone is
voided when the store is opened, before its parent's serial can be used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.core.errors import QuireError
from quire.core.request import CacheScope
from quire.core.wire import WireReader, WireWriter

MAX_SCOPE_BYTES: Final = 384
"""Room for a scope in a record. The server's salts are digests, so only programs that use `LLM` can exceed it."""

RECORD_HEAD_BYTES: Final = 32
TOKEN_BYTES: Final = 4
PAGE: Final = 4096
MAX_SLOTS: Final = 1 << 19
"""The most slots: each takes about half a kilobyte of index in memory."""


def slot_bytes(block_bytes: int) -> int:
    """Return the bytes of a slot for blocks of this many bytes: whole pages.

    >>> slot_bytes(100), slot_bytes(4096)
    (4096, 4096)
    """
    return -(-block_bytes // PAGE) * PAGE


def record_bytes(block_size: int) -> int:
    """Return the bytes of the record of a slot, for blocks of `block_size` tokens.

    >>> record_bytes(16)
    512
    """
    return -(-(RECORD_HEAD_BYTES + TOKEN_BYTES * block_size + MAX_SCOPE_BYTES) // 64) * 64


def num_slots_within(budget: int, block_bytes: int, block_size: int) -> int:
    """Return how many slots, with their records, fit into a budget of bytes. Pure.

    >>> num_slots_within(1 << 20, 100, 16)
    227
    """
    return min(budget // (slot_bytes(block_bytes) + record_bytes(block_size)), MAX_SLOTS)


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """One block of one KV group in a slot of the file.

    `parent` is the serial of the previous block; 0: this is the first block, and `scope` says which requests may hit
    it.
    """

    slot: int
    serial: int
    parent: int
    group: int
    tokens: bytes
    scope: CacheScope | None = None


@dataclass(frozen=True, slots=True)
class CacheJob:
    """Progress of an operator's cache job: storing a prompt, or importing blocks.

    `num_pending` blocks are still to be written. For a prompt: how many tokens are in memory and on disk, and in which
    slots. For a bundle: how many blocks were seen, were on disk already, and found no room.
    """

    num_pending: int = 0
    num_cached_tokens: int = 0
    num_stored_tokens: int = 0
    slots: tuple[int, ...] = ()
    num_seen: int = 0
    num_known: int = 0
    num_left_out: int = 0


class FetchError(QuireError):
    """A prefix could not be fetched from another engine. `reason`: the name under which the failure is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def may_be_kept(scope: CacheScope) -> bool:
    """Return whether blocks of a scope may be written to a disk: `persist` is set, and the scope fits into a record."""
    return scope.persist and len(scope_bytes(scope)) <= MAX_SCOPE_BYTES


def scope_bytes(scope: CacheScope) -> bytes:
    """Return the binary form of a scope; equal scopes give equal bytes.

    >>> scope = CacheScope("ada", "salt", ("key",))
    >>> read_scope(scope_bytes(scope)) == scope
    True
    """
    writer = WireWriter()
    write_scope(writer, scope)
    return writer.to_bytes()


def write_scope(writer: WireWriter, scope: CacheScope) -> None:
    """Write the binary form of a scope. Does not mutate it."""
    writer.text(scope.tenant)
    writer.text(scope.salt)
    writer.integer(len(scope.extra_keys))
    for key in scope.extra_keys:
        writer.text(key)
    writer.integer(scope.persist)
    writer.text(scope.adapter)


def next_scope(reader: WireReader) -> CacheScope:
    """Read the next scope; raises `StepLogError` if it is torn."""
    tenant, salt = reader.text(), reader.text()
    extra_keys = tuple(reader.text() for _ in range(reader.integer()))
    return CacheScope(tenant, salt, extra_keys, bool(reader.integer()), reader.text())


def read_scope(data: bytes) -> CacheScope:
    """Read the binary form of a scope back; raises `StepLogError` if bytes are missing or left over."""
    reader = WireReader(data)
    scope = next_scope(reader)
    reader.finish()
    return scope
