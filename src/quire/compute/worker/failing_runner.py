"""FailingRunner: a model that fails on demand (see `quire.core.failpoints`), to test error handling.

It wraps a real runner, so its faults arise where real ones do: after the worker has applied the plan, and before it
uses the outputs. Without a failpoint that strikes, it changes nothing.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from quire.compute.worker.kv_memory import KVMemory
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.core.failpoints import Failpoint

SLEEP: Final = "sleep"


class FailingRunner:
    """Implements `ModelRunner` around another one."""

    def __init__(self, runner: ModelRunner[Any], failpoints: Sequence[Failpoint]) -> None:
        self._runner = runner
        self._failpoints = failpoints
        self._num_runs = 0

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self._runner.vocab_size

    def run(self, inputs: StepInputs, cache: KVMemory) -> StepOutputs:
        """Compute one step, or fail. Mutates its slots in the cache."""
        self._num_runs += 1
        struck = [(failpoint, found) for failpoint in self._failpoints if (found := self._strikes(failpoint, inputs))]
        for failpoint, _ in struck:
            if failpoint.effect == "memory":
                raise MemoryError(str(failpoint))
            if failpoint.effect == "error":
                raise RuntimeError(str(failpoint))
            if failpoint.effect == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if failpoint.effect.startswith(SLEEP):
                time.sleep(float(failpoint.effect.removeprefix(SLEEP)))
        outputs = self._runner.run(inputs, cache)
        for failpoint, sequences in struck:
            if failpoint.effect == "nan":
                outputs = _spoilt(inputs, outputs, sequences)
        return outputs

    def _strikes(self, failpoint: Failpoint, inputs: StepInputs) -> list[int]:
        """Return the sequences of the step that a failpoint strikes."""
        everybody = range(len(inputs.entries))
        if failpoint.trigger == "token":
            tokens = inputs.token_ids
            return [each for each in everybody if failpoint.number in tokens[inputs.tokens_of(each)]]
        reached = len(inputs.token_ids) >= failpoint.number
        if failpoint.trigger == "step":
            reached = self._num_runs == failpoint.number
        return list(everybody) if reached else []


def _spoilt(inputs: StepInputs, outputs: StepOutputs, sequences: Sequence[int]) -> StepOutputs:
    """Return the outputs, with NaN or infinities for some sequences. Mutates the logits."""
    finite, finite_logits = outputs.finite.copy(), outputs.finite_logits.copy()
    for sequence in sequences:
        finite[inputs.tokens_of(sequence)] = False
        finite_logits[inputs.logits_of(sequence)] = False
        outputs.logits[inputs.logits_of(sequence)] = math.nan
    return replace(outputs, finite=finite, finite_logits=finite_logits)
