"""What the server tells Prometheus, and what it writes into its log."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.errors import QuireError
from quire.engine.records.stats import EngineStats, ModelState
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError
from quire.serve.gate import Gate
from quire.serve.gate_limits import GateLimits
from quire.serve.logs import AGAIN_AFTER_S, MAX_MESSAGES, JsonFormatter, Seldom, TextFormatter, configure_logs
from quire.serve.metrics import FINISHED_WELL, VLLM_NAMES, CallMetrics, Metrics
from quire.serve.prometheus import Histogram, by_label, render
from quire.serve.stats_line import StatsLine
from quire.serve.tenants import ANYBODY
from support.bare_server import FakeModel
from support.only_model import only_model
from support.prometheus_text import Read, parse

STATS = EngineStats(num_running=3, num_waiting=1, num_blocks=8, num_used_blocks=2, queried_tokens_total=100)


def told(metrics: Metrics, stats: EngineStats = STATS, model_name: str = "guide") -> dict[str, Read]:
    gate = Gate(ManualClock(), GateLimits(4, 100), lambda: ModelState.READY)
    gate.enter(ANYBODY, 2, 30)
    with pytest.raises(ApiError):
        gate.enter(ANYBODY, 3, 30)
    calls = CallMetrics()
    calls.note_call(1)
    for status in (200, 200, 503):
        calls.note_request("/v1/completions", status)
    families = [*calls.families(), *metrics.families(gate, ModelState.READY, stats, model_name)]
    return parse(render(families).decode())


def filled(compat: str = "none") -> Metrics:
    metrics = Metrics(compat)
    metrics.note_first_token(0.02)
    metrics.note_gap(0.005)
    metrics.note_gap(100.0)
    metrics.note_tokens(10, 5, 8)
    metrics.note_finish("stop", 1.5)
    metrics.note_finish("abort", 0.5)
    metrics.note_lengths(10, 5)
    return metrics


def test_what_is_noted_is_told() -> None:
    families = told(filled())
    assert families["quire_http_requests_total"].value(endpoint="/v1/completions", status="200") == 2
    assert families["quire_http_requests_total"].value(endpoint="/v1/completions", status="503") == 1
    assert families["quire_http_requests_active"].value() == 1
    assert families["quire_prompt_tokens_total"].value() == 10
    assert families["quire_generated_tokens_total"].value() == 5
    assert families["quire_cached_prompt_tokens_total"].value() == 8
    assert families["quire_texts_finished_total"].value(reason="stop") == 1
    assert families["quire_inter_token_latency_seconds"].value("_count") == 2
    assert families["quire_inter_token_latency_seconds"].value("_bucket", le="0.005") == 1
    assert families["quire_inter_token_latency_seconds"].value("_bucket", le="60") == 1
    assert families["quire_inter_token_latency_seconds"].value("_sum") == pytest.approx(100.005)
    assert families["quire_request_duration_seconds"].value("_count") == 2
    assert families["quire_request_prompt_tokens"].value("_bucket", le="5") == 0
    assert families["quire_request_prompt_tokens"].value("_bucket", le="10") == 1
    assert families["quire_request_generated_tokens"].value("_sum") == 5
    assert families["quire_queue_sequences"].value() == 2
    assert families["quire_queue_tokens"].value() == 30
    assert families["quire_admission_rejections_total"].value(reason="queue_full") == 1
    assert families["quire_requests_running"].value() == 3
    assert families["quire_kv_usage_ratio"].value() == 0.25
    assert families["quire_ready"].value() == 1
    assert not [name for name in families if name.startswith("vllm:")]


def test_guesses_are_told_by_their_proposer_and_by_their_place() -> None:
    stats = EngineStats(
        drafts_total=3,
        verified_guesses={"forced": (2, 1, 0), "ngram": (1, 1, 1)},
        right_guesses={"forced": (2, 1, 0), "ngram": (1, 0, 0)},
    )
    families = told(Metrics("vllm"), stats=stats)
    assert families["quire_drafts_total"].value() == 3
    assert families["quire_draft_tokens_total"].value() == 6
    assert families["quire_accepted_draft_tokens_total"].value() == 4
    assert families["quire_proposed_tokens_total"].value(proposer="ngram") == 3
    assert families["quire_accepted_proposed_tokens_total"].value(proposer="ngram") == 1
    places = [families["quire_accepted_draft_tokens_per_pos_total"].value(position=place) for place in "012"]
    assert places == [3, 1, 0]
    labels = {"model_name": "guide", "engine": "0", "position": "0"}
    assert families["vllm:spec_decode_num_accepted_tokens_per_pos_total"].value(**labels) == 3


def test_names_of_vllm_stand_beside_ours_where_they_are_wanted() -> None:
    families = told(filled("vllm"))
    labels = {"model_name": "guide", "engine": "0"}
    for ours, theirs in VLLM_NAMES.items():
        assert families[theirs].kind == families[ours].kind
        assert len(families[theirs].samples) == len(families[ours].samples)
    assert families["vllm:num_requests_running"].value(**labels) == 3
    assert families["vllm:kv_cache_usage_perc"].value(**labels) == 0.25
    assert families["vllm:time_to_first_token_seconds"].value("_count", **labels) == 1
    assert families["vllm:request_success_total"].value(finished_reason="stop", **labels) == 1
    assert {"abort", "error"}.isdisjoint(FINISHED_WELL)


def test_every_name_says_what_it_counts() -> None:
    for name, family in told(filled("vllm")).items():
        assert name.startswith(("quire_", "process_", "vllm:"))
        assert (family.kind == "counter") == name.endswith("_total")


@given(st.dictionaries(st.text(max_size=20), st.floats(0, 1e300), max_size=5))
def test_any_text_can_be_a_label(values: dict[str, float]) -> None:
    values = {key: value for key, value in values.items() if key.isprintable()} | {"two\nlines": 1.0}
    read = parse(render([by_label("n", "gauge", 'Has "quotes" and \\.', "what", values)]).decode())
    assert sorted(read["n"].samples.values()) == sorted(values.values())


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    *buckets, total, count = histogram.samples()
    assert [bucket.value for bucket in buckets] == [
        sum(value <= bound for value in values) for bound in (0.1, 1.0, 10.0, float("inf"))
    ]
    assert (total.value, count.value) == (pytest.approx(sum(values)), len(values))


# ---- logs -----------------------------------------------------------------------------------------------------------


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("quire.serve", logging.INFO, "file", 1, message, None, None)
    made.created = 1_700_000_000.25
    made.__dict__["fields"] = fields
    return made


def test_text_is_a_line_with_names_and_values() -> None:
    line = TextFormatter().format(record("call", path="/v1/models", ms=1.5, tenant="a b", id='x"\n=y', none=""))
    assert line == (
        '2023-11-14T22:13:20.250Z INFO quire.serve call path=/v1/models ms=1.5 tenant="a b" id="x\\"\\n=y" none=""'
    )


def test_json_is_an_object_on_a_line() -> None:
    text = JsonFormatter().format(record("call", path="/\n\u2028", ms=1.5))
    assert "\n" not in text
    assert text.isascii()
    assert json.loads(text) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "quire.serve",
        "message": "call",
        "path": "/\n\u2028",
        "ms": 1.5,
    }


FIELD = re.compile(r' ([a-z]+)=("(?:[^"\\]|\\.)*"|[^ "=]+)')
FIELDS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=4),
    st.text(max_size=12) | st.sampled_from(['"', "a=b", "\\", "\x1b[31m", "é"]),
)


@given(FIELDS)
def test_no_value_that_a_client_has_chosen_makes_another_field_or_line(values: dict[str, str]) -> None:
    line = TextFormatter().format(record("call", **values))
    assert line.isprintable()
    assert line.isascii()
    head = "2023-11-14T22:13:20.250Z INFO quire.serve call"
    assert line.startswith(head)
    rest = line[len(head) :]
    found = FIELD.findall(rest)
    assert "".join(f" {name}={text}" for name, text in found) == rest
    assert {name: json.loads(text) if text.startswith('"') else text for name, text in found} == values


def test_what_is_said_again_and_again_is_written_now_and_then() -> None:
    clock = ManualClock(5.0)
    seldom = Seldom(clock)

    def passes(message: str) -> bool:
        return seldom.filter(record(message))

    assert [passes("full\nsince 3"), passes("full\nsince 4"), passes("other")] == [True, False, True]
    clock.advance(AGAIN_AFTER_S - 0.001)
    assert not passes("full")
    clock.advance(0.001)
    assert [passes("full"), passes("full")] == [True, False]
    for index in range(2 * MAX_MESSAGES):  # messages that all differ take no memory
        assert passes(f"message {index}")
        assert len(seldom._next_s) <= MAX_MESSAGES


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_errors_are_shown_with_their_origin(formatter: logging.Formatter) -> None:
    made = record("failed")
    try:
        raise QuireError("torn")
    except QuireError:
        made.exc_info = sys.exc_info()
    assert "QuireError: torn" in formatter.format(made)


def test_all_of_quire_is_logged_and_nothing_of_uvicorn() -> None:
    stream = io.StringIO()
    configure_logs("json", stream)
    logging.getLogger("quire.serve.access").info("call", extra={"fields": {"status": 200}})
    logging.getLogger("uvicorn.error").error("noise")
    logging.getLogger("quire.engine").info("it has begun")
    logging.getLogger("quire.engine").warning("it is slow")
    for _ in range(3):
        logging.getLogger("asyncio").error("no more files\nsocket 7")
    found = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert found == ["call", "it is slow", "no more files\nsocket 7"]
    assert not logging.getLogger("quire").propagate
    assert not logging.getLogger("asyncio").propagate
    configure_logs("text", stream)  # a second server in one process takes the place of the first
    logging.getLogger("quire.serve").info("again")
    assert stream.getvalue().count("again") == 1


# ---- the line of lately ---------------------------------------------------------------------------------------------


def test_the_line_of_lately_tells_what_has_happened_since() -> None:
    clock, model = ManualClock(), FakeModel()
    model.state = ModelState.READY
    models = only_model(model, ServerConfig(), clock)
    services, line = models.first, StatsLine(models)
    clock.advance(10)
    assert line.take() is None
    services.metrics.note_tokens(100, 50, 0)
    memory = {"num_blocks": 4, "num_used_blocks": 1, "queried_tokens_total": 100, "hit_tokens_total": 25}
    model.counts = EngineStats(num_running=2, **memory)
    clock.advance(10)
    assert line.take() == {
        "running": 2,
        "waiting": 0,
        "refused": 0,
        "prompt_tokens_per_s": 10.0,
        "output_tokens_per_s": 5.0,
        "kv_usage": 0.25,
        "cache_hits": 0.25,
    }
    assert line.take() is None
    with services.gate.enter(ANYBODY, 1, 5):
        clock.advance(1)
        assert (line.take() or {})["waiting"] == 1


def test_the_line_of_lately_goes_on_when_the_engine_was_started_again() -> None:
    clock, model = ManualClock(), FakeModel()
    model.counts = EngineStats(queried_tokens_total=1000, hit_tokens_total=900)
    models = only_model(model, ServerConfig(), clock)
    services, line = models.first, StatsLine(models)
    services.metrics.note_tokens(40, 10, 0)
    model.counts = EngineStats(queried_tokens_total=40, hit_tokens_total=10)
    clock.advance(10)
    assert (line.take() or {})["cache_hits"] == 0.25


def test_a_disk_cache_is_counted_and_its_absence_is_not_told() -> None:
    assert not [name for name in told(Metrics()) if name.startswith("quire_disk")]
    stats = EngineStats(num_disk_slots=9, num_kept_blocks=4, disk_hit_tokens_total=64, disk_blocks={"given up": 2})
    families = told(Metrics(), stats)
    assert {name for name in families if name.startswith("quire_disk")} == {
        "quire_disk_slots",
        "quire_disk_blocks_kept",
        "quire_disk_blocks_landing",
        "quire_disk_off",
        "quire_disk_hit_tokens_total",
        "quire_disk_blocks_total",
    }


def test_fetches_are_counted_by_what_became_of_them() -> None:
    stats = EngineStats(fetches={"done": 3, "there already": 1}, fetched_blocks_total=40, fetched_bytes_total=9000)
    families = told(Metrics(), stats)
    fetches = families["quire_prefix_fetches_total"]
    assert [fetches.value(outcome=outcome) for outcome in ("done", "there_already")] == [3, 1]
    assert families["quire_prefix_fetched_blocks_total"].value() == 40
    assert families["quire_prefix_fetched_bytes_total"].value() == 9000
    assert families["quire_prefix_fetch_seconds_total"].value() == 0
