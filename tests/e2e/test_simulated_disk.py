"""A simulated disk: its tickets take their time, and the product's scheduler hits what it kept."""

from __future__ import annotations

import io
import json
import random
from array import array
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, cli
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kept_block import KeptBlock
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import Request
from quire.core.transfers import BlockLoad, BlockStore, Transfers
from quire.engine.records.step_log import replay
from quire.memory.tiers.rates import LoadRates
from quire.simulate.cost.linear import LinearCost
from quire.simulate.disk import ACCESS_S, WAIT_S, SimDisk
from quire.simulate.replica import EngineSetup, PagedEngine
from support.tiny_checkpoint import write_tiny_qwen3

BLOCK_S = 0.001 + ACCESS_S


def test_one_block_after_another_and_loads_first() -> None:
    disk = SimDisk(1000, 1e6)
    kept = KeptBlock(0, 1, 0, 0, b"")
    stores = (BlockStore(1, 5, kept), BlockStore(2, 6, kept))
    loads = (BlockLoad(3, 0, 7, 0), BlockLoad(4, 1, 8, 0))
    disk.ask(Transfers(loads, stores, patience_us=10_000_000), now_s=0.0)
    assert disk.waits_s(0.0) == pytest.approx(BLOCK_S)
    found = [disk.collect(BLOCK_S * count + 1e-9) for count in range(5)]
    assert [each.done.tolist() for each in found] == [[], [3], [4], [1], [2]]
    assert [each.load_us for each in found] == [0, 1100, 1100, 0, 0]
    assert disk.waits_s(1.0) == 0.0


def test_what_is_given_up_never_ends_and_what_is_too_slow_is_late() -> None:
    disk = SimDisk(1000, 1e6)
    loads = tuple(BlockLoad(ticket, 0, ticket, 0) for ticket in range(100))
    disk.ask(Transfers(loads, patience_us=20_000), now_s=0.0)
    disk.ask(Transfers(drops=array("i", range(1, 100, 2))), now_s=0.0)
    found = disk.collect(0.0201)
    assert found.done.tolist() == list(range(0, 36, 2))
    assert found.undone == dict.fromkeys(range(36, 100, 2), "late")
    assert SimDisk(10**9, 1e6).waits_s(0.0) == 0.0
    disk.ask(Transfers(tuple(BlockLoad(200 + n, 0, n, 0) for n in range(100)), patience_us=10**6), now_s=1.0)
    assert 0 < disk.waits_s(1.0) <= WAIT_S


def prompts(count: int) -> list[list[int]]:
    """Return prompts of six families in random order, each with a tail of its own."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(1, 60) for _ in range(96)] for _ in range(6)]
    return [[*rng.choice(prefixes), number % 60, *(rng.randrange(1, 60) for _ in range(8))] for number in range(count)]


def simulated_hits(spec: KVCacheSpec, num_blocks: int, num_slots: int, log: io.BytesIO | None = None) -> list[int]:
    """Return the tokens that came from a simulated disk, for each prompt."""
    memory = MemoryConfig(num_blocks=num_blocks, num_disk_slots=num_slots)
    setup = EngineSetup(spec, memory, SchedulerConfig(max_num_seqs=4), LinearCost(0.01, 0.001))
    engine, found = PagedEngine(setup, log=log), []
    for number, prompt in enumerate(prompts(60)):
        request = Request(str(number), prompt, SamplingParams(max_tokens=4))
        engine.add(request)
        while engine.num_running or engine.num_waiting:
            engine.step()
        found.append(request.num_disk_tokens)
    engine.check()
    return found


def test_hits_are_those_of_a_real_engine_and_the_log_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRates, "pays", lambda *_: True)  # a model as small as this is faster than some disks
    (tmp_path / "model").mkdir()
    folder, real = write_tiny_qwen3(tmp_path / "model"), []
    with LLM(folder, kv_memory="256KiB", disk_cache=tmp_path / "cache", skip_tokenizer_init=True) as llm:
        spec, plan = llm.engine.scheduler.memory.spec, llm.engine.scheduler.memory.pool.num_blocks
        num_slots = llm.engine.stats().num_disk_slots
        for prompt in prompts(60):
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            real.append(llm.generate([{"prompt_token_ids": prompt}], sampling)[0].num_disk_tokens)
    log = io.BytesIO()
    found = simulated_hits(spec, plan, num_slots, log)
    total = sum(map(len, prompts(60)))
    assert sum(real) > 0.05 * total
    assert abs(sum(found) - sum(real)) < 0.03 * total
    assert replay(io.BytesIO(log.getvalue())) > 60


def test_a_disk_that_seems_slow_is_tried_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadRates, "pays", lambda *_: False)
    spec = KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,)),))
    assert not any(simulated_hits(spec, 12, 200))
    monkeypatch.setattr("quire.memory.tiers.disk.RETRY_EVERY", 4)
    assert 0 < sum(map(bool, simulated_hits(spec, 12, 200))) < 15


def test_traffic_is_simulated_with_and_without_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    line = "simulate qwen3-0.6b --hardware zen5-2-cores --kv-memory 1GiB --shared-tokens 1024 --prefixes 20 --rate 0.2"
    more = "--prompt-tokens 64 --output-tokens 16 --duration 600 --disk-cache any --json -"
    rates = []
    for size in ("2MiB", "64MiB", "8GiB"):
        assert cli.main([*line.split(), *more.split(), "--disk-cache-size", size]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"].values()
        rates.append((result["hit_rate"], sum(each["num_disk_tokens"] for each in result["replicas"])))
    assert rates[0][1] <= rates[1][1] < rates[2][1]
    assert rates[2][0] > rates[0][0] + 0.1


def test_a_host_cache_on_a_gpu_saves_what_the_device_evicts(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "simulate llama-3.1-8b --hardware nvidia-h100 --device cuda --kv-memory 1GiB --shared-tokens 2048 --prefixes 12"
    )
    more = "--prompt-tokens 64 --output-tokens 16 --rate 8 --duration 15 --json -"
    found = []
    for size in ("0", "2GiB", "16GiB"):
        assert cli.main([*line.split(), *more.split(), "--host-cache", size]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"].values()
        (replica,) = result["replicas"]
        ledger = replica["ledger"]
        assert ledger["used_host_blocks"] + ledger["cached_host_blocks"] <= ledger["host_blocks"]
        found.append((replica["num_host_tokens"], result["hit_rate"], result["latencies"]["ttft_s"]["mean"]))
    assert found[0][0] == 0 < found[1][0] < found[2][0]
    assert found[2][1] > found[0][1] + 0.1
    assert found[2][2] < found[0][2]


def test_a_host_cache_is_refused_where_the_device_is_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    line = "simulate qwen3-0.6b --hardware zen5-2-cores --host-cache 1GiB --rate 1 --duration 5"
    assert cli.main(line.split()) == 2
    assert "raise kv_memory instead" in capsys.readouterr().err
