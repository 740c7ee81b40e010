"""Chapter 4: eviction and preemption when the blocks run out."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.demo.engine import DemoEngine
from quire.cli.demo.scene import Picture, Scene
from quire.core.request import Request


def full_pool() -> Iterator[Scene]:
    """Eviction first, then a request that is preempted and recomputed, then one that is swapped to the host."""
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
        "Blocks of ended requests stay cached while there is room",
        f"A and B have ended; their {engine.snapshot.ledger.cached_blocks} full blocks stay cached. C continued A's "
        f"conversation and hit {request.num_cached_tokens} tokens, so B's blocks are the least recently used ones.",
        pictures,
    )


def _eviction(engine: DemoEngine) -> Scene:
    num_free = engine.snapshot.ledger.free_blocks
    engine.add("D", range(4000, 4078), max_tokens=8)
    pictures = engine.steps(1)
    table = engine.table("D")
    return Scene(
        "Eviction: the least recently used block goes first",
        f"D needs {len(table)} blocks and {num_free} are free, so one cached block must be evicted: block {table[0]}, "
        "the last of B's. The end of a prompt goes before its beginning, because fewer requests can share it. So the "
        "beginning of B's prompt can still be hit.",
        pictures,
    )


def _recompute(engine: DemoEngine) -> Iterator[Scene]:
    request = engine.add("E", range(5000, 5030), max_tokens=8)
    pictures = engine.steps(1)
    while not request.num_preemptions:
        pictures += engine.steps(1)
    yield Scene(
        "Preemption: when there is nothing left to evict, the newest request is preempted",
        "D and E fill every block, and E needs one more. D came first, so E frees its memory and waits; the "
        f"{request.num_output_tokens} tokens it has generated are kept. Its full blocks stay cached, and D can evict "
        "them if it needs more blocks.",
        pictures,
    )
    num_lost = len(request.tokens) - 1  # all except the token that was just sampled
    pictures = _until_resumed(engine, request)
    num_hit = engine.memory.memories[request].num_hit_tokens
    yield Scene(
        "Resumed: cached tokens are not computed again",
        f"D has ended, and E has resumed. Of the {num_lost} tokens that E had computed, {num_hit} were still cached, "
        f"so {num_lost - num_hit} had to be recomputed. Without the cache E would have recomputed all of them, "
        "with the same answer.",
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
        "Preemption by swapping: blocks move to host memory",
        f"Another engine, with {engine.memory.host.num_blocks} blocks on the host. B needs a block, and C came last: "
        f"C's {engine.memory.host.num_in_use} blocks are copied to the host, and B continues in the same step. By "
        "default the scheduler chooses between swapping and recomputing by which takes less time.",
        pictures,
    )
    pictures = _until_resumed(engine, request)
    table = engine.table("C")
    yield Scene(
        "Swapped back in",
        f"A has ended, and C continues where it stopped, now in blocks {table}. Block {table[0]} was still cached on "
        "the device and was reused; only the other block had to be moved.",
        pictures,
    )


def _until_resumed(engine: DemoEngine, request: Request) -> list[Picture]:
    pictures: list[Picture] = []
    while request.row < 0:
        pictures += engine.steps(1)
    return pictures
