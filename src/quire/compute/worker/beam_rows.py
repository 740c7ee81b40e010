"""BeamRows: the beam searches of a worker's rows.

A search orders its texts by score, the control plane identifies a beam by its branch, and the worker by its row.
BeamRows maps these three:

    text 0 (best) ── branch 2 ── row 5        after a step: text i continues text parent(i), on the row of that text
    text 1        ── branch 0 ── row 3        unless a better text does, else on a row whose own text has no
    text 2        ── branch 1 ── row 4        continuation; the control plane forks the parent's blocks for it

A text keeps its row whenever it can, so that few blocks change owners. A search begins when its prompt opens into
beams. After a preemption it restarts, and finds the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.compute.sampling.beam_search import BeamSearch, Candidates, Extension, SearchRules
from quire.core.errors import ExecutionError
from quire.core.hypothesis import Hypothesis
from quire.core.step import RowStart, StepPlan


class BeamStep(NamedTuple):
    """The result of a step for a row of a search: the row that it continues, and its tokens.

    No tokens if the search is over; one per beam if it opens.
    """

    parent: int
    token_ids: list[int]


@dataclass(slots=True)
class _Search:
    rules: SearchRules
    rows: dict[int, int] = field(default_factory=dict)  # by branch
    branches: list[int] = field(default_factory=list)  # of the running texts, best first
    beams: BeamSearch | None = None  # none before it opens


class BeamRows:
    """The running searches, by request."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._searches: dict[str, _Search] = {}
        self._requests: dict[int, tuple[str, int]] = {}  # per row that is a beam, or will open into beams

    def __contains__(self, row: int) -> bool:
        """Whether a row is a beam, or will open into beams."""
        return row in self._requests

    def apply(self, plan: StepPlan) -> None:
        """Note which requests leave and take rows. Mutates."""
        for row in plan.released_rows:
            if row in self._requests:
                self._leave(row)
        for start in plan.row_starts:
            if start.sampling.num_beams > 1:
                search = self._searches.setdefault(start.request_id, _Search(_rules(start, self._eos_token_ids)))
                search.rows[start.branch] = start.row
                self._requests[start.row] = start.request_id, start.branch

    def _leave(self, row: int) -> None:
        request_id, branch = self._requests.pop(row)
        search = self._searches[request_id]
        del search.rows[branch]
        if not search.rows:
            del self._searches[request_id]

    def searches_in(self, opening: list[int], moving: list[int]) -> dict[str, list[int]]:
        """Return the rows that advance a search, by request, the best texts first. Does not mutate.

        Leaves out a search if one of its rows is missing: that row has failed, so the search fails too.
        """
        found = {self._requests[row][0]: [row] for row in opening}
        moves = set(moving)
        for request_id in dict.fromkeys(self._requests[row][0] for row in moving):
            search = self._searches[request_id]
            rows = [search.rows[branch] for branch in search.branches]
            if moves.issuperset(rows):
                found[request_id] = rows
        return found

    def num_candidates(self, request_id: str, vocab_size: int) -> int:
        """Return how many of the likeliest tokens a search needs from each of its rows. Does not mutate."""
        return min(vocab_size, self._searches[request_id].rules.num_candidates)

    def advance(
        self, request_id: str, rows: list[int], candidates: Sequence[Candidates]
    ) -> tuple[dict[int, BeamStep], tuple[Hypothesis, ...]]:
        """Advance a search; return the result per row and, once the search is over, the texts it found. Mutates.

        The candidates belong to `rows`, the rows of the texts, best first.
        """
        search = self._searches[request_id]
        if len(rows) == 1:
            search.beams = BeamSearch(search.rules)
        if search.beams is None:
            raise ExecutionError(f"the beams of request {request_id!r} move before they have opened")
        extensions = search.beams.advance(candidates)
        if search.beams.is_over:
            return {row: BeamStep(row, []) for row in rows}, tuple(search.beams.finished)
        if len(rows) == 1:
            search.branches = list(range(len(extensions)))
            return {rows[0]: BeamStep(rows[0], [each.token for each in extensions])}, ()
        owners = _owners(extensions)
        branches = search.branches
        search.branches = [branches[owner] for owner in owners]
        steps = {rows[owner]: BeamStep(rows[e.parent], [e.token]) for e, owner in zip(extensions, owners, strict=True)}
        return steps, ()


def _owners(extensions: list[Extension]) -> list[int]:
    """Return for each text the text whose place it takes: its parent's, unless a better text takes that.

    >>> _owners([Extension(1, 7), Extension(1, 8), Extension(2, 7)])
    [1, 0, 2]
    """
    free = dict.fromkeys(range(len(extensions)))
    owners = [-1] * len(extensions)
    for index, extension in enumerate(extensions):
        if extension.parent in free:
            owners[index] = extension.parent
            del free[extension.parent]
    left = iter(free)
    return [next(left) if owner < 0 else owner for owner in owners]


def _rules(start: RowStart, eos_token_ids: frozenset[int]) -> SearchRules:
    sampling = start.sampling
    return SearchRules(
        width=sampling.num_beams,
        max_length=start.max_total_tokens - start.num_prompt_tokens,
        min_length=sampling.min_tokens,
        eos_token_ids=sampling.ending_tokens(eos_token_ids),
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
    )
