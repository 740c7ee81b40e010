"""The drawing of the demonstration: what is drawn is what the manager's books say, at every width."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.demo.block_map import CELL_COLUMNS, GAP_COLUMNS, ORIGINS, draw_block_map, draw_legend, fill_bar
from quire.cli.demo.engine import BLOCK_SIZE, DemoEngine
from quire.cli.demo.panels import LEDGER_COLUMNS, draw_ledger, draw_memory, draw_tables
from quire.cli.demo.snapshot import MemorySnapshot, describe_changes, read_snapshot
from quire.cli.terminal import DRAWN
from quire.cli.text import ASCII_FORMS, plain, width
from quire.core.step import BlockCopy
from quire.memory.block import BlockState

LINES_OF_CARD = 4  # head, fill, caption, and the blank line to the next row


@dataclass
class Card:
    """What can be read from a card."""

    block_id: int
    label: str
    fill: str
    caption: str


def read_cards(lines: list[str]) -> list[Card]:
    cards = []
    for first in range(0, len(lines), LINES_OF_CARD):
        head, fill, caption = lines[first : first + 3]
        for start in range(0, len(head), CELL_COLUMNS + GAP_COLUMNS):
            cell = slice(start, start + CELL_COLUMNS)
            cards.append(Card(int(head[cell][:2]), head[cell][2:].strip(), fill[cell], caption[cell].strip()))
    return cards


def slots_of(fill: str) -> int:
    return 2 * fill.count("█") + fill.count("▌")


arrivals = st.tuples(
    st.integers(1, 70),  # tokens of the prompt
    st.sampled_from([0, 1000]),  # its first token: prompts begin alike, or not
    st.integers(1, 40),  # max_tokens
    st.integers(1, 3),  # n
    st.integers(0, 6),  # steps after it
)


def run(num_blocks: int, num_host_blocks: int, arriving: list[tuple[int, int, int, int, int]]) -> list[MemorySnapshot]:
    """Let requests come and go; return the snapshots of all steps."""
    engine = DemoEngine(num_blocks, num_host_blocks=num_host_blocks, preemption="swap" if num_host_blocks else "auto")
    snapshots = [engine.snapshot]
    for index, (length, first_token, max_tokens, n, num_steps) in enumerate(arriving):
        if length + max_tokens - 1 <= num_blocks * BLOCK_SIZE:
            prompt = range(first_token, first_token + length)
            engine.add(chr(ord("A") + 3 * index), prompt, max_tokens=max_tokens, n=n)
        for _ in range(num_steps):
            engine.step()
            snapshots.append(engine.snapshot)
    return snapshots


@given(st.integers(6, 40), st.sampled_from([0, 4]), st.lists(arrivals, min_size=1, max_size=7), st.integers(1, 130))
def test_drawing_equals_the_books(
    num_blocks: int, num_host_blocks: int, arriving: list[tuple[int, int, int, int, int]], columns: int
) -> None:
    for snapshot in run(num_blocks, num_host_blocks, arriving):
        lines = [plain(drawn) for drawn in draw_block_map(snapshot, {}, columns)]
        assert max(map(len, lines)) <= max(columns, CELL_COLUMNS)
        cards = read_cards(lines)
        assert [card.block_id for card in cards] == list(range(num_blocks))
        ledger = snapshot.ledger
        assert sum(card.fill == "▒" * CELL_COLUMNS for card in cards) == ledger.cached_blocks
        assert sum(card.fill == "·" * CELL_COLUMNS for card in cards) == ledger.free_blocks
        assert sum(slots_of(card.fill) for card in cards) == ledger.stored_slots
        for card, block in zip(cards, snapshot.blocks, strict=True):
            assert (f"×{block.ref_count}" in card.label) == (block.ref_count > 1)
            assert len(block.holders) == block.ref_count
        held = [block_id for sequence in snapshot.sequences for block_id in sequence.block_ids]
        assert len(held) == sum(block.ref_count for block in snapshot.blocks)
        assert len(set(held)) == ledger.used_blocks


@given(st.lists(arrivals, min_size=1, max_size=5), st.integers(LEDGER_COLUMNS, 130))
def test_panels_stay_within_the_columns(arriving: list[tuple[int, int, int, int, int]], columns: int) -> None:
    for snapshot in run(24, 4, arriving):
        for drawn in draw_memory(snapshot, {}, columns):
            assert width(drawn) <= columns
            assert all(unicodedata.east_asian_width(character) not in "WF" for character in plain(drawn))
            assert plain(drawn).translate(ASCII_FORMS).isascii()


@given(st.integers(1, 200), st.data())
def test_fill_bar_is_eight_wide_and_never_lies_about_the_ends(block_size: int, data: st.DataObject) -> None:
    num_stored = data.draw(st.integers(0, block_size))
    bar = fill_bar(num_stored, block_size)
    assert len(bar) == CELL_COLUMNS
    assert (bar == "░" * CELL_COLUMNS) == (num_stored == 0)
    assert (bar == "█" * CELL_COLUMNS) == (num_stored == block_size)


def test_ledger_adds_up_as_drawn() -> None:
    engine = DemoEngine(8)
    engine.add("A", range(40), max_tokens=3)
    engine.steps(2)
    lines = [plain(drawn) for drawn in draw_ledger(engine.snapshot.ledger)]
    rows = [words.split() for words in lines[2:6]]
    assert [row[:-2] for row in rows] == [["█", "used"], ["▒", "cached"], ["·", "free"], ["total"]]
    blocks = [int(row[-2]) for row in rows]
    mebibytes = [float(row[-1]) for row in rows]
    assert blocks == [3, 0, 5, 8]
    assert sum(mebibytes[:3]) == mebibytes[3] == 8 * 1.75
    assert "48 slots = 41 stored + 7 fragmented (15%)" in lines


def test_tables_name_every_sequence_and_where_it_is() -> None:
    engine = DemoEngine(8)
    assert "no sequence holds a block" in plain(draw_tables(engine.snapshot, 30)[1])
    engine.add("A", range(100), max_tokens=20)
    engine.add("B", range(1000, 1100), max_tokens=20)
    engine.step()
    lines = [plain(drawn) for drawn in draw_tables(engine.snapshot, 30)[1:]]
    assert lines == [" A  [0, 1, 2, 3, 4, 5, 6]  100", " B  waiting"]
    narrow = [plain(drawn).split() for drawn in draw_tables(engine.snapshot, 22)[1:3]]
    assert narrow == [["A", "[0,", "1,", "2,", "3,", "100"], ["4,", "5,", "6]"]]


def test_changes_of_coming_and_going() -> None:
    engine = DemoEngine(6)
    empty = engine.snapshot
    engine.add("A", range(36), max_tokens=3)
    engine.step()
    assert describe_changes(empty, engine.snapshot) == {0: "new", 1: "new", 2: "new"}
    running = engine.snapshot
    engine.step()
    assert describe_changes(running, engine.snapshot) == {}
    engine.step()
    assert describe_changes(running, engine.snapshot) == {0: "cached", 1: "cached", 2: "freed"}


def test_changes_of_sharing_and_leaving() -> None:
    engine = DemoEngine(8)
    engine.add("A", range(40), max_tokens=3)
    engine.step()
    engine.add("B", [*range(32), 7], max_tokens=4)
    alone = engine.snapshot
    engine.step()
    shared = engine.snapshot
    engine.step()
    assert describe_changes(alone, shared) == {0: "B joins", 1: "B joins", 3: "new"}
    assert describe_changes(shared, engine.snapshot) == {0: "A leaves", 1: "A leaves", 2: "freed"}
    assert describe_changes(alone, shared, [BlockCopy(2, 3)])[3] == "copy←2"
    assert describe_changes(shared, alone) == {0: "B leaves", 1: "B leaves", 3: "freed"}


def test_hit_is_told_from_eviction() -> None:
    engine = DemoEngine(4)
    engine.add("A", range(32), max_tokens=1)
    engine.step()
    cached = engine.snapshot
    assert [block.state for block in cached.blocks[:2]] == [BlockState.CACHED] * 2
    engine.add("B", [*range(32), 9], max_tokens=2)
    engine.step()
    assert describe_changes(cached, engine.snapshot) == {0: "hit", 1: "hit", 2: "new"}
    engine.steps(1)
    rested = engine.snapshot
    engine.add("C", range(5000, 5060), max_tokens=2)
    engine.step()
    assert sorted(describe_changes(rested, engine.snapshot).values()) == ["evicted", "evicted", "new", "new"]


def test_cached_content_keeps_the_name_of_its_first_holder() -> None:
    engine = DemoEngine(8)
    engine.add("A", range(40), max_tokens=2)
    engine.steps(2)
    engine.add("B", [*range(32), 9], max_tokens=2)
    engine.steps(2)
    cached = [block for block in engine.snapshot.blocks if block.state is BlockState.CACHED]
    assert [(block.block_id, block.content) for block in cached] == [(0, "A"), (1, "A")]
    assert [card.label for card in read_cards([plain(drawn) for drawn in draw_block_map(engine.snapshot, {}, 80)])][
        :3
    ] == ["a", "a", ""]


def test_many_holders_leave_room_for_the_count() -> None:
    engine = DemoEngine(16)
    engine.add("A", range(32), max_tokens=4, n=6)
    engine.step()
    card = read_cards([plain(drawn) for drawn in draw_block_map(engine.snapshot, {1: "a word far too long"}, 80)])
    assert (card[0].label, card[1].caption) == ("×6", "a word f")


def test_reading_changes_nothing() -> None:
    engine = DemoEngine(8)
    engine.add("A", range(40), max_tokens=2)
    engine.step()
    assert read_snapshot(engine.memory) == read_snapshot(engine.memory) == engine.snapshot
    engine.memory.check()


def test_what_came_from_another_tier_has_its_letter_and_its_colour_until_it_is_gone() -> None:
    engine = DemoEngine(7, num_host_blocks=4, preemption="swap")
    engine.add("A", range(1000, 1031), max_tokens=8)
    engine.add("B", range(2000, 2029), max_tokens=40)
    request = engine.add("C", range(3000, 3014), max_tokens=40)
    while not request.num_preemptions or request.row < 0:
        engine.step()
    moved = {block.block_id for block in engine.snapshot.blocks if block.origin == "host"}
    (block_id,) = moved & set(engine.table("C"))
    drawn = draw_block_map(engine.snapshot, {}, 80)
    heads, fills = (
        [part for part in drawn[index] if part.text.strip() or part.text in ("████████",)] for index in (0, 1)
    )
    assert [plain((head,))[2:3] for head in heads].index("h") == block_id
    assert fills[block_id].style.ink == ORIGINS["host"]
    while engine.scheduler.requests:
        engine.step()
    engine.add("D", range(9000, 9100), max_tokens=8)
    engine.step()
    assert not any(block.origin for block in engine.snapshot.blocks if "D" in block.holders)


@pytest.mark.parametrize("columns", [20, 40, 76, 120])
def test_legend_fits(columns: int) -> None:
    assert all(width(drawn) <= max(columns, 22) for drawn in draw_legend(columns))


def test_every_drawn_character_has_an_ascii_form() -> None:
    assert DRAWN.translate(ASCII_FORMS).isascii()
    assert len(DRAWN.translate(ASCII_FORMS)) == len(DRAWN)
