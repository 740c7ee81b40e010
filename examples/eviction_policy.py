"""A custom eviction policy: keep the blocks hit most often (LFU) instead of the most recently used (LRU).

A policy is any class with the five methods below; it holds the cached blocks and chooses the next one to evict. Here a
popular prompt returns from time to time; between its uses, more one-time prompts arrive than the memory can hold.
"""

from collections import Counter
from collections.abc import Iterator

import quire
from quire.core.clock import ManualClock
from quire.memory.block import Block
from quire.memory.eviction import EvictionPolicy
from quire.simulate.executor import SimExecutor


class KeepTheMostHit:
    """Evicts the block with the fewest hits; among equals, the one that was freed first."""

    def __init__(self) -> None:
        self.cached: dict[int, Block] = {}  # in the order in which their last holders let go of them
        self.hits: Counter[int] = Counter()  # per publication, not per block: a block's content changes

    def add(self, block: Block) -> None:
        self.cached[block.block_id] = block

    def remove(self, block: Block) -> None:
        self.hits[block.published_at] += 1
        del self.cached[block.block_id]

    def pop(self) -> Block:
        block = min(self.cached.values(), key=lambda block: self.hits[block.published_at])
        self.hits.pop(block.published_at, None)
        return self.cached.pop(block.block_id)

    def __len__(self) -> int:
        return len(self.cached)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.cached.values())


def hit_rate(eviction: EvictionPolicy | None) -> float:
    spec = quire.KVCacheSpec.from_layers([None] * 28, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    memory = quire.KVCacheManager(spec, quire.MemoryConfig(num_blocks=12), eviction=eviction)
    scheduler = quire.Scheduler(quire.SchedulerConfig(), memory, quire.RequestLimits(5000, 256, 192, 256))
    engine = quire.EngineCore(scheduler, SimExecutor(5000, clock := ManualClock()), clock)
    for number in range(40):
        is_popular = number == 1 or number % 4 == 0
        prompt = range(64) if is_popular else range(100 * number, 100 * number + 64)
        engine.add_request(quire.Request(str(number), [*prompt, 4999], quire.SamplingParams(max_tokens=4)))
        engine.run()
    memory.check()
    return memory.ledger().hit_rate


lru, lfu = hit_rate(None), hit_rate(KeepTheMostHit())
print(f"hit rate with LRU: {lru:.0%}, with LFU: {lfu:.0%}")
assert lfu > 4 * lru
