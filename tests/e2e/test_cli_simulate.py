"""`quire simulate`, as a user calls it."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.cli import main
from quire.cli.simulate.progress import ProgressLine
from quire.core.clock import ManualClock
from quire.engine.records.step_log import MAGIC, SETTINGS, read_records

SMALL = ["simulate", "qwen3-0.6b", "--kv-memory", "64MiB", "--max-model-len", "512", "--dtype", "bfloat16"]
BRIEF = ["--rate", "4", "--duration", "8", "--prompt-tokens", "60", "--output-tokens", "30"]
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.68,74,4
2023-11-16 18:15:46.99,96,9
so much for that
2023-11-16 18:15:51.22,79,5
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ") and error.count("\n") == 1
    return error


def test_a_run_says_what_was_run_and_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    table = run(capsys, *BRIEF)
    assert table == run(capsys, *BRIEF)
    head, _, *rows = table.splitlines()
    assert head.startswith("qwen3-0.6b on nvidia-a100-40gb (40.00 GiB, 36 blocks of 1.8 MiB); 4 a second, poisson")
    assert head.endswith("60 + 30 tokens; seed 0")
    assert any(row.startswith("first token: p50 / p95 / p99") for row in rows)
    assert table != run(capsys, *BRIEF, "--seed", "1")


def test_variants_stand_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    what_if = ["--what-if", "block_size=16,32", "--what-if", "system=quire,orca_max", "--csv", str(tmp_path / "t.csv")]
    report = json.loads(run(capsys, *BRIEF, *what_if, "--json", "-"))
    results = report["results"]
    assert list(results) == [
        "block_size=16 system=quire",
        "block_size=16 system=orca_max",
        "block_size=32 system=quire",
        "block_size=32 system=orca_max",
    ]
    assert len({result["output_tokens"] for result in results.values()}) == 1
    running = [result["mean_running"] for result in results.values()]
    assert running[0] > running[1] and running[2] > running[3]
    assert report["seed"] == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert {row["variant"] for row in rows} == set(results) and {row["seed"] for row in rows} == {"0"}
    assert all(float(row["stored_slots"]) >= 0 for row in rows)


def test_several_settings_may_follow_one_flag_and_blocks_have_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, *BRIEF, "--what-if", "block_size=8,32", "policy=priority", "--json", "-"))
    small, large = report["results"]["block_size=8 policy=priority"], report["results"]["block_size=32 policy=priority"]
    assert [result["replicas"][0]["ledger"]["block_size"] for result in (small, large)] == [8, 32]
    assert small["output_tokens"] == large["output_tokens"] > 0


def test_counts_over_time_are_whole_however_large(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it.csv"
    assert main(["simulate", "guide", "--kv-memory", "24GiB", "--duration", "2", "--csv", str(path)]) == 0
    capsys.readouterr()
    for row in csv.DictReader(io.StringIO(path.read_text())):
        assert (
            sum(int(row[f"{state}_blocks"]) for state in ("used", "cached", "free")) == (24 << 30) // 24_576 > 1_000_000
        )


def test_a_trace_is_run_and_what_is_no_request_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    assert "line 4" in fails(capsys, "--trace", str(path))
    table = run(capsys, "--trace", str(path), "--skip-malformed")
    assert "lines skipped: 1" in table
    assert table.splitlines()[3].split() == ["requests", "3"]


def test_a_log_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "run.log")
    steps = run(capsys, *BRIEF, "--log", path).splitlines()[-1].split()
    assert run(capsys, "--replay", path) == f"{steps[1]} plans, all identical byte for byte\n"
    again = json.loads(run(capsys, "--trace", path, "--json", "-"))["results"]["quire"]
    assert str(again["num_steps"]) == steps[1].replace(",", "")
    assert main([*SMALL, "--replay", "/dev/null"]) == 1
    assert capsys.readouterr().err.startswith("quire: error: /dev/null: not a step log")


def test_a_log_that_is_torn_is_read_up_to_there_by_everybody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, whole, torn = (tmp_path / name for name in ("run.log", "whole.log", "torn.log"))
    run(capsys, *BRIEF, "--log", str(log))
    data, ends = log.read_bytes(), [len(MAGIC)]
    for record in read_records(io.BytesIO(data)):
        ends.append(ends[-1] + 17 + len(record.payload))
    whole.write_bytes(data[: ends[400]])
    torn.write_bytes(data[: ends[400] + 3])
    for command, told in (
        ([*SMALL, "--replay"], []),
        ([*SMALL, "--what-if", "block_size=16,32", "--trace"], [", its end is missing"]),
        (["report", "--limit", "0"], ["\n\nnote: the log ends within a record; everything before that was read"]),
    ):
        assert main([*command, str(whole)]) == 0
        expected = capsys.readouterr()
        assert main([*command, str(torn)]) == 0
        found = capsys.readouterr()
        assert expected.err == ""
        assert found.err == f"quire: note: {torn}: the log ends within a record; everything before that was read\n"
        for text in told:
            assert text in found.out
            found = found._replace(out=found.out.replace(text, ""))
        assert found.out.replace(torn.name, whole.name) == expected.out


@pytest.mark.parametrize("num_bytes", [5, 60], ids=["settings", "first record"])
def test_a_log_of_which_nothing_is_whole_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, num_bytes: int
) -> None:
    log = tmp_path / "run.log"
    run(capsys, *BRIEF, "--log", str(log))
    data = log.read_bytes()
    settings = next(read_records(io.BytesIO(data)))
    start = len(MAGIC) + (17 + len(settings.payload) if num_bytes == 60 else 0)
    log.write_bytes(data[: start + num_bytes])
    for command in ([*SMALL, "--replay"], [*SMALL, "--trace"], ["report"]):
        assert main([*command, str(log)]) == 1
        assert capsys.readouterr().err == f"quire: error: {log}: the log ends within a record\n"


@pytest.mark.parametrize(
    ("machine", "sizes"),
    [
        (["zen5-2-cores"], [64, 512, 1]),
        (["zen5-2-cores", "--device", "cuda"], [256, 2048, 2]),
        (["nvidia-l4"], [256, 2048, 2]),
        (["nvidia-h100"], [256, 8192, 2]),
        (["nvidia-h100", "--device", "cpu"], [64, 512, 1]),
        (["nvidia-h100", "--max-num-batched-tokens", "40"], [40, 40, 2]),
    ],
)
def test_the_log_holds_what_was_chosen_where_it_was_left_open(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, machine: list[str], sizes: list[int]
) -> None:
    path = tmp_path / "run.log"
    run(capsys, *BRIEF, "--log", str(path), "--hardware", *machine)
    with path.open("rb") as log:
        scheduler = json.loads(next(each.payload for each in read_records(log) if each.kind == SETTINGS))["scheduler"]
    assert [scheduler[f"max_{name}"] for name in ("num_seqs", "num_batched_tokens", "steps_under_way")] == sizes
    assert "all identical byte for byte" in run(capsys, "--replay", str(path))


@pytest.mark.parametrize(
    "source",
    [
        ["--users", "5"],
        ["--turns", "3", "--thinking", "2"],
        ["--arrivals", "gamma", "--variation", "3"],
        ["--arrivals", "bursts"],
        ["--samples", "3"],
        ["--beams", "2"],
        ["--replicas", "2", "--router", "least_loaded", "--shared-tokens", "32", "--prefixes", "2"],
        ["--replicas", "2", "--report-delay", "0.5", "--report-loss", "0.2", "--fault", "2:0:kill", "4:1:drain"],
        ["--replicas", "3", "--least-replicas", "1"],
        ["--replicas", "3", "--prompt-replicas", "1", "--link-bandwidth", "0.5"],
        ["--device", "cuda", "--hardware", "nvidia-h100", "--tensor-parallel", "2", "--link-bandwidth", "64"],
        ["--system", "static"],
    ],
    ids=" ".join,
)
def test_every_kind_of_load_runs(capsys: pytest.CaptureFixture[str], source: list[str]) -> None:
    table = run(capsys, *BRIEF, *source)
    assert "output tokens a second" in table


def test_a_page_holds_what_was_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, what_if = tmp_path / "page.html", ["--what-if", "block_size=16,32", "--seed", "5"]
    table = run(capsys, *BRIEF, *what_if, "--html", str(page))
    text = page.read_text(encoding="utf-8")
    for line in table.splitlines()[3:]:
        assert all(f">{cell}<" in text for cell in re.split(r"  +", line))
    assert ">seed</dt><dd>5<" in text
    (content,) = re.findall(r'<script type="application/json" id="content">(.*)</script>', text)
    charts, films = (json.loads(content)[kind] for kind in ("charts", "films"))
    assert "<dd>40.00 GiB, 36 blocks of 1.8 MiB or 18 blocks of 3.5 MiB<" in text
    for blocks in ("36 blocks of 1.8 MiB", "18 blocks of 3.5 MiB"):
        assert f"<figcaption>Block map: {blocks}<" in text and f"<td>{blocks}<" in text
    assert [film["group"] for film in films] == ["block_size=16", "block_size=32"]
    assert {one["name"] for one in charts[-1]["series"]} == {"block_size=16", "block_size=32"}
    assert len(charts) == 2 + 2 + 1 + 4  # nobody yielded, nothing was hit
    assert run(capsys, *BRIEF, *what_if, "--html", str(page)) == table
    assert page.read_text(encoding="utf-8") == text


def test_names_in_a_trace_stay_names_in_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, page = tmp_path / "<img src=x onerror=alert(1)>.csv", tmp_path / "page.html"
    trace.write_text(TRACE)
    run(capsys, "--trace", str(trace), "--skip-malformed", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "&lt;img src=x onerror=alert(1)&gt;.csv, lines skipped: 1" in text
    assert "<img" not in text


@pytest.mark.parametrize("what_if", [[], ["--what-if", "system=quire,static"]], ids=["one", "several"])
def test_the_main_plot_is_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path, what_if: list[str]) -> None:
    svg, png = tmp_path / "plot.svg", tmp_path / "plot.PNG"
    run(capsys, *BRIEF, *what_if, "--plot", str(svg))
    words = " ".join(ElementTree.parse(svg).getroot().itertext())
    assert ("First token, cumulative" if what_if else "Where the KV memory is") + ": qwen3-0.6b, seed 0" in words
    assert ("static" in words) == bool(what_if)
    run(capsys, *BRIEF, *what_if, "--plot", str(png))
    assert png.read_bytes().startswith(b"\x89PNG\r\n")


def test_png_without_its_extra_is_refused_before_anything_is_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main([*SMALL, *BRIEF, "--plot", str(tmp_path / "plot.png")]) == 1
    output = capsys.readouterr()
    assert output.err == "quire: error: PNG needs the extra quire[png]: pip install 'quire[png]'; SVG needs nothing\n"
    assert output.out == ""


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_how_far_it_is_is_told_on_a_terminal_only(tmp_path: Path) -> None:
    path, clock = tmp_path / "file", ManualClock()
    path.write_bytes(bytes(40_000))
    for stream in (TerminalStream(), io.StringIO()):
        line = ProgressLine(stream, clock)
        line.begin("reading")
        line.note(0.1)  # too early
        clock.advance(10.0)
        with line.follow(str(path)) as file:
            file.read(io.DEFAULT_BUFFER_SIZE)
        line.close()
        shown = stream.getvalue()
        if stream.isatty():
            share = io.DEFAULT_BUFFER_SIZE / 40_000
            assert f"\rreading  [{'#' * int(20 * share)}{'-' * (20 - int(20 * share))}] {100 * share:.0f} %" in shown
            assert shown.endswith("\r\x1b[K")
        else:
            assert shown == ""


def test_figures_of_the_paper_stand_beside_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--paper", "memory", "--limit", "40")
    assert text.startswith("KV memory that holds token states, ShareGPT (seed 0)")
    assert "38.2 %" in text
    (figure,) = json.loads(run(capsys, "--paper", "memory", "--limit", "40", "--json", "-"))
    assert figure["name"] == "memory"
    assert len(figure["tables"][0]["rows"]) == 6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "0"], "rate is 0.0"),
        (["--memory", "1MiB"], "memory is"),
        (["--what-if", "block_size"], "what-if is 'block_size'"),
        (["--what-if", "no_such=1,2"], "what-if is"),
        (["--what-if", "block_size=0"], "block_size is 0"),
        (["--what-if", "router=random"], "router is 'random'"),
        (["--hardware", "abacus"], "hardware is 'abacus'"),
        (["--replicas", "0"], "replicas is 0"),
        (["--fault", "1:2:stop"], "kind of a fault is 'stop'; allowed: one of kill, silent, drain"),
        (["--fault", "soon"], "fault is 'soon'; allowed: SECONDS:REPLICA:KIND"),
        (["--fault", "1:1:kill"], "replica of a fault is 1"),
        (["--fault", "1:0:kill", "--samples", "2"], "fault is '1:0:kill'; allowed: none with --samples or --beams"),
        (["--report-delay", "-1"], "report delay is -1.0"),
        (["--prompt-replicas", "1"], "prompt-replicas is 1"),
        (["--least-replicas", "2"], "least-replicas is 2"),
        (["--replicas", "2", "--least-replicas", "1", "--fault", "1:0:kill"], "least-replicas is 1; allowed: 0 with"),
        (["--replicas", "2", "--least-replicas", "1", "--prompt-replicas", "1"], "allowed: 0 with --least-replicas"),
        (["--link-bandwidth", "0"], "link-bandwidth is 0.0"),
        (["--replicas", "2", "--prompt-replicas", "1", "--fault", "1:0:kill"], "prompt-replicas is 1; allowed: 0 with"),
        (["--replicas", "2", "--prompt-replicas", "1", "--system", "static"], "system is 'static'; allowed: quire or"),
        (["--replicas", "2", "--prompt-replicas", "1", "--samples", "2"], "allowed: requests of one sequence"),
        (["--hardware", "zen5-2-cores", "--tensor-parallel", "2"], "tensor_parallel is 2; allowed: 1 on zen5-2-cores"),
        (["--plot", "plot.pdf"], "plot is 'plot.pdf'; allowed: a file that ends in .svg or .png"),
        (["--prompt-tokens", "many"], "prompt-tokens is 'many'"),
        (["--log", "x", "--replicas", "2"], "log is 'x'"),
        (["--log", "x", "--fault", "1:0:kill"], "log is 'x'"),
        (["--trace", "/dev/null"], "trace is '/dev/null'; allowed: a file with one request or more"),
        (["--trace", "-", "--what-if", "replicas=1,2"], "trace is '-'"),
        (["--what-if", "step_log=a"], "what-if is 'step_log=a'"),
        (["--what-if", "seed=1,2"], "what-if is 'seed=1,2'"),
        (["--limit", "-1"], "limit is -1"),
        (["--duration", "nan"], "duration is nan"),
        (["--samples", "0"], "samples is 0"),
        (["--users", "3", "--turns", "2"], "turns is 2; allowed: 1 with --users"),
        (
            ["--beams", "2", "--samples", "3"],
            "beams is 2; allowed: 1 with --samples: leave out --samples for beam search",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in fails(capsys, *BRIEF, *arguments)


def test_a_plot_that_no_figure_has_costs_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
    error = fails(capsys, "--paper", "setup", "--limit", "10", "--html", str(page), "--plot", str(plot))
    assert "a figure that has a plot" in error and page.exists() and not plot.exists()
    assert "num_requests is 0" in fails(capsys, "--paper", "setup", "--limit", "0")


def test_right_guesses_bring_answers_sooner_and_wrong_ones_cost_little(capsys: pytest.CaptureFixture[str]) -> None:
    """One user at a time: while memory binds, a token more in a step costs next to nothing."""

    def token_s(*arguments: str) -> float:
        load = ["--users", "1", "--thinking", "0.1", "--duration", "2", "--prompt-tokens", "60"]
        out = run(capsys, *load, "--output-tokens", "60", "--json", "-", *arguments)
        return float(json.loads(out)["results"]["quire"]["latencies"]["tpot_s"]["mean"])

    off = token_s()
    mostly_right, wrong = (token_s("--speculation", "auto", "--acceptance", each) for each in ("0.9", "0"))
    assert mostly_right < 0.5 * off
    assert off <= wrong < 1.1 * off
    assert main([*SMALL, "--acceptance", "1.1"]) == 2
    assert "1.1 is not a number from 0 to 1" in capsys.readouterr().err


def test_a_draft_model_brings_answers_sooner_and_takes_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The other proposers are taken to cost nothing; and one that is always wrong takes the time of its pass."""

    def run_with(speculation: str, acceptance: str) -> tuple[float, int]:
        load = ["--users", "1", "--duration", "1", "--prompt-tokens", "60", "--output-tokens", "60"]
        options = ["--speculation", speculation, "--acceptance", acceptance, "--hardware", "nvidia-a100-40gb"]
        assert main(["simulate", "llama-3.1-8b", *load, *options, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        (blocks,) = re.findall(r"([\d,]+) blocks", json.dumps(found))[:1]
        return float(found["results"]["quire"]["latencies"]["tpot_s"]["mean"]), int(blocks.replace(",", ""))

    (off, most), (auto, _) = run_with("off", "0"), run_with("auto", "0.8")
    (right, blocks), (wrong, _) = run_with("qwen3-0.6b", "0.8"), run_with("qwen3-0.6b", "0")
    assert auto < right < 0.7 * off
    assert off < wrong < 1.6 * off
    assert 0.4 * most < blocks < 0.6 * most
