"""SlotFile: whatever happens to its files, a block is read as it was written, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.store.closed import forget
from quire.compute.worker.store.file_calls import FileCalls
from quire.compute.worker.store.folder import StoreFolder, remove_store, store_bytes, stores_in
from quire.compute.worker.store.opened import _make_room
from quire.compute.worker.store.record import read_record, write_record
from quire.compute.worker.store.running import RunningStore
from quire.compute.worker.store.slot_file import DamagedBlockError, FullStoreError, SlotFile, StoreForm
from quire.core.config import MemoryConfig
from quire.core.errors import InvalidConfigError
from quire.core.kept_block import KeptBlock, record_bytes
from quire.core.kv_spec import RECURRENT_WINDOW, KVCacheSpec, KVGroup, KVHeads
from quire.core.private_files import make_private
from quire.core.request import CacheScope, Request
from quire.memory.manager import KVCacheManager
from quire.serve.tenant_secret import kept_secret

BLOCK_SIZE = 4
BLOCK_BYTES = 100
SCOPE = CacheScope("ada", "salt")
STATES = (KVGroup((0, 1)), KVGroup((2,), RECURRENT_WINDOW, recurrent=True))
WIDE, NARROW = (None, KVHeads(1, 48)), [(9, None)] * 4


def opened(parent: Path, *, num_slots: int = 8, name: str = "f", calls: FileCalls | None = None) -> SlotFile:
    """Open a store in `parent`."""
    folder = StoreFolder.open(parent, name)
    return SlotFile(folder, StoreForm({"model": "m"}, BLOCK_SIZE, BLOCK_BYTES), num_slots=num_slots, calls=calls)


def block(slot: int, serial: int, parent: int = 0, group: int = 0) -> KeptBlock:
    """Return a block with tokens of its own."""
    tokens = bytes([serial % 256]) * 4 * BLOCK_SIZE
    return KeptBlock(slot, serial, parent, group, tokens, None if parent else SCOPE)


def content(serial: int, version: int = 0) -> memoryview:
    """Return the bytes of a block: those of no other serial or version."""
    return memoryview(random.Random(f"{serial} {version}").randbytes(BLOCK_BYTES))


def read(store: SlotFile, slot: int) -> bytes:
    """Return the bytes of a slot."""
    buffer = bytearray(BLOCK_BYTES)
    store.read(slot, memoryview(buffer))
    return bytes(buffer)


def chain(store: SlotFile, count: int = 4) -> list[KeptBlock]:
    """Write blocks, each the parent of the next."""
    blocks = [block(slot, slot + 1, slot) for slot in range(count)]
    for each in blocks:
        store.write(each, content(each.serial))
    return blocks


def test_blocks_are_there_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path / "cache")
    blocks = chain(store)
    store.close()
    again = opened(tmp_path / "cache")
    assert again.kept == blocks
    assert again.last_serial == 4
    for each in blocks:
        assert read(again, each.slot) == content(each.serial)
    again.close()


def test_files_are_private(tmp_path: Path) -> None:
    chain(opened(tmp_path / "cache"))
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_block_whose_parent_is_gone_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chain(store)
    store.void(1)
    store.close()
    again = opened(tmp_path)
    assert [each.serial for each in again.kept] == [1]
    assert again.last_serial == 4
    with pytest.raises(DamagedBlockError):
        read(again, 2)


def test_an_orphan_never_finds_another_parent(tmp_path: Path) -> None:
    """The serials of lost blocks are used again: a record that names one must be gone by then."""
    spec = KVCacheSpec(BLOCK_SIZE, 1, 8, "float32", (KVGroup((0,)),))
    memory = MemoryConfig(num_blocks=8, num_disk_slots=8, disk_write="always")
    store = opened(tmp_path)
    chain(store, 2)
    store.void(0)
    store.close()
    store = opened(tmp_path)
    manager = KVCacheManager(spec, memory, kept=store.kept)
    request = Request("r", [7] * 5)
    assert manager.allocate_slots(request, 5)
    request.num_computed = request.num_planned = 4
    manager.commit(request, 4)
    (stored,) = manager.take_changes().transfers.stores
    assert stored.kept.serial == 1
    store.write(stored.kept, content(1))
    store.close()
    again = opened(tmp_path)
    assert again.kept == [stored.kept], "the second block is not the one after [7] * 4"
    again.close()


@pytest.mark.parametrize("name", ["slots.idx", "blocks.bin", "meta.json"])
def test_files_cut_at_every_byte(tmp_path: Path, name: str) -> None:
    store = opened(tmp_path)
    blocks = chain(store, 2)
    store.close()
    path = tmp_path / "f" / name
    most = min(path.stat().st_size, 4096 + BLOCK_BYTES + 3)  # what is beyond the second block, nobody reads
    for size in reversed(range(most)):
        os.truncate(path, size)
        again = opened(tmp_path)
        for each in again.kept:
            assert each in blocks
            try:
                assert read(again, each.slot) == content(each.serial)
            except DamagedBlockError:
                assert name == "blocks.bin"
        if name == "meta.json":
            assert not again.kept, "the store was emptied"
            chain(again, 2)
        again.close()


def test_every_bit_of_an_entry_flipped() -> None:
    data = write_record(block(3, 2), 77, BLOCK_SIZE)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_record(bytes(damaged), 3, BLOCK_SIZE) is None


def test_every_bit_of_the_bytes_flipped(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chain(store, 2)
    path = tmp_path / "f" / "blocks.bin"
    whole = path.read_bytes()
    for bit in range(8 * BLOCK_BYTES):
        byte = whole[4096 + bit // 8]
        with open(path, "r+b", buffering=0) as file:
            file.seek(4096 + bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))
        assert read(store, 0) == content(1)
        with pytest.raises(DamagedBlockError):
            read(store, 1)
        with open(path, "r+b", buffering=0) as file:
            file.seek(4096 + bit // 8)
            file.write(bytes([byte]))
    store.close()


class Killed(BaseException):
    """The process is killed at this point."""


class StoppingCalls(FileCalls):
    """Writes this many bytes in total, then the process is killed."""

    def __init__(self, left: int) -> None:
        self.left = left

    def write(self, descriptor: int, data: bytes | memoryview, position: int) -> None:
        super().write(descriptor, data[: self.left], position)
        self.left -= len(data)
        if self.left < 0:
            raise Killed


def test_killed_at_every_byte_of_a_write(tmp_path: Path) -> None:
    store = opened(tmp_path / "whole")
    chain(store, 2)
    store.close()
    size = 2 * record_bytes(BLOCK_SIZE) + BLOCK_BYTES
    outcomes = set()
    for left in range(0, size, 7):
        shutil.copytree(tmp_path / "whole", tmp_path / "killed", dirs_exist_ok=True)
        store = opened(tmp_path / "killed", calls=StoppingCalls(left))
        with pytest.raises(Killed):
            store.write(block(1, 3, 1), content(3))
        store.close()
        again = opened(tmp_path / "killed")
        assert again.kept[0].serial == 1
        for each in again.kept:
            assert read(again, each.slot) == content(each.serial)
        outcomes.add(tuple(each.serial for each in again.kept))
        again.close()
    assert {(1, 2), (1,)} <= outcomes <= {(1, 2), (1,), (1, 3)}


def test_writes_of_different_ages_after_a_loss_of_power(tmp_path: Path) -> None:
    """Any of the last writes may be missing: each file is of any age."""
    versions = []
    store = opened(tmp_path / "store")
    for serial in (1, 2, 3):
        store.write(block(0, serial), content(serial))
        versions.append({name: (tmp_path / "store" / "f" / name).read_bytes() for name in ("slots.idx", "blocks.bin")})
    store.close()
    for index_age in range(3):
        for bytes_age in range(3):
            (tmp_path / "store" / "f" / "slots.idx").write_bytes(versions[index_age]["slots.idx"])
            (tmp_path / "store" / "f" / "blocks.bin").write_bytes(versions[bytes_age]["blocks.bin"])
            again = opened(tmp_path / "store")
            assert [each.serial for each in again.kept] == [index_age + 1]
            if index_age == bytes_age:
                assert read(again, 0) == content(index_age + 1)
            else:
                with pytest.raises(DamagedBlockError):
                    read(again, 0)
            again.close()


class FailingCalls(FileCalls):
    """The n-th call fails with an error, or writes only a part first."""

    def __init__(self, nth: int, error: int, *, in_part: bool = False) -> None:
        self.left, self.error, self.in_part = nth, error, in_part

    def _fails(self) -> bool:
        self.left -= 1
        return self.left == 0

    def read(self, descriptor: int, buffer: memoryview, position: int) -> None:
        if self._fails():
            raise OSError(self.error, os.strerror(self.error))
        super().read(descriptor, buffer, position)

    def write(self, descriptor: int, data: bytes | memoryview, position: int) -> None:
        if self._fails():
            if self.in_part:
                super().write(descriptor, data[: len(data) // 2], position)
            raise OSError(self.error, os.strerror(self.error))
        super().write(descriptor, data, position)

    def reserve(self, descriptor: int, position: int, size: int) -> None:
        if self._fails():
            raise OSError(self.error, os.strerror(self.error))
        super().reserve(descriptor, position, size)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("in_part", [False, True])
def test_every_nth_call_fails(tmp_path: Path, error: int, in_part: bool) -> None:
    for nth in range(1, 40):
        parent = tmp_path / f"{nth}"
        store = opened(parent, calls=None)
        store.close()
        store = opened(parent, calls=FailingCalls(nth, error, in_part=in_part))
        holds: dict[int, int] = {}  # slot to serial
        for serial in range(1, 8):
            slot = serial % 3
            holds.pop(slot, None)
            try:
                store.write(block(slot, serial), content(serial))
                holds[slot] = serial
            except FullStoreError:
                assert error == errno.ENOSPC
            except OSError as raised:
                assert raised.errno == error
            for each, expected in list(holds.items()):
                try:
                    assert read(store, each) == content(expected)
                except OSError as raised:
                    assert raised.errno == error
        store.close()
        again = opened(parent)
        for kept in again.kept:
            with suppress(DamagedBlockError):
                assert read(again, kept.slot) == content(kept.serial)
        assert {kept.slot: kept.serial for kept in again.kept}.items() >= holds.items()
        again.close()


def test_a_second_engine_takes_another_folder(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    chain(first)
    assert second.kept == []
    first.close()
    third = opened(tmp_path)
    assert len(third.kept) == 4
    for store in (second, third):
        store.close()


def test_a_store_of_another_form_is_emptied(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chain(store)
    store.close()
    folder = StoreFolder.open(tmp_path, "f")
    other = SlotFile(folder, StoreForm({"model": "other"}, BLOCK_SIZE, BLOCK_BYTES), num_slots=8)
    assert other.kept == []
    other.close()


def test_a_smaller_budget_cuts_the_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chain(store)
    store.close()
    smaller = opened(tmp_path, num_slots=2)
    assert [each.serial for each in smaller.kept] == [1, 2]
    assert (tmp_path / "f" / "blocks.bin").stat().st_size == 2 * 4096
    smaller.close()


def test_stores_that_nobody_uses_are_removed(tmp_path: Path) -> None:
    used, idle = opened(tmp_path, name="used"), opened(tmp_path, name="idle")
    chain(idle)
    idle.close()
    (tmp_path / "photographs").mkdir()
    assert {path.name for path in stores_in(tmp_path)} == {"used", "idle"}
    assert store_bytes(tmp_path / "idle") > 0
    assert not remove_store(tmp_path / "used")
    assert remove_store(tmp_path / "idle")
    assert {path.name for path in tmp_path.iterdir()} == {"used", "photographs"}
    with pytest.raises(InvalidConfigError):
        remove_store(tmp_path / "photographs")
    used.close()


def test_the_store_used_longest_ago_is_the_first_to_go(tmp_path: Path) -> None:
    for age, name in enumerate(("idle", "in daily use")):
        opened(tmp_path, name=name).close()
        for path in (tmp_path / name).iterdir():
            os.utime(path, (100 - age, 100 - age))
    assert [path.name for path in stores_in(tmp_path)] == ["in daily use", "idle"]
    opened(tmp_path, name="in daily use").close()
    assert [path.name for path in stores_in(tmp_path)] == ["idle", "in daily use"]


def test_a_store_may_be_removed_while_an_engine_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).close()
    flock = fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        assert remove_store(tmp_path / "f")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    store = opened(tmp_path)
    chain(store)
    assert not remove_store(tmp_path / "f"), "the engine holds the lock of the folder"
    store.close()


def test_several_engines_may_make_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path, name="idle").close()
    (tmp_path / "half").mkdir(mode=0o700)  # another engine is removing this store
    paths = [tmp_path / name for name in ("gone", "half", "idle")]
    monkeypatch.setattr("quire.compute.worker.store.opened.stores_in", lambda parent: paths)
    _make_room(tmp_path, tmp_path / "own", -1)
    assert not (tmp_path / "idle").exists()


def test_what_is_forgotten_leaves_no_byte(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chain(store)
    store.void(1)
    store.close()
    store = opened(tmp_path)
    assert forget(store, "ada") == 1
    store.close()
    for name in ("slots.idx", "blocks.bin"):
        assert not any((tmp_path / "f" / name).read_bytes()), name


def test_a_store_without_its_blocks_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).close()
    (tmp_path / "f" / "blocks.bin").unlink()
    descriptors, open_file = [], os.open

    def noted(*arguments: Any, **options: Any) -> int:
        descriptors.append(open_file(*arguments, **options))
        return descriptors[-1]

    monkeypatch.setattr(os, "open", noted)
    with pytest.raises(FileNotFoundError):
        RunningStore(tmp_path / "f")
    (descriptor,) = descriptors
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_the_folder_may_be_deleted_under_an_engine(tmp_path: Path) -> None:
    store = opened(tmp_path / "cache")
    chain(store)
    shutil.rmtree(tmp_path / "cache")
    assert read(store, 0) == content(1)
    store.write(block(5, 9), content(9))
    store.close()
    again = opened(tmp_path / "cache")
    assert again.kept == []
    again.close()


def test_folders_and_files_that_are_not_ours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(opened(tmp_path / "cache"))
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "file", "open", "file/below", "missing/below"):
        with pytest.raises(InvalidConfigError, match="disk_cache"):
            opened(tmp_path / name)
    for name in ("blocks.bin", "slots.idx", "meta.json", "lock"):
        path = tmp_path / "other" / "f" / name
        opened(tmp_path / "other").close()
        path.rename(tmp_path / name)
        path.symlink_to(tmp_path / name)
        with pytest.raises(InvalidConfigError, match="disk_cache"):
            opened(tmp_path / "other")
        path.unlink()
        os.link(tmp_path / name, path)
        with pytest.raises(InvalidConfigError, match="without hard links"):
            opened(tmp_path / "other")
        path.unlink()
        (tmp_path / name).rename(path)
        path.chmod(0o640)
        with pytest.raises(InvalidConfigError, match="private"):
            opened(tmp_path / "other")
        path.unlink()
        os.mkfifo(path, 0o600)
        with pytest.raises(InvalidConfigError, match="plain file"):
            opened(tmp_path / "other")
        path.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InvalidConfigError, match="user"):
        make_private(tmp_path / "cache")


def test_a_secret_stays_with_the_blocks_and_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    secret = kept_secret(str(folder))
    assert len(secret) == 32
    assert kept_secret(str(folder)) == secret != kept_secret(str(tmp_path / "other"))
    assert (folder / "tenant_secret").stat().st_mode & 0o777 == 0o600
    assert kept_secret(None) != kept_secret(None)
    os.truncate(folder / "tenant_secret", 5)
    assert len(kept_secret(str(folder))) == 32
    (folder / "tenant_secret").chmod(0o644)
    with pytest.raises(InvalidConfigError, match="private"):
        kept_secret(str(folder))


@pytest.mark.parametrize(
    ("spec", "used"),
    [
        # A block of 4 tokens has 256 bytes of keys in a full layer, and half a state of 512 bytes in a recurrent one.
        (KVCacheSpec(4, 1, 16, "float32", STATES, recurrent_bytes=512), [[256] * 4, [512] * 2]),
        (KVCacheSpec(4, 1, 16, "float32", STATES, recurrent_bytes=128), [[256] * 4, [128] * 2]),
        # A place has room for one layer with a head of 48 numbers, or for three layers with a head of 16.
        (
            KVCacheSpec.from_mixed_layers([WIDE, *NARROW, WIDE], KVHeads(1, 16), block_size=4, dtype="float32"),
            [[768] * 4, [768, 768, 256, 256]],
        ),
    ],
)
def test_a_block_brings_nothing_that_requests_before_have_left_in_it(spec: KVCacheSpec, used: list[list[int]]) -> None:
    cache = CacheEngine(spec, num_blocks=2)
    cache.allocate()
    for pair in cache.places():
        for array in pair:
            array[...] = np.float32(1.5)
    row = spec.key_block_bytes // 4
    for group, sizes in enumerate(used):
        buffer = memoryview(bytearray(spec.bytes_per_block))
        cache.read_block(1, group, buffer)()
        expected = np.zeros((2 * spec.num_places, row), np.float32)
        for place, size in enumerate(sizes):
            expected[place, : size // 4] = 1.5
        assert np.array_equal(np.frombuffer(buffer, np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("latent_dim", [0, 8])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_block_comes_back_whole_and_no_other_byte_changes(latent_dim: int, has_draft: bool) -> None:
    """A group with fewer layers leaves a place unused, latents have no values, and a draft model has layers too."""
    groups = (KVGroup((0, 1)),) if has_draft else (KVGroup((0, 1)), KVGroup((2,), window=4))
    spec = KVCacheSpec(4, 1, 16, "float32", groups, latent_dim=latent_dim)
    if has_draft:
        spec = spec.with_draft(KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),)))
    cache = CacheEngine(spec, num_blocks=3)
    cache.allocate()
    arrays = [array for engine in (cache, cache.draft) if engine for pair in engine.places() for array in pair]
    for seed, array in enumerate(arrays):
        array[...] = np.random.default_rng(seed).standard_normal(array.shape)
    before = [array.copy() for array in arrays]
    for group in range(len(groups)):
        buffer = memoryview(bytearray(spec.bytes_per_block))
        cache.read_block(1, group, buffer)()
        cache.write_block(2, group, buffer)
        unused = arrays[2 * len(groups[group].layers) : 4]
        for array, old in zip(arrays, before, strict=True):
            assert (array[:2] == old[:2]).all()
            expected = old[2] if any(array is each for each in unused) else old[1]
            assert (array[2] == expected).all()
        for array, old in zip(arrays, before, strict=True):
            array[...] = old
