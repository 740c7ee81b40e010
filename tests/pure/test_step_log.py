"""A run can be written down and made again, plan for plan, to the byte."""

from __future__ import annotations

import io
import random
import resource
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidConfigError, InvalidRequestError, QuireError, StepLogError
from quire.core.kv_spec import RECURRENT, KVCacheSpec, KVGroup, KVHeads
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import Abort, Clear, Fail, Stop
from quire.engine.core import EngineCore
from quire.engine.records.step_log import (
    LOST,
    MAGIC,
    OUT_OF_MEMORY,
    PLANNED,
    StepLogWriter,
    read_records,
    read_scheduler,
    replay,
)
from quire.engine.records.step_log_file import StepLogFile, step_log_notices
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.scheduler import Scheduler
from support.shadow import ShadowExecutor, expected_tokens
from support.step_faults import StepFaults

VOCAB = 50
SALTS = ("", "the salt of a tenant")


def guess(request_id: str, tokens: array[int], most: int) -> list[int]:
    """Guess the next tokens, the last of them wrongly."""
    right = expected_tokens(tokens.tolist(), min(most, 3), VOCAB, salt=SALTS[int(request_id[-1])])
    return [*right[:-1], (right[-1] + 1) % VOCAB]


def faults_of(seed: int) -> StepFaults:
    """What is wrong with the executor of a run, if anything is."""
    poison = {f"{index}-{tenant}": 6 for index in (3, 7) for tenant in range(2)}
    return [StepFaults(), StepFaults(), StepFaults(poison), StepFaults(poison, most_tokens=4)][seed % 4]


def run(seed: int, *, drafts: bool = False) -> bytes:
    """Run random requests with all kinds of things happening, and return the log."""
    rng = random.Random(seed)
    groups = rng.choice([(KVGroup((0,)),), (KVGroup((0,)), KVGroup((1,), window=5))])
    spec = KVCacheSpec(rng.choice([1, 4]), 1, 8, "float32", groups)
    memory = MemoryConfig(
        num_blocks=rng.choice([60, 150]),
        num_host_blocks=rng.choice([0, 40]),
        keeps_on_host=seed % 2 == 1,
        prefix_index=rng.choice(["hash_chain", "radix_tree", "none"]),
        eviction=rng.choice(["lru", "fifo", "priority"]),
        hash_key=b"a key that nobody may read",
    )
    depth = rng.choice([1, 2, 3])
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=40,
        policy=rng.choice(["fcfs", "priority", "fair_share"]),
        preemption=rng.choice(["recompute", "swap"]),
        max_steps_under_way=depth,
        max_drafts=5 if drafts else 0,
    )
    longest = max_sequence_tokens(memory.num_blocks, spec, longest_chunk=1 + depth)
    scheduler = Scheduler(config, KVCacheManager(spec, memory), RequestLimits(VOCAB, 40, longest, 6, (7,)))
    file = io.BytesIO()
    executor = ShadowExecutor(spec, VOCAB, salt_of=lambda name: SALTS[int(name[-1])])
    executor.guess = guess
    executor.fault = faults_of(seed).fault()
    clock = ManualClock()
    engine = EngineCore(scheduler, executor, clock, log=StepLogWriter(file, clock))
    for index in range(16):
        tenant = rng.randrange(2)
        beams = rng.random() < 0.2
        n = 2 if beams else rng.choice([1, 1, 3])
        temperature = 0.0 if beams else 1.0
        sampling = SamplingParams(n=n, beam_search=beams, temperature=temperature, max_tokens=rng.randrange(1, 12))
        scope = CacheScope(str(tenant), SALTS[tenant], ("adapter",) if index % 5 == 0 else ())
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
        request = Request(f"{index}-{tenant}", prompt, sampling, scope=scope, priority=rng.randrange(3))
        try:
            engine.add_request(request)
        except InvalidRequestError:
            continue
        for _ in range(rng.randrange(4)):
            engine.step()
        live = list(scheduler.requests)
        event = rng.random()
        if event < 0.1 and live:
            engine.send(Abort(rng.choice(live)))
        elif event < 0.2 and (samples := [name for name in live if not scheduler.requests[name].sampling.beam_search]):
            engine.send(Stop(rng.choice(samples)))
        elif event < 0.25:
            engine.send(Clear())
        elif event < 0.27 and live:
            engine.send(Fail(rng.choice(live), "its text cannot be decoded"))
        elif event < 0.3:
            executor.fail_next_collect = True
    engine.run()
    engine.close()
    assert not scheduler.requests
    return file.getvalue()


@pytest.mark.parametrize("seed", range(16))
def test_a_run_is_made_again_to_the_byte(seed):
    log = run(seed)
    assert replay(io.BytesIO(log)) == sum(kind == PLANNED for kind, _, _ in read_records(io.BytesIO(log)))


@pytest.mark.parametrize("seed", range(10))
def test_so_is_a_run_with_drafts(seed):
    assert replay(io.BytesIO(run(seed, drafts=True))) > 0


def test_steps_that_failed_and_why_are_in_the_logs():
    kinds = Counter(kind for seed in range(8) for kind, _, _ in read_records(io.BytesIO(run(seed))))
    assert kinds[LOST] > 4
    assert kinds[OUT_OF_MEMORY] > 2


def test_the_same_run_gives_the_same_log():
    assert run(3) == run(3)


def test_neither_the_hash_key_nor_a_salt_is_in_the_log():
    log = run(1)
    assert b"a key that nobody may read" not in log
    assert SALTS[1].encode() not in log


def test_a_log_torn_anywhere_within_a_record_is_refused():
    log = run(2)
    ends, at = {len(MAGIC)}, len(MAGIC)
    for _, _, payload in read_records(io.BytesIO(log)):
        at += 17 + len(payload)
        ends.add(at)
    cuts = [*range(100), *random.Random(0).sample(range(len(log)), 100)]
    for cut in set(cuts) - ends:
        with pytest.raises(StepLogError):
            replay(io.BytesIO(log[:cut]))


def test_a_log_that_ends_between_two_records_is_that_of_a_shorter_run():
    log = run(2)
    at, num_plans = len(MAGIC), 0
    for place, (kind, _, payload) in enumerate(read_records(io.BytesIO(log))):
        at += 17 + len(payload)
        num_plans += kind == PLANNED
        if place % 7 == 0:
            assert replay(io.BytesIO(log[:at])) == num_plans
    assert at == len(log)


def test_an_altered_byte_is_found():
    log = run(2)
    for place in random.Random(1).sample(range(len(log)), 100):
        altered = bytearray(log)
        altered[place] ^= 1 << place % 8
        with pytest.raises(StepLogError):
            replay(io.BytesIO(bytes(altered)))


def test_another_plan_is_found():
    """A scheduler that decides otherwise does not pass: the log is of a run with another order of arrival."""
    log = run(4)
    records = list(read_records(io.BytesIO(log)))
    file = io.BytesIO()
    writer = StepLogWriter(file, ManualClock())
    file.write(MAGIC)
    first = next(i for i, (kind, _, _) in enumerate(records) if kind == PLANNED)
    for kind, _, payload in [*records[:first], *records[first + 1 :]]:
        writer._record(kind, payload)
    file.seek(0)
    with pytest.raises(QuireError, match=r"differs|not the expected one"):
        replay(file)


@pytest.mark.parametrize("data", [b"", b"quire step log 4\n", b"\x80pickle", MAGIC])
def test_what_is_no_log_is_refused(data):
    with pytest.raises(StepLogError):
        replay(io.BytesIO(data))


# ---- in a file ------------------------------------------------------------------------------------------------------


def write_file(path: Path, log: bytes) -> StepLogFile:
    """Write the records of a log to a file of its own."""
    writer = StepLogFile(str(path), ManualClock())
    writer._write(MAGIC)
    for kind, _, payload in read_records(io.BytesIO(log)):
        writer._record(kind, payload)
    return writer


def test_only_the_owner_may_read_a_log_and_nobody_overwrites_it(tmp_path):
    paths = [tmp_path / name for name in ("run.steplog", "run.steplog.1", "run.steplog.2")]
    for seed, path in enumerate(paths):
        write_file(paths[0], run(seed)).close()
        assert replay(io.BytesIO(path.read_bytes())) == replay(io.BytesIO(run(seed)))
        assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == paths


def test_every_record_is_in_the_file_at_once(tmp_path):
    log = run(3)
    writer = write_file(tmp_path / "run.steplog", log)
    assert len(list(read_records(io.BytesIO((tmp_path / "run.steplog").read_bytes())))) == len(
        list(read_records(io.BytesIO(log)))
    )
    writer.close()
    writer.close()


@pytest.mark.parametrize("room", [len(MAGIC) - 1, 1000, 5000, 5001])
def test_a_log_without_room_ends_between_two_records_and_says_so_once(tmp_path, caplog, room):
    path, log = tmp_path / "run.steplog", run(2)
    caplog.clear()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        writer = write_file(path, log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.idled()  # there would be room again, but what is missing cannot be made up for
    writer.close()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"the step log {path} ends here, and the engine goes on: ")
    data = path.read_bytes()
    records = list(read_records(io.BytesIO(log)))
    written = list(read_records(io.BytesIO(data))) if data else []
    assert [(kind, payload) for kind, _, payload in written] == [
        (kind, payload) for kind, _, payload in records[: len(written)]
    ]
    assert room - len(data) < 17 + len(records[len(written)].payload)


def test_a_place_that_takes_no_file_is_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"^step_log is .*a writable folder"):
        step_log_notices(str(tmp_path / "nowhere" / "run.steplog"))
    with pytest.raises(InvalidConfigError, match=r"^step_log is .*; allowed: a file, not a folder"):
        step_log_notices(str(tmp_path))
    with pytest.raises(InvalidConfigError, match=r"^step_log is .*No such file"):
        StepLogFile(str(tmp_path / "nowhere" / "run.steplog"), ManualClock())
    assert step_log_notices(None) == ()
    assert "run.steplog" in step_log_notices("run.steplog")[0]


HEADS: dict[str, Any] = {"block_size": 4, "dtype": "float32"}
STATES = KVCacheSpec.from_layers([RECURRENT, None, 8], num_kv_heads=1, head_dim=8, **HEADS).with_states(100)
MIXED = KVCacheSpec.from_mixed_layers([(8, None), (None, KVHeads(1, 16))], KVHeads(2, 8), **HEADS)
ALONE = KVCacheSpec.from_layers([None], num_kv_heads=1, head_dim=8, **HEADS)


@pytest.mark.parametrize("spec", [STATES, MIXED, ALONE.with_draft(ALONE)], ids=["states", "heads", "draft"])
def test_a_log_has_the_whole_form_of_the_memory(spec: KVCacheSpec) -> None:
    manager, file = KVCacheManager(spec, MemoryConfig(num_blocks=9)), io.BytesIO()
    StepLogWriter(file, ManualClock()).begin(
        Scheduler(SchedulerConfig(), manager, RequestLimits(VOCAB, 40, 40, 6, (7,)))
    )
    file.seek(0)
    assert read_scheduler(next(read_records(file)).payload).memory.spec == spec


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"5", b"{}", b'{"spec": {}}', b'{"spec": {"groups": [1]}}', b"\xff", b"[" * 100_000]
)
def test_settings_that_are_none_are_an_error_of_the_log(payload: bytes) -> None:
    with pytest.raises(StepLogError, match=r"^the settings in the log do not match this version: "):
        read_scheduler(payload)
