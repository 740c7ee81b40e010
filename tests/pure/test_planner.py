"""Lengths, what a pool holds of them, estimates, and the search for settings, each against a slower way to say it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.model_shapes import find_shape
from quire.core.config import SchedulerConfig
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import RECURRENT, KVCacheSpec
from quire.simulate.capacity import LONGEST_CHUNK, Occupancy
from quire.simulate.estimate import Estimator, Objective
from quire.simulate.expectations import card_expectation, memory_savings, most_bits_per_weight, saving
from quire.simulate.hardware import Hardware, find_hardware
from quire.simulate.lengths import Length, RequestLengths
from quire.simulate.planner import Choices, Pool, UnreachableError, recommend
from quire.simulate.roofline import Numbers, Roofline

CARD = find_hardware("nvidia-l4")
QWEN3 = find_shape("qwen3-0.6b")
PAIRS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=12)
WINDOWS = st.sampled_from([(None,), (None, None, 24), (24, 50), (None, 7, 7), (None, RECURRENT, RECURRENT)])


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_two_figures_are_those_of_the_distribution() -> None:
    points = [(index + 0.5) / 20_000 for index in range(20_000)]
    lengths = [Length.parse("512±200").quantile(point) for point in points]
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(512, rel=0.01)
    assert math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths)) == pytest.approx(200, rel=0.03)
    assert Length.parse("512+-200") == replace(Length.parse("512±200"), text="512+-200")
    assert Length.parse("400/1500").quantile(0.95) == 1500
    assert replace(Length.parse("4K/5k"), text="") == replace(Length.parse("4096/5000"), text="")
    assert {Length.parse(text).quantile(0.99) for text in ("7", "7±0", "7/7")} == {7}


def test_pairs_cover_both_distributions_and_neither_follows_the_other() -> None:
    lengths = RequestLengths.of_lengths(Length.parse("400/1500"), Length.parse("100/300"), longest=100_000)
    prompts, outputs = (sorted(each) for each in zip(*lengths.pairs, strict=True))
    assert (prompts[499] + prompts[500]) / 2 == pytest.approx(400, rel=0.01)
    assert (outputs[499] + outputs[500]) / 2 == pytest.approx(100, rel=0.01)
    assert outputs[949] == pytest.approx(300, rel=0.02)
    longer = [output for prompt, output in lengths.pairs if prompt > 400]
    assert sorted(longer)[len(longer) // 2] == pytest.approx(100, rel=0.03)


# ---- what a pool holds ----------------------------------------------------------------------------------------------


@given(PAIRS, WINDOWS, st.sampled_from([1, 4, 16]))
def test_what_requests_hold_is_what_a_walk_through_their_steps_finds(
    pairs: list[tuple[int, int]], windows: tuple[int | None, ...], block_size: int
) -> None:
    spec = KVCacheSpec.from_layers(windows, block_size=block_size, num_kv_heads=1, head_dim=4, dtype="float32")
    lengths = RequestLengths.of_pairs(pairs, 1000)
    steps = [prompt + done for prompt, output in lengths.pairs for done in range(1, output + 1)]
    held = [
        len({position // block_size for position in range(length) if position > length - LONGEST_CHUNK - window})
        for length in steps
        for window in (group.window or length for group in spec.groups)
    ]
    seen = sum(
        block_size if group.recurrent else min(length, group.window or length)
        for length in steps
        for group in spec.groups
    )
    found = Occupancy.of(spec, lengths)
    assert found.average == pytest.approx(sum(held) / len(steps))
    assert found.waste == pytest.approx(1 - seen / (sum(held) * block_size))
    assert found.longest == spec.num_blocks_for(max(map(sum, lengths.pairs)), longest_chunk=LONGEST_CHUNK)
    pool = found.in_pool(11 * found.longest - 1, reserved_tokens=1000)
    assert pool.longest == 10
    assert pool.longest <= pool.p95 <= pool.p50
    assert pool.average == pytest.approx(
        (11 * found.longest - 1)
        * (1 - SchedulerConfig().headroom)
        / (found.average + len(spec.groups) * min(16, block_size) / block_size)
    )


# ---- estimates ------------------------------------------------------------------------------------------------------


def estimator(prompt: str = "400", output: str = "100", hardware: Hardware = CARD) -> Estimator:
    lengths = RequestLengths.of_lengths(Length.parse(prompt), Length.parse(output), 40_960)
    return Estimator(Roofline(hardware, QWEN3, Numbers()), lengths)


def test_a_busy_server_computes_prompts_as_fast_as_it_ends_them() -> None:
    found = estimator().serving(20, 2048)
    assert found.num_decodes == 20
    assert found.requests_per_s == pytest.approx(found.tokens_per_s / 100)
    roofline = Roofline(CARD, QWEN3, Numbers())
    context = round(400 + 101 / 2)
    step = roofline.step_s([context - 1] * 20 + [160], [1] * 20 + [80], 20)  # 80 tokens, from the middle of a prompt
    assert found.tpot_s == pytest.approx(step)
    assert found.ttft_s == pytest.approx(roofline.step_s([context - 1] * 20 + [0], [1] * 20 + [400], 21))


def test_a_small_budget_lets_fewer_decode_and_the_others_wait() -> None:
    found = estimator().serving(40, 100)
    assert found.num_decodes == pytest.approx(20)  # each brings 4 tokens of prompts with it
    assert found.ttft_s == pytest.approx(20 / found.requests_per_s)
    assert found.ttft_s > estimator().serving(20, 100).ttft_s


def test_a_prompt_alone_takes_its_chunks() -> None:
    roofline = Roofline(CARD, QWEN3, Numbers())
    expected = roofline.step_s([0], [256], 0) + roofline.step_s([256], [144], 1)
    assert estimator().prompt_s(400, 256) == pytest.approx(expected)


def test_a_step_takes_several_prompts_where_they_are_short_and_outputs_shorter() -> None:
    found, roofline = estimator("10", "1").serving(4, 2048), Roofline(CARD, QWEN3, Numbers())
    step = roofline.step_s([10] * 4 + [0] * 4, [1] * 4 + [10] * 4, 8)
    assert (found.num_decodes, found.tpot_s) == (4, pytest.approx(step))
    assert (found.tokens_per_s, found.requests_per_s) == (pytest.approx(4 / step), pytest.approx(4 / step))
    first = roofline.step_s([10] * 4 + [0], [1] * 4 + [10], 5)
    assert (found.ttft_s, found.ttft_p95_s) == (pytest.approx(first), pytest.approx(first))


def test_the_last_prompt_of_a_step_may_be_a_token_of_one() -> None:
    found, roofline = estimator("3", "2").serving(3, 2048), Roofline(CARD, QWEN3, Numbers())
    # 3 × 3 / 2 is 4 tokens of prompts: one of three, and one from the middle of the next
    assert found.tpot_s == pytest.approx(roofline.step_s([3] * 3 + [0, 1], [1] * 3 + [3, 1], 3 + 2))


def test_a_budget_for_less_than_one_sequence_serves_a_part_of_one() -> None:
    found, roofline = estimator("10", "1").serving(3, 5), Roofline(CARD, QWEN3, Numbers())
    assert found.num_decodes == pytest.approx(5 / 11)
    step = roofline.step_s([10, 2], [1, 5], 1)
    assert found.tpot_s == pytest.approx(step)
    assert found.requests_per_s == pytest.approx(5 / 11 / step)
    assert found.ttft_s == pytest.approx((3 - 5 / 11) * step / (5 / 11)), (
        "the others wait until those before have ended"
    )


def test_a_long_prompt_is_computed_in_what_decodes_leave_of_the_budget() -> None:
    found, roofline = estimator("64/192", "64").serving(8, 32), Roofline(CARD, QWEN3, Numbers())
    lengths = RequestLengths.of_lengths(Length.parse("64/192"), Length.parse("64"), 40_960)
    context = round(lengths.mean_context)
    for share, found_s in ((0.5, found.ttft_s), (0.95, found.ttft_p95_s)):
        seconds, prompt = 0.0, lengths.prompt(share)
        for start in range(0, prompt, 24):  # 8 decode, 24 are left
            count = min(24, prompt - start)
            last = start + count == prompt
            seconds += roofline.step_s([context - 1] * 8 + [start], [1] * 8 + [count], 8 + last)
        assert found_s == pytest.approx(seconds)
    assert found.ttft_p95_s > found.ttft_s


@pytest.mark.parametrize(("num_sequences", "enough"), [(20, 20 + 400), (200, 200 + 800)])
def test_a_budget_is_enough_when_all_decode_and_a_long_prompt_is_one_chunk(num_sequences: int, enough: int) -> None:
    estimates = estimator()
    assert estimates.is_enough(num_sequences, enough)
    assert not estimates.is_enough(num_sequences, enough - 1)
    stream = Roofline(CARD, QWEN3, Numbers()).step_s([449], [1], 1)  # in the middle of 100 tokens behind 400
    assert estimates.stream_tokens_per_s() == pytest.approx(1 / stream)


@given(PAIRS, WINDOWS)
def test_the_fewest_blocks_for_one_request_hold_one(pairs: list[tuple[int, int]], windows: list[int | None]) -> None:
    spec = KVCacheSpec.from_layers(windows, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    occupancy = Occupancy.of(spec, RequestLengths.of_pairs(pairs, 10_000))
    fewest = occupancy.blocks_for_one()
    assert occupancy.in_pool(fewest, 1000).average >= 1 - 1e-9
    assert occupancy.in_pool(fewest - 1, 1000).average < 1


@pytest.mark.parametrize(("reserved_tokens", "blocks"), [(1, 1), (2, 1), (17, 1), (18, 2), (33, 2), (34, 3)])
def test_who_reserves_the_longest_sequence_stores_all_but_its_last_token(reserved_tokens: int, blocks: int) -> None:
    spec = KVCacheSpec.from_layers([None], block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    occupancy = Occupancy.of(spec, RequestLengths.of_pairs([(5, 1)], 100))
    assert occupancy.in_pool(60, reserved_tokens).reserved == 60 // blocks


@pytest.mark.parametrize(
    ("objective", "excess"),
    [
        (Objective(), 0.0),
        (Objective(ttft_s=2.0), 0.5),
        (Objective(tpot_s=2.0), 2.0),
        (Objective(ttft_s=0.25, tpot_s=2.0), 4.0),
        (Objective(ttft_s=1.0, tpot_s=4.0), 1.0),
    ],
)
def test_the_worse_of_two_times_counts_and_only_what_is_promised(objective: Objective, excess: float) -> None:
    assert objective.excess(ttft_s=1.0, tpot_s=4.0) == excess


# ---- the search -----------------------------------------------------------------------------------------------------


def pool_of(block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> Pool | None:
    """4 GiB, of which each place and each token of a step take something."""
    left = (4 << 30) - (max_num_seqs << 20) - (max_num_batched_tokens << 19)
    spec = QWEN3.kv_cache_spec(block_size, "bfloat16")
    return Pool(spec, left // spec.bytes_per_block, 40_960) if left >= spec.bytes_per_block else None


LENGTHS = RequestLengths.of_lengths(Length.parse("300/900"), Length.parse("100±60"), 40_960)
CHOICES = Choices(sequences=(1, 4, 16, 64), budgets=(64, 256, 1024))


def search(objective: Objective, choices: Choices = CHOICES):
    return recommend(pool_of, Estimator(Roofline(CARD, QWEN3, Numbers()), LENGTHS), LENGTHS, choices, objective)


def test_nothing_that_was_to_choose_is_faster() -> None:
    best = search(Objective())
    estimates = Estimator(Roofline(CARD, QWEN3, Numbers()), LENGTHS)
    for sequences, budget in product(CHOICES.sequences, CHOICES.budgets):
        pool = pool_of(best.block_size, sequences, budget)
        if pool is not None and sequences <= budget:
            held = Occupancy.of(pool.spec, LENGTHS).in_pool(pool.num_blocks, pool.max_model_len)
            running = min(sequences, int(held.average))
            assert not running or estimates.serving(running, budget).tokens_per_s <= best.estimate.tokens_per_s / 0.98


def test_a_setting_that_is_fixed_is_kept() -> None:
    best = search(Objective(), Choices(block_sizes=(128,), sequences=(4,), budgets=(256,)))
    assert (best.block_size, best.max_num_seqs, best.estimate.budget) == (128, 4, 256)
    assert search(Objective()).block_size == 32  # nearly as many as with 16
    assert search(Objective(), Choices(block_sizes=(1, 2, 3, 4))).block_size == 4  # nearly as many as with 1


@given(ttft_ms=st.floats(0.01, 1000), tpot_ms=st.floats(0.01, 100))
def test_an_objective_is_kept_or_the_nearest_one_can_be(ttft_ms: float, tpot_ms: float) -> None:
    objective = Objective(ttft_ms / 1000, tpot_ms / 1000)
    try:
        estimate = search(objective).estimate
    except UnreachableError as error:
        assert error.nearest is not None
        assert objective.excess(error.nearest.ttft_p95_s, error.nearest.tpot_s) > 1
        nearest = Objective(error.nearest.ttft_p95_s, error.nearest.tpot_s)
        estimate = search(nearest).estimate
        assert nearest.excess(estimate.ttft_p95_s, estimate.tpot_s) <= 1
    else:
        assert objective.excess(estimate.ttft_p95_s, estimate.tpot_s) <= 1


def test_where_nothing_fits_there_is_no_nearest() -> None:
    estimates = Estimator(Roofline(CARD, QWEN3, Numbers()), LENGTHS)
    with pytest.raises(UnreachableError) as caught:
        recommend(lambda *_: None, estimates, LENGTHS, CHOICES, Objective())
    assert caught.value.nearest is None


# ---- what was expected ----------------------------------------------------------------------------------------------


def test_the_table_of_memory_saved() -> None:
    rows = {row.scenario: row for row in memory_savings()}
    assert (rows["ten of 1,024"].num_reserved, rows["ten of 1,024"].num_taken) == (40_960, 10_240)
    assert rows["eight of 500"].num_taken == 8 * 512  # 87.5 % is right because of the blocks: 500 tokens leave 87.8 %
    assert pytest.approx(0.878, abs=0.0005) == 1 - 500 / 4096
    assert all(row.saved == pytest.approx(row.expected, abs=0.002) for row in rows.values())
    assert all(row.waste < 0.04 for row in rows.values())
    with pytest.raises(InvalidConfigError, match="lengths"):
        saving("too long", 0.0, [5000])


def test_a_block_of_llama_takes_two_mebibytes() -> None:
    assert find_shape("llama-3.1-8b").kv_cache_spec(16, "float16").bytes_per_block == 2 << 20


def test_the_table_of_the_card() -> None:
    card, llama = find_hardware("nvidia-rtx-4070-ti-super"), find_shape("llama-3.1-8b")
    wide = card_expectation(card, llama, Numbers(), other_bytes=256 << 20)
    narrow = card_expectation(card, llama, Numbers(weights="int8", kv_dtype="int8"), other_bytes=256 << 20)
    assert wide is not None
    assert narrow is not None
    assert (wide.num_contexts, wide.reserved_contexts, wide.num_tokens) == (6, 1, 6480)
    assert (narrow.num_contexts, narrow.reserved_contexts, narrow.num_tokens) == (120, 30, 123_520)
    assert wide.stream_tokens_per_s < narrow.stream_tokens_per_s < 137 < wide.batch_tokens_per_s
    assert 4 < most_bits_per_weight(card, llama, 137) < 8
    assert card_expectation(replace(card, memory_bytes=15 << 30), llama, Numbers()) is None
