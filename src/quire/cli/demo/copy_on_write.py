"""Chapter 3: several answers to one prompt share its blocks until they write."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.demo.engine import DemoEngine
from quire.cli.demo.scene import Scene

NUM_SAMPLES = 3
PROMPT = range(1000, 1022)


def copy_on_write() -> Iterator[Scene]:
    """One prompt with a partial tail, three samples: two copy the tail, one keeps it."""
    engine = DemoEngine(8)
    request = engine.add("A", PROMPT, max_tokens=14, n=NUM_SAMPLES)
    pictures = engine.steps(1)
    full, tail = engine.table("A")
    yield Scene(
        f"n = {NUM_SAMPLES}: three answers A, B and C to one prompt of {request.num_prompt_tokens} tokens",
        f"The prompt was computed once. The samples share all its blocks, even block {tail}, which is only partly "
        f"full. Their next tokens differ, and each sample must write its own token into block {tail}.",
        pictures,
    )
    pictures = engine.steps(1)
    tables = {name: engine.table(name) for name in "ABC"}
    keeps = next(name for name, table in tables.items() if table[1] == tail)
    copies = {name: table[1] for name, table in tables.items() if name != keeps}
    copied = " and ".join(f"{name} copied it to block {block_id}" for name, block_id in copies.items())
    yield Scene(
        "A block that others hold is never written: copy-on-write",
        f"{copied}, because others still held block {tail}. Then {keeps} was the last holder, so it keeps the block "
        f"and writes in place. Block {full} is full, so no sample writes it, and it stays shared.",
        pictures,
    )
    pictures = engine.steps(11)
    ledger = engine.snapshot.ledger
    yield Scene(
        "From then on they are independent",
        f"New blocks belong to one sample each. Still, {ledger.used_blocks} blocks do the work of "
        f"{ledger.used_blocks + ledger.blocks_saved_by_sharing}, and only {ledger.copied_blocks} blocks were copied.",
        pictures,
    )
