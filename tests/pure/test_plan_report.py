"""What `quire plan` prints: figures, settings that make just that engine, and targets that can be kept."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.plan import parse_objective
from quire.cli.plan.report import PlanReport, flags_of, nearest_text
from quire.cli.plan.study import NarrowKV, Study
from quire.cli.tables import NOTHING
from quire.core.byte_sizes import parse_bytes
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import KVCacheSpec
from quire.simulate.capacity import Concurrency
from quire.simulate.estimate import Estimate, Objective
from quire.simulate.lengths import RequestLengths
from quire.simulate.planner import Pool, Recommendation

HELD = Concurrency(average=1234.56, p50=1500, p95=800, longest=7, reserved=3, waste=0.0625)
ESTIMATE = Estimate(
    num_sequences=96,
    budget=2048,
    num_decodes=88.4,
    tokens_per_s=1234.5,
    requests_per_s=9.87,
    tpot_s=0.0721,
    ttft_s=0.3456,
    ttft_p95_s=1.2345,
)


def spec_of(num_layers: int, heads: int, block_size: int) -> KVCacheSpec:
    return KVCacheSpec.from_layers(
        [None] * num_layers, block_size=block_size, num_kv_heads=heads, head_dim=64, dtype="bfloat16"
    )


def best_of(spec: KVCacheSpec, num_blocks: int) -> Recommendation:
    return Recommendation(spec.block_size, 96, Pool(spec, num_blocks, 4096), HELD, ESTIMATE)


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 16, 48]), st.integers(1, 1 << 20))
def test_the_flags_of_the_best_settings_make_a_pool_of_just_as_many_blocks(
    num_layers: int, heads: int, block_size: int, num_blocks: int
) -> None:
    spec = spec_of(num_layers, heads, block_size)
    flags = flags_of(best_of(spec, num_blocks))
    found = re.fullmatch(r"--block-size (\d+) --max-num-seqs 96 --max-num-batched-tokens 2048 --kv-memory (\S+)", flags)
    assert found is not None
    assert int(found[1]) == block_size
    assert parse_bytes(found[2]) // spec.bytes_per_block == num_blocks


def test_a_pool_of_whole_mebibytes_is_written_so() -> None:
    spec = spec_of(32, 16, 16)
    assert spec.bytes_per_block == 2 << 20
    assert flags_of(best_of(spec, 3914)).endswith("--kv-memory 7828MiB")
    assert flags_of(best_of(spec, 511)).endswith(f"--kv-memory {1022 << 20}")


@given(st.floats(1e-6, 1e7), st.floats(1e-6, 1e7))
def test_the_nearest_targets_are_kept_when_they_are_asked_for(ttft_s: float, tpot_s: float) -> None:
    nearest = replace(ESTIMATE, ttft_p95_s=ttft_s, tpot_s=tpot_s)
    objective = parse_objective(nearest_text(nearest))
    for asked, reached in ((objective.ttft_s, ttft_s), (objective.tpot_s, tpot_s)):
        assert asked is not None
        assert reached <= asked * (1 + 1e-15)
        assert asked <= reached * (1 + 1e-15) + 0.0001001


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("", Objective()),
        ("ttft=500ms", Objective(0.5)),
        (" tpot=0.05s , ttft=2s", Objective(2.0, 0.05)),
        ("tpot=40ms,ttft=0.5s", Objective(0.5, 0.04)),
    ],
)
def test_targets_are_times_in_any_order(text: str, objective: Objective) -> None:
    assert parse_objective(text) == objective


@pytest.mark.parametrize(
    "text",
    [
        *(",", "ttft", "ttft=", "ttft=5", "ttft=5m", "ttft=0ms", "ttft=0.000s", "ttft=-5ms", "ttft=1e3ms", "ttft=.5s"),
        *("ttft=5ms,", "ttft=5ms,ttft=6ms", "latency=5ms", "ttft=\u0665ms", "ttft=5ms;tpot=5ms", "ttft=5 ms"),
    ],
)
def test_targets_that_are_none_are_refused_in_one_way(text: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        parse_objective(text)
    assert str(caught.value) == f"slo is {text!r}; allowed: times such as ttft=500ms,tpot=0.05s, one or both"


# ---- the text -------------------------------------------------------------------------------------------------------


def engine_of(spec: KVCacheSpec) -> Any:
    parts = [("weights", 3 << 30), ("KV blocks", 5 << 20), ("swap", 0), ("activations", 1 << 20), ("total", 0)]
    plan = SimpleNamespace(parts=parts, num_blocks=12345, max_model_len=40960)
    return SimpleNamespace(plan=plan, facts=SimpleNamespace(kv_spec=spec))


def study(name: str, **more: Any) -> Study:
    hardware: Any = SimpleNamespace(
        name=name, read_bandwidth=1e9, matrix_rate={"bfloat16": 1e12}, notes="", num_ranks=1
    )
    return Study(hardware, 24 << 30, **more)


def report_of(*studies: Study, lengths: RequestLengths | None = None) -> PlanReport:
    spec = SimpleNamespace(context_length=40960)
    model = SimpleNamespace(architecture="Qwen3ForCausalLM", spec=spec, dtype="bfloat16")
    spec.layers = [None] * 28
    alone = SimpleNamespace(draft=None)
    sizer: Any = SimpleNamespace(
        config=SimpleNamespace(model="a folder/qwen3", host_cache=0), model=model, model_of=lambda config: alone
    )
    lengths = lengths or RequestLengths(((512, 128), (1024, 256)))
    return PlanReport(sizer, "--weights int8", "prompts of 512", lengths, studies)


def whole_study(name: str = "here", **more: Any) -> Study:
    spec = spec_of(28, 8, 16)
    found = {"engine": engine_of(spec), "held": HELD, "estimate": ESTIMATE, "stream_tokens_per_s": 31.4159}
    return study(name, **{**found, "prompt_s": 0.0123, "best": best_of(spec, 100), **more})


def rows_of(report: PlanReport) -> dict[str, list[str]]:
    """The table, by label; cells are two or more spaces apart."""
    table = str(report).split("\n\n")[1]
    return {cells[0]: cells[1:] for line in table.splitlines() if (cells := re.split(r"\s{2,}", line.strip()))}


def test_every_figure_of_a_machine_stands_in_its_row() -> None:
    narrow = (NarrowKV("int8", 60, 200, 2345.67),)
    rows = rows_of(report_of(whole_study(narrow=narrow)))
    assert rows == {
        "here": [],
        "memory": ["24.00 GiB"],
        "weights": ["3.00 GiB"],
        "KV blocks": ["5.0 MiB"],
        "swap": ["0 B"],
        "activations": ["1.0 MiB"],
        "blocks": ["12,345"],
        "longest sequence": ["40,960"],
        "concurrent requests, on average": ["1,234.6"],
        "all as long as the p50": ["1,500"],
        "all as long as the p95": ["800"],
        "all as long as the longest": ["7"],
        "if each reserved the context": ["3"],
        "empty slots in blocks taken": ["6.2 %"],
        "on average with int8 KV": ["2,345.7"],
        "one stream, tok/s at most": ["31.4"],
        "its first token, ms at least": ["12.3"],
        "a disk cache pays above, GB/s": ["2.4"],
        "busy: decodes side by side": ["88"],
        "tok/s at most": ["1,234"],
        "requests/s at most": ["9.9"],
        "between tokens, ms at least": ["72.1"],
        "first token, p50, ms at least": ["346"],
        "first token, p95, ms at least": ["1,234"],
    }


def test_what_a_machine_does_not_have_is_a_dash_in_line_with_the_others() -> None:
    problem = InvalidConfigError("memory", "1.0 MiB", "6MiB or more")
    report = report_of(whole_study("large"), study("small", problem=problem), whole_study("none", best=None))
    rows = rows_of(report)
    assert rows["large"] == ["small", "none"]
    del rows["large"]
    assert rows.pop("memory") == ["24.00 GiB"] * 3
    assert all(cells[1] == NOTHING and cells[0] == cells[2] != NOTHING for cells in rows.values())
    table = str(report).split("\n\n")[1].splitlines()
    assert len({len(line) for line in table}) == 1, "columns are in line"


def test_advice_is_a_command_that_can_be_copied_or_says_why_there_is_none() -> None:
    problem = InvalidConfigError("memory", "1.0 MiB", "6MiB or more")
    text = str(
        report_of(
            whole_study("large"),
            study("small", problem=problem),
            whole_study("slow", best=None, nearest=ESTIMATE),
            whole_study("none", best=None),
        )
    )
    spec = spec_of(28, 8, 16)
    assert text.split("\n\n")[2:] == [
        "best settings on large: up to 1,234 tok/s with 96 concurrent requests; 72.1 ms between tokens, first token "
        "(p95) 1,234 ms\n  quire serve 'a folder/qwen3' --weights int8 --block-size 16 --max-num-seqs 96 "
        f"--max-num-batched-tokens 2048 --kv-memory {100 * spec.bytes_per_block}",
        "small: memory is '1.0 MiB'; allowed: 6MiB or more",
        "slow: no settings meet the targets; the closest: ttft=1234.5ms,tpot=72.1ms",
        "none: no settings meet the targets",
    ]


def test_the_facts_say_what_was_cut() -> None:
    whole = report_of(whole_study())
    facts = str(whole).split("\n\n")[0].splitlines()
    assert facts[0].split(None, 1) == ["model", "a folder/qwen3: Qwen3ForCausalLM, 28 layers, bfloat16"]
    assert facts[-1].split(None, 1) == [
        "requests",
        "prompts of 512; both together: p50 640, p95 1,280, longest 1,280",
    ]
    cut = report_of(study("small"), lengths=replace(RequestLengths(((512, 128), (1024, 256))), num_cut=1))
    assert str(cut).split("\n\n")[0].endswith("longest 1,280; 1 of 2 cut to the context")
    assert "\nKV " not in str(cut).split("\n\n")[0]


def test_json_has_the_figures_as_they_are_and_nothing_where_there_is_none() -> None:
    problem = InvalidConfigError("memory", "1.0 MiB", "6MiB or more")
    found = report_of(whole_study(), study("small", problem=problem)).as_json()
    large, small = found["machines"]
    assert (large["busy"]["tpot_s"], large["concurrency"]["average"]) == (0.0721, 1234.56)
    assert large["best"]["kv_memory"] == 100 * large["bytes_per_block"]
    assert large["parts_bytes"] == {"weights": 3 << 30, "KV blocks": 5 << 20, "swap": 0, "activations": 1 << 20}
    assert (large["problem"], large["nearest"]) == (None, None)
    assert small == {
        "name": "small",
        "read_bandwidth": 1e9,
        "matrix_rate": {"bfloat16": 1e12},
        "notes": "",
        "memory_bytes": 24 << 30,
        "problem": "memory is '1.0 MiB'; allowed: 6MiB or more",
    }
    assert found["requests"] == {
        "text": "prompts of 512",
        "num_cut": 0,
        "total_tokens": {"0.5": 640, "0.95": 1280, "1.0": 1280},
    }
