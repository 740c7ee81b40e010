"""Load that is offered to servers: when requests are due, what they are, what is said of what came of them."""

from __future__ import annotations

import itertools
import json
import statistics
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidValueError
from quire.instruments.bench.load_figures import (
    FIRST_TOKEN,
    REJECTION,
    is_good,
    percentiles,
    read_objectives,
    summarize_load,
    tokens_between,
)
from quire.instruments.bench.load_plot import draw_load
from quire.instruments.bench.load_run import LoadResult
from quire.instruments.bench.offered_load import (
    CHAT,
    COMPLETIONS,
    DrawnShape,
    drawn_requests,
    request_body,
    request_source,
    require_token_ids,
)
from quire.instruments.bench.serve import read_rates, request_rate
from quire.instruments.bench.streams import Outcome, StreamReading
from quire.instruments.bench.workload_file import Workload, WorkloadError, WorkloadRequest
from quire.instruments.http.events import EventReader
from quire.simulate.workload.arrivals import arrival_times

EVENTS = (b'{"choices": []}', '{"text": "größer 😀"}'.encode(), b"[DONE]")
STREAM = b": ping\n\n" + b"".join(b"data: " + data + b"\n\n" for data in EVENTS)


# ---- when ---------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_are_those_of_the_seed_and_of_the_rate() -> None:
    times = arrival_times(50.0, 200.0, pattern="poisson", seed=3)
    assert times == arrival_times(50.0, 200.0, pattern="poisson", seed=3)
    assert times != arrival_times(50.0, 200.0, pattern="poisson", seed=4)
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 200.0
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)  # as exponential gaps have it


def test_fixed_arrivals_are_evenly_spaced() -> None:
    assert arrival_times(4.0, 1.0, pattern="fixed", seed=9) == [0.0, 0.25, 0.5, 0.75]


# ---- what -----------------------------------------------------------------------------------------------------------


def test_drawn_requests_have_lengths_within_the_spread_and_ids_of_the_vocabulary() -> None:
    requests = list(itertools.islice(drawn_requests(DrawnShape(100, 40, 0.5), 1000, seed=1), 200))
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert {20 <= request.max_tokens <= 60 for request in requests} == {True}
    ids = [token for request in requests for token in request.prompt_token_ids]
    assert min(ids) >= 300 and max(ids) < 950
    assert requests == list(itertools.islice(drawn_requests(DrawnShape(100, 40, 0.5), 1000, seed=1), 200))


@pytest.mark.parametrize("workload", [None, Workload("some", (WorkloadRequest((300, 301), 4),))])
def test_no_two_levels_share_token_ids(workload: Workload | None) -> None:
    source = request_source(workload, DrawnShape(4, 2), vocab_size=150_000, seed=0)
    levels = [[next(requests).prompt_token_ids for _ in range(3)] for requests in map(source, range(3))]
    found = [prompt for level in levels for prompt in level]
    assert len(set(found)) == len(found)


def test_bodies_ask_for_a_stream_with_usage() -> None:
    request = WorkloadRequest((5, 6), 7, n=2)
    body = json.loads(request_body(request, COMPLETIONS, "guide"))
    assert body["prompt"] == [5, 6] and body["max_tokens"] == 7 and body["n"] == 2 and body["temperature"] == 1.0
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"]
    chat = json.loads(request_body(request, CHAT, "guide"))
    assert len(chat["messages"][0]["content"].split()) == 2 and chat["max_completion_tokens"] == 7
    with pytest.raises(WorkloadError):
        require_token_ids(Workload("some", (request,)), CHAT)


# ---- streams --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 12), max_size=40), st.booleans())
def test_events_are_read_wherever_their_bytes_are_cut(sizes: list[int], with_returns: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if with_returns else STREAM
    reader, found, at = EventReader(), list[bytes](), 0
    for size in [*sizes, len(stream)]:
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == list(EVENTS)


def test_an_event_may_have_several_lines_and_other_fields() -> None:
    assert EventReader().feed(b"event: x\ndata: a\ndata:b\nid: 3\n\nid: 4\n\n") == [b"a\nb"]


def read_stream(*events: tuple[float, object]) -> tuple[Outcome, StreamReading]:
    outcome = Outcome(due_s=1.0, sent_s=1.1)
    reading = StreamReading(outcome)
    for now, event in events:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        reading.take(b"data: " + data + b"\n\n", now)
    return outcome, reading


def test_the_role_and_the_end_of_a_chat_are_no_tokens() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
    outcome, reading = read_stream(
        (2.0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        (2.0, {"choices": [{"index": 0, "delta": {"content": "a"}}]}),
        (3.0, {"choices": [{"index": 0, "delta": {"content": "b"}}]}),
        (5.0, {"choices": [{"index": 0, "delta": {"content": "c"}}]}),
        (5.0, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}),
        (5.0, {"choices": [], "usage": usage}),
        (5.0, b"[DONE]"),
    )
    assert reading.is_ended and not outcome.error
    assert outcome.events_s == [2.0, 3.0, 5.0] and outcome.gaps_s == [1.0, 2.0]
    assert (outcome.first_token_s, outcome.token_s) == (1.0, 0.75)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens) == (9, 5, 8)


def test_gaps_are_those_between_tokens_of_one_text() -> None:
    outcome, _ = read_stream(
        (1.0, {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}),
        (4.0, {"choices": [{"index": 1, "text": "c", "finish_reason": "length"}]}),
        (9.0, {"choices": [{"index": 0, "text": "d", "finish_reason": "length"}]}),
    )
    assert outcome.gaps_s == [3.0, 8.0]


@pytest.mark.parametrize("event", [{"error": {"message": "lost"}}, b"{", b'{"choices": 3}'])
def test_a_stream_that_goes_wrong_is_an_error_of_its_request(event: object) -> None:
    outcome, _ = read_stream((1.0, {"choices": [{"text": "a"}]}), (2.0, event))
    outcome.status = 200
    assert outcome.error and not outcome.is_done


# ---- figures --------------------------------------------------------------------------------------------------------


def done(due_s: float, first_s: float, end_s: float, num_tokens: int = 2) -> Outcome:
    width = (end_s - first_s) / (num_tokens - 1)
    events = [first_s + width * index for index in range(num_tokens)]
    gaps = [width] * (num_tokens - 1)
    return Outcome(due_s, due_s, end_s, 200, events, gaps, num_output_tokens=num_tokens)


def test_percentiles_are_samples() -> None:
    found = percentiles([float(value) for value in reversed(range(200))])
    assert (found.p50, found.p90, found.p99) == (100.0, 180.0, 198.0)
    assert percentiles([7.0]).p99 == 7.0


def test_objectives_are_read_and_kept() -> None:
    objectives = read_objectives(["ttft:500", "itl:100"])
    assert is_good(done(0.0, 0.5, 0.6), objectives)
    assert not is_good(done(0.0, 0.51, 0.6), objectives)
    assert not is_good(done(0.0, 0.5, 0.601), objectives)
    failed = done(0.0, 0.1, 0.2)
    failed.error = "lost"
    assert not is_good(failed, {})
    for text in ("ttft", "ttft:", "ttft:-1", "ttft:inf", "speed:1"):
        with pytest.raises(InvalidValueError):
            read_objectives([text])


def test_rates_are_those_of_the_window() -> None:
    # Ten seconds, of which the first two warm up: one request a second, each takes a second.
    outcomes = [done(float(at), at + 0.5, at + 1.0) for at in range(10)]
    outcomes.append(Outcome(5.0, 5.0, 5.002, 503, error="503: busy"))
    outcomes.append(Outcome(9.5, 9.5, 12.0, is_cut_off=True))
    outcomes.append(Outcome(3.0, 3.0, 3.1, error="ConnectionResetError: lost"))
    figures = summarize_load("1/s", LoadResult(outcomes, 10.0, 0.12), {"ttft": 400.0})
    assert figures.completed == pytest.approx(1.0)  # those that ended from 2.0 until before 10.0
    assert figures.good == 0.0
    assert figures.offered == pytest.approx(11 / 8)
    assert (figures.num_requests, figures.num_rejected, figures.num_failed, figures.num_cut_off) == (13, 1, 1, 1)
    assert figures.times_ms[FIRST_TOKEN].p99 == pytest.approx(500.0)
    assert figures.times_ms[REJECTION].p50 == pytest.approx(2.0)
    assert figures.first_error == "ConnectionResetError: lost"
    assert figures.processor_share == pytest.approx(0.01)
    assert request_rate(LoadResult(outcomes, 10.0, 0.0), figures) == pytest.approx(1.0, rel=0.1)


def test_tokens_are_spread_over_the_events_that_brought_them() -> None:
    outcome = done(0.0, 1.0, 5.0, num_tokens=5)
    outcome.num_output_tokens = 10
    assert tokens_between(outcome, 2.0, 4.0) == 4.0
    assert tokens_between(Outcome(0.0), 0.0, 9.0) == 0.0


def test_rates_are_auto_or_numbers() -> None:
    assert read_rates(["auto"]) is None
    assert read_rates(["0.5", "4"]) == (0.5, 4.0)
    for texts in (["auto", "1"], ["0"], ["x"], ["inf"]):
        with pytest.raises(InvalidValueError):
            read_rates(texts)


def test_the_plot_has_a_point_for_every_level() -> None:
    levels = [
        summarize_load(f"{rate}/s", LoadResult([done(3.0, 3.0 + rate, 9.0)] * rate, 10.0, 0.0), {})
        for rate in (1, 2, 4)
    ]
    drawn = list(ElementTree.fromstring(draw_load("a plot <&>", levels)).iter())
    circles = [node for node in drawn if node.tag.endswith("circle")]
    assert len(circles) == 3 * (3 + 3 + 2)
    assert any(node.text == "a plot <&>" for node in drawn)
