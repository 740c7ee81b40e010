"""PlanBuilder: collects the work of a step, and turns it into a `StepPlan` and the scheduler's own record.

Plain decodes (one token computed, one sampled) are only a list of requests and a list of positions, because every step
has many of them and they need no decision. Everything else is a `Chunk`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.request import Request
from quire.core.step import MAX_PROMPT_LOGITS, RowStart, StepPlan, TableChanges
from quire.memory.changes import MemoryChanges


class Chunk(NamedTuple):
    """Tokens of one request in one step. `generation` distinguishes a late result from one that counts."""

    request: Request
    row: int
    start: int
    num_tokens: int
    samples: int
    drafts: array[int]
    generation: int


@dataclass(slots=True)
class StepRecord:
    """The scheduler's record of a step in flight.

    `disturbed` is set when a request of the step is preempted or ends before the result arrives; then the entries are
    handled one by one. `generations` has the generations of disturbed decodes as planned: they have no chunk for that.
    """

    step_id: int
    decodes: list[Request]
    decode_rows: array[int]
    chunks: list[Chunk]
    asked: dict[int, tuple[Request, int]] = field(default_factory=dict)  # to guess for, by row: request, generation
    depths: dict[int, int] = field(default_factory=dict)  # of the draft model's guesses, by row
    disturbed: bool = False
    generations: dict[Request, int] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        """The request of each entry of the plan."""
        return self.decodes + [chunk.request for chunk in self.chunks]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes, drafts included."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_without_prompts(self) -> bool:
        """Whether every entry computes one known token, and guesses after it."""
        return all(chunk.num_tokens == 1 + len(chunk.drafts) for chunk in self.chunks)

    def as_chunks(self) -> list[Chunk]:
        """Return all entries in their long form."""
        decodes = [
            Chunk(request, row, -1, 1, 1, array("i"), self.generations.get(request, request.generation))
            for request, row in zip(self.decodes, self.decode_rows, strict=True)
        ]
        return decodes + self.chunks


class PlanBuilder:
    """The step that is being built."""

    __slots__ = ("decodes", "decode_starts", "chunks", "_budget", "_shares", "_num_prompt_logits_left")

    def __init__(self, budget: int, shares: Counter[str] | None = None) -> None:
        self._budget = budget
        self._shares = shares  # tokens that each tenant's running prompts may have, in addition to one per request
        self._num_prompt_logits_left = MAX_PROMPT_LOGITS
        self.decodes: list[Request] = []
        self.decode_starts: list[int] = []
        self.chunks: list[Chunk] = []

    def add_chunk(self, request: Request, count: int, samples: int, drafts: array[int]) -> None:
        """Add `count` tokens of a request. Mutates."""
        start = request.num_planned
        self.chunks.append(Chunk(request, request.row, start, count, samples, drafts, request.generation))
        self._budget -= count
        if self._shares is not None:
            self._shares[request.scope.tenant] -= count - 1
        self._num_prompt_logits_left -= max(0, min(start + count, request.num_prompt_logits_wanted) - start)

    def within_share(self, request: Request, count: int) -> int:
        """Return how many of `count` tokens a running request may have, given the share of its tenant."""
        return count if self._shares is None else min(count, 1 + max(0, self._shares[request.scope.tenant]))

    def unsplit(self, request: Request, start: int, count: int) -> int:
        """Return how many tokens to compute in this step, without splitting an image; 0: it waits for a later step.

        An image with more tokens than the step may compute is computed by a step without other prompts.
        """
        whole = request.unsplit(start, count)
        return whole if whole <= count or not self.chunks else 0

    def most_tokens(self, request: Request, start: int, count: int) -> int:
        """Return how many of `count` tokens from `start` may be computed, given the limit of prompt logits per step."""
        if request.num_prompt_logits_wanted - start <= self._num_prompt_logits_left:
            return count
        return min(count, self._num_prompt_logits_left)

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens the step may compute."""
        return self._budget - len(self.decodes)

    def record(self, step_id: int) -> StepRecord:
        """Return the scheduler's record of the step."""
        return StepRecord(step_id, self.decodes, array("i", [request.row for request in self.decodes]), self.chunks)

    def plan(
        self,
        record: StepRecord,
        changes: MemoryChanges,
        starting: list[Request],
        released_rows: array[int],
        proposals: dict[int, int],
    ) -> StepPlan:
        """Return the plan, without table changes of requests that no longer hold a row."""
        ones = array("i", [1]) * len(self.decodes)
        rows, starts, counts, samples = record.decode_rows, array("i", self.decode_starts), ones, ones
        if self.chunks:
            rows = rows + array("i", [chunk.row for chunk in self.chunks])
            starts.extend([chunk.start for chunk in self.chunks])
            counts = ones + array("i", [chunk.num_tokens for chunk in self.chunks])
            samples = ones + array("i", [chunk.samples for chunk in self.chunks])
        drafts = {chunk.row: chunk.drafts for chunk in self.chunks if chunk.drafts} if self.chunks else {}
        entries = [
            (request.row, group, index, block_id)
            for request, group, index, block_id in changes.table_entries
            if request.row >= 0
        ]
        return StepPlan(
            record.step_id,
            rows,
            starts,
            counts,
            samples,
            len(self.decodes),
            tuple(map(row_start, starting)),
            released_rows,
            TableChanges.of(entries),
            drafts,
            tuple(changes.moves_out),
            tuple(changes.copies),
            tuple(changes.moves_in),
            proposals,
            record.depths,
            changes.transfers,
        )


def row_start(request: Request) -> RowStart:
    """Return the description of a request that takes a row. Does not mutate."""
    return RowStart(
        request.row,
        request.request_id,
        request.tokens[:],
        request.num_prompt_tokens,
        request.sampling,
        request.max_total_tokens,
        request.branch,
        request.num_prompt_logits_wanted,
        request.scope,
        request.pooling,
        request.images,
    )
