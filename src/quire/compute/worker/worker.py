"""Worker: an Executor in this process, one model over one KV memory.

A step runs when it is submitted; `collect` returns the queued result. This keeps the contract with several
plans in flight: plans take effect in the order of submission, and a row's state includes the token of an
earlier step, whether or not the scheduler has collected it. With a `Launcher`, `submit` only starts the
step if its plan allows that (see `step_ahead`), and `collect` waits for it.

An error of one request becomes an entry of `failures` and affects no other row: settings that this worker
does not support, hidden states or logits that are not finite. Every other error fails the step: `collect`
raises `ExecutionError`, no token of the step becomes known, the differences, copies and moves of its plan
stay applied, and the plans after it fail too. If the worker cannot apply even the differences, copies and
moves, later plans cannot rely on them: that is an `ExecutorLostError`.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.compute.adapters.rows import AdapterRows
from quire.compute.arrays import IntArray
from quire.compute.backend import WorkerParts
from quire.compute.speculation.base import Proposer, Wanted
from quire.compute.speculation.rivals import Rivals
from quire.compute.worker.beam_rows import BeamRows
from quire.compute.worker.careful_rows import CarefulRows
from quire.compute.worker.decode_steps import DecodeSteps
from quire.compute.worker.draft_rows import DraftRows
from quire.compute.worker.grammar_rows import GrammarRows, RowMasks
from quire.compute.worker.guess_draws import GuessDraws
from quire.compute.worker.image_rows import ImageRows
from quire.compute.worker.input_batch import InputBatch, num_sampled_logits
from quire.compute.worker.layer_rows import LayerRows
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.compute.worker.pooled_rows import PooledRows
from quire.compute.worker.reports import reports
from quire.compute.worker.sampling_columns import Sampling, SamplingColumns
from quire.compute.worker.step_ahead import Launched, StepsAhead, broken
from quire.core.errors import ExecutionError, ExecutorLostError, OutOfMemoryError
from quire.core.guesses import Guesses
from quire.core.hypothesis import Hypothesis
from quire.core.logprobs import TokenLogprobs
from quire.core.step import RowStart, StepPlan, StepResult
from quire.core.transfers import NO_OUTCOME

if TYPE_CHECKING:
    from quire.compute.worker.store.transfers import BlockTransfers


class Worker:
    """Computes plans with a `ModelRunner`; implements `quire.core.executor.Executor`."""

    def __init__(self, parts: WorkerParts) -> None:
        self.cache = parts.cache
        self._runner = parts.runner
        self._sampler = parts.sampler
        self._columns = SamplingColumns(parts.eos_token_ids)
        self._grammars = GrammarRows(parts.masks, parts.eos_token_ids)
        self._beams = BeamRows(parts.eos_token_ids)
        self._careful, self._careful_ahead = CarefulRows(), CarefulRows(is_ahead=True)
        self._pooled = PooledRows(parts.classifier, parts.dense)
        self._adapters = AdapterRows(parts.has_adapter)
        self._images = ImageRows(parts.image_encoder, parts.encoded_images)
        self._decodes = DecodeSteps(self._careful)
        self._proposer = parts.proposer
        self._draft: DraftRows | LayerRows | None = None
        self._layer: LayerRows | None = None
        if parts.draft is not None:
            self._draft = DraftRows(parts.draft, self._columns, self._grammars, parts.runner.vocab_size)
        elif parts.layer is not None:
            draws = GuessDraws(parts.layer.sampler, self._columns, self._grammars)
            self._draft = self._layer = LayerRows(parts.layer, draws)
        self._rivals = Rivals()
        self._on_start = parts.on_start
        self._ahead = None
        if parts.launcher is not None:
            self._ahead = StepsAhead(parts.launcher, self._columns, self._careful_ahead, self._images)
        self._store = parts.store
        self._transfers: BlockTransfers | None = None
        self._batch: InputBatch | None = None
        self._step_s = 0.0  # compute time of the last step
        self._collected_s = 0.0  # when the last result was collected
        self._results: deque[StepResult | Launched | ExecutionError] = deque()

    def start(self) -> None:
        """Allocate the KV memory; no row is taken. Mutates."""
        self.cache.allocate()
        num_blocks, vocab_size = self.cache.num_blocks, self._runner.vocab_size
        self._batch = InputBatch(self.cache.spec, num_blocks=num_blocks, vocab_size=vocab_size)
        if self._store is not None:
            from quire.compute.worker.store.transfers import BlockTransfers  # imported late, for a faster start

            self._transfers = BlockTransfers(self._store, self.cache)
        if self._ahead is not None:
            self._ahead.prepare(self.cache)
        if self._on_start is not None:
            self._on_start()

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan and queue its result, or start it and queue the running step. Mutates."""
        if self._batch is None:
            raise ExecutionError("the worker is not started, or was shut down")
        try:
            self._apply(plan, self._batch)
        except Exception as error:
            self._results.append(_failure(ExecutorLostError, plan, error))
            return
        ahead, batch = self._ahead, self._batch
        if ahead is not None and ahead.takes(plan):
            self._results.append(_outcome(plan, lambda: self._launch(ahead, plan, batch)))
        else:
            # A choice may depend on the tokens of earlier steps.
            if self._results:
                self._results = deque(_finished(each) for each in self._results)
            self._results.append(_outcome(plan, lambda: self._compute(plan, batch)))

    def collect(self) -> StepResult:
        """Return the result of the oldest plan in flight. Mutates the queue.

        If the step failed, the plans after it fail too: they may depend on its missing results.
        """
        if not self._results:
            raise ExecutionError("no plan is under way")
        result = _finished(self._results.popleft())
        if isinstance(result, ExecutionError):
            behind = [each for each in self._results if isinstance(each, ExecutorLostError)]
            self._results.clear()
            raise behind[0] if behind else result
        transfers = NO_OUTCOME if self._transfers is None else self._transfers.collect()
        self._collected_s = time.perf_counter()
        return replace(result, transfers=transfers) if transfers else result

    def shutdown(self) -> None:
        """Release the memory and drop steps in flight. Mutates; may be called twice."""
        self._batch = None
        self._results.clear()
        self._grammars.close()
        if self._transfers is not None:
            self._transfers.close()
        elif self._store is not None:
            self._store.close()
        self.cache.release()

    def _apply(self, plan: StepPlan, batch: InputBatch) -> None:
        """Apply the differences, copies and moves: later plans rely on them even if the step fails."""
        plan.check()
        if self._proposer is not None:
            for row in plan.released_rows:
                self._proposer.release(row, batch.tokens(row))
        batch.apply(plan)
        for row in plan.released_rows:
            self._forget_guesses(row)
            self._columns.release(row)
            self._adapters.release(row)
            self._images.release(row)
            self._grammars.release(row)
        for start in plan.row_starts:
            self._enter(start, batch)
        if plan.released_rows or plan.row_starts:
            self._beams.apply(plan)
            self._careful.apply(plan)
            self._careful_ahead.apply(plan)
            self._pooled.apply(plan)
        if self._transfers is not None and plan.transfers:
            self._transfers.apply(plan.transfers)
        self.cache.apply(plan)
        if self._draft is not None:
            self._draft.apply(plan)

    def _enter(self, start: RowStart, batch: InputBatch) -> None:
        """Store how to sample a row; if that fails, only this row fails."""
        try:
            self._forget_guesses(start.row)
            self._columns.start(start)
            self._grammars.start(start)
            if self._proposer is not None:
                self._proposer.begin(start)
            self._adapters.start(start)
            self._images.start(start)
        except Exception as error:
            batch.fail(start.row, f"its settings cannot be stored: {type(error).__name__}: {error}")

    def _launch(self, ahead: StepsAhead, plan: StepPlan, batch: InputBatch) -> Launched:
        """Start a step, and let the model that guesses note it, or the layer read its tokens."""
        launched = ahead.launch(plan, batch, self.cache)
        if self._layer is not None:
            self._layer.note_launched(launched.inputs)
        if self._draft is not None:
            self._draft.note(plan, batch)
        return launched

    def _compute(self, plan: StepPlan, batch: InputBatch) -> StepResult:
        if self._transfers is not None and plan.transfers.is_waiting:
            self._transfers.wait()
        if self._proposer is None and self._transfers is None:
            return self._computed(plan, batch)
        began_s = time.perf_counter()
        result = self._computed(plan, batch)
        if self._draft is not None:
            self._draft.note(plan, batch)
        if self._proposer is None:
            return replace(result, duration_us=_microseconds_since(began_s))
        if not plan.proposals and self._draft is None:
            return replace(result, duration_us=self._microseconds_with_plan(began_s))
        have_new = {row for row, count in zip(plan.rows, result.num_tokens, strict=True) if count}
        texts = {row: batch.tokens(row) for row in plan.proposals if row in have_new and self._grammars.may_guess(row)}
        proposals = self._guess(plan, texts, self._proposer)
        duration_us = self._microseconds_with_plan(began_s)
        if self._draft is None:
            return replace(result, proposals=proposals, duration_us=duration_us)
        taken = self._rivals.take(proposals, texts)
        depths = {row: depth for row, depth in plan.depths.items() if row in texts and row not in taken}
        guesses, draft_us = self._draft.follow(batch, depths)
        guesses = self._grammars.cut(texts, guesses)
        self._rivals.note(guesses, texts)
        return replace(result, proposals=proposals | guesses, duration_us=duration_us, draft_us=draft_us)

    def _microseconds_with_plan(self, began_s: float) -> int:
        """Return the duration of a step that began at `began_s`, with its planning: the time since the last result.

        Guesses slow down planning too. Pauses between requests must not count, so planning counts as no longer than
        the step itself.
        """
        now_s = time.perf_counter()
        return round(1e6 * (now_s - began_s + min(began_s - self._collected_s, now_s - began_s)))

    def _guess(self, plan: StepPlan, texts: Mapping[int, array[int]], proposer: Proposer) -> dict[int, Guesses]:
        """Return guesses for rows with a new token for which the plan requests them."""
        forced = self._grammars.forced(texts)
        wanted = {row: Wanted(text, plan.proposals[row], forced.get(row, ())) for row, text in texts.items()}
        return self._grammars.cut(texts, proposer.propose(wanted))

    def _forget_guesses(self, row: int) -> None:
        """Forget the guesses of a row that is free or begins another text. Mutates."""
        self._rivals.release(row)
        if self._draft is not None:
            self._draft.release(row)

    def _computed(self, plan: StepPlan, batch: InputBatch) -> StepResult:
        decodes = self._decodes.build(plan, batch)
        inputs = decodes or self._pooled.with_states(plan, batch.build(plan, self._postponed(plan, batch)))
        sampled: dict[int, _Sampled] = {}
        searches: dict[int, tuple[Hypothesis, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        vectors: dict[int, bytes] = {}
        if inputs.entries:
            self._grammars.ask_behind({row: batch.tokens(row) for row in plan.drafts}, plan.drafts, plan.proposals)
            began_s = time.perf_counter()
            inputs = self._images.with_images(plan, self._adapters.with_adapters(inputs))
            run = self._runner.run if self._layer is None else partial(self._layer.run, self._runner)
            outputs = run(inputs, self.cache)
            self._images.note_computed(plan)
            self._step_s = time.perf_counter() - began_s
            if decodes is not None and outputs.finite.all() and outputs.finite_logits.all():
                return self._draw(plan, decodes, outputs, batch)
            for entry, message in broken(inputs, outputs.finite, outputs.finite_logits):
                batch.fail(plan.rows[entry], message)
            prompt_logprobs = self._report_prompts(plan, inputs, outputs, batch)
            sampled, searches = self._choose(plan, inputs, outputs, batch)
            vectors = self._pooled.vectors(plan, inputs, outputs.states)
        failures = {row: batch.failure(row) for row in plan.rows}
        chosen = [sampled.get(entry, _NOTHING) for entry in range(len(plan.rows))]
        return StepResult(
            plan.step_id,
            num_tokens=array("i", [len(one.tokens) for one in chosen]),
            tokens=array("i", [token for one in chosen for token in one.tokens]),
            failures={row: message for row, message in failures.items() if message is not None},
            parents=_parents(plan, sampled),
            logprobs={plan.rows[entry]: one.logprobs for entry, one in sampled.items() if one.logprobs},
            prompt_logprobs=prompt_logprobs,
            searches=searches,
            vectors=vectors,
        )

    def _draw(self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, batch: InputBatch) -> StepResult:
        """Return the tokens of a step of plain decodes, and make them known."""
        count = len(inputs.rows)
        draws = self._columns.draws(
            Sampling(
                rows=inputs.rows,
                logit_starts=inputs.logit_indices,
                next_positions=inputs.positions + 1,
                num_draws=np.ones(count, np.int64),
                drafted=np.zeros(count, np.int64),
                texts=(),
                drafts=(),
            )
        )
        tokens = self._sampler.sample(outputs.logits, draws).tokens.tolist()
        batch.append_each(plan.rows, tokens)
        return StepResult(plan.step_id, num_tokens=plan.samples[:], tokens=array("i", tokens))

    def _postponed(self, plan: StepPlan, batch: InputBatch) -> set[int]:
        """Return the rows to leave out of a step: those still without a mask, also in later steps planned for them."""
        late = self._grammars.late(plan.rows)
        return {
            row
            for entry, row in enumerate(plan.rows)
            if (row in late and plan.counts[entry] == 1 + len(plan.drafts.get(row, ())))
            or (row in self._grammars and not batch.knows(plan, entry))
        }

    def _report_prompts(
        self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, batch: InputBatch
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Return, by row, the log-probabilities of the prompt tokens that follow computed ones. Does not mutate."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for sequence, entry in enumerate(inputs.entries):
            row, count = plan.rows[entry], batch.num_prompt_logits(plan, entry)
            if not count or batch.failure(row) is not None:
                continue
            first, after = int(inputs.logit_starts[sequence]), plan.starts[entry] + 1
            tokens = np.array(batch.tokens(row)[after : after + count], np.int64)
            num_logprobs = self._columns.num_prompt_logprobs(row)
            choices = self._sampler.report(
                outputs.logits, np.arange(first, first + count), tokens, np.full(count, num_logprobs)
            )
            found[row] = reports(choices, 0, count, num_logprobs)
        return found

    def _choose(
        self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, batch: InputBatch
    ) -> tuple[dict[int, _Sampled], dict[int, tuple[Hypothesis, ...]]]:
        """Return the next tokens of each entry that samples, and the texts of searches that are over."""
        sequences: list[int] = []
        searching: list[int] = []
        for sequence, entry in enumerate(inputs.entries):
            if plan.samples[entry] and batch.failure(plan.rows[entry]) is None:
                (searching if plan.rows[entry] in self._beams else sequences).append(sequence)
        sampled = self._sample(plan, inputs, outputs, batch, sequences)
        if not searching:
            return sampled, {}
        beams, searches = self._search(plan, inputs, outputs, batch, searching)
        return sampled | beams, searches

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, batch: InputBatch, sequences: list[int]
    ) -> dict[int, _Sampled]:
        """Return the tokens of sampling entries and make them known."""
        masks = self._mask(plan, inputs, [plan.rows[inputs.entries[sequence]] for sequence in sequences], batch)
        no_draw = masks.failures.keys() | masks.late
        sequences = [each for each in sequences if plan.rows[inputs.entries[each]] not in no_draw]
        if not sequences:
            return {}
        entries = [inputs.entries[sequence] for sequence in sequences]
        drafts = [plan.drafts.get(plan.rows[entry], ()) for entry in entries]
        num_draws = [
            1 + len(guesses) if guesses else plan.samples[entry] for entry, guesses in zip(entries, drafts, strict=True)
        ]
        # The logits to sample from are the last ones of an entry, after its prompt's.
        logit_ends = inputs.logit_starts[np.array(sequences) + 1]
        draws = self._columns.draws(
            Sampling(
                rows=_integers([plan.rows[entry] for entry in entries]),
                logit_starts=logit_ends - _integers([num_sampled_logits(plan, entry) for entry in entries]),
                next_positions=_integers(
                    [plan.starts[e] + plan.counts[e] - len(d) for e, d in zip(entries, drafts, strict=True)]
                ),
                num_draws=_integers(num_draws),
                drafted=_integers([1 if guesses else 0 for guesses in drafts]),
                texts=[batch.tokens(plan.rows[entry]) for entry in entries],
                drafts=drafts,
                masks=masks,
            )
        )
        choices = self._sampler.sample(outputs.logits, draws)
        sampled: dict[int, _Sampled] = {}
        first = 0
        for entry, guesses, count in zip(entries, drafts, num_draws, strict=True):
            tokens = choices.tokens[first : first + count].tolist()
            if guesses:
                tokens = accepted(tokens, guesses)[: masks.most_draws(plan.rows[entry])]
            logprobs = reports(choices, first, len(tokens), int(draws.num_logprobs[first]))
            sampled[entry] = _Sampled(tokens, logprobs)
            # A row that opens into several sequences continues as the first one.
            batch.append(plan.rows[entry], tokens if guesses else tokens[:1])
            first += count
        self._grammars.ask({plan.rows[entry]: batch.tokens(plan.rows[entry]) for entry in entries}, plan.proposals)
        return sampled

    def _mask(self, plan: StepPlan, inputs: StepInputs, rows: list[int], batch: InputBatch) -> RowMasks:
        """Return the tokens that the grammars of rows allow next; a row that cannot continue fails."""
        texts = {row: batch.tokens(row) for row in rows}
        masks = self._grammars.mask(texts, plan.drafts, step_s=self._step_s, num_entries=len(inputs.entries))
        for row, message in masks.failures.items():
            batch.fail(row, message)
        return masks

    def _search(
        self, plan: StepPlan, inputs: StepInputs, outputs: StepOutputs, batch: InputBatch, sequences: list[int]
    ) -> tuple[dict[int, _Sampled], dict[int, tuple[Hypothesis, ...]]]:
        """Return the next tokens of searches, and the texts of finished searches; make the tokens known."""
        places = {plan.rows[inputs.entries[sequence]]: sequence for sequence in sequences}
        opening = [row for row, sequence in places.items() if plan.samples[inputs.entries[sequence]] > 1]
        moving = [row for row in places if row not in opening]
        sampled: dict[int, _Sampled] = {}
        searches: dict[int, tuple[Hypothesis, ...]] = {}
        for request_id, rows in self._beams.searches_in(opening, moving).items():
            logit_rows = inputs.logit_starts[_integers([places[row] for row in rows]) + 1] - 1
            count = self._beams.num_candidates(request_id, self._runner.vocab_size)
            likeliest = self._sampler.report(
                outputs.logits, logit_rows, np.zeros(len(rows), np.int64), np.full(len(rows), count)
            )
            candidates = [
                zip(ids, logprobs, strict=True)
                for ids, logprobs in zip(likeliest.top_ids.tolist(), likeliest.top_logprobs.tolist(), strict=True)
            ]
            steps, found = self._beams.advance(request_id, rows, candidates)
            if found:
                searches[rows[0]] = found
            for row, step in steps.items():
                sampled[inputs.entries[places[row]]] = _Sampled(step.token_ids, parent=step.parent)
                if step.parent == row:  # any other row restarts, with the text that it continues
                    batch.append(row, step.token_ids[:1])
        return sampled, searches


class _Sampled(NamedTuple):
    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] = ()
    parent: int = -1  # the row that it continues; -1: its own


_NOTHING = _Sampled([])


def accepted(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the leading drafts that equal the tokens drawn at their positions, and the next token drawn.

    >>> accepted([2, 3, 0], [2, 1]), accepted([2, 3, 0], [2, 3])
    ([2, 3], [2, 3, 0])
    """
    count = 0
    while count < len(drafts) and drafts[count] == drawn[count]:
        count += 1
    return list(drawn[: count + 1])


def _microseconds_since(began_s: float) -> int:
    return round((time.perf_counter() - began_s) * 1e6)


def _outcome(plan: StepPlan, work: Callable[[], StepResult | Launched]) -> StepResult | Launched | ExecutionError:
    """Return the outcome of some work on a plan, or the error that `collect` will raise instead."""
    try:
        return work()
    except ExecutionError as error:
        return error
    except MemoryError as error:
        return _failure(OutOfMemoryError, plan, error)
    except Exception as error:
        return _failure(ExecutionError, plan, error)


def _finished(outcome: StepResult | Launched | ExecutionError) -> StepResult | ExecutionError:
    """Return the result of a step; waits for one that is running, and makes its tokens known."""
    if not isinstance(outcome, Launched):
        return outcome
    result = _outcome(outcome.plan, outcome.result)
    assert not isinstance(result, Launched)  # a running step ends in a result
    return result


def _failure(kind: type[ExecutionError], plan: StepPlan, error: Exception) -> ExecutionError:
    """Return the error that `collect` will raise."""
    failure = kind(f"step {plan.step_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _parents(plan: StepPlan, sampled: dict[int, _Sampled]) -> array[int]:
    """Return the row that each entry continues; empty if each continues its own."""
    parents = plan.rows[:]
    for entry, one in sampled.items():
        if one.parent >= 0:
            parents[entry] = one.parent
    return parents if parents != plan.rows else array("i")


def _integers(values: list[int]) -> IntArray:
    return np.array(values, np.int64)
