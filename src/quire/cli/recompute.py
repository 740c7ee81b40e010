"""Recomputes blocks of a disk cache: an engine always computes the same bits, so a cache can be verified.

a store ── N blocks, with the tokens before them ──► an engine without a disk ── the bytes of its blocks ──► equal?
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.identity import fingerprint, identity_of, weights_digest
from quire.compute.worker.store.slot_file import SlotFile
from quire.compute.worker.worker import Worker
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.kept_block import KeptBlock
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import NO_BLOCK
from quire.engine.core import EngineCore
from quire.engine.factory import EngineBlueprint, plan_engine

COMPUTED_IN: Final = ("float32", "bfloat16", "float16")
"""Types of keys and values that are also types of the computation."""


class Recomputed(NamedTuple):
    """The number of recomputed blocks, and the slots of those whose bytes differ."""

    num_blocks: int
    differing: list[int]


def recompute(path: Path, store: SlotFile, count: int, model: str | None) -> Recomputed:
    """Recompute `count` blocks, evenly spread over the store, and compare their bytes. Does not mutate the store.

    `model`: the store's model; None: the model that is named in the store. Raises `InvalidConfigError` if an engine
    here would compute other bits.
    """
    meta = meta_of(path)
    blueprint = plan_engine(_config(meta, model))
    _require_same(meta["identity"], blueprint, path)
    count = min(count, len(store.kept))
    chosen = [store.kept[len(store.kept) * index // count] for index in range(count)]
    texts = _texts(store.kept)
    workers: list[Worker] = []

    def make(parts: Any) -> Worker:
        workers.append(Worker(parts))
        return workers[0]

    core = blueprint.build(SystemClock(), make_executor=make)
    try:
        differing = [
            block.slot for block in chosen if not _is_same(core, workers[0], store, block, texts[block.serial])
        ]
    finally:
        core.close()
    return Recomputed(len(chosen), differing)


def _config(meta: Mapping[str, Any], model: str | None) -> EngineConfig:
    identity = meta["identity"]
    kv_dtype = identity["kv"]["dtype"]
    return EngineConfig(
        model=model or meta["model"],
        backend=identity["backend"],
        dtype=identity["dtype"],
        weights=identity["weight_type"],
        kv_dtype="auto" if kv_dtype in COMPUTED_IN else kv_dtype,
        block_size=meta["block_size"],
        skip_tokenizer_init=True,
    )


def _require_same(stored: Mapping[str, object], blueprint: EngineBlueprint, path: Path) -> None:
    own = identity_of(blueprint.model, blueprint.backend.facts, lambda paths: weights_digest(paths, path.parent))
    if fingerprint(own) != fingerprint(stored):
        names = {
            name for name in (*stored, *own) if fingerprint({"": stored.get(name)}) != fingerprint({"": own.get(name)})
        }
        allowed = f"an engine with the bits of the store {path.name}; different: {', '.join(sorted(names))}"
        raise InvalidConfigError("--model", blueprint.config.model, allowed)


def _texts(kept: list[KeptBlock]) -> dict[int, bytes]:
    """Return the tokens up to the end of each block, by its serial. Parents precede their children. Pure."""
    texts = {0: b""}
    for block in kept:
        texts[block.serial] = texts[block.parent] + block.tokens
    return texts


def _is_same(core: EngineCore, worker: Worker, store: SlotFile, block: KeptBlock, text: bytes) -> bool:
    tokens = array("i")
    tokens.frombytes(text)
    core.add_request(Request(str(block.slot), tokens, SamplingParams(max_tokens=1)))
    core.run()
    entries = core.scheduler.memory.match_prefix(Request("", [*tokens, 0])).entries
    if len(entries) * store.block_size < len(tokens) or entries[-1].block_ids[block.group] == NO_BLOCK:
        raise ExecutionError(f"block {block.slot} is not in the memory of the engine after it was computed")
    again, kept = bytearray(store.block_bytes), bytearray(store.block_bytes)
    worker.cache.read_block(entries[-1].block_ids[block.group], block.group, memoryview(again))()
    store.read(block.slot, memoryview(kept))
    return again == kept
