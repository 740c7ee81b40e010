"""`quire plan`: its memory is the engine's own, its nearest is possible, and its settings can be run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from quire import LLM, SamplingParams
from quire.cli import MISUSED, main
from quire.cli.model_shapes import find_settings
from quire.core.byte_sizes import parse_bytes
from quire.core.config import EngineConfig
from quire.engine.factory import plan_engine
from quire.engine.memory_plan import MemoryPlan
from quire.simulate.hardware import known_hardware
from quire.simulate.model_shape import known_models
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3
from support.tiny_recurrent import CONFIG

MACHINE = "zen5-2-cores"
FIXED = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
"""With these, nothing is searched."""
SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "narrow": {"weights": "int8", "kv_dtype": "int8", "block_size": 64},
    "float32": {"dtype": "float32", "num_threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 40},
    "swap": {"swap_space": 1 << 20, "max_model_len": 300, "block_size": 32},
    "reference": {"backend": "reference", "block_size": 8},
}


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The report of a call that works."""
    assert main(["plan", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a call is refused with."""
    assert main(["plan", *arguments]) == MISUSED
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    return written.err


def flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def assert_same(machine: dict[str, Any], engine: MemoryPlan) -> None:
    """Everything but the rest of the process, which a machine that is not there does not have."""
    assert machine["parts_bytes"] == dict(engine.parts[:-1])
    assert machine["num_blocks"] == engine.num_blocks
    assert machine["bytes_per_block"] == engine.bytes_per_block
    assert machine["max_model_len"] == engine.max_model_len


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models: the built-in one, and tiny ones; one has windows."""
    root = tmp_path_factory.mktemp("models")
    windows = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    return {
        "guide": "guide",
        "qwen3": str(write_tiny_qwen3(root / "qwen3")),
        "windows": str(write_tiny_qwen3(root / "windows", settings=windows)),
        "llama": str(write_tiny_llama(root / "llama", dtype="BF16")),
    }


@pytest.mark.parametrize("model", ["guide", "qwen3", "windows", "llama"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_memory_is_that_of_the_start_up_table(
    folders: dict[str, str], model: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = FIXED | SETTINGS[name]
    arguments = [folders[model], "--memory", "64MiB", "--hardware", MACHINE, *flags(settings)]
    (machine,) = plan(*arguments, capsys=capsys)["machines"]
    kv_memory = machine["parts_bytes"]["KV blocks"]
    blueprint = plan_engine(EngineConfig(model=folders[model], kv_memory=kv_memory, **settings))
    assert_same(machine, blueprint.report.plan)
    used = sum(machine["parts_bytes"].values())
    assert used <= 64 << 20 < used + machine["bytes_per_block"]
    (again,) = plan(*arguments, "--kv-memory", str(kv_memory), capsys=capsys)["machines"]
    assert again["parts_bytes"] == machine["parts_bytes"]


def test_a_draft_model_is_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**FIXED, "speculation": "guide"}
    arguments = ["guide", "--memory", "64MiB", "--hardware", MACHINE, *flags(settings)]
    (machine,) = plan(*arguments, capsys=capsys)["machines"]
    config = EngineConfig(kv_memory=machine["parts_bytes"]["KV blocks"], **settings)
    assert_same(machine, plan_engine(config).report.plan)
    assert main(["plan", *arguments]) == 0
    assert "guesses     guide: Qwen3ForCausalLM, 6 layers" in capsys.readouterr().out
    larger = refusal("guide", "--hardware", MACHINE, "--speculation", "opt-13b", capsys=capsys)
    assert "a draft model that is smaller" in larger


def test_the_best_settings_make_an_engine_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (machine,) = plan("guide", "--memory", "48MiB", "--hardware", MACHINE, capsys=capsys)["machines"]
    best = machine["best"]
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_memory")
    with LLM("guide", **{name: best[name] for name in names}) as llm:
        assert llm.report.plan.num_blocks == best["num_blocks"]
        assert llm.report.plan.total_bytes - llm.report.plan.needs.rest_bytes <= 48 << 20
        (output,) = llm.generate(["A block is"], SamplingParams(max_tokens=3, temperature=0))
        assert len(output.outputs[0].token_ids) == 3


def test_the_command_of_the_best_settings_is_the_plan_that_it_stands_under(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--weights", "int8", "--no-enable-prefix-caching", "--num-threads", "2"]
    assert main(["plan", "guide", "--memory", "48MiB", "--hardware", MACHINE, *given]) == 0
    *_, command = capsys.readouterr().out.splitlines()
    words = shlex.split(command)
    assert words[:3] == ["quire", "serve", "guide"]
    assert main(["config", "show", "--json", *words[2:]]) == 0
    settings = {name: found["value"] for name, found in json.loads(capsys.readouterr().out).items()}
    assert (settings["weights"], settings["enable_prefix_caching"], settings["num_threads"]) == ("int8", False, 2)
    (machine,) = plan("guide", "--memory", "48MiB", "--hardware", MACHINE, *given, capsys=capsys)["machines"]
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_memory"):
        assert settings[name] == machine["best"][name]


def test_what_is_left_open_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["guide", "--memory", "48MiB", "--hardware", MACHINE]
    searched = plan(*arguments, capsys=capsys)
    assert plan(*arguments, "--max-num-seqs", "none", "--max-num-batched-tokens", "none", capsys=capsys) == searched
    (fixed,) = plan(*arguments, "--max-num-seqs", "3", capsys=capsys)["machines"]
    assert fixed["best"]["max_num_seqs"] == 3 <= fixed["best"]["max_num_batched_tokens"]


@pytest.mark.parametrize("model", ["guide", "windows", *known_models()])
def test_a_memory_that_is_too_small_is_answered_with_the_nearest(
    folders: dict[str, str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = folders.get(model, model)
    said = refusal(name, "--memory", "1MiB", "--hardware", MACHINE, capsys=capsys)
    nearest = said.partition("allowed: ")[2].partition(" or more")[0]
    assert "quire: error: memory is '1.0 MiB'" in said
    (machine,) = plan(name, "--memory", nearest, "--hardware", MACHINE, capsys=capsys)["machines"]
    assert machine["best"] is not None
    smaller = str(parse_bytes(nearest) - (2 << 20) - 2 * machine["bytes_per_block"])
    assert f"allowed: {nearest} or more" in refusal(name, "--memory", smaller, "--hardware", MACHINE, capsys=capsys)


def test_what_latents_save_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek-v2-lite", "--hardware", MACHINE, "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "bfloat16, 31,104 bytes a token" in text
    assert "one for all 16 heads of a layer; their keys and values would be 276,480 bytes a token, 8.9 times" in text


def test_a_model_that_is_too_large_is_counted_in_gpus_among_which_it_can_be_split(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal("opt-13b", "--hardware", "nvidia-l4", "nvidia-rtx-4090", capsys=capsys)
    assert "with --tensor-parallel 2 it would fit on 2 GPUs" in said
    three_would_do = refusal("llama-3.1-8b", "--memory", "8GiB", "--hardware", "nvidia-l4", capsys=capsys)
    assert "with --tensor-parallel 4 it would fit on 4 GPUs" in three_would_do
    fitting = ("--memory", "8GiB", "--hardware", "nvidia-l4", "--tensor-parallel", "4", "--max-num-seqs", "4")
    assert main(["plan", "llama-3.1-8b", *fitting]) == 0
    capsys.readouterr()
    latents = refusal("deepseek-v2-lite", "--hardware", "nvidia-l4", capsys=capsys)
    processor = refusal("opt-13b", "--memory", "4GiB", "--hardware", MACHINE, capsys=capsys)
    assert "--tensor-parallel" not in latents + processor
    assert "'nvidia-l4'; allowed: here, or another machine without a GPU: quire does not run latents" in latents
    assert main(["plan", "opt-13b", "--hardware", "nvidia-l4", "nvidia-a100-40gb"]) == 0
    text = capsys.readouterr().out
    assert "nvidia-l4: memory is '24.00 GiB'; allowed: 2" in text
    assert "best settings on nvidia-a100-40gb" in text


def test_an_objective_that_cannot_be_kept_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["llama-3.1-8b", "--hardware", "nvidia-h100"]
    said = refusal(*asked, "--slo", "ttft=1ms,tpot=1ms", capsys=capsys)
    nearest = said.partition("allowed: ")[2].partition(" ")[0]
    assert said.startswith("quire: error: slo is 'ttft=1ms,tpot=1ms'; allowed: ttft=")
    (machine,) = plan(*asked, "--slo", nearest, capsys=capsys)["machines"]
    assert machine["best"] is not None
    assert main(["plan", *asked, "nvidia-l4", "--slo", nearest]) == 0
    assert "nvidia-l4: no settings meet the targets; the closest: ttft=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], 'No folder named "no-such-model"'),
        (["guide", "--memory", "much"], "memory is 'much'"),
        (["guide", "--slo", "fast"], "slo is 'fast'; allowed: times such as ttft=500ms,tpot=0.05s"),
        (["guide", "--slo", "ttft=5ms,ttft=6ms"], "slo is 'ttft=5ms,ttft=6ms'"),
        (["guide", "--slo", "ttft=0ms"], "slo is 'ttft=0ms'"),
        (["guide", "--prompt-tokens", "some"], "prompt-tokens is 'some'"),
        (["guide", "--output-tokens", "9/3"], "output-tokens is '9/3'"),
        (["guide", "--kv-memory", "200KiB", "--memory", "1GiB"], "kv_memory is '200.0 KiB'; allowed: 1MiB or more for"),
        (["guide", "--kv-memory", "70GiB", "--memory", "1GiB"], "kv_memory is '70.00 GiB'; allowed: at most"),
        (["guide", "--max-model-len", "4096", "--memory", "1GiB"], "max_model_len is 4096; allowed: at most 2048"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(*arguments, "--hardware", MACHINE, capsys=capsys)
    assert "hardware is 'abacus'" in refusal("guide", "--hardware", "abacus", capsys=capsys)


def test_a_settings_file_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(find_settings("qwen3-0.6b").text("config.json"))
    arguments = ["--memory", "8GiB", "--hardware", MACHINE, *flags(FIXED)]
    (by_path,) = plan(str(path), *arguments, capsys=capsys)["machines"]
    (by_name,) = plan("qwen3-0.6b", *arguments, capsys=capsys)["machines"]
    assert by_path == by_name
    assert (by_name["bytes_per_token"], by_name["bytes_per_block"]) == (114_688, 1_835_008)


def test_narrow_keys_and_values_hold_more(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("qwen3-0.6b", "--memory", "8GiB", "--hardware", MACHINE, *flags(FIXED))
    (machine,) = plan(*asked, capsys=capsys)["machines"]
    int8, _, _ = machine["narrow_kv"]
    assert [(each["dtype"], each["bytes_per_token"]) for each in machine["narrow_kv"]] == [
        ("int8", 59_136),  # a scale of 4 bytes for each 128 numbers
        ("k8v4", 44_800),
        ("int4", 33_152),  # a scale and a minimum of 4 bytes for each 32 numbers of a key
    ]  # and not fp8, which the CPU engine does not have
    (narrow,) = plan(*asked, "--kv-dtype", "int8", capsys=capsys)["machines"]
    assert narrow["num_blocks"] == pytest.approx(int8["num_blocks"], rel=0.01)
    assert [each["dtype"] for each in narrow["narrow_kv"]] == ["k8v4", "int4"]
    on_gpu = ("--hardware", "nvidia-h200", "--device", "cuda", *flags(FIXED))
    (gpu,) = plan("qwen3-0.6b", *on_gpu, capsys=capsys)["machines"]
    assert [each["dtype"] for each in gpu["narrow_kv"]] == ["int8", "fp8", "k8v4", "int4"]


def test_blocks_of_states_are_as_large_as_each_kv_type_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "linear_key_head_dim": 64, "linear_value_head_dim": 64})
    )

    def machine(*more: str) -> dict[str, Any]:
        arguments = ("--memory", "64MiB", "--hardware", MACHINE, *flags(FIXED), *more)
        (found,) = plan(str(tmp_path), *arguments, capsys=capsys)["machines"]
        return cast(dict[str, Any], found)

    for foretold in machine()["narrow_kv"]:
        engine = machine("--kv-dtype", foretold["dtype"])
        assert foretold["average"] == pytest.approx(engine["concurrency"]["average"], rel=0.01)


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.machine_limits.ARITHMETIC_S", 0.0)
    for name in ("READ_BYTES", "LEAST_READ_BYTES"):
        monkeypatch.setattr(f"quire.cli.plan.here.{name}", 1 << 20)
    (machine,) = plan("guide", "--memory", "64MiB", "--num-threads", "1", capsys=capsys)["machines"]
    assert machine["name"] == "here"
    assert machine["read_bandwidth"] > 1e8
    assert machine["matrix_rate"]["float32"] > 1e8


# ---- traces ---------------------------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.68,374,44
2023-11-16 18:15:50.99,396,109
soon,1,1
2023-11-16 18:15:51.22,879,55
"""


def test_lengths_may_come_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    arguments = ["guide", "--trace", str(path), "--memory", "64MiB", "--hardware", MACHINE]
    said = refusal(*arguments, capsys=capsys)
    assert "azure.csv, line 4" in said
    report = plan(*arguments, "--skip-malformed", capsys=capsys)
    assert report["requests"]["total_tokens"] == {"0.5": 505, "0.95": 934, "1.0": 934}
    assert report["requests"]["text"] == f"3 of {path}, lines skipped: 1"
    assert "not from both" in refusal(*arguments, "--prompt-tokens", "5", capsys=capsys)
    path.write_text("")
    assert "requests is 'none'" in refusal(*arguments, capsys=capsys)


def test_two_ranks_hold_twice_as_much_and_are_less_than_twice_as_fast(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-3.1-8b", "--hardware", "nvidia-h100")
    (one,) = plan(*arguments, capsys=capsys)["machines"]
    (two,) = plan(*arguments, "--tensor-parallel", "2", capsys=capsys)["machines"]
    assert two["name"] == "2 x nvidia-h100"
    assert two["memory_bytes"] == 2 * one["memory_bytes"]
    assert two["num_blocks"] > 2 * one["num_blocks"], "the weights are there once"
    (given,) = plan(*arguments, "--tensor-parallel", "2", "--kv-memory", "8GiB", capsys=capsys)["machines"]
    assert given["num_blocks"] == 2 * (8 << 30) // given["bytes_per_block"]
    (alone, shared) = (machine["one_stream"]["tokens_per_s"] for machine in (one, two))
    assert alone < shared < 2 * alone


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_lists_the_known_models_and_machines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = "".join(capsys.readouterr().out.split())  # names are broken at hyphens
    assert [name for name in (*known_models(), *known_hardware()) if name not in shown] == []
