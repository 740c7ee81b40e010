"""KeptBlock: which block a slot of the cache on disk holds, as both planes and the file name it.

A block on disk is identified as one in memory: by its tokens and everything before them. A record names its *parent* by
serial. Serials only grow and are never used again, so a parent is always older than its children, and a record whose
parent is gone can never be attached to another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.core.request import CacheScope
from quire.core.wire import WireReader, WireWriter

MAX_SCOPE_BYTES: Final = 384
"""Room for a scope in a record. Salts of the server are digests, so longer ones come from programs that use `LLM`."""


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """One block of one KV group in a slot of the file.

    `parent` is the serial of the block before it; 0: there is none, and then `scope` says who may hit it.
    """

    slot: int
    serial: int
    parent: int
    group: int
    tokens: bytes
    scope: CacheScope | None = None


def scope_bytes(scope: CacheScope) -> bytes:
    """Return the binary form of a scope; equal scopes give equal bytes.

    >>> scope = CacheScope("ada", "salt", ("key",))
    >>> read_scope(scope_bytes(scope)) == scope
    True
    """
    writer = WireWriter()
    writer.text(scope.tenant)
    writer.text(scope.salt)
    writer.integer(len(scope.extra_keys))
    for key in scope.extra_keys:
        writer.text(key)
    return writer.to_bytes()


def read_scope(data: bytes) -> CacheScope:
    """Read the binary form of a scope back; raises `StepLogError` if it is torn."""
    reader = WireReader(data)
    tenant, salt = reader.text(), reader.text()
    scope = CacheScope(tenant, salt, tuple(reader.text() for _ in range(reader.integer())))
    reader.finish()
    return scope
