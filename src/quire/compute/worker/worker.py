"""Worker: an Executor in this process, one model over one KV memory.

A step is carried out when it is submitted; `collect` hands over the queued result. That keeps the
contract with several plans under way: plans take effect in the order of submission, and a row finds
the token that an earlier step sampled in its own state, whether or not the scheduler has collected
it.

What goes wrong with one request is an entry of `failures` and touches no other row: settings that
this worker does not serve, hidden states or logits that are not finite. Everything else fails the
step: `collect` raises `ExecutionError`, no token of the step is known afterwards, the differences,
copies and moves that its plan carried stay applied, and the plans behind it are lost with it.
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np

from quire.compute.arrays import BoolArray
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.greedy import best_tokens, verify_drafts
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.core.errors import ExecutionError
from quire.core.step import StepPlan, StepResult, column


class Worker:
    """Computes plans with a `ModelRunner`; implements `quire.core.executor.Executor`."""

    def __init__(self, runner: ModelRunner, cache: CacheEngine) -> None:
        self.runner = runner
        self.cache = cache
        self._batch: InputBatch | None = None
        self._results: deque[StepResult | ExecutionError] = deque()

    def start(self) -> None:
        """Allocate the KV memory; no row is taken. Mutates."""
        self.cache.allocate()
        num_blocks, vocab_size = self.cache.num_blocks, self.runner.vocab_size
        self._batch = InputBatch(self.cache.spec, num_blocks=num_blocks, vocab_size=vocab_size)

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan and queue its result. Mutates."""
        if self._batch is None:
            raise ExecutionError("the worker is not started, or was shut down")
        try:
            self._results.append(self._execute(plan, self._batch))
        except ExecutionError as error:
            self._results.append(error)
        except Exception as error:
            failure = ExecutionError(f"step {plan.step_id} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._results.append(failure)

    def collect(self) -> StepResult:
        """Return the result of the oldest plan under way. Mutates the queue.

        A step that failed takes the plans behind it along: what they compute may follow from what it did not.
        """
        if not self._results:
            raise ExecutionError("no plan is under way")
        result = self._results.popleft()
        if isinstance(result, ExecutionError):
            self._results.clear()
            raise result
        return result

    def shutdown(self) -> None:
        """Give the memory back and drop what is under way. Mutates; may be called twice."""
        self._batch = None
        self._results.clear()
        self.cache.release()

    def _execute(self, plan: StepPlan, batch: InputBatch) -> StepResult:
        plan.check()
        batch.apply(plan)
        self.cache.apply(plan)
        inputs = batch.build(plan)
        sampled: dict[int, list[int]] = {}
        if inputs.entries:
            outputs = self.runner.run(inputs, self.cache)
            sampled = _sample(plan, inputs, outputs, batch)
        tokens = [sampled.get(entry, []) for entry in range(len(plan.rows))]
        failures = {row: batch.failure(row) for row in plan.rows}
        return StepResult(
            plan.step_id,
            num_tokens=column(*(len(chosen) for chosen in tokens)),
            tokens=array("i", [token for chosen in tokens for token in chosen]),
            failures={row: message for row, message in failures.items() if message is not None},
        )


def _sample(plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, batch: InputBatch) -> dict[int, list[int]]:
    """Return each sampling entry's tokens and make them known; mark rows not finite."""
    finite_logits: BoolArray = np.all(np.isfinite(outputs.logits), axis=1)
    sampled: dict[int, list[int]] = {}
    for sequence, entry in enumerate(inputs.entries):
        row, samples = plan.rows[entry], plan.samples[entry]
        wanted = inputs.logits_of(sequence)
        problem = _not_finite(inputs, outputs, sequence, finite_logits[wanted])
        if problem is not None:
            batch.fail(row, problem)
        elif samples:
            logits = outputs.logits[wanted]
            drafts = plan.drafts.get(row, ())
            chosen = verify_drafts(logits, drafts) if drafts else best_tokens(logits[0], samples)
            # A row that opens into several sequences goes on as the first of them.
            batch.append(row, chosen if drafts else chosen[:1])
            sampled[entry] = chosen
    return sampled


def _not_finite(inputs: StepInputs, outputs: StepOutputs, sequence: int, finite_logits: BoolArray) -> str | None:
    """Return what is not finite in a sequence. Chunks count: their keys and values may be shared."""
    if not outputs.finite[inputs.tokens_of(sequence)].all():
        return "the model's output is not finite"
    return None if finite_logits.all() else "the logits are not finite"
