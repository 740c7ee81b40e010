"""open_store: the store for an engine, in the folder that the operator names."""

from __future__ import annotations

from pathlib import Path

from quire.compute.backend import BackendFacts
from quire.compute.models import ModelDescription
from quire.compute.worker.store.folder import StoreFolder, is_store, remove_store, store_bytes, stores_in
from quire.compute.worker.store.identity import fingerprint, identity_of, weights_digest
from quire.compute.worker.store.slot_file import SlotFile, StoreForm
from quire.compute.worker.store.spool import remove_abandoned
from quire.core.errors import InvalidConfigError
from quire.core.private_files import FIELD, make_private


def open_store(parent: Path, model: ModelDescription, facts: BackendFacts, *, num_slots: int, budget: int) -> SlotFile:
    """Open the store for an engine; raises `InvalidConfigError` if the folder cannot be used.

    All stores of the folder together stay within the budget: stores that no engine uses are removed, least recently
    used first.
    """
    make_private(parent)
    remove_abandoned(parent)
    identity = identity_of(model, facts, lambda paths: weights_digest(paths, parent))
    name = fingerprint(identity)
    folder = StoreFolder.open(parent, name)
    try:
        spec = facts.kv_spec
        form = StoreForm(identity, spec.block_size, spec.bytes_per_block, facts.config.model)
        store = SlotFile(folder, form, num_slots=num_slots)
    except OSError as error:
        raise InvalidConfigError(FIELD, str(parent), f"a folder that can be used: {error.strerror}") from error
    _make_room(parent, folder.path, budget)
    return store


def _make_room(parent: Path, own: Path, budget: int) -> None:
    """Remove unused stores of other engines until ours fits into the budget."""
    others = [path for path in stores_in(parent) if path != own]
    taken = sum(map(store_bytes, others))
    for path in others:
        if taken + store_bytes(own) <= budget:
            break
        size = store_bytes(path)
        try:
            is_gone = remove_store(path)
        except InvalidConfigError:
            is_gone = not is_store(path)  # another engine is removing it
        if is_gone:
            taken -= size
