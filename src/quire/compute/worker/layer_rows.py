"""LayerRows: the layer of a model that guesses its next tokens, in a worker (see `models.guess_layer`).

    step    model: computes and draws          [t t t t] ──► n       and the hidden state h of each token
            layer: reads h and the next token  [h h h h] ──► g1 ──► g2 ──► g3      for rows that may have guesses
                                               [t t t n]
    next    model: verifies them               [n g1 g2 g3] ──► g1 g2 x

The layer's keys and values are in the same slots of the same blocks as the model's, so everything that concerns a block
concerns both: prefix hits, copies, swaps, the disk. Hidden states are not kept, so the layer cannot catch up: it reads
every token that the model computes, in the same step. That takes as long as one more layer, without the head; only
guesses take more. So each slot that the model has computed has an entry of the layer, in each copy of its block.

The entry of the last token of a cached prefix was made with the next token of another text, and that of a prompt whose
next token is never drawn with the token itself. Guesses of the layer are written ahead, and overwritten when the model
computes these tokens. A wrong entry may make a guess wrong, and never changes a text.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.backend import GuessLayerParts
from quire.compute.worker.guess_draws import GuessDraws
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.kv_memory import KVMemory
from quire.compute.worker.model_runner import NO_INDICES, ModelRunner, StepInputs, StepOutputs
from quire.core.guesses import Guesses
from quire.core.step import StepPlan


@dataclass(slots=True)
class _Job:
    """A row that gets at most `depth` guesses; `made` so far. `place`: its place among the outputs of the layer."""

    row: int
    depth: int
    place: int
    made: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class _Read:
    """The rows whose last token the layer has read in a step, and that token's coordinates, if any."""

    coordinates: IntArray | None  # [num_axes, num_rows]
    places: dict[int, int]  # row → its place among the outputs of the layer


class LayerRows:
    """The layer that guesses, and the step whose tokens it reads next."""

    def __init__(self, parts: GuessLayerParts, draws: GuessDraws) -> None:
        self._layer = parts.layer
        self._context_length = parts.context_length
        self._draws = draws
        self._computed: StepInputs | None = None
        self._read: _Read | None = None

    def apply(self, plan: StepPlan) -> None:
        """Forget the step before this plan. Mutates."""
        self._computed = self._read = None

    def release(self, row: int) -> None:
        """Do nothing: no row has anything between steps."""

    def run(self, runner: ModelRunner[Any], inputs: StepInputs, cache: KVMemory) -> StepOutputs:
        """Compute a step of the model, whose tokens `note` reads. Mutates the cache."""
        outputs = self._layer.run_model(runner, inputs, cache)
        self._computed = inputs
        return outputs

    def note_launched(self, inputs: StepInputs) -> None:
        """Note a step that was launched, whose tokens `note` reads. Mutates."""
        self._computed = inputs

    def note(self, plan: StepPlan, batch: InputBatch) -> None:
        """Read the tokens of a step, when those after them are known, or launched. Mutates the slots of its tokens."""
        inputs, self._computed = self._computed, None
        if inputs is None:
            return
        rows, tokens, next_tokens = list[int](), list[IntArray](), array("i")
        for sequence, row in enumerate(inputs.rows.tolist()):
            if batch.failure(row) is not None:
                continue
            first, end = inputs.query_starts[sequence : sequence + 2].tolist()
            text, start = batch.tokens(row), int(inputs.positions[first])
            if row in plan.drafts:  # leaves out tokens that were guessed in vain; without a draw, all guesses were
                end = min(end, first + max(1, len(text) - 1 - start))
            after = text[start + 1 : start + 1 + end - first]
            next_tokens.extend(after if len(after) == end - first else after + text[-1:])
            rows.append(sequence)
            tokens.append(np.arange(first, end))
        if rows:
            self._read_tokens(inputs, rows, tokens, np.array(next_tokens, np.int64))

    def _read_tokens(
        self, inputs: StepInputs, sequences: list[int], tokens: list[IntArray], next_tokens: IntArray
    ) -> None:
        """Read tokens of a step, given by their places in it and their next tokens. Mutates the memory."""
        places, counts = np.concatenate(tokens), np.array(list(map(len, tokens)))
        ends = np.cumsum(counts)
        of_layer = StepInputs(
            entries=tuple(range(len(sequences))),
            query_starts=np.concatenate((np.zeros(1, np.int64), ends)),
            token_ids=next_tokens,
            positions=inputs.positions[places],
            slots=(inputs.slots[0][places],),
            block_tables=(inputs.block_tables[0][sequences],),
            logit_starts=np.zeros(len(sequences) + 1, np.int64),
            logit_indices=NO_INDICES,
            rows=inputs.rows[sequences],
            given=_given_next(inputs)[places] if len(inputs.given) else NO_INDICES,
            given_rows=inputs.given_rows,
            coordinates=inputs.coordinates[:, places if inputs.coordinates.size else NO_INDICES],
        )
        self._layer.read(of_layer, places)
        of_rows = {row: place for place, row in enumerate(of_layer.rows.tolist())}
        self._read = _Read(of_layer.coordinates[:, ends - 1] if inputs.coordinates.size else None, of_rows)

    def follow(self, batch: InputBatch, depths: Mapping[int, int]) -> tuple[dict[int, Guesses], int]:
        """Return guesses for the rows in `depths` after a step, and the microseconds of a pass; 0: not measured.

        Mutates the slots of the guesses in the memory.
        """
        read = self._read
        if read is None:
            return {}, 0
        jobs = self._jobs(read, batch, depths)
        active, places, num_passes, began_s = jobs, [job.place for job in jobs], 0, time.perf_counter()
        while active:
            if num_passes:
                self._read_guesses(read, active, places, batch)
                places = list(range(len(active)))
            active, places = self._guess(active, places, batch)
            num_passes += 1
        pass_us = round(1e6 * (time.perf_counter() - began_s) / num_passes) if num_passes else 0
        return {job.row: Guesses("mtp", job.made) for job in jobs if job.made}, pass_us

    def _jobs(self, read: _Read, batch: InputBatch, depths: Mapping[int, int]) -> list[_Job]:
        most = {row: min(depth, self._context_length - len(batch.tokens(row))) for row, depth in depths.items()}
        return [_Job(row, depth, read.places[row]) for row, depth in most.items() if depth > 0 and row in read.places]

    def _guess(self, jobs: list[_Job], places: list[int], batch: InputBatch) -> tuple[list[_Job], list[int]]:
        """Make the next guess of jobs, from the outputs at these places; return those that continue, and their places.

        Mutates the jobs.
        """
        logits, finite = self._layer.logits(np.array(places, np.int64))
        good = [index for index in range(len(jobs)) if finite[index]]
        if not good:
            return [], []
        made = {jobs[index].row: jobs[index].made for index in good}
        for index, token in zip(good, self._draws.draw(logits, good, made, batch), strict=True):
            jobs[index].made.append(token)
        good = [index for index in good if len(jobs[index].made) < jobs[index].depth]
        going_on = [jobs[index] for index in good]
        self._draws.ask({job.row: job.made for job in going_on}, batch)
        return going_on, [places[index] for index in good]

    def _read_guesses(self, read: _Read, jobs: list[_Job], places: list[int], batch: InputBatch) -> None:
        """Read the last guess of each job, whose hidden state is the output at its place. Mutates the memory."""
        rows = [job.row for job in jobs]
        starts = [len(batch.tokens(job.row)) - 2 + len(job.made) for job in jobs]
        inputs = batch.inputs_for(rows, starts, [job.made[-1:] for job in jobs], [0] * len(jobs))
        if read.coordinates is not None:
            steps = np.array([len(job.made) for job in jobs], np.int64)
            inputs = replace(inputs, coordinates=read.coordinates[:, [job.place for job in jobs]] + steps)
        self._layer.read_on(inputs, np.array(places, np.int64))


def _given_next(inputs: StepInputs) -> IntArray:
    """Return, as `StepInputs.given`, the row of the token after each, if that is in the step. Does not mutate."""
    given = np.append(inputs.given[1:], -1)
    given[inputs.query_starts[1:] - 1] = -1
    return given
