"""Chapter 2: requests with the same prefix share its blocks."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.demo.engine import BLOCK_SIZE, DemoEngine
from quire.cli.demo.scene import Scene

SYSTEM_PROMPT = range(1000, 1048)


def prefix_sharing() -> Iterator[Scene]:
    """Three requests, then a late one, with one system prompt: reference counts from T0 to T4."""
    engine = DemoEngine(8)
    yield _first(engine)
    yield from _sharing(engine)
    yield from _leaving(engine)
    yield _late(engine)


def _question(first_token: int) -> list[int]:
    return [*SYSTEM_PROMPT, *range(first_token, first_token + 6)]


def _counts(engine: DemoEngine) -> str:
    """Return the reference counts of the blocks of the system prompt."""
    blocks = engine.memory.pool.blocks[: len(SYSTEM_PROMPT) // BLOCK_SIZE]
    return "counts of blocks 0, 1, 2: " + ", ".join(str(block.ref_count) for block in blocks)


def _first(engine: DemoEngine) -> Scene:
    engine.add("A", _question(2000), max_tokens=4)
    pictures = engine.steps(1)
    return Scene(
        f"T0  A arrives with a system prompt of {len(SYSTEM_PROMPT)} tokens and a question",
        f"It takes blocks {engine.table('A')}. After the step the three full blocks are published under a hash of "
        "their tokens and all tokens before them; the last block is not full, so it stays private.",
        pictures,
    )


def _sharing(engine: DemoEngine) -> Iterator[Scene]:
    request = engine.add("B", _question(3000), max_tokens=4)
    pictures = engine.steps(1)
    yield Scene(
        "T1  B arrives with the same system prompt and another question",
        f"The first {request.num_cached_tokens} tokens are a cache hit: B's table {engine.table('B')} begins with A's "
        f"blocks, and their reference counts rise ({_counts(engine)}). Only B's own "
        f"{request.num_prompt_tokens - request.num_cached_tokens} tokens are computed.",
        pictures,
    )
    engine.add("C", _question(4000), max_tokens=4)
    pictures = engine.steps(1)
    ledger = engine.snapshot.ledger
    would_use = ledger.used_blocks + ledger.blocks_saved_by_sharing
    yield Scene(
        "T1b C joins as well: three requests, one copy of the system prompt",
        f"The prefix takes 3 blocks instead of 9: {ledger.blocks_saved_by_sharing} blocks saved. "
        f"{ledger.used_blocks} blocks do the work of {would_use}.",
        pictures,
    )


def _leaving(engine: DemoEngine) -> Iterator[Scene]:
    own = engine.table("A")[-1]
    pictures = engine.steps(1)
    yield Scene(
        "T2  A ends",
        f"Its references are dropped ({_counts(engine)}); B and C are not affected. Block {own}, which only A held, is "
        "free.",
        pictures,
    )
    pictures = engine.steps(2)
    yield Scene(
        "T3  B and C end",
        f"All counts are 0, but the {engine.snapshot.ledger.cached_blocks} blocks of the system prompt keep their "
        f"content: they are cached. This costs nothing, because they are evicted when no free block is left.",
        pictures,
    )


def _late(engine: DemoEngine) -> Scene:
    request = engine.add("D", _question(5000), max_tokens=4)
    pictures = engine.steps(1)
    ledger = engine.snapshot.ledger
    return Scene(
        "T4  D arrives when all others have ended, and still hits",
        f"{request.num_cached_tokens} of its {request.num_prompt_tokens} prompt tokens come from cached blocks, which "
        f"are in use again. So far, {ledger.hit_tokens} of {ledger.queried_tokens} prompt tokens "
        f"({ledger.hit_rate:.0%}) did not have to be computed.",
        pictures,
    )
