"""What a report says of a log is what happened, and what it advises is what another run would bring."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import re
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli import main
from quire.cli.report import make_report
from quire.cli.report.advice import FIGURES, NO_GAIN, trials
from quire.cli.report.document import report_document
from quire.cli.report.recorded import RunReader
from quire.cli.report.text import Report
from quire.cli.report.trial import LoggedTraffic, read_run
from quire.cli.simulate.progress import ProgressLine
from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import StepLogError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import CacheScope, Request, RequestStatus
from quire.core.step import BlockMove, StepPlan, column
from quire.engine.records.step_log import MAGIC, read_records, replayed
from quire.reporting.document.content import Chart, Table
from quire.reporting.document.html import document_html
from quire.simulate.cost.linear import LinearCost
from quire.simulate.meter import Latencies
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.workload.offered import OfferedRequest, OpenLoop

QUIET = ProgressLine(io.StringIO(), ManualClock())
FULL = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))
MIXED = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,), window=9)))
SHORT_OF_BLOCKS = EngineSetup(
    replace(FULL, block_size=16),
    MemoryConfig(num_blocks=14),
    SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, headroom=0.0),
    LinearCost(0.01, 0.001),
)


def setup_for(rng: random.Random) -> EngineSetup:
    """A small engine that is often short of blocks."""
    spec = rng.choice([FULL, FULL, MIXED])
    memory = MemoryConfig(
        num_blocks=rng.choice([70, 100, 400]),
        num_host_blocks=rng.choice([0, 50]),
        prefix_index=rng.choice(["hash_chain", "radix_tree", "none"]),
    )
    scheduler = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([6, 16, 200]),
        max_model_len=60,
        policy=rng.choice(["fcfs", "priority", "fair_share"]),
        preemption=rng.choice(["auto", "swap", "recompute"]),
        max_steps_under_way=rng.choice([1, 1, 2, 3]),
    )
    return EngineSetup(spec, memory, scheduler, LinearCost(0.5, 0.125))


def requests_for(rng: random.Random, *, beams: bool = True) -> list[OfferedRequest]:
    """Requests of two tenants, due all at once or later, that share beginnings."""
    prefixes = [array("i", [rng.randrange(9) for _ in range(rng.choice([0, 8, 15]))]) for _ in range(3)]
    latest = rng.choice([0, 320])
    times = sorted(rng.randint(0, latest) / 8 for _ in range(rng.randint(2, 25)))  # eighths add up without rounding
    kinds = [(1, False), (1, False), (3, False), *[(2, True)] * beams]
    return [
        OfferedRequest(
            f"r{number}",
            due_s,
            rng.choice(prefixes) + array("i", [rng.randrange(3) for _ in range(rng.randint(1, 20))]),
            rng.randint(1, 20),
            *rng.choice(kinds),
            scope=CacheScope(rng.choice(["a", "b"])),
        )
        for number, due_s in enumerate(times)
    ]


def run_and_log(setup: EngineSetup, requests: list[OfferedRequest]) -> tuple[SimulationResult, bytes]:
    log = io.BytesIO()
    result = Simulation([PagedEngine(setup, log=log)], OpenLoop(requests)).run()
    return result, log.getvalue()


def read(log: bytes) -> RunReader:
    return read_run(io.BytesIO(log))


# ---- what is said of a run ------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_figures_are_those_that_the_simulation_counted_itself(seed: int) -> None:
    """Two counts that share no line: one looks at plans while they are computed, one at the log of it."""
    rng = random.Random(seed)
    requests = requests_for(rng, beams=False)
    result, log = run_and_log(setup_for(rng), requests)
    run = read(log).run
    ledger = run.scheduler.memory.ledger()
    assert (run.num_requests, run.num_plans) == (len(requests), result.num_steps)
    num_queried = result.prompt_tokens if run.scheduler.memory.config.prefix_index != "none" else 0
    assert (ledger.queried_tokens, ledger.hit_tokens) == (num_queried, result.hit_tokens)
    assert run.scheduler.num_preemptions == result.num_preemptions
    assert run.recomputed_tokens == result.recomputed_tokens
    for name in ("itl_s", "tpot_s"):
        ours, theirs = getattr(run.latencies, name).distribution(), result.latencies[name]
        assert (ours.count, ours.most) == (theirs.count, pytest.approx(theirs.most))
        assert ours.mean == pytest.approx(theirs.mean)
    assert run.latencies.ttft_s.count == result.latencies["ttft_s"].count
    assert run.latencies.latency_s.count == result.num_sequences
    if not requests[-1].due_s:
        assert run.latencies.ttft_s.distribution().mean == pytest.approx(result.latencies["ttft_s"].mean)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_tenants_and_reasons_add_up_and_nothing_is_left_over(seed: int) -> None:
    rng = random.Random(seed)
    requests = requests_for(rng)
    result, log = run_and_log(setup_for(rng), requests)
    reader = read(log)
    run, tenants = reader.run, reader.run.tenants.values()
    assert sum(tenant.num_requests for tenant in tenants) == len(requests)
    assert sum(tenant.prompt_tokens for tenant in tenants) == result.prompt_tokens
    assert sum(tenant.hit_tokens for tenant in tenants) == result.hit_tokens
    assert sum(tenant.num_preemptions for tenant in tenants) == result.num_preemptions
    assert sum(tenant.wait_s.count for tenant in tenants) == run.wait_s.count == len(requests)
    assert sum(run.missed_tokens.values()) == result.prompt_tokens - result.hit_tokens
    assert run.missed_requests == Counter(run.scheduler.memory.ledger().misses)
    if not any(request.beam_search for request in requests):
        assert sum(tenant.output_tokens for tenant in tenants) == result.output_tokens
    assert run.most_used_blocks <= run.scheduler.memory.config.num_blocks
    assert not reader._tracks
    assert not reader._plans
    assert not reader._journal.has_news


def test_what_is_held_does_not_grow_with_the_log() -> None:
    requests = [
        OfferedRequest(str(number), 0.4 * number, array("i", [number % 7] * 20), 5, scope=CacheScope(str(number % 3)))
        for number in range(200)
    ]
    sizes = []
    for count in (50, 200):
        reader = read(run_and_log(SHORT_OF_BLOCKS, requests[:count])[1])
        sizes.append(len(reader._tracks) + len(reader._plans) + len(reader.run.tenants) + len(reader._steps))
        assert len(reader.run.timeline.points) <= 512
    assert sizes[0] == 3 + 50 * 5
    assert read(run_and_log(SHORT_OF_BLOCKS, requests)[1])._steps.maxlen == 1 << 14


# ---- what another setting would bring -------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_same_settings_bring_the_same_run(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A trial that changes nothing is the run itself: the same steps at the same times, and so the same figures."""
    rng = random.Random(seed)
    setup, requests = setup_for(rng), requests_for(rng)
    _, log = run_and_log(setup, requests)
    path = tmp_path_factory.mktemp("trial") / "run.steplog"
    path.write_bytes(log)
    before = read(log).run
    after = LoggedTraffic(str(path), before.num_records, None, QUIET).try_on(setup, "the same")
    assert (after.num_plans, after.num_records) == (before.num_plans, before.num_records)
    assert [figure.of(after) for figure in FIGURES] == pytest.approx([figure.of(before) for figure in FIGURES])
    assert after.missed_tokens == before.missed_tokens
    for name in Latencies.NAMES:
        ours, theirs = (getattr(run.latencies, name).distribution() for run in (after, before))
        assert (ours.count, ours.mean) == (theirs.count, pytest.approx(theirs.mean))


def test_an_answer_that_comes_back_in_a_prompt_is_found(tmp_path: Path) -> None:
    """The second prompt repeats an answer that no simulation would make up."""
    prompt, answer = array("i", range(32)), array("i", range(100, 133))
    turn = prompt + answer + array("i", [5])
    requests = [
        OfferedRequest("first", 0.0, prompt, 33, outputs=(answer,)),
        OfferedRequest("second", 9.0, turn, 2, outputs=(array("i", [1, 2]),)),
    ]
    log = io.BytesIO()
    engine = PagedEngine(SHORT_OF_BLOCKS, log=log, outputs={each.request_id: each.outputs for each in requests})
    Simulation([engine], OpenLoop(requests)).run()
    path = tmp_path / "run.steplog"
    path.write_bytes(log.getvalue())
    run = read(log.getvalue()).run
    assert run.scheduler.memory.ledger().hit_tokens == 64
    traffic = LoggedTraffic(str(path), run.num_records, None, QUIET)
    assert [request.outputs for request in traffic.requests()] == [request.outputs for request in requests]
    assert traffic.try_on(SHORT_OF_BLOCKS, "the same").scheduler.memory.ledger().hit_tokens == 64


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class HurriedClock(ManualClock):
    """A clock of which every look takes a second."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Report, str]:
    """The file of `busy_run`, its report, and what a terminal shows until that is made."""
    path, stream = str(busy_log(tmp_path_factory.mktemp("busy") / "run.steplog")), Terminal()
    report = make_report(path, ProgressLine(stream, HurriedClock()), limit=1000)
    return path, report, stream.getvalue()


@pytest.fixture(scope="module")
def busy(watched: tuple[str, Report, str]) -> tuple[str, Report]:
    return watched[:2]


def busy_log(path: Path) -> Path:
    path.write_bytes(busy_run())
    return path


@functools.cache
def busy_run() -> bytes:
    """The log of an engine that has too few blocks; one of its tenants asks much more than the other."""
    rng = random.Random(5)
    requests = [
        OfferedRequest(
            str(number),
            0.02 * number,
            array("i", [rng.randrange(50) for _ in range(rng.randint(10, 40))]),
            rng.randint(10, 50),
            scope=CacheScope("often" if number % 5 else "seldom"),
        )
        for number in range(60)
    ]
    return run_and_log(SHORT_OF_BLOCKS, requests)[1]


def test_advice_has_its_figures_from_another_run(busy: tuple[str, Report]) -> None:
    path, report = busy
    assert report.simulated is not None
    found = {each.setting: each for each in report.findings}
    larger = found["--kv-memory 21KiB"]
    setup = replace(SHORT_OF_BLOCKS, memory=replace(SHORT_OF_BLOCKS.memory, num_blocks=21))
    requests = LoggedTraffic(path, report.recorded.num_records, None, QUIET).requests()
    count = report.simulated.scheduler.num_preemptions
    assert count > 0
    assert larger.evidence == f"{report.recorded.scheduler.num_preemptions} preemptions"
    assert (larger.before, larger.goal) == (count, f"preemptions {count} → {larger.after:.0f}")
    assert larger.after < count
    assert Simulation([PagedEngine(setup)], OpenLoop(requests)).run().num_requests == report.recorded.num_requests
    assert found["--no-enable-prefix-caching"].verdict == "no gain"
    assert found["--block-size 32"].goal.startswith("waste ")
    verdicts = [each.verdict for each in report.findings]
    assert verdicts == sorted(verdicts)


def most_lost_blocks(log: bytes) -> int:
    """What those gave up who had yielded by recompute, at most at once: read off the sequences after each record."""
    planned: dict[Request, int] = {}  # steps under way are lost, too
    most = 0
    for record in replayed(io.BytesIO(log)):
        requests = record.scheduler.requests.values()
        alive = [each for request in requests for each in (request.group.members if request.group else [request])]
        preempted = [each for each in alive if each.status is RequestStatus.PREEMPTED]
        spec = record.scheduler.memory.spec
        lost = [spec.num_blocks_for(planned[each]) for each in preempted if not each.sampling.beam_search]
        most = max(most, sum(lost))
        planned.update((each, each.num_planned) for each in alive if each.row >= 0)
    return most


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_room_to_swap_is_for_the_most_that_was_lost_at_once(seed: int) -> None:
    rng = random.Random(seed)
    setup = setup_for(rng)
    setup = replace(setup, memory=replace(setup.memory, num_blocks=20, num_host_blocks=rng.choice([0, 5])))
    log = run_and_log(setup, requests_for(rng))[1]
    run = read(log).run
    assert run.most_lost_blocks == most_lost_blocks(log)
    swaps = [trial for trial in trials(run, setup) if "--swap-space" in trial.setting]
    assert len(swaps) == (run.most_lost_blocks > 0)
    for trial in swaps:
        assert trial.setup.memory.num_host_blocks == setup.memory.num_host_blocks + run.most_lost_blocks
        before, after = setup.scheduler.preemption, trial.setup.scheduler.preemption
        assert (after, "--preemption auto" in trial.setting) == (
            ("auto", True) if before == "recompute" else (before, False)
        )
        assert (
            (trial.setup.cost is setup.cost)
            == ("the blocks that were swapped" in trial.caveat)
            == (run.num_swapped > 0)
        )


def test_int8_is_advised_with_what_its_figures_leave_out(busy: tuple[str, Report]) -> None:
    path, report = busy
    (int8,) = (found for found in report.findings if found.setting == "--kv-dtype int8")
    narrow = replace(SHORT_OF_BLOCKS.spec, dtype="int8")
    num_blocks = 14 * SHORT_OF_BLOCKS.spec.bytes_per_block // narrow.bytes_per_block
    assert num_blocks == 37
    tried = replace(SHORT_OF_BLOCKS, spec=narrow, memory=replace(SHORT_OF_BLOCKS.memory, num_blocks=num_blocks))
    requests = LoggedTraffic(path, report.recorded.num_records, None, QUIET).requests()
    assert int8.after == Simulation([PagedEngine(tried)], OpenLoop(requests)).run().num_preemptions < int8.before
    assert "int8 changes outputs slightly (a mean KL of 0.0009 nat on SmolLM2-135M" in int8.caveat
    assert f"\n      note: {int8.caveat}\n" in str(report)
    parts = [part for section in report_document(report).sections for part in section.parts]
    assert isinstance(parts[0], Table) and any(int8.caveat in row[-1] for row in parts[0].rows)


def test_swap_space_is_advised_where_it_shortens_the_waiting_and_not_told_elsewhere(
    tmp_path: Path, busy: tuple[str, Report]
) -> None:
    rng = random.Random(5)
    requests = [
        OfferedRequest(str(number), float(number), array("i", rng.choices(range(50), k=80)), rng.randint(30, 90))
        for number in range(40)
    ]
    lossy = replace(SHORT_OF_BLOCKS, memory=MemoryConfig(24, prefix_index="none"), cost=LinearCost(0.01, 0.01))
    path = tmp_path / "lossy.steplog"
    path.write_bytes(run_and_log(lossy, requests)[1])
    report = make_report(str(path), QUIET, limit=1000)
    (swap,) = (found for found in report.findings if "--swap-space" in found.setting)
    assert swap.verdict == "a gain" and swap.after < swap.before and swap.goal.startswith("latency p95 ")
    assert any(re.fullmatch(r"tokens computed again [\d,]+ → 0", other) for other in swap.others)
    assert swap.caveat == "assumes that blocks move at 3.73 GiB per second, as --preemption auto does"
    assert f"\n      note: {swap.caveat}\n" in str(report)

    report = busy[1]  # what is lost is soon computed again
    assert [trial for trial in trials(report.recorded, SHORT_OF_BLOCKS) if "--swap-space" in trial.setting]
    assert not [found for found in report.findings if "--swap-space" in found.setting]
    assert {found.caveat for found in report.findings if found.verdict == NO_GAIN} == {""}


def test_the_time_of_a_swap_that_no_step_has_shown_is_added(tmp_path: Path) -> None:
    reader = read(busy_log(tmp_path / "run.steplog").read_bytes())
    (trial,) = (trial for trial in trials(reader.run, SHORT_OF_BLOCKS) if "--swap-space" in trial.setting)
    moves = tuple(BlockMove(block, block) for block in range(3))
    plan = StepPlan(0, column(0), column(0), column(10), column(1), moves_in=moves)
    added_s = trial.setup.cost.step_s(plan) - SHORT_OF_BLOCKS.cost.step_s(plan)
    assert added_s == pytest.approx(3 * 1024 / 4e9)


def test_int8_is_tried_with_the_blocks_that_a_model_with_states_would_get() -> None:
    spec = KVCacheSpec(
        4, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,), window=2, recurrent=True)), recurrent_bytes=900
    )
    spec = spec.with_block_size(spec.usual_block_size)
    narrow = replace(spec, dtype="int8")
    assert (spec.block_size, narrow.usual_block_size) == (32, 80)
    requests = [OfferedRequest(str(number), 0.0, array("i", [number] * 60), 60) for number in range(12)]
    for setup, block_size in (
        (replace(SHORT_OF_BLOCKS, spec=spec), 80),
        (replace(SHORT_OF_BLOCKS, spec=spec.with_block_size(64)), 64),  # as its user chose
    ):
        reader = read(run_and_log(setup, requests)[1])
        (trial,) = (each for each in trials(reader.run, setup) if each.setting == "--kv-dtype int8")
        assert trial.setup.spec == narrow.with_block_size(block_size)
        num_blocks = 14 * setup.spec.bytes_per_block // trial.setup.spec.bytes_per_block
        assert trial.setup.memory.num_blocks == num_blocks
        sizes = (" of 80 tokens", " of 32 tokens") if block_size == 80 else ("", "")
        assert trial.evidence.endswith(f"; {num_blocks} blocks{sizes[0]} would fit, not 14{sizes[1]}")


def test_a_rule_speaks_only_where_there_is_something_to_say() -> None:
    requests = [OfferedRequest(str(number), 9.0 * number, array("i", [number] * 20), 20) for number in range(12)]
    roomy = replace(SHORT_OF_BLOCKS, memory=MemoryConfig(num_blocks=100))
    for setup, expected in (
        (roomy, {"--kv-memory 50KiB", "--block-size 32", "--no-enable-prefix-caching"}),
        (replace(roomy, memory=MemoryConfig(100, prefix_index="none")), {"--enable-prefix-caching"}),
    ):
        reader = read(run_and_log(setup, requests)[1])
        assert expected <= {trial.setting for trial in trials(reader.run, setup)}
        assert not {"--max-num-seqs 16", "--policy fair_share"} & {t.setting for t in trials(reader.run, setup)}
    crowded = replace(roomy, scheduler=replace(roomy.scheduler, max_num_seqs=2))
    reader = read(run_and_log(crowded, [replace(request, due_s=0.0) for request in requests])[1])
    assert "--max-num-seqs 4" in {trial.setting for trial in trials(reader.run, crowded)}
    narrow = replace(SHORT_OF_BLOCKS, spec=replace(SHORT_OF_BLOCKS.spec, dtype="int8"))
    reader = read(run_and_log(narrow, [replace(request, due_s=0.0) for request in requests])[1])
    assert "--kv-memory 8KiB" in {trial.setting for trial in trials(reader.run, narrow)}
    assert "--kv-dtype int8" not in {trial.setting for trial in trials(reader.run, narrow)}


# ---- logs that are not whole ----------------------------------------------------------------------------------------


def test_a_torn_log_is_read_up_to_there(tmp_path: Path) -> None:
    log = busy_log(tmp_path / "run.steplog").read_bytes()
    ends, at = [], len(MAGIC)
    for record in read_records(io.BytesIO(log)):
        at += 17 + len(record.payload)
        ends.append(at)
    for number in (2, 40, 333, len(ends) - 2):
        whole, torn = read(log[: ends[number]]).run, read(log[: ends[number] + 5]).run
        assert (whole.torn, torn.torn) == ("", "the log ends within a record")
        assert torn.num_records == whole.num_records == number
        assert torn.wait_s.distribution() == whole.wait_s.distribution()
    path = tmp_path / "torn.steplog"
    path.write_bytes(log[: ends[333] + 5])
    text = str(make_report(str(path), QUIET, limit=3))
    assert "note: the log ends within a record; everything before that was read" in text
    assert "from simulating 3 requests again" in text


@pytest.mark.parametrize("data", [b"", b"quire step log 4\n", b"TIMESTAMP,ContextTokens\n", MAGIC], ids=repr)
def test_what_is_no_log_is_refused_in_one_line(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.steplog"
    path.write_bytes(data)
    assert main(["report", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ") and error.count("\n") == 1


def test_an_altered_log_is_refused(tmp_path: Path) -> None:
    log = bytearray(busy_log(tmp_path / "run.steplog").read_bytes())
    for place in random.Random(1).sample(range(len(MAGIC), len(log)), 15):
        log[place] ^= 4
        with contextlib.suppress(StepLogError):
            assert read(bytes(log)).run.torn  # a length that leads beyond the end
        log[place] ^= 4


# ---- as a user calls it ---------------------------------------------------------------------------------------------


def test_the_command_says_it_in_text_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = str(busy_log(tmp_path / "run.steplog")), tmp_path / "report.json"
    assert main(["report", path, "--json", str(target)]) == 0
    text = capsys.readouterr().out
    content = json.loads(target.read_text())
    assert text.splitlines()[0].startswith(f"{path}: 60 requests in ")
    assert [line for line in text.splitlines() if line.startswith("often  ")]
    for found in content["findings"]:
        assert f"  {found['setting']}: {found['verdict']}\n      because {found['evidence']}\n" in text
    assert content["recorded"]["num_requests"] == 60
    assert content["recorded"]["tenants"]["often"]["num_requests"] == 48
    assert content["settings"]["memory"]["num_blocks"] == 14
    assert main(["report", path, "--limit", "0", "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["recorded"] == content["recorded"]
    assert (again["simulated"], again["findings"]) == (None, [])
    assert main(["report", path, "--limit", "-1"]) == 2
    assert "limit is -1" in capsys.readouterr().err


def test_every_part_of_a_report_says_how_far_it_is(watched: tuple[str, Report, str]) -> None:
    _, report, shown = watched
    for name in ("the same settings", *(found.setting for found in report.findings)):
        assert f"simulating {name}  [#" in shown
        assert f"reading the run of {name}  [####################] 100 %" in shown


def test_a_page_has_the_tables_and_charts_of_the_report(busy: tuple[str, Report]) -> None:
    report = busy[1]
    page = report_document(report)
    parts = [part for section in page.sections for part in section.parts]
    settings_told = [row[0] for row in parts[0].rows] if isinstance(parts[0], Table) else []
    assert settings_told == [f"`{found.setting}`" for found in report.findings]
    memory, queue = (part for part in parts if isinstance(part, Chart))
    columns = zip(*(one.values for one in memory.series), strict=True)
    totals = [sum(value or 0.0 for value in values) for values in columns]
    assert totals == pytest.approx([14] * len(totals))
    assert max(value or 0 for value in queue.series[0].values) <= report.recorded.most_running
    assert document_html(page).startswith("<!doctype html>")


def test_a_name_from_outside_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scopes = [CacheScope("\x1b[2J\nevil"), CacheScope("plain")]
    requests = [OfferedRequest(str(n), 0.0, array("i", [n] * 9), 4, scope=scopes[n % 2]) for n in range(4)]
    path = tmp_path / "run.steplog"
    path.write_bytes(run_and_log(SHORT_OF_BLOCKS, requests)[1])
    assert main(["report", str(path), "--limit", "0"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\n?[2J?evil " in text


def test_there_is_no_advice_from_fewer_than_a_hundred_requests(tmp_path: Path) -> None:
    report = make_report(str(busy_log(tmp_path / "run.steplog")), QUIET)
    assert report.recorded.num_requests == 60
    assert (report.simulated, report.findings) == (None, ())
    assert "tried nothing (fewer than 100 requests; --limit N tries them anyway)" in str(report)
