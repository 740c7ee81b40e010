"""DraftRows: the draft model in a worker. It reads the same texts as the model, and guesses how they continue.

    step    model: computes and draws      [t t t t] ──► n
            draft: reads the same tokens   [t t t t   n] ──► g1 ──► g2 ──► g3        for rows that may have guesses
    next    model: verifies them           [n g1 g2 g3] ──► g1 g2 x

The draft model has its keys and values in the same slots of the same blocks as the model, so everything that concerns
a block concerns both models: prefix hits, copies, swaps. It reads a text only if it is to guess for it, unread tokens
first, at most `most_tokens` a step. So if guesses do not pay, it costs nothing, not even for the prompt; when they pay
again, it catches up.

A flag per slot records what it has read. A slot that the model writes is unread until the draft model has read the
text up to there, and the flags move with their block. A text that catches up can write into blocks that others read:
the same tokens make the same keys, so nothing changes. A slot of a guess counts as read if the guess was right.

A guess is drawn as the model would draw it: with the row's settings, rules, random seed and position, and with the
mask of its grammar if that arrives in time. Wrong keys or logits of the draft model would cost time, and never change
a text.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from quire.compute.arrays import BoolArray
from quire.compute.backend import DraftParts
from quire.compute.worker.grammar_rows import GrammarRows
from quire.compute.worker.guess_draws import GuessDraws
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.sampling_columns import SamplingColumns
from quire.core.guesses import Guesses
from quire.core.step import StepPlan

FEW: Final = 4
"""A pass that reads at most this many tokens per row takes as long as a pass that reads one."""


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


class _Ahead(NamedTuple):
    """Tokens read ahead of the model, from position `start` on: the last known token, then guesses."""

    start: int
    tokens: array[int]


class DraftRows:
    """The draft model, and a flag for each slot that it has read."""

    def __init__(self, parts: DraftParts, columns: SamplingColumns, grammars: GrammarRows, vocab_size: int) -> None:
        self._parts = parts
        # A draft model that lacks some tokens of the model draws without rules and masks.
        self._draws = GuessDraws(parts.sampler, columns, grammars, parts.runner.vocab_size >= vocab_size)
        self._ahead: dict[int, _Ahead] = {}  # by row
        self._slots_read = np.zeros((parts.cache.num_blocks, parts.cache.spec.block_size), np.bool_)
        self._host_slots_read: dict[int, BoolArray] = {}  # by host block

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes of blocks to the flags. Mutates."""
        read, on_host = self._slots_read, self._host_slots_read
        for block, host_block in plan.moves_out:
            on_host[host_block] = read[block].copy()
        for source, destination in plan.copies:
            read[destination] = read[source]
        for block, host_block in plan.moves_in:
            read[block] = on_host[host_block]
        for load in plan.transfers.loads:
            read[load.block] = False  # the disk does not keep the flags

    def release(self, row: int) -> None:
        """Forget a row that is free or begins another text. Mutates."""
        self._ahead.pop(row, None)

    def note(self, plan: StepPlan, batch: InputBatch) -> None:
        """Note the slots that the model writes in a step; call it for each step computed or launched. Mutates."""
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            if batch.failure(row) is None:
                self._note_computed(row, start, start + count, batch)

    def follow(self, batch: InputBatch, depths: Mapping[int, int]) -> tuple[dict[int, Guesses], int]:
        """Return guesses for the rows in `depths` after a step, and the microseconds of a pass; 0: not measured.

        Mutates the flags, and the slots of the tokens in the memory.
        """
        jobs = self._jobs(depths, batch)
        active, times_s = jobs, list[float]()
        while active:
            began_s = time.perf_counter()
            is_short = sum(len(job.tokens) for job in active) <= FEW * len(active)
            self._pass(active, batch)
            if is_short:
                times_s.append(time.perf_counter() - began_s)
            active = [job for job in active if len(job.made) < job.depth]
        deep = [job for job in jobs if job.made]
        for job in deep:
            text = batch.tokens(job.row)  # the last guess has not been read
            self._ahead[job.row] = _Ahead(len(text) - 1, text[-1:] + job.made[:-1])
        pass_us = round(1e6 * sum(times_s) / len(times_s)) if times_s else 0
        return {job.row: Guesses("draft_model", job.made) for job in deep}, pass_us

    def _note_computed(self, row: int, start: int, end: int, batch: InputBatch) -> None:
        """Note that the model has written slots of a row: they are unread, except for those read before. Mutates."""
        text, ahead = batch.tokens(row), self._ahead.pop(row, None)
        end = min(end, len(text))
        self._slots_read.flat[batch.slots(row, start, end)] = False
        if ahead is not None:
            num_right = 0
            for guess, token in zip(ahead.tokens, text[ahead.start : end], strict=False):
                if guess != token:
                    break
                num_right += 1
            self._slots_read.flat[batch.slots(row, ahead.start, ahead.start + num_right)] = True

    def _jobs(self, depths: Mapping[int, int], batch: InputBatch) -> list[_Job]:
        """Return the first read of each row. Does not mutate."""
        jobs, left = list[_Job](), self._parts.most_tokens
        being_read = np.zeros(self._slots_read.size, np.bool_)
        for row, most in depths.items():
            text = batch.tokens(row)
            slots = batch.slots(row, 0, len(text))
            depth = min(most, self._parts.context_length - len(text))
            # If two texts share blocks, one text reads them, and the other one waits.
            if depth <= 0 or left <= 0 or being_read[slots].any():
                continue
            unread = ~self._slots_read.flat[slots[:-1]]
            start = int(unread.argmax()) if unread.any() else len(text) - 1
            end = min(start + left, len(text))
            jobs.append(_Job(row, start, text[start:end], depth if end == len(text) else 0))
            being_read[slots[start:end]] = True
            left -= end - start
        return jobs

    def _pass(self, jobs: list[_Job], batch: InputBatch) -> None:
        """Read the tokens of jobs, and make the next guess of the jobs that continue. Mutates the jobs."""
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
        logit_rows, made = [logit_row for logit_row, _ in going_on], {job.row: job.made for _, job in going_on}
        tokens = self._draws.draw(outputs.logits, logit_rows, made, batch)
        for (_, job), token in zip(going_on, tokens, strict=True):
            job.start, job.tokens = job.end, array("i", [token])
            job.made.append(token)
        self._draws.ask({job.row: job.made for _, job in going_on if len(job.made) < job.depth}, batch)
