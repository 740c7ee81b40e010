"""The gains that an older document expected of paging, and its mistakes (simulate/expectations.py)."""

from __future__ import annotations

from quire.core.byte_sizes import format_bytes
from quire.reporting.document.content import Table
from quire.simulate.expectations import (
    BLOCK_SIZE,
    RESERVED_TOKENS,
    card_expectation,
    memory_savings,
    most_bits_per_weight,
)
from quire.simulate.paper.figure import Figure, make_figure
from quire.simulate.paper.runs import LLAMA_8B, Laboratory, Site
from quire.simulate.roofline import Numbers

ACTIVATION_BYTES = 256 << 20
ONE_STREAM = 137
NUMBERS = (
    ("16 bits", Numbers()),
    ("int8 weights", Numbers(weights="int8")),
    ("int8", Numbers(weights="int8", kv_dtype="int8")),
)


def expectations(laboratory: Laboratory) -> Figure:
    """Return the two tables of the document, computed again, and its mistakes."""
    site = laboratory.sites[LLAMA_8B]
    rows, found = [], {}
    for row in memory_savings():
        rows.append((row.scenario, f"{row.num_reserved:,}", f"{row.num_taken:,}", f"{100 * row.saved:.1f} %"))
        found[f"saved: {row.scenario}"] = 100 * row.saved
    saved = Table(("requests", "slots reserved", "in blocks", "saved"), tuple(rows), "4,096 slots reserved for each")
    card, of_card = _card(site)
    bits = most_bits_per_weight(site.hardware, site.shape, ONE_STREAM)
    return make_figure("expectations", [saved, card, _slips(site, bits)], found | of_card, bits=bits)


def _card(site: Site) -> tuple[Table, dict[str, float]]:
    """Return a table of the card's capacity and speed, and the same values by the names of the expected ones."""
    rows: list[tuple[str, ...]] = []
    found: dict[str, float] = {}
    for name, numbers in NUMBERS:
        held = card_expectation(site.hardware, site.shape, numbers, other_bytes=ACTIVATION_BYTES)
        if held is None:
            continue
        counts = held.num_tokens, held.num_contexts, held.reserved_contexts
        speeds = held.stream_tokens_per_s, held.batch_tokens_per_s
        rows.append((name, *(f"{count:,}" for count in counts), *(f"{speed:,.0f}" for speed in speeds)))
        found[f"{name}: contexts at once"] = held.num_contexts
        found[f"{name}: longest context"] = held.num_tokens / 1024
        found[f"{name}: tok/s of one stream"], found[f"{name}: tok/s of all"] = speeds
    header = ("numbers", "tokens, total", "contexts of 1,024", "each reserving 4,096", "tok/s of one", "tok/s of all")
    return Table(header, tuple(rows), f"{site.shape.name} on {site.hardware.name}"), found


def _slips(site: Site, bits: float) -> Table:
    block = site.shape.kv_cache_spec(BLOCK_SIZE, "float16").bytes_per_block
    wasted = 100 * (1 - 500 / RESERVED_TOKENS)
    rows = (
        ("a block: 16 × 32 × 2 × 128 × 8 × 2 = 4,194,304 bytes", f"{block:,} bytes, {format_bytes(block)}"),
        ("4,096 reserved, 500 used: 87 % wasted", f"{wasted:.1f} %"),
        ("20.4 % used by transformers, 38.4 % by FasterTransformer", "20.4 % by Orca (Max), 38.2 % by Orca (Oracle)"),
        ("up to 55 % saved by parallel sampling", "up to 30.5 %; 55.2 % is that of beams"),
        (f"{ONE_STREAM} tok/s of one stream of an 8B model on this card", f"at {bits:.1f} bits a weight or fewer"),
    )
    return Table(("the document", "correct"), rows, "Mistakes in the document")
