"""The record of a slot: a few hundred bytes of fixed size, with their own checksum.

    magic │ crc of the bytes │ serial │ parent │ group │ scope length │ tokens │ padded scope │ crc up to here

If a record is torn, void or of another form, its slot is free. The checksum detects accidental damage. It does not
protect from an attacker: anyone who can write here can also write the model.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from quire.compute.worker.store.checksum import crc32
from quire.core.errors import StepLogError
from quire.core.kept_block import MAX_SCOPE_BYTES, TOKEN_BYTES, KeptBlock, read_scope, record_bytes, scope_bytes

MAGIC: Final = b"qkv1"
_HEAD: Final = struct.Struct("<4sIQQHH")
_CHECKSUM: Final = struct.Struct("<I")


class FoundRecord(NamedTuple):
    """A valid record, and the checksum of the bytes that it describes."""

    block: KeptBlock
    checksum: int


def write_record(block: KeptBlock, checksum: int, block_size: int) -> bytes:
    """Return the bytes of a record."""
    scope = b"" if block.scope is None else scope_bytes(block.scope)
    if len(scope) > MAX_SCOPE_BYTES or len(block.tokens) != TOKEN_BYTES * block_size:
        raise ValueError("a record has no room for this scope, or for these tokens")
    head = _HEAD.pack(MAGIC, checksum, block.serial, block.parent, block.group, len(scope))
    body = (head + block.tokens + scope).ljust(record_bytes(block_size) - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(crc32(body))


def read_record(data: bytes, slot: int, block_size: int) -> FoundRecord | None:
    """Return the record in `data`; None if it is not valid.

    >>> block = KeptBlock(5, serial=2, parent=1, group=0, tokens=bytes(64))
    >>> data = write_record(block, 77, block_size=16)
    >>> read_record(data, 5, 16) == (block, 77), read_record(data[:-1], 5, 16), read_record(bytes(512), 5, 16)
    (True, None, None)
    """
    if len(data) != record_bytes(block_size) or not data.startswith(MAGIC):
        return None
    body = data[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] != crc32(body):
        return None
    _, checksum, serial, parent, group, scope_length = _HEAD.unpack(body[: _HEAD.size])
    tokens_end = _HEAD.size + TOKEN_BYTES * block_size
    if not 0 <= parent < serial or scope_length > MAX_SCOPE_BYTES or (scope_length == 0) != (parent != 0):
        return None
    try:
        scope = read_scope(body[tokens_end : tokens_end + scope_length]) if scope_length else None
    except StepLogError:
        return None
    return FoundRecord(KeptBlock(slot, serial, parent, group, body[_HEAD.size : tokens_end], scope), checksum)
