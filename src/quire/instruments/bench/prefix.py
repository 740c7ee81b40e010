"""The time of prefix lookup and hashing per token, and of building a pool."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Callable, Sequence

from quire.core.config import MemoryConfig
from quire.core.request import Request
from quire.instruments.bench.workload import BLOCK_SIZE, SPEC, hash_prompts, random_tokens
from quire.memory.block_pool import BlockPool
from quire.memory.eviction import create_eviction_policy
from quire.memory.manager import KVCacheManager
from quire.reporting.report import Goal, Section, cell
from quire.reporting.samples import summarize

MAX_LOOKUP_NS = 200.0
MAX_POOL_S = 2.0

NUM_PROMPTS = 64
NUM_TOKENS = 4096
INDEXES = ("hash_chain", "radix_tree")
POOL_BLOCKS = 1_000_000


def measure_prefix(repeat: int, tell: Callable[[str], None]) -> Section:
    """Measure lookups that hit, miss at the last block, and miss at the first; and the hash alone."""
    prompts = _draw(random.Random(0))
    late = [_changed(prompt, len(prompt) - BLOCK_SIZE - 1) for prompt in prompts]
    early = [_changed(prompt, 0) for prompt in prompts]
    cases = {"hit": prompts, "miss at the last block": late, "miss at the first block": early}
    found: dict[str, list[float]] = {}
    for index in range(repeat):
        tell(f"prefix: run {index + 1} of {repeat}")
        for name in INDEXES:
            manager = _filled(name, prompts)
            for case, wanted in cases.items():
                found.setdefault(f"{name}: {case}", []).append(_lookup_ns(manager, wanted))
        found.setdefault("hashing alone (keyed blake2b, chained)", []).append(_ns_per_token(hash_prompts(prompts)))
    goals = [
        Goal(f"lookup, {name}, ns per token", summarize(values).median, MAX_LOOKUP_NS)
        for name, values in found.items()
        if name.endswith(": hit")
    ]
    text = (
        f"`match_prefix` of {NUM_PROMPTS} prompts of {NUM_TOKENS} tokens in turn, all cached "
        f"({NUM_PROMPTS * NUM_TOKENS // BLOCK_SIZE:,} blocks of {BLOCK_SIZE}), per token of the prompt. A miss at the "
        f"first block ends the lookup there. Median of {repeat} runs (min–max)."
    )
    rows = [(name, cell(summarize(values))) for name, values in found.items()]
    return Section("Prefix lookup", text, ("what", "ns per prompt token"), rows, {"ns_per_token": found}, goals)


def _draw(rng: random.Random) -> list[array[int]]:
    return [random_tokens(rng, NUM_TOKENS) for _ in range(NUM_PROMPTS)]


def _changed(prompt: array[int], index: int) -> array[int]:
    """Return a copy with another token at `index`."""
    copy = prompt[:]
    copy[index] ^= 1
    return copy


def _filled(index: str, prompts: Sequence[array[int]]) -> KVCacheManager:
    """Return a manager that has cached all prompts."""
    num_blocks = NUM_PROMPTS * NUM_TOKENS // BLOCK_SIZE
    manager = KVCacheManager(SPEC, MemoryConfig(num_blocks=num_blocks, prefix_index=index))
    for number, prompt in enumerate(prompts):
        request = Request(str(number), prompt)
        if not manager.allocate_slots(request, NUM_TOKENS):
            raise RuntimeError("the pool of the benchmark is too small")
        request.num_planned = request.num_computed = NUM_TOKENS
        manager.commit(request, NUM_TOKENS)
        manager.free(request)
    return manager


def _lookup_ns(manager: KVCacheManager, prompts: Sequence[array[int]]) -> float:
    requests = [Request(str(number), prompt) for number, prompt in enumerate(prompts)]
    gc.collect()
    started = time.perf_counter()
    for request in requests:
        manager.match_prefix(request)
    return _ns_per_token(time.perf_counter() - started)


def _ns_per_token(seconds: float) -> float:
    return 1e9 * seconds / (NUM_PROMPTS * NUM_TOKENS)


def measure_pool(repeat: int, tell: Callable[[str], None]) -> Section:
    """Measure the time to build a pool of a million blocks."""
    pool_s: list[float] = []
    for index in range(repeat):
        tell(f"pool: run {index + 1} of {repeat}")
        gc.collect()
        started = time.perf_counter()
        pool = BlockPool(POOL_BLOCKS, create_eviction_policy("lru"), on_evict=lambda _: None)
        pool_s.append(time.perf_counter() - started)
        del pool
    summary = summarize(pool_s)
    return Section(
        "Building a pool",
        f"`BlockPool({POOL_BLOCKS:,})`. Median of {repeat} runs (min–max).",
        ("what", "s"),
        [(f"{POOL_BLOCKS:,} blocks", cell(summary))],
        {"pool_s": pool_s},
        [Goal(f"pool of {POOL_BLOCKS:,} blocks, s", summary.median, MAX_POOL_S)],
    )
