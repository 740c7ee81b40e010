"""The thin slice from a model folder to tokens: scheduler, paged memory and the reference decoder together."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from quire.compute.models.source import ModelFolder
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import CheckpointError
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.factory import create_reference_engine
from quire.engine.records.step_log import replay
from support.tiny_checkpoint import write_tiny_qwen3

SYSTEM = [(7 * i) % 120 for i in range(40)]
PROMPTS = [SYSTEM + [i, 2 * i, 3 * i + 1] * (1 + i % 4) for i in range(10)] + [[5], SYSTEM[:32], SYSTEM[:32]]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


def generate(folder: Path, prompts: list[list[int]], *, block_size: int = 16, log=None, **settings) -> list[list[int]]:
    """Run prompts together and return their tokens."""
    memory_names = {"num_blocks", "num_host_blocks", "keeps_on_host", "prefix_index", "eviction"}
    memory = MemoryConfig(**{name: value for name, value in settings.items() if name in memory_names})
    scheduler = SchedulerConfig(
        **{"max_num_seqs": 16, "max_model_len": 256}
        | {name: value for name, value in settings.items() if name not in memory_names}
    )
    engine = create_reference_engine(
        ModelFolder(folder), block_size=block_size, memory=memory, scheduler=scheduler, log=log
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [Request(f"request {i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add_request(request)
    while engine.step() is not None:
        engine.scheduler.check()
    engine.close()
    assert engine.scheduler.memory.pool.num_in_use == 0
    assert not any(request.error for request in requests)
    return [request.output_token_ids for request in requests]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """Each prompt in an engine of its own."""
    return [generate(folder, [prompt], prefix_index="none")[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_index": "radix_tree"},
        {"prefix_index": "none"},
        {"max_steps_under_way": 2},
        {"max_num_batched_tokens": 16},
        {"block_size": 1, "num_blocks": 512},
        {"block_size": 64},
        {"num_blocks": 9, "preemption": "recompute"},
        {"num_blocks": 9, "num_host_blocks": 32, "preemption": "swap", "max_steps_under_way": 3},
        {"num_blocks": 9, "num_host_blocks": 64, "keeps_on_host": True, "preemption": "recompute"},
        {"num_blocks": 9, "num_host_blocks": 12, "keeps_on_host": True, "preemption": "swap", "max_steps_under_way": 3},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_what_happens_around_a_request(folder, alone, settings):
    assert generate(folder, PROMPTS, **settings) == alone


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_evicted_is_hit_on_the_host_to_the_same_bits(folder, depth):
    """Nine blocks hold one prompt; the host holds them all."""
    memory = MemoryConfig(num_blocks=9, num_host_blocks=64, keeps_on_host=True)
    scheduler = SchedulerConfig(max_num_seqs=16, max_model_len=256, max_steps_under_way=depth)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3)
    prompts = [[1 + (7 * number + index) % 100 for index in range(100)] for number in range(3)]
    log, answers = io.BytesIO(), []
    engine = create_reference_engine(ModelFolder(folder), memory=memory, scheduler=scheduler, log=log)
    for turn, prompt in enumerate([*prompts, *prompts, prompts[0][:96]]):
        request = Request(str(turn), prompt, sampling)
        engine.add_request(request)
        engine.run()
        engine.scheduler.check()
        answers.append((request.output_token_ids, request.logprobs))
        hits = request.num_cached_tokens, request.num_host_tokens
        if turn < len(prompts):
            assert hits == (0, 0)
        elif turn < 2 * len(prompts):
            assert hits == (96, 96)
    assert hits[0] == 95, "the last token is computed, in a block of its own"
    assert answers[:3] == answers[3:6]
    stats, ledger = engine.stats(), engine.scheduler.memory.ledger()
    assert stats.host_hit_tokens_total >= 3 * 96
    assert stats.num_cached_host_blocks == ledger.cached_host_blocks > 9
    assert ledger.used_host_blocks + ledger.cached_host_blocks <= ledger.host_blocks == 64
    engine.close()
    log.seek(0)
    assert replay(log) > 20


def test_the_run_can_be_replayed_from_its_log(folder):
    file = io.BytesIO()
    generate(folder, PROMPTS[:4], log=file, num_blocks=12)
    file.seek(0)
    assert replay(file) > NUM_TOKENS


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        create_reference_engine(ModelFolder(tmp_path))
