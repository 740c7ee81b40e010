"""DraftRows: the draft model in a worker. It reads what the model reads, and guesses how the texts of rows go on.

    step    model: computes and draws      [t t t t] ──► n
            draft: reads the same tokens   [t t t t   n] ──► g1 ──► g2 ──► g3        for rows that may have guesses
    next    model: verifies them           [n g1 g2 g3] ──► g1 g2 x

The draft model has its keys and values in the same slots of the same blocks as the model. So it reads in each step the
tokens that the model has computed, prompts too, and then everything that concerns a block concerns both models: prefix
hits, copies, swaps. What it wrote for guesses that turn out wrong is written over when the right tokens are read, as
the model's own is. A block is published when its tokens are committed, and then both models have read them.

Where no guess could pay, as with many requests at once, the plan names no row: then the draft model reads prompts only.
It notes which slots it has read. A row that has a hole in its text, of its own or in a cached prefix, gets no guesses:
what lies there may be of another text.

A guess is drawn as the model would draw it: with the settings of the row, its rules, the mask of its grammar if it comes
in a moment, and the noise of its seed and position. Wrong keys or logits of the draft model would cost time, and never
change a text.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from quire.compute.arrays import BoolArray
from quire.compute.backend import DraftParts
from quire.compute.worker.grammar_rows import NO_MASKS, GrammarRows
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.sampling_columns import SamplingColumns
from quire.core.guesses import Guesses
from quire.core.step import StepPlan, StepResult


@dataclass(slots=True)
class _Row:
    """A row: it has read the first `num_read` tokens of the text, and then `ahead`, guesses of what follows them."""

    num_read: int
    ahead: array[int] = field(default_factory=lambda: array("i"))
    has_hole: bool = False

    def settle(self, text: array[int]) -> None:
        """Find which guesses turned out right, and forget the others. Mutates."""
        for token in self.ahead:
            if self.num_read >= len(text) or text[self.num_read] != token:
                break
            self.num_read += 1
        self.ahead = array("i")


@dataclass(slots=True)
class _Job:
    """What a row reads next, from position `start` on; it gets the guesses `made`, at most `depth`."""

    row: int
    start: int
    tokens: array[int]
    depth: int
    made: array[int] = field(default_factory=lambda: array("i"))

    @property
    def end(self) -> int:
        """The position after the tokens."""
        return self.start + len(self.tokens)


class DraftRows:
    """The draft model, and what it has read of each row."""

    def __init__(self, parts: DraftParts, columns: SamplingColumns, grammars: GrammarRows, vocab_size: int) -> None:
        self._parts = parts
        self._columns = columns
        self._grammars = grammars
        # Rules and masks name tokens of the model: a draft model that lacks some of them draws without them.
        self._sees_rules = parts.runner.vocab_size >= vocab_size
        self._rows: dict[int, _Row] = {}
        self._slots_read = np.zeros((parts.cache.num_blocks, parts.cache.spec.block_size), np.bool_)
        self._host_slots_read: dict[int, BoolArray] = {}  # by host block
        self._moved: set[int] = set()  # rows whose block tables have changed

    def apply(self, plan: StepPlan) -> None:
        """Note what a plan does to blocks and tables. Mutates."""
        read, on_host = self._slots_read, self._host_slots_read
        for block, host_block in plan.moves_out:
            on_host[host_block] = read[block].copy()
        for source, destination in plan.copies:
            read[destination] = read[source]
        for block, host_block in plan.moves_in:
            read[block] = on_host[host_block]
        for load in plan.transfers.loads:
            read[load.block] = False  # whether it was read when it went to disk is not known
        self._moved.update(plan.tables.rows)

    def release(self, row: int) -> None:
        """A row is free, or begins a text. Mutates."""
        self._rows.pop(row, None)

    def follow(
        self, plan: StepPlan, result: StepResult, batch: InputBatch, depths: Mapping[int, int]
    ) -> tuple[dict[int, Guesses], int]:
        """Read what a step has computed, and return guesses for the rows in `depths`, and the number of passes.

        Mutates what was read, and the slots of the tokens in the memory.
        """
        jobs = [job for entry in range(len(plan.rows)) if (job := self._job(plan, result, entry, batch, depths))]
        deep, num_passes, active = [job for job in jobs if job.depth], 0, jobs
        while active:
            self._pass(active, batch)
            num_passes += 1
            active = [job for job in active if len(job.made) < job.depth]
        for job in jobs:
            # The last guess has not been read.
            self._rows[job.row].ahead = job.made[:-1]
        return {job.row: Guesses("draft_model", job.made) for job in deep if job.made}, num_passes

    def _job(
        self, plan: StepPlan, result: StepResult, entry: int, batch: InputBatch, depths: Mapping[int, int]
    ) -> _Job | None:
        """Return what the row of an entry reads after a step; None: nothing."""
        row, start = plan.rows[entry], plan.starts[entry]
        if batch.failure(row) is not None:
            return None
        text, state = batch.tokens(row), self._rows.setdefault(row, _Row(start))
        state.settle(text)
        num_drafts = len(plan.drafts.get(row, ()))
        computed = start + (max(1, result.num_tokens[entry]) if num_drafts else plan.counts[entry])
        is_prompt = not plan.samples[entry] or plan.counts[entry] > 1 + num_drafts
        if self._skips(row, state, batch, is_wanted=is_prompt or row in plan.depths):
            first, end = min(start, len(text)), min(computed, len(text))
            self._slots_read.flat[batch.slots(row, end)[first:]] = False
            return None
        depth = min(depths.get(row, 0), self._parts.context_length - len(text))
        if depth > 0:
            # The last token is known, but the model computes it in the next step.
            first, end = min(state.num_read, len(text) - 1), len(text)
        else:
            depth, first, end = 0, state.num_read, min(computed, len(text), self._parts.context_length)
        state.num_read = max(state.num_read, end)
        return _Job(row, first, text[first:end], depth) if first < end else None

    def _skips(self, row: int, state: _Row, batch: InputBatch, *, is_wanted: bool) -> bool:
        """Return whether a row is read no more: it has a hole, or gets one now. Mutates."""
        if row in self._moved and not state.has_hole:
            self._moved.discard(row)
            state.has_hole = not self._slots_read.flat[batch.slots(row, state.num_read)].all()
        state.has_hole |= not is_wanted
        return state.has_hole

    def _pass(self, jobs: list[_Job], batch: InputBatch) -> None:
        """Read the tokens of jobs, and make the next guess of those that go on. Mutates the jobs."""
        inputs = batch.inputs_for(
            [job.row for job in jobs],
            [job.start for job in jobs],
            [job.tokens for job in jobs],
            [int(job.depth > 0) for job in jobs],
        )
        known = self._parts.runner.vocab_size - 1  # a token that only the model has is read as another one
        np.minimum(inputs.token_ids, known, out=inputs.token_ids)
        outputs = self._parts.runner.run(inputs, self._parts.cache)
        self._slots_read.flat[inputs.slots[0]] = True
        going_on: list[tuple[int, _Job]] = []  # and its row of the logits
        for logit_row, job in enumerate(job for job in jobs if job.depth):
            if outputs.finite_logits[logit_row]:
                going_on.append((logit_row, job))
            else:
                job.depth = len(job.made)
        if not going_on:
            return
        rows, positions = [job.row for _, job in going_on], [job.end for _, job in going_on]
        texts = [(batch.tokens(job.row), job.made) for _, job in going_on] if self._sees_rules else []
        masks = (
            self._grammars.masks_behind({job.row: job.made for _, job in going_on}) if self._sees_rules else NO_MASKS
        )
        draws = self._columns.guesses(rows, positions, texts, masks)
        draws.logit_rows[:] = [logit_row for logit_row, _ in going_on]
        tokens = self._parts.sampler.sample(outputs.logits, draws).tokens.tolist()
        for (_, job), token in zip(going_on, tokens, strict=True):
            job.start, job.tokens = job.end, array("i", [token])
            job.made.append(token)
        if self._sees_rules:  # the next masks are made during the next pass
            next_jobs = [job for _, job in going_on if len(job.made) < job.depth]
            self._grammars.ask_behind(
                {job.row: batch.tokens(job.row) for job in next_jobs}, {job.row: job.made for job in next_jobs}
            )
