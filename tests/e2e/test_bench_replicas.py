"""`quire bench replicas`: an engine is lost among real streams, whose texts are compared, and two engines are timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire import cli
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.instruments.bench import replicas
from quire.instruments.bench.replica_predictions import Figures, read_log
from quire.simulate.cost.fitted import FittedCost
from quire.simulate.cost.linear import LinearCost
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.drawn import DrawnPrompts, drawn_requests
from quire.simulate.workload.lengths import UniformLengths
from quire.simulate.workload.offered import OpenLoop


def test_streams_of_a_lost_engine_end_with_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "NUM_ENGINES", 2)
    out = tmp_path / "run.json"
    line = f"bench replicas --only loss --streams 3 --output-tokens 300 --repeat 1 --json {out}"
    assert cli.main(line.split()) == cli.DONE
    samples = json.loads(out.read_text())["samples"]["When an engine is lost"]
    assert set(samples) == {"calm", "killed", "restarted"}
    for turns in samples.values():
        (turn,) = turns
        assert (turn["num_lost"], turn["num_changed"], len(turn["pauses_s"])) == (0, 0, 3)


def test_streams_that_are_refused_are_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "NUM_ENGINES", 1)
    line = "bench replicas --only loss --streams 2 --output-tokens 100000 --repeat 1"
    assert cli.main(line.split()) == 1
    assert "streams ended before all had started: 400: " in capsys.readouterr().err


def test_one_engine_and_two_run_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, workload = tmp_path / "run.json", tmp_path / "small.jsonl"
    lines = [{"id": number, "prompt_token_ids": [300 + number] * 20, "max_tokens": 8} for number in range(6)]
    workload.write_text("\n".join(map(json.dumps, lines)))
    line = f"bench replicas --only speed --shape tiny --workload {workload} --limit 4 --repeat 1 --json {out}"
    assert cli.main([*line.split(), "--kv-memory", "8MiB"]) == cli.DONE
    assert "4 requests of small.jsonl at once over HTTP" in capsys.readouterr().out
    samples = json.loads(out.read_text())["samples"]["Two engines"]
    assert [len(samples[name]) for name in ("one engine", "two engines")] == [1, 1]
    assert all(turn["wall_s"] > 0 for turns in samples.values() for turn in turns)


@pytest.mark.parametrize("part", ["speed", "predictions"])
def test_a_workload_is_needed(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "replicas", "--only", part]) == cli.MISUSED
    assert "workload" in capsys.readouterr().err


def test_a_workload_is_served_and_simulated(tmp_path: Path) -> None:
    out, workload = tmp_path / "run.json", tmp_path / "small.jsonl"
    lines = [{"prompt_token_ids": [7] * 32 + [number] * 8, "max_tokens": 4} for number in range(6)]
    workload.write_text("\n".join(map(json.dumps, lines)))
    line = f"bench replicas --only predictions --shape tiny --workload {workload} --record 0.4 --repeat 1"
    assert cli.main([*line.split(), "--kv-memory", "8MiB", "--json", str(out)]) == cli.DONE
    samples = json.loads(out.read_text())["samples"]["Predicted"]
    for manner in ("at once", "as they come"):
        (measured,), (predicted,) = samples[manner]["measured"], samples[manner]["predicted"]
        assert set(measured) == set(predicted)
        assert min(*measured.values(), *predicted.values()) > 0
        for figures in (measured, predicted):  # the prefix is computed at each engine, or at one of them
            assert 6 * 8 < figures["computed_tokens"] <= 6 * 8 + 2 * 32 + 16


def test_steps_of_a_log_predict_the_run_that_it_is_of(tmp_path: Path) -> None:
    setup = EngineSetup(
        KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,)),)),
        MemoryConfig(num_blocks=400),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=1024),
        LinearCost(0.004, 2e-4),
    )
    prompts = DrawnPrompts(UniformLengths((10, 200), (5, 40)), 1024)
    requests = list(drawn_requests(Arrivals(20.0), prompts, duration_s=4.0, seed=3))
    with (tmp_path / "steps").open("wb") as file:
        result = Simulation([PagedEngine(setup, log=file)], OpenLoop(requests)).run()
    logged, steps = read_log(tmp_path / "steps", [(0.0, 1e9)])
    assert (logged.spec, logged.memory, logged.scheduler) == (setup.spec, setup.memory, setup.scheduler)
    assert len(steps) == result.num_steps
    assert len(read_log(tmp_path / "steps", [(1.0, 2.0)])[1]) < len(steps)
    figures = Figures.predicted([replace(logged, cost=FittedCost.fit(steps))], requests)
    assert figures.tokens_per_s == pytest.approx(result.output_tokens_per_s, rel=0.01)
    assert figures.first_p95_s == pytest.approx(result.latencies["ttft_s"].p95, rel=0.05)
    assert figures.computed_tokens == result.prompt_tokens - result.hit_tokens


def test_the_router_computes_fewer_tokens_than_engines_that_take_turns(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert cli.main(f"bench replicas --only routing --duration 0.3 --json {out}".split()) == cli.DONE
    results = json.loads(out.read_text())
    assert not results["timed"], "it is the same on a busy machine"
    prefixes, chats = results["samples"]["Routing"].values()
    assert prefixes["computed_tokens"][0] >= prefixes["computed_tokens"][1]
    assert chats["computed_tokens"][0] > chats["computed_tokens"][1]
    for runs in (prefixes, chats):
        assert [each["count"] > 0 for each in runs["first_token_s"]] == [True, True]
        assert runs["command"].startswith("quire simulate llama-3.1-8b")
