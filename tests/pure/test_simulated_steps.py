"""What a simulated step does: its texts, beams and times, each against a plain definition of its own."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.errors import ExecutionError
from quire.core.sampling_params import SamplingParams
from quire.core.step import BlockCopy, BlockMove, RowStart, StepPlan, column
from quire.simulate.beams import BeamModel
from quire.simulate.cost.linear import LinearCost
from quire.simulate.cost.moving import MovingCost
from quire.simulate.cost.unsteady import STRETCH, UnsteadyCost
from quire.simulate.executor import SimExecutor, hash_prompt, text_after

PROMPT = array("i", range(10))


def start(row: int, name: str = "r", *, branch: int = 0, text: Sequence[int] = (), **sampling: Any) -> RowStart:
    """A request that takes a row, with what it has said so far."""
    tokens = PROMPT + array("i", text)
    return RowStart(row, name, tokens, len(PROMPT), SamplingParams(**sampling), 10_000, branch)


def plan(
    number: int,
    decodes: Sequence[int] = (),
    chunks: Sequence[tuple[int, int]] = (),
    starts: Sequence[RowStart] = (),
    **more: Any,
) -> StepPlan:
    """A step: rows that decode, and rows whose prompts are computed, each with how many texts it opens."""
    rows = column(*decodes, *(row for row, _ in chunks))
    return StepPlan(
        number,
        rows,
        column(*[20] * len(decodes), *[0] * len(chunks)),
        column(*[1] * len(decodes), *[10] * len(chunks)),
        column(*[1] * len(decodes), *(samples for _, samples in chunks)),
        len(decodes),
        tuple(starts),
        **more,
    )


def run(executor: SimExecutor, step: StepPlan) -> list[int]:
    executor.submit(step)
    return executor.collect().tokens.tolist()


# ---- texts ----------------------------------------------------------------------------------------------------------


@given(
    vocab_size=st.sampled_from([1, 2, 1000, 65_534, 65_535, 65_536, 200_000]),
    branch=st.integers(0, 300),
    num_known=st.integers(0, 1100),
)
def test_a_text_is_the_same_from_wherever_it_goes_on(vocab_size: int, branch: int, num_known: int) -> None:
    whole = text_after(b"prompt", branch, 0, vocab_size)
    expected = [next(whole) for _ in range(num_known + 300)][num_known:]
    rest = text_after(b"prompt", branch, num_known, vocab_size)
    assert [next(rest) for _ in range(300)] == expected
    assert all(0 <= token < vocab_size for token in expected)
    if vocab_size > 1000:
        other = text_after(b"prompt", branch + 1, num_known, vocab_size)
        assert [next(other) for _ in range(300)] != expected


@given(
    known=st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=4),
    num_branches=st.integers(1, 4),
)
def test_a_known_answer_is_said_first_and_after_a_preemption_from_where_it_was(
    known: list[list[int]], cuts: list[int], num_branches: int
) -> None:
    """Each branch says what is known of it and then what its prompt draws, however often it loses its row."""
    clock = ManualClock()
    executor = SimExecutor(1000, clock, outputs={"r": [array("i", each) for each in known]})
    texts = [[token] for token in run(executor, plan(0, chunks=[(0, num_branches)], starts=[start(0)]))]
    for number, cut in enumerate(cuts, start=1):
        rows = range(1, num_branches + 1)  # taken again, as after a preemption of them all
        starts = [start(row, branch=row - 1, text=texts[row - 1]) for row in rows]
        for step in range(cut):
            said = run(executor, plan(10 * number + step, decodes=rows, starts=starts if not step else ()))
            for text, token in zip(texts, said, strict=True):
                text.append(token)
    for branch, text in enumerate(texts):
        answer = known[branch] if branch < len(known) else []
        drawn = text_after(hash_prompt(PROMPT), branch, len(answer), 1000)
        expected = (answer + [next(drawn) for _ in range(len(text))])[: len(text)]
        assert text == expected


def test_a_prompt_in_chunks_says_nothing_before_its_end() -> None:
    executor = SimExecutor(1000, ManualClock())
    assert run(executor, plan(0, chunks=[(0, 0)], starts=[start(0)])) == []
    assert run(executor, plan(1, chunks=[(0, 1)])) == run(
        SimExecutor(1000, ManualClock()), plan(0, chunks=[(0, 1)], starts=[start(0)])
    )


def test_rows_that_change_without_a_start_say_what_is_theirs() -> None:
    executor, alone = SimExecutor(1000, ManualClock()), {}
    starts = [start(row, f"r{row}", text=range(row)) for row in range(4)]
    for row in range(4):
        alone[row] = text_after(hash_prompt(PROMPT), 0, row, 1000)
    for number, rows in enumerate(([0, 1, 2, 3], [3, 1], [3, 1], [1, 3], [0, 2], [0, 1, 2, 3])):
        said = run(executor, plan(number, decodes=rows, starts=[] if number else starts))
        assert said == [next(alone[row]) for row in rows]


@given(
    order=st.permutations([(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]), num_steps=st.integers(1, 6), seed=st.integers(0, 9)
)
def test_the_beams_of_a_step_continue_what_their_search_chooses(
    order: list[tuple[int, int]], num_steps: int, seed: int
) -> None:
    """Two searches and a row without one, whose entries lie in any order. Rows: 2 × branch + search."""
    names, widths, free = ("a", "b"), (2, 3), 9
    executor, model = SimExecutor(1000, ManualClock()), BeamModel()
    search = [{"n": width, "beam_search": True, "temperature": 0.0} for width in widths]
    starts = [start(each, names[each], text=[], **search[each]) for each in (0, 1)]
    executor.submit(plan(0, chunks=[(0, 2), (1, 3), (free, 1)], starts=[*starts, start(free, "c")]))
    assert executor.collect().parents.tolist() == [0, 1, free], "what opens continues itself"
    for each in (0, 1):
        model.open(names[each], hash_prompt(PROMPT), widths[each])
    siblings = [
        start(2 * branch + each, names[each], branch=branch, text=[1], **search[each])
        for branch, each in order
        if branch
    ]
    for number in range(1, num_steps + 1):
        position = len(PROMPT) + number + seed
        rows = [2 * branch + each for branch, each in order]
        step = StepPlan(
            number,
            column(free, *rows),
            column(*[position] * 6),
            column(*[1] * 6),
            column(*[1] * 6),
            1,
            tuple(siblings if number == 1 else ()),
        )
        executor.submit(step)
        chosen = [model.choose(names[each], hash_prompt(PROMPT), position) for each in (0, 1)]
        expected = [2 * chosen[each][branch] + each for branch, each in order]
        assert executor.collect().parents.tolist() == [free, *expected]


def test_results_come_in_order_and_time_passes_when_they_are_collected() -> None:
    clock = ManualClock()
    executor = SimExecutor(1000, clock, LinearCost(1.0, 0.0))
    with pytest.raises(ExecutionError, match="no step is under way"):
        executor.collect()
    plans = [plan(0, chunks=[(0, 1)], starts=[start(0)]), plan(1, decodes=[0]), plan(2, decodes=[0])]
    for each in plans:
        executor.submit(each)
    assert clock.now() == 0.0
    for number, each in enumerate(plans):
        assert executor.collect().step_id == number
        assert (executor.plan, clock.now()) == (each, number + 1.0)
    executor.submit(plan(3, decodes=[0]))
    executor.shutdown()
    with pytest.raises(ExecutionError, match="no step is under way"):
        executor.collect()
    assert clock.now() == 3.0


# ---- beams ----------------------------------------------------------------------------------------------------------


@given(prompt=st.binary(min_size=1, max_size=4), num_beams=st.integers(1, 8), num_steps=st.integers(0, 12))
def test_beams_go_on_as_a_search_over_all_continuations_says(prompt: bytes, num_beams: int, num_steps: int) -> None:
    """Scores of our own, with a sort over all continuations, and each beam kept by its best one."""
    rng = random.Random(prompt)
    model = BeamModel()
    model.open("r", prompt, num_beams)
    scores = list(gaps(rng, num_beams))
    for position in range(num_steps):
        rng = random.Random(prompt + position.to_bytes(8))
        found = [(scores[beam] + gap, beam) for beam in range(num_beams) for gap in gaps(rng, num_beams)]
        best = sorted(found, reverse=True)[:num_beams]
        parents = model.choose("r", prompt, position)
        assert sorted(parents) == sorted(beam for _, beam in best)
        living = set(parents)
        assert all(parents[beam] == beam for beam in living), "a beam that goes on keeps its place"
        for beam in living:
            places = [place for place in range(num_beams) if parents[place] == beam]
            mine = [score for score, parent in best if parent == beam]
            assert len(places) == len(mine)
            scores_then = dict(zip([beam, *(place for place in places if place != beam)], mine, strict=True))
            assert model._scores["r"][beam] == scores_then[beam], "with its best continuation"
        scores = list(model._scores["r"])
        assert sorted(scores, reverse=True) == [score for score, _ in best]


def gaps(rng: random.Random, count: int) -> Sequence[float]:
    found, score = [], 0.0
    for rank in range(1, count + 1):
        score -= rng.expovariate(rank)
        found.append(score)
    return found


def test_searches_do_not_know_of_each_other_and_begin_again_alike() -> None:
    alone, both = BeamModel(), BeamModel()
    alone.open("a", b"prompt", 4)
    both.open("b", b"other", 4)
    both.open("a", b"prompt", 4)
    for position in range(10):
        both.choose("b", b"other", position)
        assert alone.choose("a", b"prompt", position) == both.choose("a", b"prompt", position)
    again = BeamModel()
    both.forget("b")
    both.forget("b")
    both.open("a", b"prompt", 4)
    again.open("a", b"prompt", 4)
    assert both.choose("a", b"prompt", 0) == again.choose("a", b"prompt", 0)
    with pytest.raises(KeyError):
        both.choose("b", b"other", 10)


# ---- times ----------------------------------------------------------------------------------------------------------


@given(moved_in=st.integers(0, 3), moved_out=st.integers(0, 3), copied=st.integers(0, 3), s_per_block=st.floats(0, 5))
def test_blocks_that_move_take_their_time_and_copies_none(
    moved_in: int, moved_out: int, copied: int, s_per_block: float
) -> None:
    step = plan(
        0,
        decodes=[0, 1],
        moves_in=tuple(BlockMove(each, each) for each in range(moved_in)),
        moves_out=tuple(BlockMove(each, each) for each in range(moved_out)),
        copies=tuple(BlockCopy(each, each + 10) for each in range(copied)),
    )
    resting = LinearCost(0.5, 0.25)
    assert MovingCost(resting, s_per_block).step_s(step) == resting.step_s(step) + s_per_block * (moved_in + moved_out)


@given(num_ratios=st.sampled_from([1, 2, 199, 200, 201, 1000]), seed=st.integers(0, 50), stretch=st.integers(0, 5))
def test_a_stretch_of_steps_is_a_stretch_of_the_record(num_ratios: int, seed: int, stretch: int) -> None:
    ratios = array("d", [1.0 + number / 1024 for number in range(num_ratios)])
    cost = UnsteadyCost(LinearCost(1.0, 0.0), ratios, seed)
    taken = [cost.step_s(plan(stretch * STRETCH + place)) for place in range(STRETCH)]
    begin = round((taken[0] - 1.0) * 1024)
    assert taken == [ratios[(begin + place) % num_ratios] for place in range(STRETCH)]
    assert begin + STRETCH <= num_ratios or begin == 0, "a stretch does not run over the end of a longer record"
    assert [cost.step_s(plan(stretch * STRETCH + place)) for place in (7, 3)] == [taken[7], taken[3]]


def test_stretches_and_seeds_are_drawn_apart() -> None:
    ratios = array("d", map(float, range(1, 5001)))
    begins = {
        UnsteadyCost(LinearCost(1.0, 0.0), ratios, seed).step_s(plan(stretch * STRETCH))
        for seed in range(4)
        for stretch in range(25)
    }
    assert len(begins) > 90
