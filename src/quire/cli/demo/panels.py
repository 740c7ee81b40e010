"""The panels next to the block map: the block tables, and the ledger. Pure, like the map."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from quire.cli.demo.block_map import CELL_COLUMNS, GAP_COLUMNS, MAX_CELLS_IN_ROW, chip, draw_block_map
from quire.cli.demo.snapshot import MemorySnapshot, SequenceView
from quire.cli.text import BOLD, FAINT, PLAIN, Line, line, pad, side_by_side, span, width
from quire.core.request import RequestStatus
from quire.memory.ledger import MemoryLedger

MAP_COLUMNS = MAX_CELLS_IN_ROW * (CELL_COLUMNS + GAP_COLUMNS) - GAP_COLUMNS
TABLES_COLUMNS = 30
COUNT_COLUMNS = 5
LEDGER_COLUMNS = 44
BESIDE_COLUMNS = 3
BAR_COLUMNS = 36
BYTES_PER_MIB = 1 << 20


def draw_memory(snapshot: MemorySnapshot, changes: Mapping[int, str], columns: int) -> list[Line]:
    """Draw map, tables and ledger, depending on the width: side by side, with the map on top, or one below another."""
    blocks = draw_block_map(snapshot, changes, columns)
    tables, ledger = draw_tables(snapshot, min(TABLES_COLUMNS, columns)), draw_ledger(snapshot.ledger)
    if columns >= MAP_COLUMNS + BESIDE_COLUMNS + LEDGER_COLUMNS:
        return side_by_side(blocks, [*tables, (), *ledger], MAP_COLUMNS + BESIDE_COLUMNS)
    if columns >= TABLES_COLUMNS + BESIDE_COLUMNS + LEDGER_COLUMNS:
        return [*blocks, (), *side_by_side(tables, ledger, TABLES_COLUMNS + BESIDE_COLUMNS)]
    return [*blocks, (), *tables, (), *ledger]


def draw_tables(snapshot: MemorySnapshot, columns: int) -> list[Line]:
    """Draw the block table of every sequence, and the number of its stored tokens. Does not mutate."""
    lines = [line(pad(line(span("block tables", FAINT)), columns - 6), span("tokens", FAINT))]
    for sequence in snapshot.sequences:
        lines.extend(_draw_sequence(sequence, columns))
    return lines if snapshot.sequences else [*lines, line(span("no sequence holds a block", FAINT))]


def _draw_sequence(sequence: SequenceView, columns: int) -> list[Line]:
    name = line(chip(sequence.name), " ")
    where = _where(sequence)
    if where:
        return [line(name, span(where, FAINT))]
    room = max(columns - width(name) - COUNT_COLUMNS, 8)
    wrapped = textwrap.wrap(str(list(sequence.block_ids)), room) or ["[]"]
    first = pad(line(name, span(wrapped[0], BOLD)), columns - COUNT_COLUMNS)
    rest = [line(" " * width(name), span(text, BOLD)) for text in wrapped[1:]]
    return [line(first, f"{sequence.num_stored:>{COUNT_COLUMNS}}"), *rest]


def _where(sequence: SequenceView) -> str:
    """Return where a sequence without a table waits; empty for one with a table."""
    if sequence.num_host_blocks:
        return f"on the host: {sequence.num_host_blocks} blocks"
    if sequence.status is RequestStatus.WAITING:
        return "waiting"
    return "waiting (preempted)" if sequence.status is RequestStatus.PREEMPTED else ""


def draw_ledger(ledger: MemoryLedger) -> list[Line]:
    """Draw the uses of the memory, as numbers that add up. Does not mutate."""
    rows = [
        ("█ used", ledger.used_blocks, ledger.used_bytes),
        ("▒ cached", ledger.cached_blocks, ledger.cached_bytes),
        ("· free", ledger.free_blocks, ledger.free_bytes),
        ("  total", ledger.num_blocks, ledger.num_blocks * ledger.bytes_per_block),
    ]
    lines = [line(span(f"{'ledger':<12}{'blocks':>6}{'MiB':>10}", FAINT)), _draw_bar(ledger)]
    for name, num_blocks, num_bytes in rows:
        key = span(name[:2], PLAIN if name.endswith("used") else FAINT)
        numbers = f"{name[2:]:<10}{num_blocks:>6}{num_bytes / BYTES_PER_MIB:>10.2f}"
        lines.append(line(key, span(numbers, FAINT if name.endswith("total") else PLAIN)))
    return [*lines, _draw_slots(ledger), *_draw_counters(ledger)]


def _draw_bar(ledger: MemoryLedger) -> Line:
    """Draw used, cached and free blocks as one bar."""
    used, cached = _shares(ledger)
    free = BAR_COLUMNS - used - cached
    return line("█" * used, span("▒" * cached + "·" * free, FAINT))


def _shares(ledger: MemoryLedger) -> tuple[int, int]:
    ends = [ledger.used_blocks, ledger.used_blocks + ledger.cached_blocks]
    first, second = (round(end * BAR_COLUMNS / ledger.num_blocks) for end in ends)
    return first, second - first


def _draw_slots(ledger: MemoryLedger) -> Line:
    slots = ledger.used_blocks * ledger.block_size
    reserved = f" + {ledger.reserved_slots} reserved" if ledger.reserved_slots else ""
    return line(
        f"{slots} slots = {ledger.stored_slots} stored{reserved} + {ledger.fragmented_slots} fragmented",
        span(f" ({ledger.fragmentation:.0%})", FAINT),
    )


def _draw_counters(ledger: MemoryLedger) -> list[Line]:
    facts = [
        (ledger.blocks_saved_by_sharing, "saved by sharing"),
        (ledger.copied_blocks, "copied"),
        (ledger.evictions, "evicted"),
        (ledger.used_host_blocks, "on the host"),
    ]
    shown = [f"{count} {words}" for count, words in facts if count]
    return [line(span("blocks: " + ", ".join(shown), BOLD))] if shown else []
