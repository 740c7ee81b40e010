"""Steps that are launched while the one before them is computed: the same texts, and waiting where waiting is due."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch import sampling
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.load import load_model
from quire.compute.torch.rehearsal import filtered_draws
from quire.compute.torch.runner import TorchRunner, TorchStep
from quire.compute.worker.model_runner import UNKNOWN, StepInputs
from quire.compute.worker.step_ahead import Drawn
from quire.compute.worker.worker import Worker
from quire.core.errors import ExecutionError, ExecutorLostError, OutOfMemoryError
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepResult, column
from support.step_plans import GREEDY, PlanDriver, Work
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3
from support.torch_runs import FLOAT32

PROMPT = [(5 * i * i + 3 * i + 1) % 126 for i in range(40)]
WARM = SamplingParams(temperature=1.5, seed=3)


class Watched:
    """A runner, and what it was given: the order in which steps are launched and waited for, and unknown tokens."""

    def __init__(self, runner: TorchRunner) -> None:
        self.vocab_size = runner.vocab_size
        self.events: list[str] = []
        self.num_unknown = 0
        self._runner = runner

    def prepare(self, cache: TorchCache) -> None:
        self.events.append("prepare")

    def launch(self, inputs: StepInputs, draws: object, cache: TorchCache) -> WatchedStep:
        number = sum(event.startswith("launch") for event in self.events)
        self.events.append(f"launch {number}")
        self.num_unknown += int((inputs.token_ids == UNKNOWN).sum())
        return WatchedStep(self, number, self._runner.launch(inputs, draws, cache))  # type: ignore[arg-type]


class WatchedStep:
    def __init__(self, watched: Watched, number: int, step: TorchStep) -> None:
        self._watched, self._number, self._step = watched, number, step

    def wait(self) -> Drawn:
        self._watched.events.append(f"wait {self._number}")
        return self._step.wait()


class Run:
    """A worker driven by hand, whose steps may be under way."""

    def __init__(self, folder: Path, device: str, *, invariant: bool = True, ahead: bool = True) -> None:
        settings = replace(FLOAT32, device=device, batch_invariant=invariant)
        parts = load_model(read_model(ModelFolder(folder)), settings).parts(64)
        self.watched = Watched(cast(TorchRunner, parts.runner))
        self.worker = Worker(replace(parts, launcher=self.watched) if ahead else parts.with_runner(parts.runner))
        self.worker.start()
        self.driver = PlanDriver.over(self.worker.cache.spec, range(64))

    def submit(self, *works: Work) -> None:
        self.worker.submit(self.driver.plan(*works))

    def step(self, *works: Work) -> StepResult:
        self.submit(*works)
        return self.worker.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(folder: Path, device: str) -> Run:
    return Run(folder, device)


def texts_of(folder: Path, device: str, works: Iterator[list[Work]], sampling: SamplingParams) -> list[list[int]]:
    """Return the tokens of each step, computed one after another by a worker that never launches any."""
    run = Run(folder, device, ahead=False)
    for row in range(3):
        run.driver.open(row, PROMPT[row:], sampling)
    found = [run.step(*each).tokens.tolist() for each in works]
    assert not run.watched.events
    return found


def steps() -> Iterator[list[Work]]:
    """Yield the works of steps: a prompt beside decodes, in chunks, and decodes of several rows."""
    yield [Work(0, 0, 40, 1)]
    yield [Work(0, 40, 1, 1), Work(1, 0, 30)]
    yield [Work(0, 41, 1, 1), Work(1, 30, 9, 1)]
    for i in range(4):
        yield [Work(0, 42 + i, 1, 1), Work(1, 39 + i, 1, 1)]
    yield [Work(1, 43, 1, 1), Work(2, 0, 38, 1)]
    yield [Work(0, 46, 1, 1), Work(1, 44, 1, 1), Work(2, 38, 1, 1)]


RULES = {
    "penalties": replace(WARM, repetition_penalty=1.7, presence_penalty=1.1, frequency_penalty=-0.6),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.3),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.9),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=-1.5),
    "biases": SamplingParams(temperature=0.0, logit_bias={5: 2.0}),
    "allowed": replace(WARM, allowed_token_ids=(3, 5, 60), presence_penalty=0.5),
    "a bad word": replace(WARM, bad_words_ids=((7,), (9,)), repetition_penalty=0.6),
    "no early end": replace(WARM, min_tokens=4, stop_token_ids=tuple(range(60))),
}


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, WARM, *RULES.values()],
    ids=["greedy", "drawn", *RULES],
)
def test_texts_are_the_same_with_steps_under_way(sampling: SamplingParams, run: Run, folder: Path, device: str) -> None:
    for row in range(3):
        run.driver.open(row, PROMPT[row:], sampling)
    found = []
    for number, works in enumerate(steps()):
        run.submit(*works)
        if number:
            found.append(run.worker.collect().tokens.tolist())
    found.append(run.worker.collect().tokens.tolist())
    assert found == texts_of(folder, device, steps(), sampling)
    # Each step is launched before the one before it is waited for: its tokens are known to the device only.
    assert run.watched.events[:6] == ["prepare", "launch 0", "launch 1", "wait 0", "launch 2", "wait 1"]
    assert run.watched.num_unknown == 13


def test_several_steps_may_be_under_way(run: Run, folder: Path, device: str) -> None:
    run.driver.open(0, PROMPT)
    run.submit(Work(0, 0, 40, 1))
    for i in range(5):
        run.submit(Work(0, 40 + i, 1, 1))
    text = [run.worker.collect().tokens[0] for _ in range(6)]
    alone = Run(folder, device)
    alone.driver.open(0, PROMPT)
    assert text == [alone.step(Work(0, 0, 40, 1)).tokens[0]] + [
        alone.step(Work(0, 40 + i, 1, 1)).tokens[0] for i in range(5)
    ]


def test_counts_are_those_of_the_text_whatever_steps_it_came_from(run: Run, folder: Path, device: str) -> None:
    """Steps under way, then one that waits for another row's reports, then steps under way, and a row taken again."""
    rules = RULES["penalties"]

    def texts(run: Run, num_ahead: int) -> list[list[int]]:
        found: list[list[int]] = []
        run.driver.open(0, PROMPT, rules)
        run.driver.open(1, PROMPT[2:], replace(rules, logprobs=1))
        run.driver.open(2, PROMPT[3:], RULES["presence"])
        plans = [[Work(0, 0, 40, 1), Work(2, 0, 37, 1)]]
        plans += [[Work(0, 40 + i, 1, 1), Work(2, 37 + i, 1, 1)] for i in range(4)]
        plans += [[Work(1, 0, 38, 1)], [Work(1, 38, 1, 1), Work(0, 44, 1, 1)]]
        plans += [[Work(0, 45 + i, 1, 1), Work(2, 41 + i, 1, 1)] for i in range(5)]
        for number, works in enumerate(plans):
            run.submit(*works)
            if number >= num_ahead:
                found.append(run.worker.collect().tokens.tolist())
        run.driver.release(0)
        run.driver.open(0, PROMPT[:9], rules)
        for works in [[Work(0, 0, 9, 1)], [Work(0, 9, 1, 1)], [Work(0, 10, 1, 1)]]:
            run.submit(*works)
        return found + [run.worker.collect().tokens.tolist() for _ in range(num_ahead + 3)]

    expected = texts(Run(folder, device, ahead=False), 0)
    assert texts(run, 2) == expected
    assert run.watched.num_unknown > 15
    assert len({token for tokens in expected for token in tokens}) > 5


CAREFUL = {
    "a word": SamplingParams(temperature=0.0, bad_words_ids=((4, 5),)),
    "report": SamplingParams(temperature=0.0, logprobs=2),
    "beams": SamplingParams(temperature=0.0, beam_search=True, best_of=1),
}


@pytest.mark.parametrize("sampling", CAREFUL.values(), ids=CAREFUL.keys())
def test_who_looks_at_its_text_waits_for_it(sampling: SamplingParams, run: Run) -> None:
    run.driver.open(0, PROMPT)
    run.driver.open(1, PROMPT, sampling)
    run.submit(Work(0, 0, 40, 1), Work(1, 0, 20))
    assert run.watched.events == ["prepare"]  # a chunk of it as well: what it reports may be wanted of any step
    run.submit(Work(0, 40, 1, 1))
    run.submit(Work(0, 41, 1, 1))
    run.submit(Work(0, 42, 1, 1), Work(1, 20, 20, 1))
    assert run.watched.events == ["prepare", "launch 0", "launch 1", "wait 0", "wait 1"]
    for _ in range(4):
        run.worker.collect()
    # Without it the steps are launched again.
    run.driver.release(1)
    run.submit(Work(0, 43, 1, 1))
    assert run.watched.events[-1] == "launch 2"


def test_drafts_and_opening_rows_wait(run: Run) -> None:
    run.driver.open(0, PROMPT)
    run.driver.open(1, PROMPT, replace(GREEDY, n=2))
    first = run.step(Work(0, 0, 40, 1)).tokens[0]
    run.submit(Work(0, 40, 1, 1))
    run.submit(Work(1, 0, 40, 2))
    assert run.watched.events[-1] == "wait 1"
    run.worker.collect()
    assert run.worker.collect().tokens.tolist() == [first, first]
    assert run.step(Work(0, 41, 2, 1, drafts=[3])).num_tokens[0] >= 1
    assert run.watched.events[-1] == "wait 1"


def test_a_row_given_to_another_keeps_its_own_text(run: Run, folder: Path, device: str) -> None:
    run.driver.open(0, PROMPT)
    run.submit(Work(0, 0, 40, 1))
    run.driver.release(0)
    run.driver.open(0, PROMPT[3:])
    run.submit(Work(0, 0, 37, 1))
    run.submit(Work(0, 37, 1, 1))
    results = [run.worker.collect() for _ in range(3)]
    expected = []
    for prompt in (PROMPT, PROMPT[3:]):
        alone = Run(folder, device)
        alone.driver.open(0, prompt)
        expected.append(alone.step(Work(0, 0, len(prompt), 1)).tokens[0])
    assert [result.tokens[0] for result in results[:2]] == expected
    assert results[2].num_tokens == column(1)


def test_a_row_whose_numbers_are_not_finite_fails_alone(tmp_path: Path, device: str) -> None:
    write_tiny_qwen3(tmp_path, tie=False)
    tensors = tiny_qwen3_tensors(tiny_qwen3_config(tie=False), seed=0)
    tensors["model.embed_tokens.weight"][126] = np.inf
    write_model_weights(tmp_path, tensors)
    run = Run(tmp_path, device)
    run.driver.open(0, [126, *PROMPT])
    run.driver.open(1, PROMPT)
    run.submit(Work(0, 0, 41, 1), Work(1, 0, 40, 1))
    run.submit(Work(0, 41, 1, 1), Work(1, 40, 1, 1))
    for _ in range(2):
        result = run.worker.collect()
        assert result.failures == {0: "the model's output is not finite"}
        assert result.num_tokens == column(0, 1)
    # From then on it takes no part.
    result = run.step(Work(0, 42, 1, 1), Work(1, 41, 1, 1))
    assert (list(result.failures), result.num_tokens) == ([0], column(0, 1))
    result = run.step(Work(0, 43, 1, 1))
    assert (list(result.failures), result.num_tokens) == ([0], column(0))


def test_a_step_that_fails_while_under_way_takes_those_behind_it_along(run: Run) -> None:
    run.driver.open(0, PROMPT)
    run.submit(Work(0, 0, 40, 1))
    step = run.worker._results[0].step  # type: ignore[union-attr]
    step.wait = failing  # type: ignore[union-attr, method-assign]
    run.submit(Work(0, 40, 1, 1))
    with pytest.raises(ExecutionError, match="step 1 failed: AcceleratorError: the device is gone"):
        run.worker.collect()
    with pytest.raises(ExecutionError, match="no plan is under way"):
        run.worker.collect()


def failing() -> Drawn:
    raise torch.AcceleratorError("the device is gone")


class Broken:
    """An event of a device that has failed, and a sampler without memory."""

    def synchronize(self) -> None:
        raise torch.AcceleratorError("an illegal memory access\nand what torch says of it")

    def choose(self, logits: torch.Tensor, draws: object, counted: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more")


def test_a_device_that_has_failed_is_lost(run: Run) -> None:
    run.driver.open(0, PROMPT)
    run.submit(Work(0, 0, 40, 1))
    run.worker._results[0].step._step._arrived = Broken()  # type: ignore[union-attr]
    with pytest.raises(ExecutorLostError, match=r"^the device has failed: an illegal memory access\Z"):
        run.worker.collect()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), ExecutorLostError, "unspecified launch"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), ExecutorLostError, "failed: an illegal memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"),
            ExecutorLostError,
            "EXECUTION_FAILED",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemoryError, "out of memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemoryError, "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OutOfMemoryError, "ALLOC_FAILED"),
        (RuntimeError("shapes do not match"), ExecutionError, "shapes do not match"),
    ],
    ids=str,
)
def test_an_error_of_a_launch_says_whether_the_device_is_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], text: str
) -> None:
    def launched(*_: object) -> None:
        raise error

    run.driver.open(0, PROMPT)
    monkeypatch.setattr(run.watched._runner._decoder, "run", launched)
    with pytest.raises(kind, match=text) as found:
        run.step(Work(0, 0, 40, 1))
    assert type(found.value) is kind


def test_a_device_that_does_not_answer_after_any_error_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object) -> None:
        raise RuntimeError("something internal")

    run.driver.open(0, PROMPT)
    monkeypatch.setattr(run.watched._runner._decoder, "run", launched)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(ExecutionError, match="something internal") as found:
        run.step(Work(0, 0, 40, 1))
    assert type(found.value) is ExecutionError
    monkeypatch.setattr(torch.cuda, "synchronize", failing)
    with pytest.raises(ExecutorLostError, match="the device has failed: something internal"):
        run.step(Work(0, 0, 40, 1))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: an illegal address"), ExecutorLostError),
        (torch.OutOfMemoryError("no more"), MemoryError),
    ],
    ids=str,
)
def test_draws_and_reports_that_wait_say_what_has_become_of_the_device(
    error: Exception, kind: type[Exception], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choosing(*_: object) -> None:
        raise error

    monkeypatch.setattr(sampling, "choose_tokens", choosing)
    monkeypatch.setattr(sampling, "_log_softmax", choosing)
    sampler, logits = sampling.TorchSampler(8), torch.zeros((1, 8), device=device)
    one = np.ones(1, np.int64)
    with pytest.raises(kind):
        sampler.sample(logits, filtered_draws(1))
    with pytest.raises(kind):
        sampler.report(logits, 0 * one, one, one)


def test_draws_that_do_not_fit_make_the_step_fail_for_lack_of_memory(run: Run) -> None:
    run.driver.open(0, PROMPT)
    runner = run.watched._runner
    runner._sampler, sampler = Broken(), runner._sampler  # type: ignore[assignment]
    with pytest.raises(OutOfMemoryError, match="no more"):
        run.step(Work(0, 0, 40, 1))
    runner._sampler = sampler
    assert run.step(Work(0, 0, 40, 1)).num_tokens == column(1)
