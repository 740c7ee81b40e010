"""The benchmarks with tiny sizes: what they print and write. No time is looked at."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from quire import LLM, SamplingParams, cli
from quire import _benchmarks as timed
from quire import _native as native
from quire.cli.model_shapes import find_shape
from quire.compute.models.source import ModelFolder
from quire.compute.native.load import kernels_for
from quire.compute.weights.decoder_weights import compact_bytes, weight_bytes
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError, ExecutionError
from quire.engine.factory import plan_engine
from quire.instruments.bench import gpu_engine
from quire.instruments.bench.attention_layout import PagedLayers
from quire.instruments.bench.flags import SHAPES
from quire.instruments.bench.gpu_predictions import whole_runs
from quire.instruments.bench.installation import installed_bytes
from quire.instruments.bench.kernels import ProductRun, together
from quire.instruments.bench.measured_engine import MeasuredEngine, WatchedRunner
from quire.instruments.bench.model_costs import model_costs
from quire.instruments.bench.shapes import CONFIGS, kernel_shape, write_byte_tokenizer, write_random_checkpoint
from quire.instruments.bench.workload_file import WorkloadRequest, read_workload
from quire.simulate.cost.fitted import FittedCost, read_steps
from quire.simulate.workload.offered import OfferedRequest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ["--kv-memory", "8MiB", "--num-threads", "1"]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Three requests: two that begin alike, one with two outputs."""
    prompt = list(range(300, 348))
    requests = [(prompt, 4, 1), ([*prompt, 7], 3, 1), ([5, 6, 7], 5, 2)]
    path = tmp_path / "workload_tiny.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": index, "prompt_token_ids": ids, "max_tokens": most, "n": n}) + "\n"
            for index, (ids, most, n) in enumerate(requests)
        ),
        encoding="utf-8",
    )
    return path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """One request: what the time to the first token and the speed of decoding are measured with."""
    path = tmp_path / "workload_single.jsonl"
    path.write_text('{"id": 0, "prompt_token_ids": [5, 6, 7], "max_tokens": 4, "n": 1}\n', encoding="utf-8")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts of the guide, and one that is too short to foretell anything."""
    held_out = (BENCHMARKS / "workload_guide_held_out.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    path = tmp_path / "workload_texts.jsonl"
    path.write_text("\n".join([*held_out, '{"prompt_token_ids": [5], "max_tokens": 1}']) + "\n", encoding="utf-8")
    return path


def script(name: str) -> Any:
    """Return a script of benchmarks/ as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine's arithmetic once, not as often as fits into a time: no test asks how exact it is."""
    monkeypatch.setattr("quire.cli.machine_limits.ARITHMETIC_S", 0.0)


def bench(*arguments: str | Path, folder: Path) -> dict[str, Any]:
    """Run a benchmark; return what it wrote as JSON."""
    path = folder / "found.json"
    assert cli.main(["bench", *map(str, arguments), "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "date", "machine", "versions", "load_average", "processors_busy_with_others"} <= set(found)
    return found["samples"]  # type: ignore[no-any-return]


def test_quality(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench("quality", "guide", "--workload", texts, folder=tmp_path)["Narrower numbers"]
    printed = capsys.readouterr().out
    assert "reads 4 texts" in printed
    assert "| int8     | bfloat16" in printed
    assert "| bfloat16 | int8" in printed
    assert "not claimed" not in printed
    prompts = [json.loads(line)["prompt_token_ids"] for line in texts.read_text(encoding="utf-8").splitlines()]
    num_tokens = sum(map(len, prompts))
    means = []
    for found in samples.values():
        assert len(found["surprises"]) == num_tokens - len(prompts)
        assert len(found["divergences"]) == len(found["agreements"]) == num_tokens
        assert min(found["divergences"]) >= 0
        means.append(float(np.mean(found["divergences"])))
    exact, half, int8, int4, int8_kv, k8v4_kv, int4_kv, both = means
    assert exact == 0 < half < int8_kv < 0.01
    assert 0 < int8 < int4 < 0.1
    assert both < 0.01
    assert int8_kv < k8v4_kv < int4_kv
    assert all(samples["float32 + float32"]["agreements"])
    # As the log-probabilities of prompts have it.
    with LLM("guide", dtype="float32", kv_memory="4MiB") as llm:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    expected = [
        -entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
        if entry
    ]
    assert samples["float32 + float32"]["surprises"] == pytest.approx(expected, abs=1e-5)


def test_quality_needs_two_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt_token_ids": [5], "max_tokens": 1}\n', encoding="utf-8")
    assert cli.main(["bench", "quality", "--workload", str(path)]) == 2
    assert "a prompt of two tokens or more" in capsys.readouterr().err


def test_throughput(workload: Path, single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench("throughput", "guide", *SMALL, "--repeat", "2", "--workload", workload, single, folder=tmp_path)
    printed = capsys.readouterr().out
    for text in ("## Engine", "load to ready", "KV pool", "## Workload tiny", "## Workload single", "decode, tok/s"):
        assert text in printed
    for text in ("output, tok/s", "time to first token, p99, ms", "between tokens, median, ms", "preemptions"):
        assert text in printed
    assert samples["Engine"]["load_s"] > 0
    runs = samples["Workload tiny"]["runs"]
    assert [run["num_output_tokens"] for run in runs] == [4 + 3 + 2 * 5] * 2
    assert [len(run["first_token_s"]) for run in runs] == [3, 3]
    assert [len(run["gaps_s"]) for run in runs] == [3 + 2 + 2 * 4] * 2
    # The second request begins as the first, whose three blocks it takes; nothing comes from the run before.
    assert [sum(run["cached_tokens"].values()) for run in runs] == [48, 48]
    assert all(0 < run["decoder_s"] <= run["executor_s"] <= run["wall_s"] for run in runs)


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--contexts",
        "24",
        "--sequences",
        "1",
        "3",
        "--prompts",
        "40",
        "99999",
        "--steps",
        "4",
        "--repeat",
        "2",
        "--chats",
        "2",
    ]
    samples = bench("latency", "guide", *SMALL, *sizes, "--read-size", "1MiB", folder=tmp_path)
    printed = capsys.readouterr()
    assert "left out: a prompt that takes 100,000 tokens" in printed.err
    assert "% of bound" in printed.out
    assert "% of the arithmetic" in printed.out
    assert list(samples["Decode"]) == ["24 tokens, 1 sequences", "24 tokens, 3 sequences"]
    one, three = samples["Decode"].values()
    assert [len(run["step_s"]) for run in one + three] == [4] * 4
    # The newest token of three sequences attends to about three times as many as that of one.
    assert 2.5 < three[0]["kv_bytes"] / one[0]["kv_bytes"] < 4
    assert all(run["bound_s"] > 0 for run in one)
    assert 2.5 < three[0]["num_operations"] / one[0]["num_operations"] < 4
    assert list(samples["Prefill"]) == ["40 tokens"]
    for run in samples["Chats during a prompt"]["runs"]:
        assert len(run["quiet_s"]) == 2 * 4  # two chats, four steps
        assert len(run["disturbed_s"]) >= 2


def test_latency_makes_room_for_the_sequences(tmp_path: Path) -> None:
    sizes = ["--contexts", "8", "--sequences", "5", "--prompts", "8", "--steps", "2", "--repeat", "1"]
    room = ["--max-num-seqs", "2", "--max-num-batched-tokens", "4"]
    samples = bench("latency", "guide", *SMALL, *room, *sizes, "--read-size", "1MiB", folder=tmp_path)
    assert list(samples["Decode"]) == ["8 tokens, 5 sequences"]


def test_latency_says_where_sequences_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--kv-memory", "256KiB", "--num-threads", "1", "--read-size", "1MiB", "--repeat", "1"]
    sizes = ["--contexts", "120", "--sequences", "8", "--prompts", "8", "--steps", "2"]
    assert cli.main(["bench", "latency", "guide", *small, *sizes]) == cli.MISUSED
    assert "for 8 sequences that decode together at a context of 120" in capsys.readouterr().err.splitlines()[-1]


def test_memory(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench("memory", "guide", *SMALL, "--workload", workload, folder=tmp_path)
    printed = capsys.readouterr().out
    assert "peak until ready" in printed
    assert "slots that hold a token" in printed
    waste = samples["KV waste"]
    assert waste["stored_slots"] + waste["reserved_slots"] + waste["fragmented_slots"] == waste["used_slots"] > 0
    held = samples["Where the memory goes"]
    # 48 tokens in three blocks that two requests share, an end each, and two outputs of a third request.
    assert 6 <= held["num_written_blocks"] <= 10
    assert held["planned"]["weights"] > 0


def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench("startup", "guide", *SMALL, "--repeat", "1", "--read-size", "1MiB", folder=tmp_path)
    printed = capsys.readouterr().out
    assert "process start to the first token, s" in printed
    assert "installed without numpy, MB" in printed
    guide, (load,) = samples["The guide"], samples["Loading"]["runs"]
    assert 0 < guide["first_token_s"][0] <= guide["end_s"][0]
    assert 0 < load["load_s"] < load["ready_s"]
    assert load["weight_bytes"] > 1_000_000
    assert load["peak_bytes"] is None or load["peak_bytes"] > load["weight_bytes"]


def test_startup_says_what_a_process_has_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["guide", "--kv-memory", "1KiB", "--repeat", "1", "--read-size", "1MiB"]
    assert cli.main(["bench", "startup", *arguments]) == cli.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("quire: error: a process ended with status 1: ")
    assert "kv_memory" in last


def test_an_installation_is_counted_without_numpy() -> None:
    found = installed_bytes()
    assert {"quire", "tokenizers", "jinja2", "markupsafe"} <= set(found)
    assert "numpy" not in found
    assert found["quire"] > 1_000_000  # the guide's weights, if nothing else
    assert all(size > 0 for size in found.values())


def test_memory_brings_a_workload_of_its_own(tmp_path: Path) -> None:
    samples = bench("memory", "guide", *SMALL, "--limit", "2", folder=tmp_path)
    assert samples["KV waste"]["num_steps"] > 0


def matrix_bytes(num_outputs: int, num_inputs: int) -> int:
    """The bytes of a matrix of bfloat16 in the fastest kernels here."""
    has_compact = kernels_for(None).has_compact
    return compact_bytes(num_outputs, num_inputs) if has_compact else 2 * num_outputs * num_inputs


# Of a layer of the tiny shape: query, key and value; output; gate and up; down.
LAYER_BYTES = sum(matrix_bytes(*shape) for shape in ((256, 64), (64, 128), (96, 64), (64, 48)))


def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "1", "3", "--block-sizes", "16", "32", "--decodes", "2x40", "--prompts", "24", "--repeat", "1"]
    memory = ["--read-size", "1MiB", "--working-set", "100KiB", "--threads", "2"]
    kinds = ("bfloat16", "int8", "Q6_K")
    samples = bench("kernels", "--shape", "tiny", *sizes, *memory, "--codes", *kinds[1:], folder=tmp_path)
    printed = capsys.readouterr().out
    assert "## Limits of the machine" in printed
    assert "## Goals" not in printed  # what caches serve is held to nothing
    matrices = ("query, key, value", "output", "gate, up", "down", "head", "all of a step")
    products = samples["Products: tiny"]
    assert set(products) == {f"{name}, {rows} rows" for name in matrices for rows in (1, 3)}
    (product,), (step,) = products["gate, up, 3 rows"], products["all of a step, 3 rows"]
    assert product["num_operations"] == 2 * 3 * 96 * 64
    assert product["num_bytes"] == matrix_bytes(96, 64)
    numbers = 2 * (8 * 32 * 64 + 64 * 128 + 96 * 64 + 64 * 48) + 256 * 64  # two layers and the head
    num_bytes = 2 * LAYER_BYTES + matrix_bytes(256, 64)
    assert (step["num_operations"], step["num_bytes"]) == (2 * 3 * numbers, num_bytes)
    codes = samples["Products with codes: tiny"]
    assert list(codes) == [f"{kind}, {rows} rows" for rows in (1, 3) for kind in kinds]
    bytes_of = {kind: codes[f"{kind}, 1 rows"][0]["num_bytes"] for kind in kinds}
    in_groups = (numbers + 2 * 64 * 16) // 32  # the 48 inputs of “down” are filled up to 64
    factors = 2 * (2 * (256 + 64 + 96 + 64) + 256)  # a float16 for up to 256 inputs of each output
    assert bytes_of == {"bfloat16": num_bytes, "int8": 34 * in_groups, "Q6_K": 26 * in_groups + factors}
    assert list(samples["Paged attention: tiny"]) == ["2 × 40, blocks of 16", "2 × 40, blocks of 32"]
    runs = samples["Paged attention: tiny"]["2 × 40, blocks of 16"]
    assert {name: len(seconds) for name, seconds in runs["seconds"].items()} == {
        "shuffled": 1, "in order": 1, "contiguous": 1
    }  # fmt: skip
    assert {name: len(seconds) for name, seconds in samples["Attention with int8: tiny"]["2 × 40"].items()} == {
        "bfloat16": 1, "int8": 1
    }  # fmt: skip
    assert {name: len(found) for name, found in samples["Attention of prompts: tiny"]["24"].items()} == {
        "rates": 1, "shares": 1
    }  # fmt: skip


def test_kernels_with_several_numbers_of_threads(tmp_path: Path) -> None:
    only = ["--only", "limits", "products", "attention", "--shape", "tiny", "--rows", "3"]
    sizes = ["--block-sizes", "16", "--decodes", "2x40", "--prompts", "24", "--repeat", "1"]
    memory = ["--read-size", "1MiB", "--working-set", "1KiB", "--threads", "1", "3"]
    samples = bench("kernels", *only, *sizes, *memory, folder=tmp_path)
    assert list(samples["Limits of the machine"]) == ["1 threads", "3 threads"]
    assert {"Products: tiny, 1 thread", "Paged attention: tiny, 3 threads"} <= set(samples)
    works = ["tiny, products of 3 rows", "tiny, decode of 2 × 40, blocks of 16", "tiny, attention of a prompt of 24"]
    assert {number: list(seconds) for number, seconds in samples["Threads"].items()} == {"1": works, "3": works}


def test_a_roofline_shows_what_was_measured_below_what_is_possible(tmp_path: Path) -> None:
    plot = script("roofline_plot")
    run = {"num_bytes": 2e9, "bandwidth": 40e9, "arithmetic": 1e12}  # 0.05 s for the bytes, 0.02 s of arithmetic a row
    runs = {rows: {**run, "num_operations": rows * 2e10, "seconds": 0.1 * rows} for rows in (1, 4)}
    products = {f"all of a step, {rows} rows": [each] for rows, each in runs.items()} | {"head, 1 rows": [runs[1]]}
    (tmp_path / "results.json").write_text(json.dumps({"samples": {"Products: wide": products, "Limits": {}}}))
    assert plot.main([str(tmp_path / "results.json"), str(tmp_path / "plot.svg")]) == 0
    points = plot.points_of({"Products: wide": products})["wide"]
    assert [(point.rows, point.measured, point.roof) for point in points] == [(1, 200, 400), (4, 200, 1000)]
    drawn = list(ElementTree.parse(tmp_path / "plot.svg").iter())
    assert "wide" in [element.text for element in drawn if element.tag.endswith("text")]
    assert len([element for element in drawn if element.tag.endswith("polyline")]) == 2


def test_products_of_prompts_are_without_the_head(tmp_path: Path) -> None:
    memory = ["--read-size", "1MiB", "--working-set", "1KiB", "--threads", "1", "--repeat", "1"]
    samples = bench("kernels", "--only", "products", "--shape", "tiny", "--rows", "65", *memory, folder=tmp_path)
    (step,), (head,) = (samples["Products: tiny"][f"{name}, 65 rows"] for name in ("all of a step", "head"))
    assert step["num_bytes"] == 2 * LAYER_BYTES
    assert head["num_bytes"] == matrix_bytes(256, 64)


def test_the_products_of_a_step_are_held_to_the_bounds_of_each() -> None:
    first, second = ProductRun(2.0, 10, 100, 5.0, 50.0), ProductRun(8.0, 20, 200, 10.0, 100.0)
    step = together([(3, first), (1, second)])
    assert (step.seconds, step.num_bytes, step.num_operations) == (14.0, 50, 500)
    assert step.read_share == pytest.approx(100 * (3 * 2.0 + 2.0) / 14.0)
    assert step.arithmetic_share == pytest.approx(100 * (3 * 2.0 + 2.0) / 14.0)
    assert together([(1, replace(first, arithmetic=None))]).arithmetic is None


def test_shuffled_and_contiguous_memory_are_the_same_bytes() -> None:
    layers = PagedLayers((4, 2, 32), (3, 40), block_size=16, num_bytes=100_000)
    shuffled, in_order, contiguous = layers.layouts.values()
    assert sorted(shuffled.tables.ravel()) == list(in_order.tables.ravel()) == list(range(9))
    assert list(contiguous.tables.ravel()) == [0, 1, 2]
    assert not np.array_equal(shuffled.tables.ravel(), np.arange(9))
    for (keys, values), (whole_keys, whole_values) in zip(shuffled.layers, contiguous.layers, strict=True):
        assert np.shares_memory(keys, whole_keys)
        assert np.shares_memory(values, whole_values)
        assert (keys.shape, whole_keys.shape) == ((9, 16, 2, 32), (3, 48, 2, 32))


def test_simulations_are_counted_and_timed(tmp_path: Path) -> None:
    samples = bench("simulator", "--duration", "0.5", "--hour", "8", "--repeat", "1", folder=tmp_path)
    assert [len(speeds) for speeds in samples["Simulated tokens a second"]["tokens_per_s"].values()] == [1, 1, 1]
    assert set(samples["Hours of traffic"]["peak_bytes"]) == {"2", "8"}
    assert min(min(peaks) for peaks in samples["Hours of traffic"]["peak_bytes"].values()) > 1 << 24


def test_recorded_steps_are_fitted_and_foretell_other_traffic(tmp_path: Path) -> None:
    steps, short = tmp_path / "steps.jsonl", ["--max-model-len", "256"]
    samples = bench("record", "guide", "--duration", "0.4", "--steps", steps, *SMALL, *short, folder=tmp_path)
    weights = samples["What a step takes"]["weights"]
    assert len(weights) == 6 and min(weights) >= 0 < max(weights)
    recorded = list(read_steps(steps.read_text(encoding="utf-8").splitlines(), "steps"))
    assert len(recorded) == len(samples["What a step takes"]["errors"])
    assert FittedCost.fit(recorded).weights == pytest.approx(weights, abs=1e-9)
    for load in ("40%", "70%"):
        measured, simulated = (samples[f"Foretold at {load}"][side] for side in ("measured", "simulated"))
        for name in ("num_requests", "output_tokens", "prompt_tokens"):
            assert measured[name] == simulated[name]


def test_sharing_writes_its_part_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, model = tmp_path / "RESULTS.md", tmp_path / "tiny"
    write_random_checkpoint(model, "tiny")
    write_byte_tokenizer(model, 256)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    page.write_text("# Results\n\nAbout.\n\n## Control plane\n\nold\n\n## Sharing\n\nold\n\n## Other\n\nold\n")
    samples = bench("sharing", model, "--requests", "1", "--markdown", page, folder=tmp_path)
    shares = samples["Blocks saved"]["share_saved"]
    assert len(shares) == 12
    assert all(0 < share < 1 for share in shares.values())
    parts = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert parts == ["## Control plane", "## Sharing", "## Other"]
    assert page.read_text(encoding="utf-8").count("old") == 2
    assert "the paper's range" in capsys.readouterr().out


def test_what_is_predicted_of_a_gpu_stands_in_the_results(tmp_path: Path) -> None:
    def tables(page: Path) -> list[str]:
        (part,) = re.findall(r"^## GPU: predictions\n.*?(?=^## |\Z)", page.read_text(encoding="utf-8"), re.M | re.S)
        return [line for line in part.splitlines() if line.startswith("|")]

    page = tmp_path / "RESULTS.md"
    bench("gpu-predictions", "--markdown", page, folder=tmp_path)
    kept = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
    assert len(tables(page)) > 30
    assert tables(page) == tables(kept)
    for run in whole_runs():  # what stands beside what is measured
        assert any(f"| {run.text} " in line and f" s, {run.predicted_share} % " in line for line in tables(page))


def test_whole_runs_are_held_to_the_roofline_of_their_requests(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "tiny", "tiny")
    requests = [OfferedRequest(str(each), 0.0, array("i", range(each, 40)), 6) for each in range(3)]
    cases = [gpu_engine.WholeRun(name, "", "tiny", tuple(requests), 10.0, 44) for name in ("nano-vllm", "single-8b")]
    case, cut = cases[0], replace(cases[1], requests=(replace(requests[0], num_output_tokens=10_000),))
    config = EngineConfig(model=str(tmp_path / "tiny"), kv_memory="8MiB", num_threads=1)
    options, failures = argparse.Namespace(repeat=2, read_size=1 << 20), list[str]()
    engine, *_, runs = gpu_engine.measure_model(config, [cut, case], options, lambda _: None, failures)
    assert engine.title == "Engine"
    gpu_engine.write_workloads([cut], tmp_path)
    assert read_workload(tmp_path / "single-8b.jsonl") == gpu_engine.workload(cut)
    failed, row = runs.rows
    assert failures == ["single-8b"] and failed[:1] + failed[2:] == ("single-8b", *"–" * 6)
    assert row[0] == "nano-vllm" and row[4] == "44 %" and row[-1] == "≥ 10 %" and len(row) == len(runs.header)
    assert [goal.bound for goal in runs.goals] == [10.0, 5.0]
    found: Any = runs.samples["nano-vllm"]
    assert all(run["num_output_tokens"] == 18 and run["unawaited_s"] == 0 for run in found["runs"])
    fast = gpu_engine.ceilings(found["bandwidth"], found["rate"])
    assert found["bound_s"] == gpu_engine.bound_s(requests, find_shape(config.model), fast) > 0


def test_random_weights_of_a_known_model_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint(tmp_path / "tiny", "tiny")
    monkeypatch.setattr(gpu_engine, "find_settings", lambda model: ModelFolder(tmp_path / "tiny"))
    said: list[str] = []
    for _ in range(2):
        with gpu_engine.checkpoint("known", str(tmp_path / "kept"), said.append) as folder:
            assert (folder / "model.safetensors").read_bytes() == (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert said == ["writing random weights of known"] and folder == tmp_path / "kept" / "known"
    with gpu_engine.checkpoint("known", None, said.append) as folder:
        assert LLM(str(folder), kv_memory="8MiB", num_threads=1, skip_tokenizer_init=True).config.model == str(folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["guide"], "model"),
        (["--device", "cuda"], "device"),
    ],
)
def test_a_run_on_a_gpu_is_refused_before_weights_are_written(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["bench", "gpu-engine", *arguments]) == 2
    assert re.fullmatch(rf"quire: error: {message} .*\n", capsys.readouterr().err)


def test_parts_of_kernels_can_be_measured_alone(tmp_path: Path) -> None:
    samples = bench("kernels", "--only", "limits", "--repeat", "1", "--read-size", "1MiB", folder=tmp_path)
    assert list(samples) == ["Limits of the machine"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["throughput", "guide"], 2, "the following arguments are required: --workload"),
        (["throughput", "guide", "--workload", "missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
        (["throughput", "no/such/folder", "--workload", "{workload}"], 2, "no/such/folder"),
        (["kernels", "--decodes", "3"], 2, "--decodes"),
        (["kernels", "--working-set", "lots"], 2, "a number of bytes"),
        (["latency", "guide", "--steps", "0"], 2, "must be 1 or more"),
        (["memory", "guide", "--block-size", "17"], 2, "block_size is 17"),
    ],
)
def test_misuse_is_one_line(
    arguments: list[str], status: int, message: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *(text.format(workload=workload) for text in arguments)]) == status
    printed = capsys.readouterr()
    *progress, last = printed.err.splitlines()
    assert printed.out == ""
    assert message in last
    assert all(line.startswith("quire bench: ") for line in progress)


def test_a_broken_line_is_named_before_anything_is_loaded(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(workload.read_text(encoding="utf-8") + '{"prompt_token_ids": [1]}\n', encoding="utf-8")
    assert cli.main(["bench", "throughput", "no/such/folder", "--workload", str(workload)]) == cli.MISUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: error: {workload}, line 4: max_tokens is None")


def test_a_request_that_cannot_be_served_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [1] * 3000, "max_tokens": 1}) + "\n", encoding="utf-8")
    assert cli.main(["bench", "throughput", "guide", *SMALL, "--workload", str(path)]) == cli.MISUSED
    assert "prompt" in capsys.readouterr().err.splitlines()[-1]


# ---- shapes ---------------------------------------------------------------------------------------------------------


def test_a_shape_needs_no_checkpoint(tmp_path: Path) -> None:
    sizes = ["--contexts", "8", "--sequences", "2", "--prompts", "8", "--steps", "2", "--repeat", "1", "--chats", "1"]
    page = tmp_path / "RESULTS.md"
    arguments = ["--shape", "tiny", *SMALL, *sizes, "--read-size", "1MiB", "--title", "Tiny", "--markdown", page]
    samples = bench("latency", *arguments, folder=tmp_path)
    assert list(samples["Decode"]) == ["8 tokens, 2 sequences"]
    assert "\n## Tiny\n" in page.read_text(encoding="utf-8")


def test_a_shape_is_no_model_beside_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "memory", "guide", "--shape", "tiny"]) == cli.MISUSED
    assert "model is 'guide'; allowed: none with --shape" in capsys.readouterr().err


def test_named_shapes_are_those_that_the_options_name() -> None:
    assert set(SHAPES) == set(CONFIGS)
    shape = kernel_shape("llama-3.2-1b")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 64)
    sizes = {name: (each.num_outputs, each.num_inputs, each.count) for name, each in shape.matrices.items()}
    assert sizes == {
        "query, key, value": (3072, 2048, 16),
        "output": (2048, 2048, 16),
        "gate, up": (16_384, 2048, 16),
        "down": (2048, 8192, 16),
        "head": (128_256, 2048, 1),
    }


def test_the_shape_of_a_folder_is_that_of_its_settings(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", "tiny")
    folder = str(tmp_path / "model")
    assert kernel_shape(folder) == replace(kernel_shape("tiny"), name=folder)
    with pytest.raises(CheckpointError, match="No folder named"):
        kernel_shape(str(tmp_path / "other"))


# ---- what they stand on ---------------------------------------------------------------------------------------------


def test_a_request_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("broken")

    with MeasuredEngine(EngineConfig(kv_memory="4MiB", num_threads=1)) as engine:
        monkeypatch.setattr(WatchedRunner, "run", fail)
        with pytest.raises(ExecutionError, match=r"request 0 has failed: step \d failed: ValueError: broken"):
            engine.run([WorkloadRequest((1, 2, 3), 4)])


def test_costs_of_the_guide() -> None:
    blueprint = plan_engine(EngineConfig(kv_memory="4MiB"))
    spec, backend = blueprint.model.spec, blueprint.backend
    costs = model_costs(blueprint.model, backend.facts)
    assert costs is not None
    assert spec.tied_head
    assert costs.step_bytes == backend.facts.weight_bytes  # the embedding is the head, so all is read
    assert costs.kv_bytes([3, 5]) == 8 * backend.facts.kv_spec.bytes_per_token
    heads = spec.attention.num_heads * spec.attention.head_dim
    numbers_of_head = spec.vocab_size * spec.hidden_size
    norms = (4 * spec.hidden_size + 4 * spec.attention.head_dim) * len(spec.layers) // 2 + spec.hidden_size
    numbers_per_token = weight_bytes(spec, "float32") // 4 - numbers_of_head - norms
    weights = numbers_per_token * 2 + numbers_of_head
    attended = (1 + 2) * len(spec.layers)
    assert costs.prompt_operations(2) == 2 * (weights + 2 * heads * attended)
    assert costs.decode_operations([1, 2]) == costs.prompt_operations(2) + 2 * numbers_of_head
    narrow = plan_engine(EngineConfig(weights="int8")).backend.facts
    fewer = model_costs(blueprint.model, narrow)
    assert fewer is not None
    assert 0.5 * costs.step_bytes < fewer.step_bytes == narrow.weight_bytes < 0.71 * costs.step_bytes
    assert fewer.prompt_operations(2) == costs.prompt_operations(2)


def test_native_measurements_refuse_what_does_not_fit() -> None:
    kernels, team = native.kernels("portable"), native.ThreadTeam(2)
    assert len(timed.read_seconds(team, np.ones(3 << 20, np.uint8), 2)) == 2
    assert all(timed.arithmetic_rate(native.kernels(name), team, 0.001) > 0 for name in native.kernel_names())
    with pytest.raises(ValueError, match="copy"):
        timed.ProductBenchmark(kernels, team, np.zeros((16, 8), np.uint16), 0)
    product = timed.ProductBenchmark(kernels, team, np.zeros((20, 8), np.uint16), 2)
    assert len(product.run(3, 5)) == 5
    with pytest.raises(ValueError, match="row"):
        product.run(0, 1)
    layer = (np.zeros((2, 16, 1, 32), np.uint16), np.zeros((2, 16, 1, 32), np.uint16))
    table, lengths = np.array([[0, 1]]), np.array([20])

    def attend(table: Any, lengths: Any, num_queries: int = 1, head_dim: int = 32) -> list[float]:
        seconds: list[float] = timed.attention_seconds(
            kernels, team, [layer], "bfloat16", table, lengths, num_queries, 2, head_dim, 3
        )
        return seconds

    assert len(attend(table, lengths)) == 3
    assert len(attend(table, lengths, 20)) == 3
    for arguments in (
        (np.array([[0, 2]]), lengths),
        (table, np.array([33])),
        (table, np.array([0])),
        (table, np.array([1, 1])),
        (table, lengths, 0),
        (table, lengths, 21),
        (table, lengths, 1, 48),
    ):
        with pytest.raises(ValueError, match=r"do(es)? not"):
            attend(*arguments)


# ---- beside the peers -----------------------------------------------------------------------------------------------

LINE_FIELDS = {
    "peer", "version", "label", "dtype", "threads", "workload", "rep", "requests", "prompt_tokens", "output_tokens",
    "wall_s", "out_tok_s", "total_tok_s", "peak_rss_gib", "load_s", "warmup_s", "python",
}  # fmt: skip
"""Of every line that a runner writes."""

FAKE_RUNNER = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("--model", "--out", "--repeat", "--threads", "--limit"):
    parser.add_argument(name)
parser.add_argument("--workload", nargs="+")
parser.add_argument("--eager", action="store_true")
options, _ = parser.parse_known_args()
if options.eager:
    raise SystemExit("no eager mode")
for workload in options.workload:
    name = workload.split("workload_")[-1].removesuffix(".jsonl")
    line = {"peer": "fake", "version": "fake 1", "label": "", "dtype": "bfloat16", "workload": name, "load_s": 9.0,
            "requests": 1, "wall_s": 1.0, "out_tok_s": 2.0, "total_tok_s": 3.0, "peak_rss_gib": 1.0}
    if name == "single":
        line |= {"decode_tok_s": 2.0, "ttft_s": 0.5}
    with open(options.out, "a") as out:
        out.write(json.dumps(line) + "\\n")
"""


def test_bench_quire_writes_the_lines_of_the_runners(workload: Path, single: Path, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = ["--model", "guide", "--repeat", "2", "--threads", "1", "--kv-memory", "8MiB", "--block", "32"]
    arguments += ["--out", str(out), "--workload", str(workload), str(single)]
    assert script("bench_quire").main(arguments) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(line["workload"], line["rep"]) for line in lines] == [
        ("tiny", 0),
        ("tiny", 1),
        ("single", 0),
        ("single", 1),
    ]
    assert all(set(line) >= LINE_FIELDS and line["peer"] == "quire" for line in lines)
    assert [set(line) - LINE_FIELDS for line in lines] == [set(), set()] + [{"ttft_s", "decode_tok_s"}] * 2
    assert (lines[0]["requests"], lines[0]["prompt_tokens"], lines[0]["output_tokens"]) == (3, 48 + 49 + 3, 17)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--set", "no_such_setting=1"], 2, "no_such_setting"),
        (["--kv-memory", "lots"], 2, "kv_memory"),
        (["--model", "no/such/folder"], 2, "no/such/folder"),
    ],
)
def test_bench_quire_says_what_is_wrong(
    workload: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script("bench_quire").main(["--model", "guide", "--workload", str(workload), *arguments]) == status
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == ""
    assert message in line


def compare(folder: Path, single: Path, *arguments: str) -> int:
    for name in ("bench_vllm.py", "bench_openvino.py"):
        (folder / name).write_text(FAKE_RUNNER, encoding="utf-8")
    status: int = script("compare").main([
        "--model", "guide", "--runners", str(folder), "--workload", str(single), "--kv-gib", "1", "--threads", "1",
        "--repeat", "2", "--page", str(folder / "PAGE.md"), "--results", str(folder / "results"), *arguments,
    ])  # fmt: skip
    return status


def test_a_comparison_writes_a_page_samples_and_a_plot_without_a_peer_that_fails(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = ["--vllm-python", sys.executable, "--openvino-python", sys.executable, "--openvino-args=--eager"]
    assert compare(tmp_path, single, *peers, "--variant", "small=--block 32") == 0
    assert capsys.readouterr().err.count("OpenVINO is left out: it ended with status 1: no eager mode") == 1
    page = (tmp_path / "PAGE.md").read_text(encoding="utf-8")
    assert page.startswith("# Results\n")
    assert "\n## Throughput beside the peers\n" in page
    assert "| quire small" in page
    assert "| fake 1" in page
    assert "it ended with status 1: no eager mode" in page
    assert "single: decode, tok/s: quire to the best of vLLM" in page
    assert re.search(r"\| ratio of quire +\| ratio of quire small +\|", page)
    (samples,) = (tmp_path / "results").glob("*.json")
    repeats = json.loads(samples.read_text(encoding="utf-8"))["samples"]["Results"]["repeats"]
    assert [list(repeat) for repeat in repeats] == [["quire", "quire small", "vLLM"], ["quire small", "vLLM", "quire"]]
    (plot,) = (tmp_path / "results").glob("*.svg")
    assert f"](results/{plot.name})" in page
    texts = [element.text for element in ElementTree.parse(plot).iter() if element.tag.endswith("text")]
    assert {"quire", "quire small", "vLLM", "single: decode, tok/s"} <= set(texts)
    assert "OpenVINO" not in texts


def test_every_variant_is_held_to_the_bounds_that_bear_its_name() -> None:
    comparison = script("comparison")

    def lines(decode: float, output: float) -> list[dict[str, Any]]:
        return [
            {"workload": "single", "decode_tok_s": decode, "version": "1", "dtype": "x"},
            {"workload": "mixed", "out_tok_s": output, "version": "1", "dtype": "x"},
        ]

    repeat = {
        "quire": lines(20, 340), "quire int8": lines(60, 360), "vLLM": lines(10, 140), "OpenVINO": lines(16, 200),
        "llama.cpp": lines(40, 30),
    }  # fmt: skip
    found = comparison.Comparison(dict.fromkeys(repeat, ""), [repeat])
    (_, results) = found.sections()
    assert [(goal.text, round(goal.measured, 3), goal.bound, goal.is_met) for goal in results.goals] == [
        ("single: decode, tok/s: quire to the best of vLLM, OpenVINO", 1.25, 1.3, False),
        ("mixed: output, tok/s: quire to the best of vLLM, OpenVINO", 1.7, 1.4, True),
        ("single: decode, tok/s: quire int8 to the best of vLLM, OpenVINO", 3.75, 2.3, True),
        ("mixed: output, tok/s: quire int8 to the best of vLLM, OpenVINO", 1.8, 2.2, False),
        ("single: decode, tok/s: quire int8 to the best of llama.cpp", 1.5, 1.2, True),
    ]
    single = results.rows[0]
    assert single[-2:] == ("0.500× (0.500–0.500)", "1.50× (1.50–1.50)")
    alone = comparison.Comparison({"quire": "", "vLLM": ""}, [{"quire": repeat["quire"]}], {"vLLM": "no eager mode"})
    assert not alone.sections()[1].goals


def test_a_comparison_without_quire_is_none(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, single, "--quire-args=--set x=1") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("compare: error: quire did not run: it ended with status 2: bench")
    assert not (tmp_path / "PAGE.md").exists()


def test_settings_of_the_runner_are_numbers_truths_and_texts() -> None:
    runner = script("bench_quire")
    pairs = ("batch_invariant=true", "enable_prefix_caching=false", "block_size=32", "policy=priority")
    given = [word for pair in pairs for word in ("--set", pair)]
    settings = runner.settings_of(runner.parser().parse_args(["--model", "m", "--workload", "w", *given]))
    found = [settings[pair.partition("=")[0]] for pair in pairs]
    assert found == [True, False, 32, "priority"]
