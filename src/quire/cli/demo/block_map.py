"""The block map: a snapshot drawn as a card for each block.

     0 ABC×3  3    A   4        7
    ████████ ██▌░░░░░ ········ ▒▒▒▒▒▒▒▒      id, d or h for disk or host, holders, reference count over 1
      B joins     new            cached      fill: a character for every eighth of the slots, ▌ for a sixteenth
                                             what just happened

Pure: a function from a snapshot to lines. The characters carry all the information; colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.cli.demo.snapshot import BlockView, MemorySnapshot
from quire.cli.text import BOLD, FAINT, Colour, Line, Span, Style, line, span, width
from quire.memory.block import BlockState

CELL_COLUMNS = 8
GAP_COLUMNS = 1
MAX_CELLS_IN_ROW = 8
WHITE = Colour(231, 15)
BLACK = Colour(16, 0)
SHARED = Colour(178, 3)
ORIGINS = {"disk": Colour(81, 14), "host": Colour(141, 13)}
"""The colours of blocks whose bytes came from another tier."""
OWNERS = (
    Colour(25, 4),  # blue
    Colour(130, 1),  # orange
    Colour(29, 2),  # green
    Colour(97, 5),  # violet
    Colour(30, 6),  # teal
    Colour(125, 1),  # crimson
    Colour(94, 3),  # brown
    Colour(62, 4),  # indigo
)
"""Dark enough for white letters, light enough to stand out from a black background."""


def owner_colour(name: str) -> Colour:
    """Return the colour of a sequence."""
    return OWNERS[(ord(name[0]) - ord("A")) % len(OWNERS)]


def chip(name: str) -> Span:
    """Return the name of a sequence on its colour."""
    return span(f" {name} ", Style(WHITE, owner_colour(name), bold=True))


def draw_block_map(snapshot: MemorySnapshot, changes: Mapping[int, str], columns: int) -> list[Line]:
    """Draw every block once, in rows of at most eight cards, each of three lines. Does not mutate."""
    in_row = min(max((columns + GAP_COLUMNS) // (CELL_COLUMNS + GAP_COLUMNS), 1), MAX_CELLS_IN_ROW)
    lines: list[Line] = []
    for first in range(0, len(snapshot.blocks), in_row):
        row = snapshot.blocks[first : first + in_row]
        if first:
            lines.append(())
        lines.append(_join([_head(block) for block in row]))
        lines.append(_join([_fill(block, snapshot.block_size) for block in row]))
        lines.append(_join([_caption(changes.get(block.block_id, "")) for block in row]))
    return lines


def draw_legend(columns: int) -> list[Line]:
    """Explain the cards, in as many lines as the width requires. Does not mutate."""
    owned, shared = Style(OWNERS[0]), Style(SHARED)
    parts = [
        line(span("██▌", owned), span("░", owned), " one holder"),
        line(span("███", shared), " shared, ×2: by two"),
        line(span("▒▒▒", FAINT), " cached, can be hit"),
        line(span("···", FAINT), " free"),
        line(span("0d ███", Style(ORIGINS["disk"])), " from disk"),
        line(span("0h ███", Style(ORIGINS["host"])), " from the host"),
    ]
    lines: list[Line] = [parts[0]]
    for part in parts[1:]:
        if width(lines[-1]) + 3 + width(part) <= columns:
            lines[-1] = line(lines[-1], "   ", part)
        else:
            lines.append(part)
    return lines


def _join(cells: list[Line]) -> Line:
    joined: list[Span] = []
    for place, cell in enumerate(cells):
        joined.extend([span(" " * GAP_COLUMNS), *cell] if place else cell)
    return tuple(joined)


def _head(block: BlockView) -> Line:
    number = f"{block.block_id:>2}{block.origin[:1]}"
    return line(span(number + _label(block).rjust(CELL_COLUMNS - len(number)), _head_style(block)))


def _label(block: BlockView) -> str:
    """Return the holders of the block, or only their number if there is no room."""
    if block.state is not BlockState.IN_USE:
        return f"{block.content.lower()} "
    names, count = "".join(block.holders), f"×{block.ref_count}" if block.ref_count > 1 else " "
    return names + count if len(names) + len(count) <= CELL_COLUMNS - 3 else count


def _head_style(block: BlockView) -> Style:
    if block.state is not BlockState.IN_USE:
        return FAINT
    return Style(BLACK, SHARED, bold=True) if block.ref_count > 1 else Style(WHITE, _own_colour(block), bold=True)


def _own_colour(block: BlockView) -> Colour:
    return SHARED if block.ref_count > 1 or not block.holders else owner_colour(block.holders[0])


def _fill(block: BlockView, block_size: int) -> Line:
    if block.state is BlockState.FREE:
        return line(span("·" * CELL_COLUMNS, FAINT))
    colour = ORIGINS.get(block.origin)
    if block.state is BlockState.CACHED:
        return line(span("▒" * CELL_COLUMNS, FAINT if colour is None else Style(colour)))
    return line(span(fill_bar(block.num_stored, block_size), Style(colour or _own_colour(block))))


def fill_bar(num_stored: int, block_size: int) -> str:
    """Return the fill of a block as eight characters; any content shows as at least half a character.

    >>> fill_bar(16, 16), fill_bar(5, 16), fill_bar(1, 256)
    ('████████', '██▌░░░░░', '▌░░░░░░░')
    """
    halves = num_stored * 2 * CELL_COLUMNS // block_size
    if num_stored:
        halves = max(halves, 1)
    bar = "█" * (halves // 2) + "▌" * (halves % 2)
    return bar.ljust(CELL_COLUMNS, "░")


def _caption(word: str) -> Line:
    return line(span(word[:CELL_COLUMNS].center(CELL_COLUMNS), BOLD))
