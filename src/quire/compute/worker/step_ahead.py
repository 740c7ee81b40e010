"""Steps ahead: launches a step while the previous step runs, whose sampled tokens become known later.

    host     build 1, launch │ build 2, launch │ wait 1, result │ build 3, launch │ wait 2, result │ …
    device                   └── step 1 ───────┴── step 2 ──────┴── step 3 ───────┴── …

A device that waits until the host has read its tokens, scheduled the next step and built its inputs is idle for a large
part of every step. It need not wait, because a sampled token is already on the device. So the row's text continues with
`UNKNOWN`, the runner takes the row's last token from device memory, and the text is completed when the result is
collected.

Rules that depend on no token of the text work as in any step: `min_tokens`, biases, tokens that are allowed or banned.
The runner continues the counts of penalties: it gets the counts of a text whose tokens are all known, and then counts
each token that it draws. This does not work for other choices that depend on the text or on log-probabilities: bad
words of several tokens, grammars, beams, reports, drafts, guesses to be made. A plan with such a row is computed when
all earlier tokens are known, and so is every plan without a `Launcher`. Whether a row's numbers are finite is also
known late: by then the row's next step may be running, and its token is discarded.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.compute.arrays import BoolArray, IntArray
from quire.compute.sampling.draws import Draws
from quire.compute.worker.careful_rows import CarefulRows
from quire.compute.worker.image_rows import ImageRows
from quire.compute.worker.input_batch import InputBatch, RowState
from quire.compute.worker.kv_memory import KVMemory
from quire.compute.worker.model_runner import UNKNOWN, Memory_contra, StepInputs
from quire.compute.worker.sampling_columns import Sampling, SamplingColumns
from quire.core.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Drawn:
    """The results of a launched step."""

    tokens: IntArray  # [num_draws]
    finite: BoolArray  # [num_tokens]: the hidden state of the token
    finite_logits: BoolArray  # [num_logits]


class StepUnderWay(Protocol):
    """A launched step."""

    def wait(self) -> Drawn:
        """Wait for the step and return its results."""
        ...


class Launcher(Protocol[Memory_contra]):
    """A runner that also samples, and returns before either is done."""

    def prepare(self, cache: Memory_contra) -> None:
        """Do slow work before the first step, when the memory is allocated. Mutates the launcher only."""
        ...

    def launch(self, inputs: StepInputs, draws: Draws, cache: Memory_contra) -> StepUnderWay:
        """Start a step of at least one token, with a draw for each row of logits. Mutates its slots in the cache.

        An `UNKNOWN` token of the inputs is the token that its row drew in the step launched last. The draw after it
        comes without counts for penalties: the launcher adds the token to the counts of that step.
        """
        ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A running step, and the states of the rows at its launch, which get its tokens."""

    plan: StepPlan
    inputs: StepInputs
    states: tuple[RowState, ...]  # one per entry of the plan
    sampling: tuple[int, ...]  # entries that draw
    step: StepUnderWay | None  # None: every row had failed earlier

    def result(self) -> StepResult:
        """Wait for the step and return its result. Mutates the rows: their tokens become known."""
        sampled: dict[int, int] = {}
        if self.step is not None:
            drawn = self.step.wait()
            for entry, message in broken(self.inputs, drawn.finite, drawn.finite_logits):
                self.states[entry].failure = message
            for entry, token in zip(self.sampling, drawn.tokens.tolist(), strict=True):
                state = self.states[entry]
                state.tokens[self.plan.starts[entry] + self.plan.counts[entry]] = token
                if state.failure is None:
                    sampled[entry] = token
        failures = {row: state.failure for row, state in zip(self.plan.rows, self.states, strict=True) if state.failure}
        return StepResult(
            self.plan.step_id,
            num_tokens=array("i", [int(entry in sampled) for entry in range(len(self.plan.rows))]),
            tokens=array("i", sampled.values()),
            failures=failures,
        )


class StepsAhead:
    """Decides which steps need not wait, and launches them."""

    def __init__(
        self, launcher: Launcher[Any], columns: SamplingColumns, careful: CarefulRows, images: ImageRows
    ) -> None:
        self._launcher = launcher
        self._columns = columns
        self._careful = careful
        self._images = images

    def prepare(self, cache: KVMemory) -> None:
        """Let the launcher do its slow work before the first step. Mutates it."""
        self._launcher.prepare(cache)

    def takes(self, plan: StepPlan) -> bool:
        """Return whether a plan may be launched while the steps before it run. Does not mutate."""
        is_plain = not plan.drafts and not plan.proposals and max(plan.samples, default=0) <= 1
        return is_plain and self._careful.isdisjoint(plan.rows)

    def launch(self, plan: StepPlan, batch: InputBatch, cache: KVMemory) -> Launched:
        """Start a step; its tokens are `UNKNOWN` until `Launched.result`. Mutates the rows and the cache."""
        inputs = self._images.with_images(plan, batch.build(plan))
        states = tuple(batch.state(row) for row in plan.rows)
        sampling = tuple(entry for entry in inputs.entries if plan.samples[entry])
        step = None
        if inputs.entries:
            step = self._launcher.launch(inputs, self._draws(plan, sampling, states), cache)
            self._images.note_computed(plan)
        for entry in sampling:
            states[entry].tokens.append(UNKNOWN)
        return Launched(plan, inputs, states, sampling, step)

    def _draws(self, plan: StepPlan, sampling: tuple[int, ...], states: tuple[RowState, ...]) -> Draws:
        """Return a draw for each entry that samples; only these entries have a row of logits, one each."""
        rows, starts, counts = (np.array(column, np.int64) for column in (plan.rows, plan.starts, plan.counts))
        entries, count = np.array(sampling, np.int64), len(sampling)
        return self._columns.draws(
            Sampling(
                rows=rows[entries],
                logit_starts=np.arange(count),
                next_positions=starts[entries] + counts[entries],
                num_draws=np.ones(count, np.int64),
                drafted=np.zeros(count, np.int64),
                texts=[states[entry].tokens for entry in sampling],
                drafts=[()] * count,
            )
        )


def broken(inputs: StepInputs, finite: BoolArray, finite_logits: BoolArray) -> Iterator[tuple[int, str]]:
    """Yield the entries with numbers that are not finite, and an error message for each.

    Includes chunks of a prompt: other requests may share their keys and values. Does not mutate.
    """
    if finite.all() and finite_logits.all():
        return
    for sequence, entry in enumerate(inputs.entries):
        if not finite[inputs.tokens_of(sequence)].all():
            yield entry, "the model's output is not finite"
        elif not finite_logits[inputs.logits_of(sequence)].all():
            yield entry, "the logits are not finite"
