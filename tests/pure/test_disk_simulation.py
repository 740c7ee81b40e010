"""Whole runs of the control plane over a disk that is slow, fails, hangs and is killed: no token is ever wrong.

Each seed is a scenario of `support.simulation` with a disk of a few slots or many. It is run several times over one
disk, each time with an empty memory, as after a restart.
"""

from __future__ import annotations

import io
import random
from array import array
from collections import Counter

import pytest

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kept_block import KeptBlock
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.core.transfers import TransferOutcome
from quire.core.validate import RequestLimits
from quire.engine.commands import Clear
from quire.engine.core import EngineCore
from quire.engine.records.step_log import StepLogWriter, replay
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.memory.tiers.disk import MAX_TICKET
from quire.scheduler.scheduler import Scheduler
from support.shadow import ShadowExecutor
from support.shadow_disk import DiskChaos, ShadowDisk
from support.simulation import Scenario, Simulation

SALTS = ("", "the salt of a tenant")
NUM_SHARDS = 2


def run_seed(seed: int, chaos: DiskChaos | None = None) -> Counter[str]:
    """Run a scenario three times over one disk."""
    rng = random.Random(seed + 3)
    scenario = Scenario.draw(seed).with_disk(rng)
    disk = ShadowDisk(seed, chaos or DiskChaos.draw(rng))
    seen = Counter[str]()
    for _ in range(3):
        seen += Simulation(scenario, disk=disk).run()
    return seen


def test_no_token_is_wrong_whatever_the_disk_does() -> None:
    seen = Counter[str]()
    for seed in range(16):
        seen += run_seed(seed)
    happened = ("stored", "loaded", "evicted", "given up", "failed", "damaged", "late", "full", "from disk", "taken in")
    assert [name for name in happened if not seen[name]] == []


@pytest.mark.long
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_no_token_is_wrong_in_many_more_runs(shard: int) -> None:
    for seed in range(10_000 + shard * 1000, 10_000 + (shard + 1) * 1000):
        run_seed(seed)


@pytest.mark.parametrize("chaos", [DiskChaos(hangs=1.0), DiskChaos(undone=1.0), DiskChaos(delay=0.0)])
def test_a_disk_that_never_answers_or_always_fails_delays_requests_and_nothing_else(chaos: DiskChaos) -> None:
    for seed in range(4):
        run_seed(seed, chaos)


def log_of(disk: ShadowDisk, seed: int) -> bytes:
    """Run requests that begin alike, of two salts, over a disk, and return the step log."""
    spec = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))
    memory = MemoryConfig(num_blocks=40, num_disk_slots=20, disk_write="always")
    manager = KVCacheManager(spec, memory, kept=disk.restart())
    limits = RequestLimits(50, 100, max_sequence_tokens(40, spec), 4)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), manager, limits)
    executor = ShadowExecutor(spec, 50, salt_of=lambda name: SALTS[int(name) % 2], disk=disk)
    file = io.BytesIO()
    core = EngineCore(scheduler, executor, ManualClock(), log=StepLogWriter(file, ManualClock()))
    for number in range(6):
        prompt = [*range(20), number, seed]
        scope = CacheScope("t", SALTS[number % 2])
        core.add_request(Request(str(number), prompt, SamplingParams(max_tokens=3), scope=scope))
        core.run()
    core.send(Clear())
    return file.getvalue()


def test_a_log_is_replayed_with_the_disk_as_it_was() -> None:
    disk = ShadowDisk(1, DiskChaos(delay=0.3, undone=0.1, hangs=0.1))
    for seed in range(3):
        data = log_of(disk, seed)
        assert replay(io.BytesIO(data)) > 12
        assert SALTS[1].encode() not in data, "a log has no salts"


def test_tickets_begin_again_after_the_largest_that_a_plan_can_name() -> None:
    spec = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))
    manager = KVCacheManager(spec, MemoryConfig(num_blocks=8, num_disk_slots=8, disk_write="always"), kept=[])
    manager.disk._last_ticket = MAX_TICKET - 1
    writer = Request("writer", range(13))
    assert manager.allocate_slots(writer, 13)
    writer.num_computed = writer.num_planned = 12
    manager.commit(writer, 12)
    done = []
    while stores := manager.take_changes().transfers.stores:
        tickets = array("i", [each.ticket for each in stores])
        done += tickets
        manager.note_step(1, 1, TransferOutcome(tickets))
        manager.check()
    assert done == [MAX_TICKET, 1, 2]


def test_what_was_told_to_be_forgotten_is_gone_from_the_disk() -> None:
    disk = ShadowDisk(1, DiskChaos(delay=0.0))
    log_of(disk, 0)
    assert not disk.slots


def test_a_block_comes_back_although_the_one_after_it_makes_room() -> None:
    """A bundle brings a block that was damaged to a full disk, on which only the block after it may be evicted."""
    first, second = (array("i", [token] * 4).tobytes() for token in (1, 2))
    blocks = [KeptBlock(0, 1, 0, 0, first, CacheScope()), KeptBlock(1, 2, 1, 0, second, None)]
    spec = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))
    memory = MemoryConfig(num_blocks=8, num_disk_slots=2, disk_write="always")
    manager = KVCacheManager(spec, memory, kept=blocks)

    def end_transfers(reason: str = "") -> None:
        transfers = manager.take_changes().transfers
        tickets = array("i", [each.ticket for each in (*transfers.loads, *transfers.stores)])
        assert tickets
        undone = dict.fromkeys(tickets, reason) if reason else {}
        manager.note_step(1, 1, TransferOutcome(array("i") if reason else tickets, undone))
        manager.check()

    reader = Request("reader", [1] * 4 + [3])
    assert manager.start_load(reader, manager.match_prefix(reader))
    end_transfers("damaged")
    manager.disk.end_loads(reader)
    writer = Request("writer", [9] * 5)
    assert manager.allocate_slots(writer, 5)
    writer.num_computed = writer.num_planned = 4
    manager.commit(writer, 4)
    end_transfers()
    manager.jobs.take("job", "bundle", blocks)
    manager.check()
    end_transfers()
    assert len(manager.match_prefix(Request("again", [1] * 4 + [3])).known) == 1
