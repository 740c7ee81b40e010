"""Work lists: every position that a token sees is attended to once, in parts that are merged in ascending order."""

from __future__ import annotations

from itertools import pairwise, product
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.torch.attention.shared_prefix import MIN_TILES, shared_prefixes
from quire.compute.torch.attention.work import MOST_PARTS, Tiles, WorkList, work_lists
from quire.compute.torch.kernels.tile_shape import SPLIT, TileShape, Use

LENGTHS = st.one_of(
    st.integers(1, 5000), st.sampled_from([SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 1, 7 * SPLIT])
)


def test_tiles_fit_into_the_shared_memory_of_small_gpus() -> None:
    """Queries, and tiles of keys and of values that are read ahead; RTX 30 and 40 and the L4 have 99 KiB."""
    for use, head_dim, bits in product(Use, (64, 128, 256, 512), (8, 16, 32)):
        shape = TileShape.of(use, head_dim=head_dim, group=4, block_size=16, kv_bits=bits, capability=86)
        num_tokens = shape.rows + 2 * (shape.num_stages - 1) * shape.tokens
        assert num_tokens * shape.padded_dim * bits // 8 <= 99 << 10, (use, head_dim, bits)


def tiles(sequences: list[tuple[int, int]], tokens_per_tile: int) -> Tiles:
    lengths, counts = (np.array(column) for column in zip(*sequences, strict=True))
    return Tiles.of(np.concatenate(([0], np.cumsum(counts))), lengths, range(len(counts)), tokens_per_tile)


def spans(work: WorkList) -> dict[int, list[tuple[int, int, int, int]]]:
    """What is done for each token: (part, table's sequence, first, stop), by part."""
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for first_entry, count, sequence, first, stop in work.tasks.tolist():
        assert first < stop
        for entry in range(first_entry, first_entry + count):
            found.setdefault(int(work.tokens[entry]), []).append((int(work.parts[entry]), sequence, first, stop))
    return {token: sorted(done) for token, done in found.items()}


def check_token(
    done: list[tuple[int, int, int, int]], oldest: int, position: int, merge: tuple[int, int] | None
) -> None:
    """Spans follow one another from no later than `oldest` to beyond `position`; parts are those that are merged."""
    assert oldest // SPLIT * SPLIT >= done[0][2] and done[0][2] % SPLIT == 0
    assert all(earlier[3] == later[2] for earlier, later in pairwise(done))
    assert done[-1][3] > position
    if merge is None:
        assert len(done) == 1 and done[0][0] == -1
    else:
        assert [part for part, *_ in done] == list(range(merge[0], sum(merge)))
        assert all(later[2] % SPLIT == 0 for later in done)


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int]]:
    lengths = draw(st.lists(LENGTHS, min_size=1, max_size=8))
    return [(length, draw(st.integers(1, min(length, 100)))) for length in lengths]


@given(
    sequences=sequences(),
    rows=st.integers(1, 64),
    window=st.one_of(st.none(), st.integers(1, 3000)),
    longest_task=st.one_of(st.none(), st.integers(0, 6000)),
)
def test_every_position_once(sequences, rows, window, longest_task):
    [work] = work_lists(tiles(sequences, rows), window=window, longest_task=longest_task)
    merges = {token: (first, count) for token, first, count in work.merges.tolist()}
    done, token = spans(work), 0
    assert done.keys() == set(range(sum(count for _, count in sequences)))
    for sequence, (length, count) in enumerate(sequences):
        for position in range(length - count, length):
            assert {each[1] for each in done[token]} == {sequence}
            oldest = 0 if window is None else max(0, position - window + 1)
            check_token(done[token], oldest, position, merges.get(token))
            token += 1
    used = [part for token in done for part, *_ in done[token] if part >= 0]
    assert sorted(used) == list(range(work.num_parts))
    spent = work.tasks[:, 4] - work.tasks[:, 3]
    assert (np.diff(spent) <= 0).all()


def test_tokens_over_a_long_context_are_cut_in_launches_that_have_memory_for_their_parts():
    [few] = work_lists(tiles([(30_050, 50)], 32), longest_task=1000)
    assert len(few.tasks) == 2 * 59
    assert few.num_parts == 50 * 59
    many = work_lists(tiles([(30_050, 300), (20_000, 40), (900, 9)], 32), longest_task=1000)
    assert [work.num_parts for work in many] == [4 * 32 * 59, 4 * 32 * 59, 32 * 59 + 12 * 59 + 40 * 40]
    assert sorted(token for work in many for token in set(work.tokens.tolist())) == list(range(349))
    assert (many[0].parts == -1).sum() == 9  # what is not cut comes first
    large = work_lists(tiles([(200_000, 40)], 40), longest_task=1000)
    assert [work.num_parts for work in large] == [40 * 391]  # more than there may be of several tiles


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12),
    shared=st.lists(st.integers(0, 200), min_size=12, max_size=12),
    rows=st.integers(1, 8),
    longest_task=st.integers(0, 6000),
    most_parts=st.sampled_from([1, 7, 30, MOST_PARTS]),
)
def test_shared_prefixes_are_read_through_equal_blocks(lengths, shared, rows, longest_task, most_parts):
    block_size, width = 16, 400
    tables = np.arange(len(lengths) * width).reshape(len(lengths), width)
    for sequence, count in enumerate(shared[: len(lengths)]):
        tables[sequence, :count] = -1 - np.arange(count)  # the same blocks as others
    prefixes = shared_prefixes(tables, np.array(lengths), block_size, SPLIT)
    assert all(len(prefix.tiles) >= MIN_TILES and prefix.num_splits >= 1 for prefix in prefixes)
    decodes = tiles([(length, 1) for length in lengths], rows)
    with patch("quire.compute.torch.attention.work.MOST_PARTS", most_parts):
        works = work_lists(decodes, longest_task=longest_task, prefixes=prefixes, tokens_per_task=rows)
    assert sorted(token for work in works for token in spans(work)) == list(range(len(lengths)))
    for work in works:
        assert work.tasks[:, 1].max() <= rows
        merges = {token: (first, count) for token, first, count in work.merges.tolist()}
        for token, done in spans(work).items():
            check_token(done, 0, lengths[token] - 1, merges.get(token))
            for _, sequence, first, stop in done:
                blocks = slice(first // block_size, -(-min(stop, lengths[token]) // block_size))
                assert (tables[sequence, blocks] == tables[token, blocks]).all()
    for work in works[1:]:
        assert work.num_parts <= most_parts or len(work.merges) == 1


def test_what_many_share_is_one_task_a_split():
    tables = np.array([[*range(64), 100 + row] for row in range(8)])
    length = 64 * 16 + 5
    prefixes = shared_prefixes(tables, np.full(8, length), 16, SPLIT)
    [work] = work_lists(tiles([(length, 1)] * 8, 8), prefixes=prefixes, tokens_per_task=8)
    assert sorted(work.tasks[:, 1].tolist()) == [1] * 8 + [8] * 2


def test_three_rows_or_less_than_a_split_are_not_worth_it():
    tables = np.tile(np.arange(64), (4, 1))
    assert not shared_prefixes(tables[:3], np.full(3, 1000), 16, SPLIT)
    assert not shared_prefixes(tables, np.full(4, SPLIT - 1), 16, SPLIT)
