"""Workloads: what is drawn is what was asked for, the same seed draws the same, and traces are read or refused."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import statistics
import tracemalloc
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError
from quire.simulate.lengths import Length
from quire.simulate.workload.arrivals import PATTERNS, Arrivals
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.conversations import Conversations, Turns
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes, drawn_requests
from quire.simulate.workload.lengths import (
    ALPACA,
    SHAREGPT,
    FixedLengths,
    Lengths,
    LognormalLengths,
    SaidLengths,
    UniformLengths,
)
from quire.simulate.workload.offered import OpenLoop
from quire.simulate.workload.trace import Trace, TraceError, tokens_of_blocks

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109

2023-11-16 18:15:51.2224670,879,55
""".splitlines()
MOONCAKE = [
    '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]}',
    '{"timestamp": 3000, "input_length": 1200, "output_length": 7, "hash_ids": [1, 2, 4]}',
]

seeds = st.integers(0, 1 << 32)
patterns = st.sampled_from(PATTERNS)
LONG = SaidLengths(Length.parse("5000"), Length.parse("400/1500"))


# ---- when ---------------------------------------------------------------------------------------------------------


@given(pattern=patterns, rate=st.floats(0.1, 100.0), seed=seeds)
def test_arrivals_never_go_back_and_are_those_of_their_seed(pattern: str, rate: float, seed: int) -> None:
    arrivals = Arrivals(rate, pattern, variation=2.0)
    times = list(itertools.islice(arrivals.times(seed), 200))
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times == list(itertools.islice(arrivals.times(seed), 200))


@pytest.mark.parametrize(
    ("make", "field", "low", "high"),
    [
        (lambda value: FixedLengths(value, 5), "prompt tokens", 1, 1 << 30),
        (lambda value: FixedLengths(5, value), "output tokens", 1, 1 << 30),
        (lambda value: UniformLengths((value, 1 << 30), (1, 5)), "least prompt tokens", 1, 1 << 30),
        (lambda value: UniformLengths((3, value), (1, 5)), "most prompt tokens", 3, 1 << 30),
        (lambda value: UniformLengths((1, 5), (value, 1 << 30)), "least output tokens", 1, 1 << 30),
        (lambda value: UniformLengths((1, 5), (3, value)), "most output tokens", 3, 1 << 30),
        (lambda value: LognormalLengths("", value, 5.0), "mean of prompt tokens", 1, 1_000_000_000),
        (lambda value: LognormalLengths("", 5.0, value), "mean of output tokens", 1, 1_000_000_000),
        (lambda value: LognormalLengths("", 5.0, 5.0, value), "spread", 0, 3),
    ],
)
def test_lengths_have_bounds_and_reach_them(make: Callable[[int], Lengths], field: str, low: int, high: int) -> None:
    rng = random.Random(0)
    for value in (low, high):
        prompt, output = make(value).draw(rng, 1000)
        assert prompt >= 1 <= output
        assert prompt + output <= 1000
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidConfigError, match=f"^{field} is {value}; "):
            make(value)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_arrivals_come_at_their_rate(pattern: str) -> None:
    arrivals = Arrivals(20.0, pattern, variation=3.0, period_s=10.0)
    within = itertools.takewhile(lambda time_s: time_s < 2000.0, arrivals.times(1))
    assert sum(1 for _ in within) == pytest.approx(40_000, rel=0.05)


@pytest.mark.parametrize("variation", [0.3, 1.0, 3.0])
def test_gamma_gaps_vary_as_was_asked(variation: float) -> None:
    times = list(itertools.islice(Arrivals(5.0, "gamma", variation=variation).times(0), 40_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_bursts_bring_their_share_in_their_time() -> None:
    arrivals = Arrivals(50.0, "bursts", peak=5.0, burst_share=0.1, period_s=20.0)
    times = list(itertools.takewhile(lambda time_s: time_s < 2000.0, arrivals.times(2)))
    in_bursts = sum(time_s % 20.0 < 2.0 for time_s in times)
    assert in_bursts / len(times) == pytest.approx(0.5, rel=0.05)


def test_a_burst_cannot_bring_more_than_all() -> None:
    with pytest.raises(InvalidConfigError, match="peak"):
        Arrivals(1.0, "bursts", peak=11.0, burst_share=0.1)


# ---- what -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [SHAREGPT, ALPACA])
def test_lognormal_lengths_have_the_published_means(trace: LognormalLengths) -> None:
    rng = random.Random(0)
    prompts, outputs = zip(*(trace.draw(rng, 1 << 20) for _ in range(20_000)), strict=True)
    assert statistics.fmean(prompts) == pytest.approx(trace.prompt, rel=0.03)
    assert statistics.fmean(outputs) == pytest.approx(trace.output, rel=0.03)


@given(longest=st.integers(2, 4000), seed=seeds)
def test_lengths_fit(longest: int, seed: int) -> None:
    rng = random.Random(seed)
    for lengths in (LognormalLengths("", 5.0, 5.0), FixedLengths(500, 700), UniformLengths((1, 900), (1, 800)), LONG):
        prompt, output = lengths.draw(rng, longest)
        assert prompt >= 1 and output >= 1 and prompt + output <= longest


@given(seed=seeds, count=st.integers(1, 4), num_tokens=st.integers(1, 40))
def test_shared_prefixes_are_shared_and_nothing_else_is(seed: int, count: int, num_tokens: int) -> None:
    prompts = DrawnPrompts(FixedLengths(20, 4), prefixes=SharedPrefixes(count, num_tokens))
    drawn = [prompt for prompt, _ in itertools.islice(prompts.draw(seed), 30)]
    assert {len(prompt) for prompt in drawn} == {num_tokens + 20}
    assert len({prompt[:num_tokens].tobytes() for prompt in drawn}) <= count
    assert len({prompt[num_tokens:].tobytes() for prompt in drawn}) == 30


def test_another_rate_asks_for_the_same_prompts() -> None:
    slow, fast = (
        list(drawn_requests(Arrivals(rate), DrawnPrompts(SHAREGPT), duration_s=1000.0, seed=5, limit=50))
        for rate in (1.0, 8.0)
    )
    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert slow[-1].due_s > 4 * fast[-1].due_s


def test_a_closed_loop_never_has_more_under_way_than_users() -> None:
    loop = ClosedLoop(3, DrawnPrompts(FixedLengths(4, 4)), duration_s=30.0, seed=0, thinking_s=1.0)
    rng, under_way, now_s, num_taken = random.Random(1), [], 0.0, 0
    while True:
        due_s = loop.next_due_s()
        if due_s is not None:
            under_way.append(loop.take().request_id)
            now_s, num_taken = max(now_s, due_s), num_taken + 1
            assert due_s < 30.0
        elif under_way:
            now_s += rng.random()
            loop.ended(under_way.pop(rng.randrange(len(under_way))), array("i", [1]), now_s)
        else:
            break
        assert len(under_way) <= 3
    assert num_taken > 10


def test_each_turn_of_a_chat_repeats_what_was_said() -> None:
    prompts = DrawnPrompts(FixedLengths(10, 6), longest=200)
    chats = Conversations(Arrivals(1.0), prompts, Turns(3, 5.0), duration_s=20.0, seed=3)
    said: dict[str, array[int]] = {}
    turns: dict[str, int] = {}
    while chats.next_due_s() is not None:
        turn = chats.take()
        name, _, number = turn.request_id.partition(".")
        assert int(number) == turns.get(name, 0)
        turns[name] = int(number) + 1
        before = said.get(name, array("i"))
        assert turn.prompt[: len(before)] == before
        assert len(turn.prompt) == len(before) + 10
        answer = array("i", [int(number)] * 6)
        said[name] = turn.prompt + answer
        chats.ended(turn.request_id, answer, turn.due_s + 1.0)
    assert len(turns) > 8
    assert set(turns.values()) == {3}


def test_a_chat_goes_on_alike_whatever_becomes_of_the_others() -> None:
    def turns_of(order: str) -> dict[str, tuple[int, int]]:
        prompts = DrawnPrompts(UniformLengths((1, 30), (1, 30)), longest=4000)
        chats = Conversations(Arrivals(1.0), prompts, Turns(3, 5.0), duration_s=20.0, seed=3)
        taken, waiting = {}, []
        while chats.next_due_s() is not None or waiting:
            if chats.next_due_s() is not None:
                turn = chats.take()
                taken[turn.request_id] = len(turn.prompt), turn.num_output_tokens
                waiting.append(turn)
            if len(waiting) > 4 or chats.next_due_s() is None:
                turn = waiting.pop(0 if order == "first" else -1)
                chats.ended(turn.request_id, array("i", [1] * turn.num_output_tokens), turn.due_s + 1.0)
        return taken

    assert turns_of("first") == turns_of("last")


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_an_azure_trace_is_read() -> None:
    trace = Trace(AZURE, name="azure")
    requests = list(trace)
    assert [(len(request.prompt), request.num_output_tokens) for request in requests] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert [request.due_s for request in requests] == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-5)
    assert (trace.num_read, trace.num_skipped) == (3, 0)
    doubled = list(Trace(AZURE, name="azure", speed=2.0))
    assert doubled[-1].due_s == pytest.approx(requests[-1].due_s / 2)


def test_the_same_trace_as_json_says_the_same() -> None:
    as_json = [json.dumps(row) for row in csv.DictReader(line for line in AZURE if line)]
    read = [[(r.due_s, r.prompt, r.num_output_tokens) for r in Trace(lines, name="t")] for lines in (AZURE, as_json)]
    assert read[0] == read[1]


def test_equal_hash_ids_of_a_mooncake_trace_are_equal_tokens() -> None:
    first, second = Trace(MOONCAKE, name="mooncake")
    assert second.due_s == 3.0
    assert (len(first.prompt), len(second.prompt), second.num_output_tokens) == (1030, 1200, 7)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:1030]


@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=4), other=st.lists(st.integers(0, 5), min_size=1, max_size=4)
)
def test_blocks_are_equal_just_where_their_ids_are(ids: list[int], other: list[int]) -> None:
    texts = tokens_of_blocks(ids, 512 * len(ids)), tokens_of_blocks(other, 512 * len(other))
    for index, (one, two) in enumerate(zip(ids, other, strict=False)):
        block = slice(512 * index, 512 * (index + 1))
        assert (texts[0][block] == texts[1][block]) == (one == two)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("2023-11-16 18:15:47,374", "3 cells"),
        ("2023-11-16 18:15:47,374,44,1", "3 cells"),
        ("soon,374,44", "TIMESTAMP"),
        ("nan,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:47,0,44", "ContextTokens"),
        ("2023-11-16 18:15:47,374,-1", "GeneratedTokens"),
        ("2023-11-16 18:15:47,374,1e3", "GeneratedTokens"),
        ("2023-11-16 18:15:47,99999999999999999999999999,4", "ContextTokens"),
        ("2023-11-16 18:15:40,374,44", "time"),
        ("{", "JSON object"),
        ('{"TIMESTAMP": 1}', "fields"),
        ("[" * 100_000, "3 cells"),
    ],
)
def test_a_line_that_is_no_request_is_named_and_refused_or_counted(line: str, named: str) -> None:
    lines = [*AZURE[:2], line, *AZURE[2:]]
    with pytest.raises(TraceError, match=r"^azure, line 3") as caught:
        list(Trace(lines, name="azure"))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    trace = Trace(lines, name="azure", malformed="skip")
    assert len(list(trace)) == 3
    assert (trace.num_read, trace.num_skipped) == (3, 1)


@pytest.mark.parametrize("ids", ["[1]", "[1, 2, 3.5]", "[1, 2, true]", '"x"', "null", "[1, 2, 36893488147419103232]"])
def test_hash_ids_must_be_there_for_all_tokens(ids: str) -> None:
    line = f'{{"timestamp": 5, "input_length": 1030, "output_length": 5, "hash_ids": {ids}}}'
    with pytest.raises(TraceError, match="line 1: hash_ids"):
        list(Trace([line], name="mooncake"))


def test_a_prompt_takes_no_more_memory_than_its_tokens_however_many_blocks_its_line_names() -> None:
    ids = list(range(20_000))  # of 512 tokens each: 40 MB
    line = json.dumps({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": ids})
    tracemalloc.start()
    (request,) = Trace([line], name="mooncake")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert request.prompt == tokens_of_blocks([0, 1], 513)
    assert len(request.prompt) == 513
    assert most < 8_000_000


@pytest.mark.parametrize(
    ("field", "low", "high", "allowed"),
    [
        ("ContextTokens", 1, 1 << 24, "an integer from 1 to 16777216"),
        ("GeneratedTokens", 1, 1 << 24, "an integer from 1 to 16777216"),
        ("TIMESTAMP", -(10**15) + 1, 10**15 - 1, "a time"),
    ],
)
def test_each_number_of_a_line_has_bounds_and_reaches_them(field: str, low: int, high: int, allowed: str) -> None:
    line = {"TIMESTAMP": 5, "ContextTokens": 3, "GeneratedTokens": 4}
    for value in (low, high) if field != "ContextTokens" else (low,):  # the longest prompt takes 64 MB
        assert len(list(Trace([json.dumps(line | {field: value})], name="azure"))) == 1
    refused: tuple[object, ...] = (low - 1, high + 1, True, None, [low], "x")
    for value in refused:
        with pytest.raises(TraceError) as caught:
            list(Trace([json.dumps(line | {field: value})], name="azure"))
        assert str(caught.value) == f"azure, line 1: {field} is {value!r}; allowed: {allowed}"


@given(text=st.text(max_size=200))
def test_whatever_a_line_is_it_is_read_or_refused(text: str) -> None:
    for lines in ([text], [AZURE[0], text], [*MOONCAKE, text]):
        try:
            list(Trace(lines, name="any"))
        except TraceError as error:
            assert str(error).startswith("any, line ")


def test_reading_a_trace_takes_no_more_memory_where_it_is_longer() -> None:
    def peak(num_lines: int) -> int:
        lines = itertools.chain([AZURE[0]], (f"{number / 10},50,5" for number in range(num_lines)))
        tracemalloc.start()
        source = OpenLoop(Trace(lines, name="long"))
        while source.next_due_s() is not None:
            source.take()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    short = peak(200)
    assert peak(5000) < 1.5 * short + 20_000


def test_a_file_is_a_trace_as_it_is() -> None:
    assert len(list(Trace(io.StringIO("\n".join(AZURE)), name="azure"))) == 3
