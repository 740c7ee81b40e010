"""Chapter 4: what happens when the blocks run out."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.demo.engine import DemoEngine
from quire.cli.demo.scene import Picture, Scene
from quire.core.request import Request


def full_pool() -> Iterator[Scene]:
    """Eviction first, then a request that yields and is recomputed, then one that is swapped to the host."""
    engine = DemoEngine(8)
    yield _full_of_memories(engine)
    yield _eviction(engine)
    yield from _recompute(engine)
    yield from _swap(DemoEngine(7, num_host_blocks=4, preemption="swap"))


def _full_of_memories(engine: DemoEngine) -> Scene:
    first = engine.add("A", range(1000, 1031), max_tokens=2)
    pictures = engine.steps(2)
    engine.add("B", range(2000, 2031), max_tokens=2)
    pictures += engine.steps(2)
    request = engine.add("C", [*first.tokens, *range(3000, 3008)], max_tokens=2)
    pictures += engine.steps(2)
    return Scene(
        "What has ended is remembered for as long as there is room",
        f"A and B have ended; their {engine.snapshot.ledger.cached_blocks} full blocks stay cached. C went on with A's "
        f"conversation and hit {request.num_cached_tokens} tokens, so A's blocks were used last, and B's longest ago.",
        pictures,
    )


def _eviction(engine: DemoEngine) -> Scene:
    num_free = engine.snapshot.ledger.free_blocks
    engine.add("D", range(4000, 4078), max_tokens=8)
    pictures = engine.steps(1)
    table = engine.table("D")
    return Scene(
        "Eviction: the least recently used block goes first",
        f"D needs {len(table)} blocks and {num_free} are free, so a cached one must go. It is block {table[0]}: of the "
        "blocks used longest ago, B's, the last one, because the fewest requests can share the end of a prompt. The "
        "beginning of B's prompt can still be hit.",
        pictures,
    )


def _recompute(engine: DemoEngine) -> Iterator[Scene]:
    request = engine.add("E", range(5000, 5030), max_tokens=8)
    pictures = engine.steps(1)
    while not request.num_preemptions:
        pictures += engine.steps(1)
    yield Scene(
        "Preemption: when nothing is left to evict, the newest request yields",
        "D and E have grown into every block, and E needs one more. D came first, so E lets go of its memory and "
        f"waits; the {request.num_output_tokens} tokens it has generated are kept. Its full blocks turn into cached "
        "ones, which D may take if it must.",
        pictures,
    )
    num_lost = len(request.tokens) - 1  # all but the one that was just sampled
    pictures = _until_resumed(engine, request)
    num_hit = engine.memory.memories[request].num_hit_tokens
    yield Scene(
        "Resumed: what is still cached is not computed again",
        f"D has ended and E is back. Of the {num_lost} tokens that it had computed, {num_hit} were still cached and "
        f"were hit, so yielding cost it {num_lost - num_hit} recomputed tokens. Without the cache it would have "
        f"recomputed all of them, with the same answer.",
        pictures,
    )


def _swap(engine: DemoEngine) -> Iterator[Scene]:
    engine.add("A", range(1000, 1031), max_tokens=8)
    engine.add("B", range(2000, 2029), max_tokens=40)
    request = engine.add("C", range(3000, 3014), max_tokens=40)
    pictures = engine.steps(1)
    while not request.num_preemptions:
        pictures += engine.steps(1)
    yield Scene(
        "Or by swapping: blocks move to host memory",
        f"Another engine, with {engine.memory.host.num_blocks} blocks on the host. B needs a block, C came last: C's "
        f"{engine.memory.host.num_in_use} blocks are copied to the host, and B goes on in the same step. Whether to "
        "swap or to recompute is a matter of which takes less time; by default the scheduler works it out.",
        pictures,
    )
    pictures = _until_resumed(engine, request)
    table = engine.table("C")
    yield Scene(
        "Swapped in again",
        f"A has ended, and C is back as it was, now in blocks {table}. Block {table[0]} was still cached on the device "
        "and was simply taken again; only the other one had to be moved.",
        pictures,
    )


def _until_resumed(engine: DemoEngine, request: Request) -> list[Picture]:
    pictures: list[Picture] = []
    while request.row < 0:
        pictures += engine.steps(1)
    return pictures
