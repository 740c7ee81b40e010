"""Figures of a load: which requests count, at both ends of the window, and what each measure is a time of."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ExecutionError, InvalidValueError
from quire.instruments.bench.load_figures import (
    BETWEEN_TOKENS,
    FIRST_TOKEN,
    MEASURES,
    PER_TOKEN,
    REJECTION,
    WHOLE,
    LoadFigures,
    Percentiles,
    is_good,
    read_objectives,
    summarize_load,
    times_of,
    tokens_between,
)
from quire.instruments.bench.load_run import LoadResult
from quire.instruments.bench.streams import Outcome, StreamReading

DONE = Outcome(1.0, 1.25, 4.0, 200, [2.0, 2.5, 3.5], [0.5, 1.0], num_prompt_tokens=7, num_output_tokens=6)


def summary(*outcomes: Outcome, duration_s: float = 10.0, **objectives: float) -> LoadFigures:
    return summarize_load("level", LoadResult(list(outcomes), duration_s, processor_s=0.5), objectives)


# ---- times ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "measure", "times"),
    [
        ({}, "ttft", [1000.0]),
        ({}, "tpot", [300.0]),
        ({}, "itl", [500.0, 1000.0]),
        ({}, "e2el", [3000.0]),
        ({"events_s": [], "gaps_s": []}, "ttft", []),
        ({"events_s": [], "gaps_s": []}, "tpot", []),
        ({"events_s": [2.0], "gaps_s": []}, "itl", []),
        ({"num_output_tokens": 1}, "tpot", []),
        ({"num_output_tokens": 2}, "tpot", [1500.0]),
        ({"error": "lost"}, "e2el", []),
        ({"is_cut_off": True}, "e2el", []),
        ({"status": 0}, "e2el", []),
        ({"error": "lost"}, "ttft", [1000.0]),
    ],
)
def test_each_measure_is_a_time_since_the_request_was_due(
    changes: dict[str, Any], measure: str, times: list[float]
) -> None:
    assert times_of(replace(DONE, **changes), measure) == pytest.approx(times)


@pytest.mark.parametrize(
    ("changes", "num_tokens", "problem"),
    [
        ({"error": "lost"}, None, "a request has failed: lost"),
        ({"error": "lost"}, 6, "a request has failed: lost"),
        ({}, 7, "the server sent 6 tokens, not 7"),
    ],
)
def test_a_result_that_must_be_complete(changes: dict[str, Any], num_tokens: int | None, problem: str) -> None:
    complete, other = LoadResult([DONE], 10.0, 0.5), LoadResult([DONE, replace(DONE, **changes)], 10.0, 0.5)
    complete.require_done()
    complete.require_done(6)
    with pytest.raises(ExecutionError, match=f"^{problem}$"):
        other.require_done(num_tokens)


def test_a_request_without_tokens_counts_until_its_end() -> None:
    assert (DONE.first_s, replace(DONE, events_s=[]).first_s) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "is_done", "is_rejected"),
    [
        ({}, True, False),
        ({"error": "lost"}, False, False),
        ({"is_cut_off": True}, False, False),
        ({"status": 0}, False, False),
        ({"status": 500}, False, False),
        ({"status": 429, "error": "429: busy"}, False, True),
        ({"status": 503}, False, True),
        ({"status": 201}, False, False),
    ],
)
def test_what_became_of_a_request(changes: dict[str, Any], is_done: bool, is_rejected: bool) -> None:
    outcome = replace(DONE, **changes)
    assert (outcome.is_done, outcome.is_rejected) == (is_done, is_rejected)


def test_a_request_that_nothing_has_become_of_has_nothing() -> None:
    outcome = Outcome(1.0)
    assert outcome == Outcome(1.0, 0.0, 0.0, 0, [], [], 0, 0, 0, "", False)
    reading = StreamReading(outcome)
    assert not reading.is_ended
    reading.take(b"data: [DO", 2.0)
    assert not reading.is_ended
    reading.take(b"NE]\n\n", 3.0)
    assert (reading.is_ended, outcome) == (True, Outcome(1.0))


@given(st.integers(0, 1 << 40))
def test_tokens_are_counted_from_the_beginning_of_a_span_until_before_its_end(seed: int) -> None:
    rng = random.Random(seed)
    events = sorted(float(rng.randrange(10)) for _ in range(rng.randint(0, 8)))
    num_tokens = rng.choice([0, len(events), 3 * len(events)])
    start, end = sorted((float(rng.randrange(10)), float(rng.randrange(10))))
    found = tokens_between(Outcome(0.0, events_s=events, num_output_tokens=num_tokens), start, end)
    inside = [event for event in events if start <= event and not end <= event]
    assert found == pytest.approx(len(inside) * (num_tokens / len(events) if num_tokens else 1))
    whole = tokens_between(Outcome(0.0, events_s=events, num_output_tokens=num_tokens), 0.0, 10.0)
    assert whole == pytest.approx(num_tokens or len(events)), "no token is counted twice, and none is lost"


# ---- objectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objectives", "kept"),
    [
        ({}, True),
        ({"ttft": 1000.0, "tpot": 300.0, "itl": 1000.0, "e2el": 3000.0}, True),
        ({"ttft": 999.0}, False),
        ({"tpot": 299.0}, False),
        ({"itl": 999.0}, False),
        ({"e2el": 2999.0}, False),
        ({"ttft": 1000.0, "itl": 1.0}, False),
    ],
)
def test_an_answer_is_good_if_it_kept_every_objective_to_the_millisecond(
    objectives: dict[str, float], kept: bool
) -> None:
    assert is_good(DONE, objectives) is kept
    assert not is_good(replace(DONE, error="lost"), objectives)
    bare = replace(DONE, events_s=[], gaps_s=[], end_s=1.0)
    assert is_good(bare, objectives), "what has no such time keeps it"


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "TTFT:5"])
def test_what_is_no_objective_is_shown_as_it_was_written(text: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        read_objectives(["itl:5", text])
    assert str(caught.value) == (
        f"goodput is {text!r}; allowed: ttft, tpot, itl, e2el, each with milliseconds, as ttft:500"
    )


def test_objectives_are_milliseconds_by_measure() -> None:
    assert read_objectives(["ttft:0.5", "e2el:1e3", "ttft:7"]) == {"ttft": 7.0, "e2el": 1000.0}
    assert MEASURES == {"ttft": FIRST_TOKEN, "tpot": PER_TOKEN, "itl": BETWEEN_TOKENS, "e2el": WHOLE}


# ---- a level -------------------------------------------------------------------------------------------------------


def done(due_s: float, end_s: float) -> Outcome:
    return Outcome(due_s, due_s, end_s, 200, [end_s], num_output_tokens=1)


def test_the_window_begins_after_a_fifth_and_ends_with_the_duration() -> None:
    ends = {1.999: 0, 2.0: 1, 9.999: 1, 10.0: 0, 11.0: 0}
    for moment, counted in ends.items():
        found = summary(done(0.0, moment))
        assert (found.completed, found.good, found.output_tokens) == pytest.approx((counted / 8,) * 3)
        assert (found.offered, found.num_requests, found.times_ms) == (0.0, 1, {})
        found = summary(done(moment, 99.0))
        assert (found.offered, found.completed) == (pytest.approx(counted / 8), 0.0)
        assert (FIRST_TOKEN in found.times_ms) == bool(counted)
    assert summary(*[done(5.0, 6.0)] * 3, duration_s=20.0).completed == pytest.approx(3 / 16)


def test_good_ones_are_a_part_of_those_that_ended_in_the_window() -> None:
    found = summary(done(3.0, 4.0), done(3.0, 5.0), done(0.5, 1.5), e2el=1000.0)
    assert (found.completed, found.good) == (pytest.approx(2 / 8), pytest.approx(1 / 8))


def test_rejected_failed_and_cut_off_ones_are_told_apart() -> None:
    rejected = Outcome(5.0, 5.0, 5.25, 429, error="429: busy")
    lost = Outcome(5.0, 5.0, 6.0, 0, error="lost")
    broken = Outcome(5.0, 5.0, 7.0, 200, [6.0], error="broken")
    refused = Outcome(5.0, 5.0, 7.0, 400, [6.5], error="400: no")
    cut = Outcome(9.0, 9.0, 12.0, 200, [9.5], is_cut_off=True)
    found = summary(rejected, lost, broken, refused, cut)
    assert (found.num_requests, found.num_rejected, found.num_failed, found.num_cut_off) == (5, 1, 3, 1)
    assert (found.first_error, found.completed) == ("lost", 0.0)
    assert found.times_ms == {
        REJECTION: Percentiles(250.0, 250.0, 250.0),
        FIRST_TOKEN: Percentiles(1000.0, 1000.0, 1000.0),  # of what was answered, broken or cut off, and no 400
    }
    assert summary(done(3.0, 4.0)).first_error == ""


def test_lateness_and_the_share_of_a_processor_are_of_this_process() -> None:
    outcomes = [replace(done(float(at % 10), 12.0), sent_s=at % 10 + at / 1000) for at in range(100)]
    found = summary(*outcomes)
    assert found.lateness_ms == pytest.approx(99.0)
    assert found.processor_share == pytest.approx(0.5 / 12.0), "of the time until the last one has ended"
    assert summary().lateness_ms == 0.0


def test_a_level_in_a_line() -> None:
    found = summary(done(3.0, 4.5), done(3.0, 5.0))
    assert found.summary == "level: 0.25 completed/s, 0 tok/s, first token p99 2,000 ms"
    assert summary().summary == "level: 0.00 completed/s, 0 tok/s, no first token"
