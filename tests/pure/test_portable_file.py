"""quire cache export and import: what comes in is what was there, or nothing, whatever the file holds."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path

import pytest

from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.folder import StoreFolder
from quire.compute.worker.store.identity import fingerprint
from quire.compute.worker.store.portable import Taken, export_blocks, import_blocks, opened_file
from quire.compute.worker.store.record import write_record
from quire.compute.worker.store.slot_file import SlotFile, StoreForm
from quire.core.errors import InvalidConfigError
from quire.core.kept_block import TOKEN_BYTES, KeptBlock, record_bytes
from quire.core.request import CacheScope

BLOCK_SIZE = 4
BLOCK_BYTES = 60
ENTRY_BYTES = record_bytes(BLOCK_SIZE) + BLOCK_BYTES
IDENTITY = {"model": "m", "kv": {"groups": [{}, {}]}}
NAME = fingerprint(IDENTITY)
BlockName = tuple[tuple[str, ...], int]  # the tokens from the root, with the scope first; the group


def opened(parent: Path, num_slots: int = 64) -> SlotFile:
    """Open the store in `parent`."""
    form = StoreForm(IDENTITY, BLOCK_SIZE, BLOCK_BYTES, "guide")
    return SlotFile(StoreFolder.open(parent, NAME), form, num_slots=num_slots)


def fill(parent: Path, seed: int, num_entries: int = 12) -> None:
    """Write a random tree of entries, most of them in both groups."""
    draw = random.Random(seed)
    store, slots, serials = opened(parent), iter(draw.sample(range(64), 64)), [0]
    for serial in sorted(draw.sample(range(1, 1000), num_entries)):
        parent_serial = draw.choice(serials)
        scope = None if parent_serial else CacheScope(draw.choice(["", "ada"]), f"{serial}")
        tokens = draw.randbytes(TOKEN_BYTES * BLOCK_SIZE)
        for group in range(draw.choice([1, 2, 2])):
            block = KeptBlock(next(slots), serial, parent_serial, group, tokens, scope)
            store.write(block, memoryview(draw.randbytes(BLOCK_BYTES)))
        serials.append(serial)
    store.close()


def content(parent: Path) -> dict[BlockName, bytes]:
    """Return the bytes of each block, by everything that identifies it; serials and slots do not."""
    store, found = opened(parent), dict[BlockName, bytes]()
    paths: dict[int, tuple[str, ...]] = {0: ()}
    for block in store.kept:
        scope = () if block.scope is None else (repr(block.scope),)
        paths[block.serial] = (*paths[block.parent], *scope, block.tokens.hex())
        buffer = bytearray(BLOCK_BYTES)
        store.read(block.slot, memoryview(buffer))
        found[paths[block.serial], block.group] = bytes(buffer)
    assert len(found) == len(store.kept), "no block is there twice"
    store.close()
    return found


def export(parent: Path, file: Path, tenant: str | None = None) -> int:
    """Export the store of `parent`."""
    store = opened(parent)
    try:
        return export_blocks(store, meta_of(parent / NAME), file, tenant)
    finally:
        store.close()


def take(file: Path, parent: Path, num_slots: int = 64) -> Taken:
    """Import a file into the store of `parent`, which is made where it is missing."""
    store = opened(parent)
    try:
        with opened_file(file) as source:
            assert source.store_name == NAME
            return import_blocks(source, store, meta_of(parent / NAME), num_slots)
    finally:
        store.close()


@pytest.mark.parametrize("seed", range(20))
def test_an_empty_store_gets_the_same_entries_and_bytes(tmp_path: Path, seed: int) -> None:
    fill(tmp_path / "from", seed)
    there = content(tmp_path / "from")
    assert export(tmp_path / "from", tmp_path / "file") == len(there)
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0
    assert take(tmp_path / "file", tmp_path / "to") == Taken(len(there), 0, 0, 0)
    assert content(tmp_path / "to") == there
    assert take(tmp_path / "file", tmp_path / "to") == Taken(0, len(there), 0, 0), "nothing comes in twice"


@pytest.mark.parametrize("seed", range(10))
def test_a_store_keeps_its_own_blocks(tmp_path: Path, seed: int) -> None:
    """Some entries are in both; their bytes differ here, as those of one fingerprint never should."""
    fill(tmp_path / "from", seed)
    fill(tmp_path / "to", seed + 100)
    export(tmp_path / "from", tmp_path / "file")
    take(tmp_path / "file", tmp_path / "to")
    both = content(tmp_path / "to")
    store = opened(tmp_path / "to")
    block = store.kept[0]
    store.write(block, memoryview(bytes(BLOCK_BYTES)))
    store.close()
    changed = content(tmp_path / "to")
    assert changed != both and changed.keys() == both.keys()
    assert take(tmp_path / "file", tmp_path / "to").added == 0
    assert content(tmp_path / "to") == changed


@pytest.mark.parametrize("num_slots", [0, 1, 5, 11])
def test_leaves_are_left_out_where_room_is_short(tmp_path: Path, num_slots: int) -> None:
    fill(tmp_path / "from", 1)
    there = content(tmp_path / "from")
    export(tmp_path / "from", tmp_path / "file")
    assert take(tmp_path / "file", tmp_path / "to", num_slots) == Taken(num_slots, 0, 0, len(there) - num_slots)
    found = content(tmp_path / "to")
    assert found.items() <= there.items() and len(found) == num_slots
    store = opened(tmp_path / "to")
    assert all(block.slot < num_slots for block in store.kept)
    store.close()


def test_blocks_of_one_tenant(tmp_path: Path) -> None:
    fill(tmp_path / "from", 4)
    count = export(tmp_path / "from", tmp_path / "file", "ada")
    take(tmp_path / "file", tmp_path / "to")
    expected = {path: data for path, data in content(tmp_path / "from").items() if "tenant='ada'" in path[0][0]}
    assert content(tmp_path / "to") == expected and count == len(expected) > 0


def test_a_file_cut_at_every_byte_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "from", 4, num_entries=2)
    export(tmp_path / "from", tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(InvalidConfigError, match="FILE"), opened_file(tmp_path / "cut"):
            pass
    (tmp_path / "cut").write_bytes(whole + b"\0")
    with pytest.raises(InvalidConfigError, match="FILE"), opened_file(tmp_path / "cut"):
        pass


def test_bits_flipped_anywhere_never_give_a_wrong_entry(tmp_path: Path) -> None:
    """Every second byte or so, each place of a bit: 17 and 8 have no common divisor."""
    fill(tmp_path / "from", 5, num_entries=2)
    there = content(tmp_path / "from")
    count = export(tmp_path / "from", tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    head = len(whole) - count * ENTRY_BYTES
    for bit in range(0, 8 * len(whole), 17):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "damaged").write_bytes(damaged)
        if bit // 8 < head:
            with pytest.raises(InvalidConfigError, match="FILE"), opened_file(tmp_path / "damaged"):
                pass
            continue
        store = opened(tmp_path / "to")
        for block in store.kept:
            store.void(block.slot)
        store.close()
        assert take(tmp_path / "damaged", tmp_path / "to").damaged > 0
        found = content(tmp_path / "to")
        assert found.items() < there.items()


def forged(meta: dict[str, object], blocks: list[KeptBlock], file: Path) -> Path:
    """Write a file with checksums that are right and anything in it."""
    text = json.dumps(meta).encode()
    head = struct.pack("<8sIQ", b"quireKV1", len(text), len(blocks)) + text
    data = bytes(BLOCK_BYTES)
    entries = [write_record(each, zlib.crc32(data), BLOCK_SIZE) + data for each in blocks]
    file.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + b"".join(entries))
    return file


def test_forged_records(tmp_path: Path) -> None:
    fill(tmp_path / "from", 6)
    meta, scope = meta_of(tmp_path / "from" / NAME), CacheScope()

    def block(serial: int, parent: int, group: int = 0, fill: int = 0) -> KeptBlock:
        return KeptBlock(0, serial, parent, group, bytes([fill]) * 16, None if parent else scope)

    last = (1 << 64) - 1
    for blocks, expected in (
        ([block(9, 8)], Taken(0, 0, 1, 0)),  # no parent
        ([block(9, 8), block(8, 0)], Taken(1, 0, 1, 0)),  # a parent that comes later
        ([block(9, 0), block(9, 0, fill=1)], Taken(1, 0, 1, 0)),  # two entries of one serial
        ([block(9, 0), block(9, 0)], Taken(1, 1, 0, 0)),
        ([block(8, 0), block(9, 0)], Taken(1, 1, 0, 0)),  # one entry of two serials
        ([block(9, 0, group=2)], Taken(0, 0, 1, 0)),  # the memory has two groups
        ([block(last - 1, 0), block(last, last - 1)], Taken(2, 0, 0, 0)),
    ):
        store = opened(tmp_path / "to")
        for each in store.kept:
            store.void(each.slot)
        store.close()
        assert take(forged(meta, blocks, tmp_path / "forged"), tmp_path / "to") == expected
        content(tmp_path / "to")
        store = opened(tmp_path / "to")
        assert store.last_serial <= 2, "serials are ours, and small"
        store.close()


@pytest.mark.parametrize(
    "change",
    [{"block_size": 0}, {"block_size": -4}, {"block_size": True}, {"block_size": 1 << 80}, {"block_bytes": "60"},
     {"identity": []}, {"identity": None}, {"block_bytes": 1.5}],
)  # fmt: skip
def test_forged_beginnings_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    fill(tmp_path / "from", 7)
    meta = meta_of(tmp_path / "from" / NAME) | change
    block = KeptBlock(0, 1, 0, 0, bytes(16), CacheScope())
    with pytest.raises(InvalidConfigError, match="FILE"), opened_file(forged(meta, [block], tmp_path / "forged")):
        pass


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "from", 8)
    meta = meta_of(tmp_path / "from" / NAME)
    with pytest.raises(InvalidConfigError, match="of the same form"):
        take(forged(meta | {"store": "another"}, [], tmp_path / "forged"), tmp_path / "to")


def test_no_file_is_overwritten_and_damaged_blocks_stay_behind(tmp_path: Path) -> None:
    fill(tmp_path / "from", 9)
    there = content(tmp_path / "from")
    store = opened(tmp_path / "from")
    first = store.kept[0]
    store.close()
    path = tmp_path / "from" / NAME / "blocks.bin"
    data = bytearray(path.read_bytes())
    data[first.slot * 4096] ^= 1
    path.write_bytes(data)
    count = export(tmp_path / "from", tmp_path / "file")
    assert count < len(there)
    take(tmp_path / "file", tmp_path / "to")
    found = content(tmp_path / "to")
    assert found.items() < there.items() and len(found) == count
    with pytest.raises(InvalidConfigError, match="does not exist yet"):
        export(tmp_path / "from", tmp_path / "file")
