"""ClosedStore: a store that no engine uses, opened by its own `meta.json`, to be listed, read or emptied."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.compute.worker.store.folder import StoreFolder, store_bytes, stores_in
from quire.compute.worker.store.slot_file import MAX_META_BYTES, DamagedBlockError, SlotFile, StoreForm
from quire.core.errors import InvalidConfigError
from quire.core.kept_block import MAX_SLOTS, KeptBlock
from quire.core.private_files import FIELD, make_private


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """The facts about a store, without its blocks. `num_blocks` and `tenants` are None while an engine uses it."""

    name: str
    model: str
    dtype: str
    num_bytes: int
    block_size: int
    num_blocks: int | None = None
    tenants: dict[str, int] | None = None


def summaries(parent: Path) -> list[StoreSummary]:
    """Return a summary of each store in a folder. Raises `InvalidConfigError` if the folder must not be used."""
    require_folder(parent)
    found = []
    for path in stores_in(parent):
        meta = meta_of(path)
        identity = meta["identity"]
        facts = (path.name, meta["model"], f"{identity['dtype']}, KV {identity['kv']['dtype']}", store_bytes(path))
        with opened(path) as store:
            if store is None:
                found.append(StoreSummary(*facts, meta["block_size"]))
            else:
                tenants = Counter(tenants_of(store.kept).values())
                found.append(StoreSummary(*facts, meta["block_size"], len(store.kept), dict(tenants)))
    return found


@contextmanager
def opened(path: Path) -> Iterator[SlotFile | None]:
    """Return a context with the open store, or with None if an engine uses it."""
    folder = StoreFolder.existing(path)
    if folder is None:
        yield None
        return
    meta = meta_of(path)
    form = StoreForm(meta["identity"], meta["block_size"], meta["block_bytes"], meta["model"])
    store = SlotFile(folder, form, num_slots=MAX_SLOTS)
    try:
        yield store
    finally:
        store.close()


def damaged(store: SlotFile) -> list[KeptBlock]:
    """Return the blocks whose bytes are not as written. Reads the entire store; does not mutate."""
    buffer, found = memoryview(bytearray(store.block_bytes)), []
    for block in store.kept:
        try:
            store.read(block.slot, buffer)
        except (DamagedBlockError, OSError):
            found.append(block)
    return found


def forget(store: SlotFile, tenant: str | None) -> int:
    """Erase the blocks of a tenant, or all, and what earlier blocks have left; return their number. Mutates."""
    owners = tenants_of(store.kept)
    gone = [block for block in store.kept if tenant is None or owners[block.serial] == tenant]
    for block in gone:
        store.void(block.slot)
    store.erase_free()
    return len(gone)


def tenants_of(kept: list[KeptBlock]) -> dict[int, str]:
    """Return the tenant of each serial: the tenant of its path's first block. Pure."""
    owners: dict[int, str] = {}
    for block in kept:
        owners[block.serial] = owners[block.parent] if block.scope is None else block.scope.tenant
    return owners


def require_folder(parent: Path) -> None:
    """Raise `InvalidConfigError` unless this is a folder of stores that this process may use."""
    if not parent.is_dir():
        raise InvalidConfigError(FIELD, str(parent), "the folder of a disk cache")
    make_private(parent)


def meta_of(path: Path) -> dict[str, Any]:
    """Return the content of a store's `meta.json`."""
    with open(path / "meta.json", "rb") as file:
        meta: dict[str, Any] = json.loads(file.read(MAX_META_BYTES))
    return meta
