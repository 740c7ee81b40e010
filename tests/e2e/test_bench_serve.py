"""`quire bench serve` against a server of the guide, briefly: what it prints and writes. No time is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire import cli
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.instruments.bench.load_run import Target, run_batch, run_closed, run_open
from quire.instruments.bench.offered_load import CHAT, COMPLETIONS, DrawnShape, drawn_requests
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess

CONFIG = EngineConfig(model="guide", kv_memory="8MiB", num_threads=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(CONFIG) as process:
        yield process


def bench(*arguments: str | Path, folder: Path) -> dict[str, Any]:
    path = folder / "found.json"
    assert cli.main(["bench", "serve", *map(str, arguments), "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found["samples"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_batch_is_read_as_it_comes(server: ServerProcess, endpoint: str) -> None:
    requests = [WorkloadRequest(tuple(range(300, 310 + index)), 5 + index) for index in range(6)]
    result = run_batch(Target(server.url, "guide", endpoint), requests)
    for outcome, request in zip(result.outcomes, requests, strict=True):
        assert outcome.is_done, outcome.error
        assert outcome.num_output_tokens == request.max_tokens
        assert 0 < len(outcome.events_s) <= request.max_tokens
        assert outcome.due_s <= outcome.sent_s <= outcome.events_s[0] <= outcome.events_s[-1] <= outcome.end_s
    if endpoint == COMPLETIONS:
        assert [outcome.num_prompt_tokens for outcome in result.outcomes] == [10, 11, 12, 13, 14, 15]


def test_texts_of_one_request_are_told_apart(server: ServerProcess) -> None:
    [outcome] = run_batch(Target(server.url, "guide", COMPLETIONS), [WorkloadRequest((300, 301), 6, n=3)]).outcomes
    assert outcome.is_done and outcome.num_output_tokens == 18
    assert len(outcome.gaps_s) == len(outcome.events_s) - 3


def test_errors_of_a_server_are_outcomes(server: ServerProcess) -> None:
    target = Target(server.url, "guide", COMPLETIONS)
    [outcome] = run_batch(target, [WorkloadRequest((10**6,), 4)]).outcomes
    assert outcome.status == 400 and outcome.error.startswith("400: prompt") and not outcome.is_done
    [outcome] = run_batch(Target("http://127.0.0.1:9", "guide", COMPLETIONS), [WorkloadRequest((5,), 4)]).outcomes
    assert outcome.status == 0 and "Error" in outcome.error


def test_what_does_not_end_in_time_is_cut_off(server: ServerProcess) -> None:
    source = drawn_requests(DrawnShape(8, 1900), 2048, seed=1)
    result = run_open(Target(server.url, "guide", COMPLETIONS), source, [0.0] * 8, 0.1, 0.1)
    assert all(outcome.is_cut_off for outcome in result.outcomes)
    closed = run_closed(
        Target(server.url, "guide", COMPLETIONS), drawn_requests(DrawnShape(8, 4), 2048, 2), 3, 0.5, 30.0
    )
    assert len(closed.outcomes) > 3 and all(outcome.is_done for outcome in closed.outcomes)


def test_a_server_that_runs_is_measured_at_rates(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = bench(
        *(server.url, "--rates", "4", "8", "--concurrency", "2", "--duration", "0.75", "--prompt-tokens", "8"),
        *("--output-tokens", "4", "--vocab-size", "2048", "--goodput", "ttft:60000", "--plot", tmp_path / "plot.svg"),
        folder=tmp_path,
    )
    printed = capsys.readouterr().out
    for text in ("## Load", "## Times", "| 2 at once", "| 4/s", "| 8/s", "time to first token", "between tokens"):
        assert text in printed
    assert "What HTTP costs" not in printed
    levels = samples["Load"]
    assert list(levels) == ["2 at once", "4/s", "8/s"]
    for level in levels.values():
        assert level["figures"]["num_failed"] == level["figures"]["num_cut_off"] == 0
        assert level["memory_bytes"] is None and level["requests"]
        assert level["figures"]["good"] == level["figures"]["completed"]
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")


def test_a_model_is_served_and_loaded_until_it_overflows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench(
        *("guide", "--kv-memory", "8MiB", "--num-threads", "1", "--max-num-seqs", "8", "--duration", "0.3"),
        *("--prompt-tokens", "8", "--output-tokens", "4", "--streams", "4", "--repeat", "2"),
        folder=tmp_path,
    )
    printed = capsys.readouterr().out
    for text in ("goodput at 2×, to the peak", "over HTTP to the engine alone", "first token, over HTTP, ms"):
        assert text in printed
    assert len(samples["Load"]) == 4
    assert all(level["memory_bytes"] for level in samples["Load"].values())
    assert all(run["client_s"] > 0 for run in samples["What HTTP costs"]["over HTTP"])
    assert "throughput with one reader to that without" in printed
    assert all(run["num_bytes"] > 0 for run in samples["What watching costs"]["one reader"])
    assert not any(run["num_bytes"] for run in samples["What watching costs"]["nobody"])


def test_a_shape_is_served_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench(
        *("--shape", "tiny", "--kv-memory", "1MiB", "--num-threads", "1", "--only", "http", "--streams", "3"),
        *("--repeat", "1", "--prompt-tokens", "8", "--output-tokens", "5"),
        folder=tmp_path,
    )
    assert list(samples) == ["What HTTP costs"]
    assert "What HTTP costs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["http://127.0.0.1:9", "--kv-memory", "1GiB"], "none with the URL"),
        (["http://127.0.0.1:9", "--only", "http"], "a server that the benchmark starts"),
        (["guide", "--goodput", "speed:1"], "goodput is 'speed:1'"),
        (["guide", "--rates", "0"], "rates is '0'"),
        (
            ["http://127.0.0.1:9", "--api-key-env", "NO_SUCH_NAME"],
            "the name of an environment variable that holds the key",
        ),
        (["http://127.0.0.1:9"], "refused"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *arguments]) in (1, 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("quire: error:") and what in last


# ---- the server in a process of its own -----------------------------------------------------------------------------


def test_a_server_of_our_own_says_what_it_takes(server: ServerProcess) -> None:
    assert server.exit_status is None and server.ready_s > 0
    assert server.children() and (server.resident_bytes() or 0) > 0 and (server.processor_s() or 0) > 0
    assert ask(f"{server.url}/v1/models").json()["data"][0]["id"] == "guide"


def test_a_server_that_cannot_start_is_an_error_with_its_words() -> None:
    with pytest.raises(ExecutionError, match="the server has ended with status 2"):
        ServerProcess(CONFIG, options=["--no-such-option"]).start()


def test_a_server_ends_when_it_is_told_to() -> None:
    server = ServerProcess(CONFIG).start()
    children = server.children()
    assert server.stop() == 0 and server.stop() == 0
    assert not [pid for pid in children if (Path("/proc") / str(pid) / "cmdline").exists()]
