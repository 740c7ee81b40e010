"""Meter: measures the latencies that the users of one replica see, step by step.

    due ────► first token ──► token ──► … ──► last token
     └─ ttft ──────┘└── itl ──┘                   │
     └───────────────────── latency ──────────────┘         tpot: mean of the itl of a sequence

Times count from when a request was due, so waiting for the current step is included. Normalised latency is latency over
output length, as in the paper.

Two tokens of a sequence are usually one step apart, and then the gap is the same for all sequences. So as long as the
same rows decode, one time stands for all of them. When the rows change, the time is stored for each row, and equal
times are counted in C (`Counter`). A sequence that loses its row keeps its time in its `Track`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.core.step import StepPlan
from quire.scheduler.commit import StepOutcome
from quire.simulate.histogram import Histogram

Key = tuple[str, int]
NOT_BEGUN = -1.0


class Latencies:
    """The histograms of a run, for all replicas together."""

    NAMES = ("ttft_s", "tpot_s", "itl_s", "latency_s", "normalised_latency_s")

    def __init__(self) -> None:
        self.ttft_s = Histogram()
        self.tpot_s = Histogram()
        self.itl_s = Histogram()
        self.latency_s = Histogram()
        self.normalised_latency_s = Histogram()


@dataclass(slots=True)
class Track:
    """The times of one running sequence."""

    due_s: float
    first_s: float = NOT_BEGUN
    last_s: float = NOT_BEGUN  # while it holds no row
    chunk_end: int = 0  # the number of its tokens in chunks of plans so far
    is_received: bool = False  # its known tokens were computed by another replica


class Meter:
    """Records the steps of one replica."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._tracks: dict[Key, Track] = {}
        self._holders: dict[int, Key] = {}  # by row
        self._last_s: dict[int, float] = {}  # by row, the time of its last token, except `_steady_rows`
        self._steady_rows = array("i")  # rows whose last tokens had the same time
        self._steady_s = 0.0
        self.num_computed_tokens = 0
        self.num_drafts = 0  # computed tokens that were guesses, right or wrong
        self.num_recomputed_tokens = 0  # computed before, and dropped by a preemption
        self.num_received_tokens = 0  # not computed, but received from another replica
        self._leaving: set[str] = set()  # requests that continue in another replica when they end here
        self._left: dict[str, Track] = {}
        self.num_output_tokens = 0
        self.num_needed_tokens = 0  # prompts and outputs of ended requests; shared prompts count once
        self.num_ended = 0
        self.num_steps = 0
        self.busy_s = 0.0
        self.sequence_seconds = 0.0  # the sum of the steps' sequences times durations
        self.num_copied_blocks = 0
        self.num_moved_blocks = 0

    def took(self, request: Request, due_s: float, track: Track | None, *, leaves: bool) -> None:
        """Record that a request was added; `track`: its times from another replica. Mutates.

        `leaves`: it continues in another replica after its end here.
        """
        self._tracks[request.request_id, 0] = Track(due_s) if track is None else track
        if leaves:
            self._leaving.add(request.request_id)

    def take_left(self, request_id: str) -> Track | None:
        """Return the times of a request that continues in another replica; None: it has ended. Mutates."""
        return self._left.pop(request_id, None)

    def give_up(self) -> dict[str, Track]:
        """Forget the running sequences, which the replica has lost; return the times of each request. Mutates."""
        self._last_s.update(dict.fromkeys(self._steady_rows, self._steady_s))
        for row, key in self._holders.items():
            if key in self._tracks:
                self._tracks[key].last_s = self._last_s[row]
        tracks = {request_id: track for (request_id, _), track in self._tracks.items()}
        self._tracks.clear()
        self._holders.clear()
        self._steady_rows = array("i")
        return tracks

    def note(self, plan: StepPlan, outcome: StepOutcome, began_s: float, now_s: float) -> None:
        """Record a step. Mutates; O(sequences in the step), mostly in C."""
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        self.num_drafts += sum(map(len, plan.drafts.values()))
        self.busy_s += now_s - began_s
        self.sequence_seconds += len(plan.rows) * (now_s - began_s)
        self.num_copied_blocks += len(plan.copies)
        self.num_moved_blocks += len(plan.moves_in) + len(plan.moves_out)
        changed = plan.row_starts or plan.released_rows
        if plan.rows == self._steady_rows and plan.num_decodes == len(plan.rows) and not changed:
            self._latencies.itl_s.add(now_s - self._steady_s, len(plan.rows))
            self._steady_s = now_s
        else:
            self._note_rows(plan, now_s)
        for sibling in outcome.opened:
            self._open(sibling, now_s)
        for request in outcome.finished:
            self._end(request, now_s)

    def _note_rows(self, plan: StepPlan, now_s: float) -> None:
        self._last_s.update(dict.fromkeys(self._steady_rows, self._steady_s))
        self._change_rows(plan)
        num_decodes = plan.num_decodes
        sampled = plan.rows[:num_decodes]
        if num_decodes < len(plan.rows):
            samples = plan.samples[num_decodes:]
            sampled += array("i", [row for row, count in zip(plan.rows[num_decodes:], samples, strict=True) if count])
        self._note_tokens(sampled, now_s)
        self._steady_rows, self._steady_s = sampled, now_s

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            key = self._holders.pop(row, None)  # None: a row of an earlier run of the same engine
            if key in self._tracks:
                self._tracks[key].last_s = self._last_s[row]
        starts = dict(zip(plan.rows, plan.starts, strict=True)) if plan.row_starts else {}
        for start in plan.row_starts:
            key = (start.request_id, start.branch)
            self._holders[start.row] = key
            self._last_s[start.row] = self._tracks[key].last_s
            num_known, chunk_end = len(start.tokens), self._tracks[key].chunk_end
            before = max(chunk_end, num_known - 1) if num_known > start.num_prompt_tokens else chunk_end
            again = max(0, before - starts.get(start.row, before))
            if self._tracks[key].is_received:
                self.num_received_tokens += again
                self._tracks[key].is_received = False
            else:
                self.num_recomputed_tokens += again
        decodes = plan.num_decodes
        for row, first, count in zip(plan.rows[decodes:], plan.starts[decodes:], plan.counts[decodes:], strict=True):
            self._tracks[self._holders[row]].chunk_end = first + count - len(plan.drafts.get(row, ()))

    def _note_tokens(self, rows: array[int], now_s: float) -> None:
        last_s = self._last_s
        gaps = Counter(map(last_s.__getitem__, rows))
        if NOT_BEGUN in gaps:
            del gaps[NOT_BEGUN]
            for row in rows:
                if last_s[row] == NOT_BEGUN:
                    track = self._tracks[self._holders[row]]
                    track.first_s = now_s
                    self._latencies.ttft_s.add(now_s - track.due_s)
        for since_s, count in gaps.items():
            self._latencies.itl_s.add(now_s - since_s, count)

    def _open(self, sibling: Request, now_s: float) -> None:
        """Start another sequence of a request; a beam that replaces another one continues its times."""
        key = (sibling.request_id, sibling.branch)
        if key not in self._tracks:
            leader = self._tracks[sibling.request_id, 0]
            self._tracks[key] = Track(leader.due_s, leader.first_s, now_s)

    def _end(self, request: Request, now_s: float) -> None:
        track = self._tracks.pop((request.request_id, request.branch))
        num_tokens = request.num_output_tokens
        if num_tokens < 1 or track.first_s == NOT_BEGUN:
            raise InvariantError(f"request {request.request_id!r} ended before it began")
        if request.request_id in self._leaving:
            self._leaving.remove(request.request_id)
            self._left[request.request_id] = Track(track.due_s, track.first_s, now_s, is_received=True)
            return
        self.num_ended += 1
        self.num_output_tokens += num_tokens
        self.num_needed_tokens += num_tokens - 1 + (0 if request.branch else request.num_prompt_tokens)
        latency_s = now_s - track.due_s
        self._latencies.latency_s.add(latency_s)
        self._latencies.normalised_latency_s.add(latency_s / num_tokens)
        if num_tokens > 1:
            self._latencies.tpot_s.add((now_s - track.first_s) / (num_tokens - 1))

    @property
    def num_under_way(self) -> int:
        """The number of sequences that have not ended."""
        return len(self._tracks)
