"""Chapter 1: blocks instead of reservations."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.demo.block_map import chip, owner_colour
from quire.cli.demo.engine import BLOCK_SIZE, DemoEngine
from quire.cli.demo.scene import Scene
from quire.cli.text import BOLD, FAINT, Line, Style, line, span
from quire.core.request import Request

RESERVED = 36  # slots for each sequence if memory must be contiguous
LENGTHS = {"A": 20, "B": 8, "C": 12}


def paging() -> Iterator[Scene]:
    """Three sequences: reserved, then paged; then one whose blocks are scattered."""
    yield _reservation()
    engine = DemoEngine(24)
    yield _paged(engine)
    yield from _scattered(engine)


def _reservation() -> Scene:
    used, reserved = sum(LENGTHS.values()), RESERVED * len(LENGTHS)
    wastes = " + ".join(str(RESERVED - length) for length in LENGTHS.values())
    return Scene(
        "Without paging: one contiguous reservation for each sequence",
        f"The length of an answer is not known in advance, so each sequence reserves {RESERVED} slots in a row, for "
        f"the longest answer. {used} of {reserved} slots hold a token; {wastes} = {reserved - used} are wasted "
        f"({(reserved - used) / reserved:.0%}), and no other sequence can use them.",
        [_draw_reservation],
    )


def _draw_reservation(columns: int) -> list[Line]:
    lines = []
    for name, length in LENGTHS.items():
        bar = span("█" * length, Style(owner_colour(name))), span("░" * (RESERVED - length), FAINT)
        numbers = f"  {length:>2} of {RESERVED} slots used"
        lines.append(line(chip(name), " ", *bar, numbers if columns >= 62 else ""))
    return lines


def _paged(engine: DemoEngine) -> Scene:
    engine.add("A", range(100, 116), max_tokens=7)
    engine.add("B", range(200, 204), max_tokens=40)
    engine.add("C", range(300, 308), max_tokens=6)
    pictures = engine.steps(5)
    ledger = engine.snapshot.ledger
    slots = ledger.used_blocks * BLOCK_SIZE
    return Scene(
        f"With paging: blocks of {BLOCK_SIZE} slots, taken when a token needs one",
        f"The same three sequences grow, token by token. A filled block {engine.table('A')[0]} and took the next free "
        f"one, {engine.table('A')[1]}: its table is {engine.table('A')}. Only the last block of a sequence can have "
        f"empty slots: {ledger.fragmented_slots} of {slots} now, against "
        f"{RESERVED * len(LENGTHS) - ledger.stored_slots} of {RESERVED * len(LENGTHS)} above, and all other blocks "
        "are free for any sequence.",
        pictures,
    )


def _scattered(engine: DemoEngine) -> Iterator[Scene]:
    """Others start and end until blocks 5, 12 and 3 are the next free ones; then 35 tokens arrive."""
    engine.add("D", range(400, 406), max_tokens=40)
    engine.add("E", range(500, 505), max_tokens=4)
    engine.add("F", range(600, 690), max_tokens=40)
    engine.add("G", range(700, 705), max_tokens=3)
    pictures = engine.steps(4)
    request = engine.add("H", range(800, 835), max_tokens=4)
    pictures += engine.steps(1)
    table = engine.table("H")
    yield Scene(
        "Blocks need not be neighbours",
        f"D, E, F and G started; C, A, G and E ended and freed their blocks. Now H arrives with "
        f"{request.num_computed} tokens and gets the blocks that were freed last: its table is {table}. Only the order "
        "in the table matters, not the order in memory.",
        pictures,
    )
    yield _slot_arithmetic(engine, request)


def _slot_arithmetic(engine: DemoEngine, request: Request) -> Scene:
    table = engine.memory.memories[request].tables[0]
    rows = [(position, table.slot(position)) for position in (0, 15, 16, 31, 32, 34)]

    def draw(columns: int) -> list[Line]:
        lines = [line(span("token   logical block   block   offset   slot", FAINT))]
        for position, slot in rows:
            logical, offset = divmod(position, BLOCK_SIZE)
            block_id = table.block_ids[logical]
            numbers = f"{position:>5}   {logical:>13}   {block_id:>5}   {offset:>6}   "
            sum_of = f"   = {block_id} × {BLOCK_SIZE} + {offset}" if columns >= 62 else ""
            lines.append(line(numbers, span(f"{slot:>4}", BOLD), span(sum_of, FAINT)))
        return lines

    return Scene(
        f"From a token's position to its slot, through table {table.block_ids}",
        f"Logical block = position // {BLOCK_SIZE}, offset = position % {BLOCK_SIZE}; the table turns the logical "
        f"block into a block in memory, and slot = block × {BLOCK_SIZE} + offset. Attention needs nothing else to find "
        "keys and values.",
        [draw],
    )
