"""InputBatch: the state that a worker keeps between steps, and the arrays of one step.

A plan contains only differences. So the batch keeps the known tokens of each row and one block table per KV
group. It applies the differences in the contract's order (rows released, rows taken, table entries
changed), and then builds the flat arrays of the step. Building does not mutate: a sampled token becomes
known only when the worker calls `append`, and drafts exist only within one step.

    tables[group]   [num_rows, max_blocks]   NO_BLOCK where a row holds none; grows by doubling

Each step is checked before it runs: a row may compute only known tokens, and every position that it reads
or writes must be in a block of its tables. A plan that breaks this would read another request's memory, so
the entire plan fails. A row that has failed alone (bad sampling settings, logits that are not finite) stays
failed until it is released, and steps that were planned before the scheduler knew leave it out.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.worker.model_runner import StepInputs
from quire.core.errors import ExecutionError
from quire.core.kv_spec import KVCacheSpec
from quire.core.sampling_params import SamplingParams
from quire.core.step import NO_BLOCK, RowStart, StepPlan, TableChanges


@dataclass(slots=True)
class RowState:
    """The state of a row. `failure` is the reason why the row has failed; once set, it stays.

    The first `num_prompt_logits` positions need logits whenever they are computed.
    """

    tokens: array[int]
    num_prompt_logits: int
    failure: str | None = None


class InputBatch:
    """The rows of a worker, their tokens and block tables."""

    def __init__(self, spec: KVCacheSpec, *, num_blocks: int, vocab_size: int) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._rows: dict[int, RowState] = {}
        self._tables = [np.full((1, 1), NO_BLOCK, np.int64) for _ in spec.groups]

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's differences: rows released, rows taken, tables changed. Mutates."""
        for row in plan.released_rows:
            self._rows.pop(row, None)
        for start in plan.row_starts:
            self._start_row(start)
        self._change_tables(plan.tables)

    def tokens(self, row: int) -> array[int]:
        """Return the known tokens of a row; callers must not change them."""
        return self._row(row).tokens

    def state(self, row: int) -> RowState:
        """Return the state of a row: the object itself, which the row keeps until it is released."""
        return self._row(row)

    def num_prompt_logits(self, plan: StepPlan, entry: int) -> int:
        """Return how many of an entry's first tokens need logits for the prompt. Does not mutate."""
        start, stop = plan.starts[entry], plan.starts[entry] + plan.counts[entry]
        return max(0, min(stop, self._row(plan.rows[entry]).num_prompt_logits) - start)

    def knows(self, plan: StepPlan, entry: int) -> bool:
        """Return whether the tokens that an entry computes are known. Does not mutate."""
        num_drafts = len(_drafts(plan, entry))
        return plan.starts[entry] + plan.counts[entry] - num_drafts <= len(self._row(plan.rows[entry]).tokens)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Make sampled tokens known. Mutates the row."""
        self._rows[row].tokens.extend(tokens)

    def append_each(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Make a sampled token of each row known. Mutates the rows."""
        for row, token in zip(rows, tokens, strict=True):
            self._rows[row].tokens.append(token)

    def fail(self, row: int, message: str) -> None:
        """Mark a row as failed. Mutates the row."""
        self._rows[row].failure = message

    def failure(self, row: int) -> str | None:
        """Return the reason why a row has failed, or None."""
        return self._row(row).failure

    def build(self, plan: StepPlan, left_out: Collection[int] = ()) -> StepInputs:
        """Return the arrays of the step, without failed rows and `left_out`. Does not mutate; O(tokens)."""
        entries = [entry for entry, row in enumerate(plan.rows) if self.failure(row) is None and row not in left_out]
        for entry in entries:
            self._check_entry(plan, entry)
        rows, starts, counts = (
            np.array([column[entry] for entry in entries], np.int64) for column in (plan.rows, plan.starts, plan.counts)
        )
        wanted = np.array([self._num_logits(plan, entry) for entry in entries], np.int64)
        return self._inputs(entries, (rows, starts, counts, wanted), self._token_ids(plan, entries))

    def slots(self, row: int, start: int, end: int) -> IntArray:
        """Return the slots of the positions start … end - 1 of a row, in the first KV group. Does not mutate."""
        return self._slots(self._tables[0], np.full(end - start, row), np.arange(start, end))

    def inputs_for(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[array[int]], wanted: Sequence[int]
    ) -> StepInputs:
        """Return the arrays of a step in which rows compute these tokens from `starts` on, with this many logits each.

        The step is that of a model whose layers use the block tables of the first KV group. Does not mutate; O(tokens).
        Raises `ExecutionError` unless the block tables hold their positions.
        """
        counts = list(map(len, tokens))
        columns = _integers(rows), _integers(starts), _integers(counts), _integers(wanted)
        token_ids = _integers([token for each in tokens for token in each])
        return self._inputs(range(len(rows)), columns, token_ids, num_groups=1)

    def _inputs(
        self,
        entries: Sequence[int],
        columns: tuple[IntArray, IntArray, IntArray, IntArray],
        token_ids: IntArray,
        num_groups: int | None = None,
    ) -> StepInputs:
        """Return the arrays of entries, given columns of their rows, starts, counts and numbers of logits.

        `num_groups`: the KV groups that the step uses; None: all.
        """
        rows, starts, counts, wanted = columns
        tables = self._tables[:num_groups]
        self._check_tables(rows, starts, starts + counts, tables)
        query_starts, positions = _running_sum(counts), _spans(starts, counts)
        most_blocks = -(-int((starts + counts).max(initial=0)) // self._spec.block_size)
        return StepInputs(
            entries=tuple(entries),
            query_starts=query_starts,
            token_ids=token_ids,
            positions=positions,
            slots=tuple(self._slots(table, np.repeat(rows, counts), positions) for table in tables),
            block_tables=tuple(table[:, :most_blocks][rows] for table in tables),
            logit_starts=_running_sum(wanted),
            logit_indices=_spans(query_starts[1:] - wanted, wanted),
            rows=rows,
        )

    def last_tokens(self, plan: StepPlan) -> IntArray | None:
        """Return the last token of each row; None unless each row computes only its last token. Does not mutate."""
        rows = self._rows
        try:
            states = [rows[row] for row in plan.rows]
        except KeyError:
            return None
        for state, start in zip(states, plan.starts, strict=True):
            if len(state.tokens) != start + 1 or state.failure is not None:
                return None
        return np.array([state.tokens[-1] for state in states], np.int64)

    def decode_tables(
        self, rows: IntArray, positions: IntArray
    ) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]] | None:
        """Return the slots of decodes and their block tables, by KV group; None if a block is missing.

        Does not mutate.
        """
        size = self._spec.block_size
        last, offsets = positions // size, positions % size
        most_blocks = int(last.max()) + 1
        slots, tables = [], []
        for group, table in zip(self._spec.groups, self._tables, strict=True):
            mine = table[:, :most_blocks][rows]
            columns = np.arange(mine.shape[1])
            is_read = columns <= last[:, None]
            if group.window is not None:
                is_read &= columns >= (positions[:, None] - group.window + 1) // size
            if most_blocks > len(columns) or (is_read & ((mine < 0) | (mine >= self._num_blocks))).any():
                return None
            slots.append(mine[np.arange(len(rows)), last] * size + offsets)
            tables.append(mine)
        return tuple(slots), tuple(tables)

    def _row(self, row: int) -> RowState:
        state = self._rows.get(row)
        if state is None:
            raise ExecutionError(f"row {row} is in a plan, but no request has taken it")
        return state

    def _start_row(self, start: RowStart) -> None:
        state = RowState(array("i", start.tokens), start.num_prompt_logits, self._refusal(start))
        self._rows[start.row] = state
        self._tables = [_grown(table, start.row + 1, 1) for table in self._tables]
        for table in self._tables:
            table[start.row] = NO_BLOCK

    def _refusal(self, start: RowStart) -> str | None:
        """Return why this worker cannot serve the request, or None."""
        if start.tokens and not 0 <= min(start.tokens) <= max(start.tokens) < self._vocab_size:
            return f"a token is out of range; allowed: a token id from 0 to {self._vocab_size - 1}"
        if any(not 0 <= min(each) <= max(each) < self._vocab_size for each in _named_tokens(start.sampling) if each):
            return f"a rule is out of range; allowed: a token id from 0 to {self._vocab_size - 1}"
        return None

    def _change_tables(self, changes: TableChanges) -> None:
        if not changes:
            return
        rows, groups, indices, blocks = (
            np.array(column, np.int64) for column in (changes.rows, changes.groups, changes.indices, changes.blocks)
        )
        for group, table in enumerate(self._tables):
            mine = groups == group
            if mine.any():
                grown = _grown(table, int(rows[mine].max()) + 1, int(indices[mine].max()) + 1)
                grown[rows[mine], indices[mine]] = blocks[mine]
                self._tables[group] = grown

    def _num_logits(self, plan: StepPlan, entry: int) -> int:
        """Return how many of an entry's last tokens need logits."""
        return plan.counts[entry] if self.num_prompt_logits(plan, entry) else num_sampled_logits(plan, entry)

    def _token_ids(self, plan: StepPlan, entries: Sequence[int]) -> IntArray:
        """Return the tokens that entries compute; a slice may end before the drafts that follow the known tokens."""
        found = array("i")
        for entry in entries:
            start = plan.starts[entry]
            found.extend(self._row(plan.rows[entry]).tokens[start : start + plan.counts[entry]])
            found.extend(_drafts(plan, entry))
        return np.array(found, np.int64)

    def _slots(self, table: IntArray, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the slot of each token: block × block_size + offset."""
        size = self._spec.block_size
        slots: IntArray = table[rows, positions // size] * size + positions % size
        return slots

    def _check_entry(self, plan: StepPlan, entry: int) -> None:
        row, start, count = plan.rows[entry], plan.starts[entry], plan.counts[entry]
        drafts, samples = _drafts(plan, entry), plan.samples[entry]
        known = len(self._row(row).tokens) + len(drafts)
        if start < 0 or count < 1 or start + count > known:
            problem = f"positions {start} to {start + count - 1}, but knows {known} tokens"
            raise ExecutionError(f"row {row} is to compute {problem}")
        if samples and start + count != known:
            raise ExecutionError(f"row {row} is to sample after {start + count} of {known} tokens")
        if drafts and (samples != 1 or count <= len(drafts)):
            raise ExecutionError(f"row {row} has drafts, but does not compute and sample after them")
        if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
            raise ExecutionError(f"row {row} has a draft that is not a token id")

    def _check_tables(self, rows: IntArray, starts: IntArray, stops: IntArray, tables: Sequence[IntArray]) -> None:
        """Raise unless the tables hold each position that computing starts … stops - 1 reads or writes.

        `tables`: those of the first KV groups, or of all.
        """
        size = self._spec.block_size
        for group, table in zip(self._spec.groups, tables, strict=False):
            first = np.array([group.first_needed(start) for start in starts.tolist()], np.int64) // size
            counts = (stops - 1) // size + 1 - first
            owners, indices = np.repeat(np.arange(len(rows)), counts), _spans(first, counts)
            blocks = table[rows[owners], np.minimum(indices, table.shape[1] - 1)]
            is_missing = (blocks < 0) | (blocks >= self._num_blocks) | (indices >= table.shape[1])
            if is_missing.any():
                entry = owners[is_missing.argmax()]
                positions = f"positions {first[entry] * size} to {stops[entry] - 1}"
                raise ExecutionError(f"the block table of row {rows[entry]} does not hold {positions}")


def _drafts(plan: StepPlan, entry: int) -> Sequence[int]:
    return plan.drafts.get(plan.rows[entry], ())


def _named_tokens(sampling: SamplingParams) -> Iterator[Sequence[int]]:
    """Yield the tokens that sampling parameters name."""
    yield sampling.stop_token_ids
    yield sampling.allowed_token_ids or ()
    yield [token for token, _ in sampling.biases]
    yield from sampling.bad_words_ids


def num_sampled_logits(plan: StepPlan, entry: int) -> int:
    """Return how many of an entry's last tokens have logits to sample from."""
    return 1 + len(_drafts(plan, entry)) if plan.samples[entry] else 0


def _grown(table: IntArray, num_rows: int, num_blocks: int) -> IntArray:
    """Return a table with room for this many rows and entries: the table itself, or a larger copy."""
    rows, blocks = table.shape
    if num_rows <= rows and num_blocks <= blocks:
        return table
    new_rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
    new_blocks = blocks if num_blocks <= blocks else max(num_blocks, 2 * blocks)
    grown = np.full((new_rows, new_blocks), NO_BLOCK, np.int64)
    grown[:rows, :blocks] = table
    return grown


def _spans(starts: IntArray, counts: IntArray) -> IntArray:
    """Return start, start + 1, … of each span, one after another.

    >>> _spans(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _integers(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int64)


def _running_sum(counts: IntArray) -> IntArray:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
