"""A portable file: the blocks of a store, for a store of the same fingerprint on another machine.

    magic │ length of the meta │ number of blocks │ meta: the store's meta.json │ crc up to here
    for each block, parents first:  its record (record.py) │ its bytes

The beginning is written last, so an incomplete file is refused. All sizes follow from the meta, which must equal that
of the store: the file cannot contradict the store. Blocks get new serials and slots; the store's own blocks stay
unchanged. Each block has its checksums, so a damaged block is left out, together with its descendants. The checksums
detect accidental damage; an attacker who writes such a file can put wrong KV into it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from quire.compute.worker.store.checksum import crc32
from quire.compute.worker.store.closed import tenants_of
from quire.compute.worker.store.identity import fingerprint
from quire.compute.worker.store.record import FoundRecord, read_record, write_record
from quire.compute.worker.store.slot_file import MAX_META_BYTES, DamagedBlockError, FullStoreError, SlotFile
from quire.core.errors import InvalidConfigError
from quire.core.kept_block import KeptBlock, record_bytes
from quire.core.model_files import open_model_file
from quire.core.request import CacheScope

MAGIC: Final = b"quireKV1"
FIELD: Final = "FILE"
_HEAD: Final = struct.Struct("<8sIQ")
_CHECKSUM: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size
MAX_BEGINNING_BYTES: Final = HEAD_BYTES + MAX_META_BYTES + _CHECKSUM.size
_Content = tuple[int, bytes, CacheScope | None]  # the identity of an entry: parent, tokens, scope


class Taken(NamedTuple):
    """The counts of a file's blocks: stored, already present, damaged or without a parent, without room."""

    added: int
    known: int
    damaged: int
    left_out: int


@dataclass(frozen=True, slots=True)
class PortableFile:
    """An open file with a valid beginning."""

    path: Path
    file: BinaryIO
    meta: Mapping[str, Any]
    num_blocks: int

    @property
    def store_name(self) -> str:
        """The fingerprint: the name of the stores that can take these blocks."""
        return fingerprint(self.meta["identity"])


def export_blocks(store: SlotFile, meta: Mapping[str, Any], path: Path, tenant: str | None) -> int:
    """Write the blocks of a tenant, or all, to a new file; return their number. Does not mutate the store.

    Leaves out damaged blocks and their descendants. Raises `InvalidConfigError` if the file exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError as error:
        raise InvalidConfigError(FIELD, str(path), "a file that does not exist yet") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(len(beginning_bytes(meta, 0))))
            count = _write_blocks(store, file, meta["block_size"], tenant)
            file.seek(0)
            file.write(beginning_bytes(meta, count))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return count


def beginning_bytes(meta: Mapping[str, Any], count: int) -> bytes:
    """Return the beginning of a file with this many blocks."""
    text = json.dumps(meta).encode()
    head = _HEAD.pack(MAGIC, len(text), count) + text
    return head + _CHECKSUM.pack(crc32(head))


def _write_blocks(store: SlotFile, file: BinaryIO, block_size: int, tenant: str | None) -> int:
    owners, buffer = tenants_of(store.kept), memoryview(bytearray(store.block_bytes))
    written, count = {0}, 0
    for block in store.kept:
        if block.parent not in written or tenant not in (None, owners[block.serial]):
            continue
        try:
            store.read(block.slot, buffer)
        except DamagedBlockError:
            continue
        file.write(write_record(block, crc32(buffer), block_size))
        file.write(buffer)
        written.add(block.serial)
        count += 1
    return count


@contextmanager
def opened_file(path: Path) -> Iterator[PortableFile]:
    """Return a context with the open file; raises `InvalidConfigError` unless the file is complete and well-formed."""
    allowed = "a complete file from quire cache export; copy or export it again"
    with open_model_file(path) as file:
        found = read_beginning(file.read)
        if found is None:
            raise InvalidConfigError(FIELD, str(path), allowed)
        meta, num_blocks = found
        size = file.tell() + num_blocks * (record_bytes(meta["block_size"]) + meta["block_bytes"])
        if os.fstat(file.fileno()).st_size != size:
            raise InvalidConfigError(FIELD, str(path), allowed)
        yield PortableFile(path, file, meta, num_blocks)


def read_beginning(read: Callable[[int], bytes]) -> tuple[dict[str, Any], int] | None:
    """Return the meta of a file and the number of its blocks; None if the beginning is not valid. Pure."""
    head = read(HEAD_BYTES)
    num_bytes = beginning_size(head)
    if num_bytes is None:
        return None
    text, checksum = read(num_bytes - HEAD_BYTES - _CHECKSUM.size), read(_CHECKSUM.size)
    if checksum != _CHECKSUM.pack(crc32(head + text)):
        return None
    try:
        meta = json.loads(text)
        sizes = [meta["block_size"], meta["block_bytes"]]
        json.dumps(meta["identity"])  # no deeper than what can be named
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_sound = isinstance(meta["identity"], dict) and all(type(size) is int and size > 0 for size in sizes)
    return (meta, _HEAD.unpack(head)[2]) if is_sound else None


def beginning_size(head: bytes) -> int | None:
    """Return the length of a beginning, from its first `HEAD_BYTES`; None if it is not valid. Pure."""
    if len(head) < HEAD_BYTES or not head.startswith(MAGIC):
        return None
    length = _HEAD.unpack(head)[1]
    return HEAD_BYTES + length + _CHECKSUM.size if length <= MAX_META_BYTES else None


def import_blocks(source: PortableFile, store: SlotFile, meta: Mapping[str, Any], num_slots: int) -> Taken:
    """Put the blocks of a file into free slots below `num_slots`, parents first. Mutates the store.

    `meta` is the store's. Raises `InvalidConfigError` unless the file is for this store, and `OSError`.
    """
    if form_of(source.meta) != form_of(meta):
        raise InvalidConfigError(FIELD, str(source.path), f"a file of the store {source.store_name}, of the same form")
    intake, num_groups = _Intake(store, num_slots), len(meta["identity"]["kv"]["groups"])
    counts = dict.fromkeys(Taken._fields, 0)
    for _ in range(source.num_blocks):
        record = read_record(source.file.read(record_bytes(meta["block_size"])), 0, meta["block_size"])
        data = memoryview(source.file.read(store.block_bytes))
        if record is None or record.block.group >= num_groups:  # the memory has no place for another group
            counts["damaged"] += 1
        else:
            counts[intake.take(record, data)] += 1
    return Taken(**counts)


def form_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the meta that two stores must share to exchange blocks: all except the model's name."""
    return {name: value for name, value in meta.items() if name != "model"}


class _Intake:
    """Gives the blocks of a file serials and slots of the store, and finds those that the store already holds."""

    def __init__(self, store: SlotFile, num_slots: int) -> None:
        self._store = store
        held = {block.slot for block in store.kept}
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in held]
        self._last_serial = store.last_serial
        self._serials: dict[_Content, int] = {}
        self._present: set[tuple[int, int]] = set()  # serial and group
        self._renamed = {0: 0}  # the file's serial to ours
        for block in store.kept:
            self._serials.setdefault((block.parent, block.tokens, block.scope), block.serial)
            self._present.add((block.serial, block.group))

    def take(self, record: FoundRecord, data: memoryview) -> str:
        """Store a block unless the store has it; return the field of `Taken` that counts it. Mutates."""
        block = record.block
        parent = self._renamed.get(block.parent)
        if parent is None:  # once the store is full, the missing parent may be a block that was left out
            return "damaged" if self._free else "left_out"
        if len(data) != self._store.block_bytes or crc32(data) != record.checksum:  # it may have been cut meanwhile
            return "damaged"
        content = (parent, block.tokens, block.scope)
        serial = self._serials.get(content, self._last_serial + 1)
        if self._renamed.get(block.serial, serial) != serial:
            return "damaged"  # two entries of one serial
        if (serial, block.group) in self._present:
            self._renamed[block.serial] = serial
            return "known"
        if not self._free:
            return "left_out"
        ours = KeptBlock(self._free[-1], serial, parent, block.group, block.tokens, block.scope)
        try:
            self._store.write(ours, data)
        except FullStoreError:
            self._free.clear()
            return "left_out"
        self._free.pop()
        self._last_serial = max(self._last_serial, serial)
        self._serials[content] = self._renamed[block.serial] = serial
        self._present.add((serial, block.group))
        return "added"
