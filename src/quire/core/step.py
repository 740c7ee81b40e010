"""StepPlan and StepResult: the two values that pass between the planes.

A plan says what one step computes. It is **columnar** (one column per fact, one entry per request in the step) and
has **only differences**: a request is described in full once, when it takes a row. After that the worker knows
its tokens (it sampled them itself) and its block tables, and the plan has only the changes.

    row         a small stable number that a request holds while it is running; the worker keeps for each row the
                tokens, the sampling parameters and one block table per KV group
    starts[i]   the position of the first token that row rows[i] computes in this step
    counts[i]   how many tokens it computes: the token at starts[i], the next one, …
    samples[i]  how many tokens are sampled from the logits of the last position: 0 while tokens of the request are
                still to be computed, usually 1, k when the request opens into k sequences
    drafts      guessed tokens, appended by the plan to the known ones; the result shows how many were accepted
    proposals   rows whose next tokens are guessed after the step, and the most guesses for each; the result has the
                guesses, which the scheduler may plan as drafts
    depths      rows for which the draft model guesses, and the number of tokens: the row has slots for this many tokens
                after those that the step computes
    transfers   blocks to load from the disk or to write to it; each has a ticket, and a result reports when it ends

There are no phases: prefill, chunked prefill, decode, the rest after a prefix hit and speculation differ only in starts
and counts.

Order within a step: released rows, row starts, table changes, moves out, copies, moves in, then the computation. The
first `num_decodes` entries are plain decodes (one token computed, one sampled): executors may use a faster path for
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quire.core.errors import InvariantError, StepLogError
from quire.core.guesses import GUESSERS, Guesses
from quire.core.hypothesis import Hypothesis, read_hypothesis, write_hypothesis
from quire.core.images import Image, read_image, write_image
from quire.core.kept_block import next_scope, write_scope
from quire.core.logprobs import TokenLogprobs, read_logprobs, write_logprobs
from quire.core.pooling import Pooling
from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.sampling_wire import read_sampling, write_sampling
from quire.core.transfers import NO_OUTCOME, NO_TRANSFERS, TransferOutcome, Transfers
from quire.core.wire import WireReader, WireWriter

NO_BLOCK = -1
"""Replaces a block in a block table after the block left the sliding window and was freed."""

MAX_PROMPT_LOGITS: Final = 128
"""The most prompt positions whose logits one step computes, for `prompt_logprobs`."""


MAX_STEP_DRAFTS: Final = 64
"""The most drafts in a step, over all rows; engines have memory for the logits of this many."""


class BlockCopy(NamedTuple):
    """Copy the bytes of one block of the device to another (copy-on-write)."""

    source: int
    destination: int


class BlockMove(NamedTuple):
    """Move the bytes of a block between the device and the host tier (swap)."""

    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row: everything that the worker needs to know, except its block tables.

    `max_total_tokens` is its maximum length, prompt and output together. If `num_prompt_logits` is not 0, the result
    reports the log-probability of the token after each of this many leading positions. Guesses may
    come from earlier texts of the same `scope`, and of no other. With `pooling` nothing is sampled: the result of the
    step that computes the last token has a vector. The wire form has `images` without their pixels.
    """

    row: int
    request_id: str
    tokens: array[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_total_tokens: int
    branch: int = 0
    num_prompt_logits: int = 0
    scope: CacheScope = DEFAULT_SCOPE
    pooling: Pooling | None = None
    images: tuple[Image, ...] = ()


def column(*values: int) -> array[int]:
    """Return a column of 32-bit integers."""
    return array("i", values)


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Entries of block tables that change: in the table of `rows[i]`, group `groups[i]`, entry `indices[i]`."""

    rows: array[int] = field(default_factory=column)
    groups: array[int] = field(default_factory=column)
    indices: array[int] = field(default_factory=column)
    blocks: array[int] = field(default_factory=column)

    def __len__(self) -> int:
        """Return the number of entries that change."""
        return len(self.rows)

    @classmethod
    def of(cls, entries: Sequence[tuple[int, int, int, int]]) -> TableChanges:
        """Return the columns of entries (row, group, index, block).

        >>> TableChanges.of([(0, 0, 5, 17), (1, 0, 2, 9)]).blocks
        array('i', [17, 9])
        """
        return cls(*(array("i", values) for values in zip(*entries, strict=True))) if entries else NO_CHANGES


NO_CHANGES: Final = TableChanges()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes; see the module for the meaning of the columns."""

    step_id: int
    rows: array[int]
    starts: array[int]
    counts: array[int]
    samples: array[int]
    num_decodes: int = 0
    row_starts: tuple[RowStart, ...] = ()
    released_rows: array[int] = field(default_factory=column)
    tables: TableChanges = field(default_factory=TableChanges)
    drafts: dict[int, array[int]] = field(default_factory=dict)
    moves_out: tuple[BlockMove, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    moves_in: tuple[BlockMove, ...] = ()
    proposals: dict[int, int] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)
    transfers: Transfers = NO_TRANSFERS

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes."""
        return sum(self.counts)

    def check(self) -> None:
        """Raise `InvariantError` unless copies and moves can be done in the stated order."""
        if not len(self.rows) == len(self.starts) == len(self.counts) == len(self.samples):
            raise InvariantError("the columns of a plan differ in length")
        if len(set(self.rows)) != len(self.rows):
            raise InvariantError("a plan contains a row twice")
        if not (self.copies or self.moves_in or self.moves_out):
            return
        written = [copy.destination for copy in self.copies] + [move.device_block for move in self.moves_in]
        if len(set(written)) != len(written):
            raise InvariantError("two copies or moves in a plan write the same block")
        if set(written).intersection(copy.source for copy in self.copies):
            raise InvariantError("a copy in a plan reads a block that another copy or move of the plan writes")
        hosts = [move.host_block for move in self.moves_out]
        if len(set(hosts)) != len(hosts) or set(hosts).intersection(move.host_block for move in self.moves_in):
            raise InvariantError("two moves in a plan use the same host block")

    def to_bytes(self) -> bytes:
        """Return the compact binary form; equal plans give equal bytes."""
        writer = WireWriter()
        writer.integer(self.step_id)
        writer.integer(self.num_decodes)
        for values in (self.rows, self.starts, self.counts, self.samples, self.released_rows):
            writer.column(values)
        for values in (self.tables.rows, self.tables.groups, self.tables.indices, self.tables.blocks):
            writer.column(values)
        for pairs in (self.moves_out, self.copies, self.moves_in):
            writer.column(array("i", [number for pair in pairs for number in pair]))
        writer.integer(len(self.drafts))
        for row, tokens in sorted(self.drafts.items()):
            writer.integer(row)
            writer.column(tokens)
        for pairs_by_row in (self.proposals, self.depths):
            writer.column(array("i", [number for pair in sorted(pairs_by_row.items()) for number in pair]))
        self.transfers.write(writer)
        writer.integer(len(self.row_starts))
        for start in self.row_starts:
            _write_row_start(writer, start)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """Read the compact binary form back; raises `StepLogError` if it is torn."""
        reader = WireReader(data)
        step_id, num_decodes = reader.integer(), reader.integer()
        rows, starts, counts, samples, released = (reader.column() for _ in range(5))
        tables = TableChanges(*(reader.column() for _ in range(4)))
        moves_out, copies, moves_in = (_pairs(reader.column()) for _ in range(3))
        drafts = {reader.integer(): reader.column() for _ in range(reader.integer())}
        proposals, depths = (dict(_pairs(reader.column())) for _ in range(2))
        transfers = Transfers.read(reader)
        row_starts = tuple(_read_row_start(reader) for _ in range(reader.integer()))
        reader.finish()
        return cls(
            step_id,
            rows,
            starts,
            counts,
            samples,
            num_decodes,
            row_starts,
            released,
            tables,
            drafts,
            tuple(BlockMove(*pair) for pair in moves_out),
            tuple(BlockCopy(*pair) for pair in copies),
            tuple(BlockMove(*pair) for pair in moves_in),
            proposals,
            depths,
            transfers,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step.

    Entry i of the plan got `num_tokens[i]` tokens: 0 while the request still has tokens to compute, usually 1, more if
    drafts were accepted or if the request opened into several sequences. `tokens` has the tokens of all entries, one
    entry after another. An entry without a token, although the plan requests a sample, is **postponed**: the row's mask
    is not known yet. Then only its last token counts as not computed, and the next plan has this token again.

    `parents[i]` names the row whose sequence entry i continues (beam search picks survivors and their parents;
    otherwise, and if the column is empty, a row continues itself). `searches` maps the row of the first beam to the
    texts of a search that is over, best first: one per beam, and none of the beams gets a token in that step.
    `failures` maps a row to the error of its request. `logprobs` maps a row that requested them to one entry per token,
    and `prompt_logprobs` to one entry per prompt token that follows one computed in this step. `proposals` maps a row
    of the plan's proposals to guesses of its next tokens, if there are any. `vectors` maps a pooled row to its vector,
    in the step that computes its last token: float32 numbers, little-endian. `duration_us` is the computing time by the
    executor's own clock, reported only if it makes guesses or has a disk; `draft_us` is the time of each draft model
    pass after that. `transfers` has the tickets that ended.
    """

    step_id: int
    num_tokens: array[int]
    tokens: array[int]
    parents: array[int] = field(default_factory=column)
    failures: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    searches: dict[int, tuple[Hypothesis, ...]] = field(default_factory=dict)
    proposals: dict[int, Guesses] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)
    duration_us: int = field(default=0, compare=False)
    draft_us: int = field(default=0, compare=False)
    transfers: TransferOutcome = NO_OUTCOME

    def to_bytes(self) -> bytes:
        """Return the compact binary form; equal results give equal bytes."""
        writer = WireWriter()
        writer.integer(self.step_id)
        for values in (self.num_tokens, self.tokens, self.parents):
            writer.column(values)
        writer.integer(len(self.failures))
        for row, message in sorted(self.failures.items()):
            writer.integer(row)
            writer.text(message)
        for reports in (self.logprobs, self.prompt_logprobs):
            writer.integer(len(reports))
            for row, entries in sorted(reports.items()):
                writer.integer(row)
                writer.integer(len(entries))
                for entry in entries:
                    write_logprobs(writer, entry)
        writer.integer(len(self.searches))
        for row, hypotheses in sorted(self.searches.items()):
            writer.integer(row)
            writer.integer(len(hypotheses))
            for hypothesis in hypotheses:
                write_hypothesis(writer, hypothesis)
        writer.integer(len(self.proposals))
        for row, guesses in sorted(self.proposals.items()):
            writer.integer(row)
            writer.integer(GUESSERS.index(guesses.guesser))
            writer.column(guesses.tokens)
        writer.integer(len(self.vectors))
        for row, vector in sorted(self.vectors.items()):
            writer.integer(row)
            writer.raw(vector)
        writer.integer(self.duration_us)
        writer.integer(self.draft_us)
        self.transfers.write(writer)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepResult:
        """Read the compact binary form back; raises `StepLogError` if it is torn."""
        reader = WireReader(data)
        step_id = reader.integer()
        num_tokens, tokens, parents = (reader.column() for _ in range(3))
        failures = {reader.integer(): reader.text() for _ in range(reader.integer())}
        logprobs, prompt_logprobs = (
            {
                reader.integer(): tuple(read_logprobs(reader) for _ in range(reader.integer()))
                for _ in range(reader.integer())
            }
            for _ in range(2)
        )
        searches = {
            reader.integer(): tuple(read_hypothesis(reader) for _ in range(reader.integer()))
            for _ in range(reader.integer())
        }
        proposals = dict(_read_guesses(reader) for _ in range(reader.integer()))
        vectors = {reader.integer(): reader.raw() for _ in range(reader.integer())}
        duration_us, draft_us = reader.integer(), reader.integer()
        transfers = TransferOutcome.read(reader)
        reader.finish()
        return cls(
            step_id,
            num_tokens,
            tokens,
            parents,
            failures,
            logprobs,
            prompt_logprobs,
            searches,
            proposals,
            vectors,
            duration_us,
            draft_us,
            transfers,
        )


def _write_row_start(writer: WireWriter, start: RowStart) -> None:
    numbers = start.row, start.num_prompt_tokens, start.max_total_tokens, start.branch, start.num_prompt_logits
    writer.column(column(*numbers))
    writer.text(start.request_id)
    write_scope(writer, start.scope)
    writer.column(start.tokens)
    pooling = start.pooling
    writer.text("" if pooling is None else pooling.kind)
    writer.integer(0 if pooling is None else pooling.dimensions)
    write_sampling(writer, start.sampling)
    writer.integer(len(start.images))
    for image in start.images:
        write_image(writer, image)


def _read_row_start(reader: WireReader) -> RowStart:
    row, num_prompt_tokens, max_total_tokens, branch, num_prompt_logits = reader.column(5)
    request_id, scope = reader.text(), next_scope(reader)
    tokens, kind, dimensions = reader.column(), reader.text(), reader.integer()
    pooling, sampling = Pooling(kind, dimensions) if kind else None, read_sampling(reader)
    images = tuple(read_image(reader) for _ in range(reader.integer()))
    return RowStart(
        row,
        request_id,
        tokens,
        num_prompt_tokens,
        sampling,
        max_total_tokens,
        branch,
        num_prompt_logits,
        scope,
        pooling,
        images,
    )


def _read_guesses(reader: WireReader) -> tuple[int, Guesses]:
    row, guesser = reader.integer(), reader.integer()
    if not 0 <= guesser < len(GUESSERS):
        raise StepLogError(f"a result has guesses of an unknown proposer, number {guesser}")
    return row, Guesses(GUESSERS[guesser], reader.column())


def _pairs(values: array[int]) -> list[tuple[int, int]]:
    if len(values) % 2:
        raise StepLogError("a column of pairs has an odd length")
    return list(zip(values[::2], values[1::2], strict=True))
