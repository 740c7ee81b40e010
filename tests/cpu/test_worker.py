"""The worker, by plans written by hand: every verb of a plan, and what may fail with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.reference import load_parts
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.compute.worker.sampling_columns import SamplingColumns
from quire.compute.worker.worker import Worker
from quire.core.errors import ExecutionError, ExecutorLostError, InvalidConfigError, OutOfMemoryError
from quire.core.executor import Executor
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.sampling_params import SamplingParams
from quire.core.step import NO_BLOCK, BlockCopy, BlockMove, RowStart, StepPlan, StepResult, column
from support.reference_runs import ReferenceRun
from support.step_plans import GREEDY, Work
from support.tiny_checkpoint import tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3

PROMPT = [(5 * i * i + 3 * i + 1) % 126 for i in range(40)]
POISON_TOKEN = 126  # in `sick_folder`, its embedding is not finite


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(folder: Path) -> ReferenceRun:
    return ReferenceRun(folder, block_size=8)


@pytest.fixture
def sick_run(tmp_path: Path) -> ReferenceRun:
    write_tiny_qwen3(tmp_path, tie=False)
    tensors = tiny_qwen3_tensors(read_config(tmp_path), seed=0)
    tensors["model.embed_tokens.weight"][POISON_TOKEN] = np.inf
    write_model_weights(tmp_path, tensors)
    return ReferenceRun(tmp_path, block_size=8)


def read_config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def text_of(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy text after a prompt, by a run that does nothing else."""
    run = ReferenceRun(folder, block_size=8)
    return [run.prefill(0, prompt), *run.decode(0, len(prompt), count - 1)]


# --- tokens ------------------------------------------------------------------------------------


def test_a_chunk_samples_nothing_and_the_last_chunk_one_token(run: ReferenceRun) -> None:
    run.driver.open(3, PROMPT)
    first = run.step(Work(3, 0, 25))
    assert (first.num_tokens, first.tokens, first.failures) == (column(0), column(), {})
    last = run.step(Work(3, 25, 15, 1))
    assert last.num_tokens == column(1)
    assert last.tokens == column(int(run.logits[3, 39].argmax()))
    assert last.parents == column()


def test_decode_finds_the_sampled_token_in_its_row(run: ReferenceRun, folder: Path) -> None:
    text = [run.prefill(0, PROMPT), *run.decode(0, len(PROMPT), 9)]
    assert text == text_of(folder, PROMPT, 10)
    other = ReferenceRun(folder)
    assert other.prefill(0, PROMPT + text[:-1]) == text[-1]


def test_several_plans_may_be_under_way(run: ReferenceRun, folder: Path) -> None:
    run.driver.open(0, PROMPT)
    plans = [run.driver.plan(Work(0, 0, 40, 1))]
    plans += [run.driver.plan(Work(0, 40 + i, 1, 1)) for i in range(5)]
    for plan in plans:
        run.worker.submit(plan)
    results = [run.worker.collect() for _ in plans]
    assert [result.step_id for result in results] == [plan.step_id for plan in plans]
    assert [result.tokens[0] for result in results] == text_of(folder, PROMPT, 6)


def test_results_stand_in_the_order_of_the_plan(run: ReferenceRun, folder: Path) -> None:
    for row in (4, 1, 7):
        run.driver.open(row, PROMPT[row:])
    result = run.step(Work(4, 0, 36, 1), Work(1, 0, 10), Work(7, 0, 33, 1))
    assert result.num_tokens == column(1, 0, 1)
    expected = [text_of(folder, PROMPT[row:], 1)[0] for row in (4, 7)]
    assert result.tokens.tolist() == expected


def test_equal_logits_give_the_lowest_token(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, tie=False)
    tensors = tiny_qwen3_tensors(read_config(tmp_path), seed=0)
    head = tensors["lm_head.weight"]
    best = ReferenceRun(tmp_path).prefill(0, PROMPT)
    for twin in (100, 101):
        head[twin] = head[best]
    head[[3, best]] = head[[best, 3]]
    write_model_weights(tmp_path, tensors)
    run = ReferenceRun(tmp_path)
    run.driver.open(0, PROMPT)
    assert run.step(Work(0, 0, 40, 1)).tokens.tolist() == [3]


# --- fan-out and drafts ------------------------------------------------------------------------


def test_a_row_that_opens_draws_for_each_sequence_with_its_own_seed(run: ReferenceRun) -> None:
    warm = SamplingParams(temperature=2.0, seed=40)
    for row in range(4):
        run.driver.open(row, PROMPT, replace(warm, seed=40 + row))
    alone = run.step(*(Work(row, 0, 40, 1) for row in range(4))).tokens
    run.driver.open(4, PROMPT, replace(warm, n=4))
    opened = run.step(Work(4, 0, 40, 4))
    assert opened.num_tokens == column(4)
    assert opened.tokens == alone
    assert len(set(alone)) > 1


def test_a_row_that_opens_greedily_opens_into_equals(run: ReferenceRun) -> None:
    run.driver.open(0, PROMPT, SamplingParams(temperature=0.0, n=3))
    assert run.step(Work(0, 0, 40, 3)).tokens.tolist() == [int(run.logits[0, 39].argmax())] * 3


def test_drawn_text_is_the_same_with_and_without_drafts(folder: Path) -> None:
    warm = SamplingParams(temperature=1.5, seed=3)
    run = ReferenceRun(folder, block_size=8)
    run.driver.open(0, PROMPT, warm)
    text = [run.step(Work(0, 0, 40, 1)).tokens[0], *run.decode(0, 40, 6)]
    run.driver.open(1, PROMPT, warm)
    assert run.step(Work(1, 0, 40, 1)).tokens.tolist() == text[:1]
    assert run.step(Work(1, 40, 4, 1, drafts=text[1:4])).tokens.tolist() == text[1:5]
    wrong = (text[6] + 1) % 128
    assert run.step(Work(1, 44, 3, 1, drafts=[text[5], wrong])).tokens.tolist() == text[5:7]


def test_what_would_end_a_text_is_not_drawn_before_min_tokens(run: ReferenceRun) -> None:
    run.driver.open(0, PROMPT)
    likeliest = run.step(Work(0, 0, 40, 1)).tokens[0]
    run.driver.open(1, PROMPT, replace(GREEDY, min_tokens=2, stop_token_ids=(likeliest,)))
    order = np.argsort(-run.logits[0, 39], kind="stable")
    assert run.step(Work(1, 0, 40, 1)).tokens[0] == order[1]
    assert likeliest not in run.decode(1, 40, 1)


def test_log_probabilities_come_with_the_tokens_of_those_who_asked(run: ReferenceRun) -> None:
    run.driver.open(0, PROMPT)
    run.driver.open(1, PROMPT, replace(GREEDY, logprobs=2))
    result = run.step(Work(0, 0, 40, 1), Work(1, 0, 40, 1))
    assert list(result.logprobs) == [1]
    (entry,) = result.logprobs[1]
    logits = run.logits[1, 39].astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum())
    assert entry.rank == 1
    assert entry.top_ids.tolist() == np.argsort(-exact)[:2].tolist()
    assert entry.logprob == entry.top_logprobs[0] == pytest.approx(exact.max())
    assert StepResult.from_bytes(result.to_bytes()) == result


def test_branches_share_blocks_and_copy_the_one_they_write(run: ReferenceRun, folder: Path) -> None:
    prompt = PROMPT[:20]  # blocks of 8: the third is half full
    run.driver.open(0, prompt, SamplingParams(temperature=0.0, n=2))
    first, second = run.step(Work(0, 0, 20, 2)).tokens
    shared = run.driver.tables[0, 0]
    run.driver.open(1, [*prompt, second])
    for index, block in enumerate([shared[0], shared[1], 200]):
        run.driver.set_block(1, 0, index, block)
    copies = [BlockCopy(source=shared[2], destination=200)]
    tokens = run.step(Work(0, 20, 1, 1), Work(1, 20, 1, 1), copies=copies).tokens
    rest = [run.step(Work(0, 21 + i, 1, 1), Work(1, 21 + i, 1, 1)).tokens for i in range(8)]
    texts = [[step[row] for step in (tokens, *rest)] for row in (0, 1)]
    assert texts == [text_of(folder, [*prompt, branch], 9) for branch in (first, second)]


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, None])
def test_drafts_change_the_steps_and_never_the_text(run: ReferenceRun, folder: Path, wrong_at: int | None) -> None:
    text = text_of(folder, PROMPT, 12)
    run.prefill(0, PROMPT)
    drafts = text[1:5]
    if wrong_at is not None:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % 128
    result = run.step(Work(0, 40, 5, 1, drafts))
    accepted = 4 if wrong_at is None else wrong_at
    assert result.tokens.tolist() == text[1 : accepted + 2]
    known = accepted + 2
    assert run.decode(0, 40 + known - 1, 12 - known) == text[known:]


def test_drafts_may_follow_the_last_chunk_of_a_prompt(run: ReferenceRun, folder: Path) -> None:
    text = text_of(folder, PROMPT, 4)
    run.driver.open(0, PROMPT)
    run.step(Work(0, 0, 30))
    result = run.step(Work(0, 30, 12, 1, text[:2]))
    assert result.tokens.tolist() == text[:3]


# --- blocks ------------------------------------------------------------------------------------


def test_swapping_out_and_in_leaves_the_text_alone(run: ReferenceRun, folder: Path) -> None:
    text = [run.prefill(0, PROMPT[:20])]
    blocks = run.driver.tables[0, 0]
    run.driver.release(0)
    moves_out = [BlockMove(block, host) for host, block in enumerate(blocks)]
    run.driver.open(1, PROMPT)
    for index, block in enumerate([*blocks, 100, 101]):
        run.driver.set_block(1, 0, index, block)  # overwrites what was moved out in the same step
    run.step(Work(1, 0, 40, 1), moves_out=moves_out)
    run.driver.open(0, PROMPT[:20] + text)
    moves_in = [BlockMove(110 + host, host) for host in range(3)]
    for index, move in enumerate(moves_in):
        run.driver.set_block(0, 0, index, move.device_block)
    text += run.step(Work(0, 20, 1, 1), moves_in=moves_in).tokens
    text += run.decode(0, 21, 6)
    assert text == text_of(folder, PROMPT[:20], 8)


def test_moves_out_copies_and_moves_in_take_effect_in_this_order() -> None:
    spec = KVCacheSpec(2, 1, 2, "float32", (KVGroup((0, 1)), KVGroup((2, 3))))
    cache = CacheEngine(spec, num_blocks=4, num_host_blocks=2)
    cache.allocate()
    for layer in (0, 1):
        held = cache.layer(layer)
        held.keys[...] = np.arange(4)[:, None, None, None] + 10 * layer
        held.values[...] = -held.keys
    cache.apply(step_of_moves(moves_out=[BlockMove(0, 1)]))
    plan = step_of_moves(moves_out=[BlockMove(1, 0)], copies=[BlockCopy(2, 1)], moves_in=[BlockMove(2, 1)])
    cache.apply(plan)
    cache.apply(step_of_moves(moves_in=[BlockMove(3, 0)]))
    assert cache.layer(0).keys[:, 0, 0, 0].tolist() == [0, 2, 0, 1]
    assert cache.layer(1).values[:, 0, 0, 0].tolist() == [-10, -12, -10, -11]


def test_groups_of_layers_share_the_arrays() -> None:
    spec = KVCacheSpec(2, 1, 2, "float32", (KVGroup((0, 2)), KVGroup((1, 3), window=4)))
    cache = CacheEngine(spec, num_blocks=4)
    cache.allocate()
    assert [cache.layer(layer).group for layer in range(4)] == [0, 1, 0, 1]
    assert np.shares_memory(cache.layer(0).keys, cache.layer(1).keys)
    assert np.shares_memory(cache.layer(2).values, cache.layer(3).values)
    assert not np.shares_memory(cache.layer(0).keys, cache.layer(2).keys)


def step_of_moves(
    moves_out: Sequence[BlockMove] = (),
    copies: Sequence[BlockCopy] = (),
    moves_in: Sequence[BlockMove] = (),
) -> StepPlan:
    nothing = column()
    return StepPlan(
        1,
        nothing,
        nothing,
        nothing,
        nothing,
        moves_out=tuple(moves_out),
        copies=tuple(copies),
        moves_in=tuple(moves_in),
    )


def test_a_released_row_and_its_blocks_serve_another_request(run: ReferenceRun, folder: Path) -> None:
    run.prefill(0, PROMPT)
    blocks = run.driver.tables[0, 0]
    run.driver.release(0)
    run.driver.open(0, PROMPT[7:])  # the same row, in one plan
    for index, block in enumerate(reversed(blocks)):
        run.driver.set_block(0, 0, index, block)
    result = run.step(Work(0, 0, 33, 1))
    assert result.tokens.tolist() == text_of(folder, PROMPT[7:], 1)


def test_a_prefix_computed_by_another_row_is_read_through_the_table(run: ReferenceRun, folder: Path) -> None:
    run.prefill(0, PROMPT)
    other = [*PROMPT[:16], 9, 8, 7]
    run.driver.open(1, other)
    for index, block in enumerate(run.driver.tables[0, 0][:2]):
        run.driver.set_block(1, 0, index, block)
    assert run.step(Work(1, 16, 3, 1)).tokens.tolist() == text_of(folder, other, 1)


# --- failures of one request --------------------------------------------------------------------


def test_a_row_that_is_not_finite_fails_alone(sick_run: ReferenceRun, tmp_path: Path) -> None:
    sick_run.driver.open(0, PROMPT)
    sick_run.driver.open(1, [*PROMPT[:4], POISON_TOKEN, 5])
    sick_run.driver.open(2, PROMPT[9:])
    plans = [sick_run.driver.plan(Work(0, 0, 40, 1), Work(1, 0, 6, 1), Work(2, 0, 31, 1))]
    plans += [
        sick_run.driver.plan(Work(0, 40 + i, 1, 1), Work(1, 6 + i, 1, 1), Work(2, 31 + i, 1, 1)) for i in range(3)
    ]
    for plan in plans:
        sick_run.worker.submit(plan)
    results = [sick_run.worker.collect() for _ in plans]
    for result in results:
        assert result.num_tokens == column(1, 0, 1)
        assert result.failures == {1: "the model's output is not finite"}
    healthy = write_tiny_qwen3(tmp_path / "healthy", tie=False)
    for index, prompt in enumerate([PROMPT, PROMPT[9:]]):
        assert [result.tokens[index] for result in results] == text_of(healthy, prompt, 4)


def test_a_chunk_that_is_not_finite_fails_before_anyone_shares_it(sick_run: ReferenceRun) -> None:
    sick_run.driver.open(0, [1, POISON_TOKEN, *PROMPT])
    assert list(sick_run.step(Work(0, 0, 10)).failures) == [0]
    sick_run.driver.release(0)
    sick_run.prefill(1, PROMPT)  # a released row fails no more


def test_logits_that_overflow_fail_the_row(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, tie=False)
    tensors = tiny_qwen3_tensors(read_config(tmp_path), seed=0)
    tensors["lm_head.weight"][3] = np.finfo(np.float32).max
    write_model_weights(tmp_path, tensors)
    run = ReferenceRun(tmp_path)
    run.driver.open(0, PROMPT)
    assert run.step(Work(0, 0, 40, 1)).failures == {0: "the logits are not finite"}


@pytest.mark.parametrize(
    ("sampling", "tokens", "field"),
    [
        (GREEDY, [1, 128], "allowed: a token id from 0 to 127"),
        (GREEDY, [-1, 3], "allowed: a token id from 0 to 127"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(
    run: ReferenceRun, sampling: SamplingParams, tokens: list[int], field: str
) -> None:
    run.driver.open(0, PROMPT)
    run.driver.open(1, tokens, sampling)
    result = run.step(Work(0, 0, 40, 1), Work(1, 0, 2))
    assert result.num_tokens == column(1, 0)
    assert list(result.failures) == [1]
    assert field in result.failures[1]


# --- failures of a step ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work(5, 0, 1), "row 5 is in a plan, but no request has taken it"),
        (Work(0, 41, 1, 1), "row 0 is to compute positions 41 to 41, but knows 41 tokens"),
        (Work(0, 40, 0), "row 0 is to compute"),
        (Work(0, -1, 1), "row 0 is to compute"),
        (Work(0, 10, 1, 1), "row 0 is to sample after 11 of 41 tokens"),
        (Work(0, 40, 2, 0, [1]), "row 0 has drafts"),
        (Work(0, 41, 1, 1, [1]), "row 0 has drafts"),
        (Work(0, 40, 2, 1, [128]), "row 0 has a draft that is not a token id"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_fails_the_step(
    run: ReferenceRun, folder: Path, work: Work, message: str
) -> None:
    first = run.prefill(0, PROMPT)
    run.driver.tables[5, 0] = []
    run.worker.submit(run.driver.plan(work))
    with pytest.raises(ExecutionError, match=message):
        run.worker.collect()
    assert [first, *run.decode(0, 40, 3)] == text_of(folder, PROMPT, 4)  # nothing of it counts


@pytest.mark.parametrize("block", [NO_BLOCK, 256])
def test_a_table_without_a_needed_block_fails_the_step(run: ReferenceRun, block: int) -> None:
    run.prefill(0, PROMPT)
    run.driver.set_block(0, 0, 1, block)
    run.worker.submit(run.driver.plan(Work(0, 40, 1, 1)))
    with pytest.raises(ExecutionError, match="table of row 0 does not hold positions 0 to 40"):
        run.worker.collect()


def test_a_row_does_not_inherit_the_blocks_of_the_request_before(run: ReferenceRun) -> None:
    run.prefill(0, PROMPT)
    run.driver.release(0)
    run.driver.open(0, PROMPT)
    run.driver.tables[0, 0] = [0, 1, 2, 3, 4]  # the driver sends no change for these
    run.worker.submit(run.driver.plan(Work(0, 0, 40, 1)))
    with pytest.raises(ExecutionError, match="table of row 0 does not hold positions 0 to 39"):
        run.worker.collect()


@pytest.mark.parametrize(
    "moves",
    [
        {"copies": [BlockCopy(-1, 0)]},
        {"copies": [BlockCopy(0, 256)]},
        {"moves_out": [BlockMove(0, 4)]},
        {"moves_in": [BlockMove(0, -1)]},
    ],
)
def test_a_copy_or_move_of_no_block_loses_the_worker(run: ReferenceRun, moves: dict[str, list[BlockCopy]]) -> None:
    run.worker.submit(run.driver.plan(**moves))  # type: ignore[arg-type]
    with pytest.raises(ExecutorLostError, match="a plan names block"):
        run.worker.collect()


def test_a_lost_worker_says_so_behind_a_failed_step_too(run: ReferenceRun) -> None:
    run.prefill(0, PROMPT)
    run.worker.submit(run.driver.plan(Work(0, 41, 1, 1)))
    run.worker.submit(run.driver.plan(copies=[BlockCopy(-1, 0)]))
    with pytest.raises(ExecutorLostError, match="a plan names block"):
        run.worker.collect()


def test_settings_that_cannot_be_entered_fail_their_row_alone(
    run: ReferenceRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_row = SamplingColumns.start

    def start(columns: SamplingColumns, start: RowStart) -> None:
        if start.row == 1:
            raise ValueError("no such rule")
        start_row(columns, start)

    monkeypatch.setattr(SamplingColumns, "start", start)
    for row in range(3):
        run.driver.open(row, PROMPT[row:])
    result = run.step(Work(0, 0, 40, 1), Work(1, 0, 39, 1), Work(2, 0, 38, 1))
    assert result.failures == {1: "its settings cannot be stored: ValueError: no such rule"}
    assert result.num_tokens == column(1, 0, 1)
    assert result.tokens.tolist() == [text_of(folder, PROMPT[row:], 1)[0] for row in (0, 2)]


def test_a_mistake_of_the_runner_fails_its_step_and_no_other(
    run: ReferenceRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [run.prefill(0, PROMPT)]
    with monkeypatch.context() as patch:
        patch.setattr(run.runner, "run", without_memory)
        run.worker.submit(run.driver.plan(Work(0, 40, 1, 1)))
    with pytest.raises(OutOfMemoryError, match="step 2 failed: MemoryError: no more") as failure:
        run.worker.collect()
    assert isinstance(failure.value.__cause__, MemoryError)
    assert text + run.decode(0, 40, 3) == text_of(folder, PROMPT, 4)


def test_a_failed_step_takes_those_behind_it_along(
    run: ReferenceRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.prefill(0, PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(run.runner, "run", without_memory)
        run.worker.submit(run.driver.plan(Work(0, 40, 1, 1)))
    run.worker.submit(run.driver.plan(Work(0, 41, 1, 1)))
    with pytest.raises(ExecutionError, match="no more"):
        run.worker.collect()
    with pytest.raises(ExecutionError, match="no plan is under way"):
        run.worker.collect()
    assert [first, *run.decode(0, 40, 3)] == text_of(folder, PROMPT, 4)


def without_memory(inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
    """Run as a runner whose machine has no memory left."""
    raise MemoryError("no more")


# --- life --------------------------------------------------------------------------------------


def test_a_worker_is_an_executor_with_a_beginning_and_an_end(folder: Path) -> None:
    worker: Executor = Worker(
        load_parts(read_model(ModelFolder(folder)), block_size=16, num_blocks=8, num_host_blocks=2)
    )
    plan = step_of_moves()
    with pytest.raises(ExecutionError, match="not started"):
        worker.submit(plan)
    worker.start()
    with pytest.raises(ExecutionError, match="no plan is under way"):
        worker.collect()
    worker.submit(plan)
    assert worker.collect() == StepResult(1, column(), column())
    worker.submit(plan)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(ExecutionError, match="no plan is under way"):
        worker.collect()
    with pytest.raises(ExecutionError, match="shut down"):
        worker.submit(plan)
    worker.start()
    worker.submit(plan)
    assert worker.collect().step_id == 1


def test_the_shape_of_the_memory_is_known_before_it_is_allocated(folder: Path) -> None:
    description = read_model(ModelFolder(folder))
    spec = description.spec.kv_cache_spec(block_size=16)
    assert spec == KVCacheSpec(16, 2, 32, "float32", (KVGroup((0, 1, 2)),))
    assert (description.spec.vocab_size, description.spec.context_length) == (128, 4096)
    assert description.eos_token_ids == (127,)
    assert load_parts(read_model(ModelFolder(folder)), block_size=16, num_blocks=8).cache.spec == spec


def test_memory_that_cannot_be_had_is_a_setting_that_is_not_allowed(folder: Path) -> None:
    worker = Worker(load_parts(read_model(ModelFolder(folder)), block_size=16, num_blocks=1 << 45))
    with pytest.raises(InvalidConfigError, match="num_blocks is"):
        worker.start()


def test_what_nothing_computes_with_is_not_cached() -> None:
    spec = KVCacheSpec(2, 1, 2, "float16", (KVGroup((0,)),))
    with pytest.raises(InvalidConfigError, match="dtype of the KV cache is 'float16'"):
        CacheEngine(spec, num_blocks=1)


TAKE_MEMORY = """
import resource, sys
from pathlib import Path
from quire.compute.worker.cache_engine import CacheEngine
from quire.core.kv_spec import KVCacheSpec

def in_memory():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()

spec = KVCacheSpec.from_layers([None] * 2, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")
cache = CacheEngine(spec, num_blocks=(64 << 20) // spec.bytes_per_block, touch_threads=int(sys.argv[1]))
before = in_memory()
cache.allocate()
print(in_memory() - before)
"""


@pytest.mark.parametrize(("threads", "least", "most"), [(0, 0, 8 << 20), (2, 60 << 20, 80 << 20)])
def test_memory_is_taken_as_it_is_filled_or_all_at_the_start(threads: int, least: int, most: int) -> None:
    # In a process of its own: what others have freed would be taken first, and is there already.
    command = [sys.executable, "-c", TAKE_MEMORY, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert least <= int(done.stdout) <= most
