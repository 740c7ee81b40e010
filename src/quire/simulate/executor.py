"""SimExecutor: an Executor that computes no model, but takes the simulated time of one.

Time is that of the given clock: collecting a step moves a `ManualClock` forward by the time of the cost model, so hours
of traffic run in seconds. The tokens after a prompt are drawn from a hash of the prompt, and the next token depends
only on the length of the sequence. So equal prompts have equal outputs, and a token never depends on the batch, the
chunks or the cache: another schedule must produce the same tokens. If the answer of a request is known (from a log),
its tokens are used instead.

With speculation, a guess is right with a given probability.

Speed matters here: a step of 256 decodes is one pass in C over 256 iterators. Tokens are drawn 256 at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from quire.core.clock import ManualClock
from quire.core.errors import ExecutionError
from quire.core.guesses import Guesses
from quire.core.step import RowStart, StepPlan, StepResult
from quire.simulate.beams import BeamModel
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.linear import LinearCost
from quire.simulate.disk import SimDisk

_CHUNK = 256
NOTHING = array("i")
NO_PLAN = StepPlan(0, NOTHING, NOTHING, NOTHING, NOTHING)
Outputs = Mapping[str, "Sequence[array[int]]"]
"""Known answers: the tokens of each sequence, by request."""


class SimExecutor:
    """Simulates the computation of plans. `acceptance`: the probability that a guess is right; None: no guesses.

    `draft_cost`: the cost model of a draft model, which then makes all guesses; None: prompt lookup guesses.
    """

    def __init__(
        self,
        vocab_size: int,
        clock: ManualClock,
        cost: StepCost | None = None,
        *,
        outputs: Outputs | None = None,
        acceptance: float | None = None,
        draft_cost: StepCost | None = None,
    ) -> None:
        self.disk: SimDisk | None = None
        """The disk, if there is one; set it before the first plan."""
        self._draft_cost = draft_cost
        self._num_read: dict[int, int] = {}  # tokens that the draft model has read, by row
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._clock = clock
        self._cost = cost or LinearCost()
        self._outputs = {} if outputs is None else outputs
        self._known: dict[int, Sequence[array[int]]] = {}  # by row, the known answers of its request
        self._prompts: dict[int, bytes] = {}  # by row, the hash of its prompt
        self._texts: dict[int, Iterator[int]] = {}  # by row, its future tokens
        self._beams = BeamModel()
        self._searches: dict[int, RowStart] = {}  # by row, the start of a beam
        self._steady_rows = array("i")  # the rows of the last plan, and their future tokens
        self._steady_texts: list[Iterator[int]] = []
        self._under_way: deque[tuple[StepPlan, StepResult, float]] = deque()
        self.plan = NO_PLAN
        """The plan whose result was collected last, except plans only for the disk or for the moves after a step."""

    def start(self) -> None:
        """Do nothing: no preparation is needed."""

    def submit(self, plan: StepPlan) -> None:
        """Take a plan. Mutates."""
        for start in plan.row_starts:
            prompt = hash_prompt(start.tokens[: start.num_prompt_tokens])
            self._prompts[start.row] = prompt
            self._known[start.row] = self._outputs.get(start.request_id, ())
            num_known = len(start.tokens) - start.num_prompt_tokens
            self._texts[start.row] = self._text(start.row, start.branch, num_known)
            before = self._searches.pop(start.row, start)
            if all(before.request_id != other.request_id for other in (start, *self._searches.values())):
                self._beams.forget(before.request_id)  # a preempted search can have restarted on other rows
            if start.sampling.num_beams > 1:
                self._searches[start.row] = start
        texts, num_decodes = self._texts, plan.num_decodes
        if plan.row_starts or plan.rows != self._steady_rows:
            self._steady_rows = plan.rows
            self._steady_texts = [texts[row] for row in plan.rows]
        tokens = array("i", map(next, self._steady_texts[:num_decodes]))
        num_tokens = plan.samples
        for row, samples in zip(plan.rows[num_decodes:], plan.samples[num_decodes:], strict=True):
            if samples:
                tokens.append(next(texts[row]))
            for branch in range(1, samples):
                tokens.append(next(self._text(row, branch, 0)))
            if row in plan.drafts:
                right = _take_equal(texts[row], tokens[-1], plan.drafts[row])
                tokens.extend(right)
                num_tokens = num_tokens[:]
                num_tokens[plan.rows.index(row)] += len(right)
        parents = self._parents(plan) if self._searches else array("i")
        seconds = self._step_s(plan)
        proposals = {} if self._acceptance is None else self._guess(plan, self._acceptance)
        passes_s, pass_s = (0.0, 0.0) if self._draft_cost is None else self._passes(plan, self._draft_cost)
        result = StepResult(
            plan.step_id,
            num_tokens,
            tokens,
            parents,
            proposals=proposals,
            duration_us=round(seconds * 1e6),
            draft_us=round(pass_s * 1e6),
        )
        seconds += passes_s
        self._under_way.append((plan, result, seconds))

    def _step_s(self, plan: StepPlan) -> float:
        """Return how long a plan takes; a plan only for the disk waits for the disk. Mutates the disk."""
        if self.disk is None:
            return self._cost.step_s(plan)
        now_s = self._clock.now()
        self.disk.ask(plan.transfers, now_s)
        if not _is_for_disk(plan):
            return self._cost.step_s(plan)
        return self.disk.waits_s(now_s) if plan.transfers.is_waiting else 0.0

    def _passes(self, plan: StepPlan, cost: StepCost) -> tuple[float, float]:
        """Return the draft model's time after a step, and its time for a pass of one token per row. Mutates.

        The first pass reads all tokens that it has not read yet; tokens from the cache count as read.
        """
        for started in plan.row_starts:
            self._num_read.pop(started.row, None)
        places = {row: entry for entry, row in enumerate(plan.rows)}
        for row, entry in places.items():
            self._num_read.setdefault(row, plan.starts[entry])
        if not plan.depths:
            return 0.0, 0.0
        total_s, pass_s = 0.0, 0.0
        for number in range(max(plan.depths.values())):
            rows = array("i", [row for row, depth in plan.depths.items() if depth > number])
            ends = [plan.starts[places[row]] + plan.counts[places[row]] + 1 + number for row in rows]
            starts, ones = array("i", [end - 1 for end in ends]), array("i", [1]) * len(rows)
            seconds = cost.step_s(StepPlan(plan.step_id, rows, starts, ones, ones, len(rows)))
            if number == 0:
                pass_s = seconds
                starts = array("i", [min(self._num_read[row], end - 1) for row, end in zip(rows, ends, strict=True)])
                counts = array("i", [end - start for start, end in zip(starts, ends, strict=True)])
                seconds = cost.step_s(StepPlan(plan.step_id, rows, starts, counts, ones, 0))
            total_s += seconds
        self._num_read.update({row: plan.starts[places[row]] + 1 for row in plan.depths})
        return total_s, pass_s

    def _guess(self, plan: StepPlan, acceptance: float) -> dict[int, Guesses]:
        """Return guesses of the next tokens, some of them wrong. Mutates: it draws future tokens."""
        found = {}
        asked, guesser = (plan.proposals, "ngram") if self._draft_cost is None else (plan.depths, "draft_model")
        for row, most in asked.items():
            text = self._texts[row]
            if not isinstance(text, _ForeseenText):
                text = self._texts[row] = _ForeseenText(text)
                self._steady_rows = array("i")
            coming = text.coming(most)
            guesses = array("i", [self._guessed(self._prompts[row], token, acceptance) for token in coming])
            found[row] = Guesses(guesser, guesses)
        return found

    def _guessed(self, prompt: bytes, token: int, acceptance: float) -> int:
        is_right = zlib.crc32(prompt + token.to_bytes(4)) < acceptance * (1 << 32)
        return token if is_right else (token + 1) % self._vocab_size

    def _text(self, row: int, branch: int, num_known: int) -> Iterator[int]:
        """Return the tokens of a sequence after its first `num_known` ones."""
        known = self._known[row][branch] if branch < len(self._known[row]) else array("i")
        drawn = text_after(self._prompts[row], branch, max(num_known, len(known)), self._vocab_size)
        return itertools.chain(known[num_known:], drawn) if num_known < len(known) else drawn

    def _parents(self, plan: StepPlan) -> array[int]:
        """Return the row that each entry continues; starts new searches. Mutates."""
        parents = plan.rows[:]
        found: dict[str, list[tuple[int, int]]] = {}  # the branch and entry of each beam
        for entry in range(plan.num_decodes, len(plan.rows)):
            start = self._searches.get(plan.rows[entry])
            if start is None or not plan.samples[entry]:
                continue
            if plan.samples[entry] > 1:
                self._beams.open(start.request_id, self._prompts[start.row], plan.samples[entry])
            else:
                found.setdefault(start.request_id, []).append((start.branch, entry))
        for request_id, beams in found.items():
            entries = [entry for _, entry in sorted(beams)]
            prompt, position = self._prompts[plan.rows[entries[0]]], plan.starts[entries[0]]
            for entry, parent in zip(entries, self._beams.choose(request_id, prompt, position), strict=True):
                parents[entry] = plan.rows[entries[parent]]
        return parents

    def collect(self) -> StepResult:
        """Return the oldest result and move the clock past it. Mutates."""
        if not self._under_way:
            raise ExecutionError("no step is under way")
        plan, result, seconds = self._under_way.popleft()
        if self.plan.rows and not plan.rows:  # the moves that remain after the last step
            self.plan = replace(self.plan, moves_out=self.plan.moves_out + plan.moves_out)
        elif self.disk is None or not _is_for_disk(plan):
            self.plan = plan
        self._clock.advance(seconds)
        if self.disk is None:
            return result
        return replace(result, transfers=self.disk.collect(self._clock.now()))

    def shutdown(self) -> None:
        """Drop the steps in flight. Mutates."""
        self._under_way.clear()


def _is_for_disk(plan: StepPlan) -> bool:
    """Return whether a plan computes and moves nothing."""
    return not (plan.rows or plan.moves_in or plan.moves_out or plan.copies)


class _ForeseenText(Iterator[int]):
    """An iterator over future tokens, with look-ahead."""

    def __init__(self, rest: Iterator[int]) -> None:
        self._rest = rest
        self._seen: deque[int] = deque()

    def __next__(self) -> int:
        return self._seen.popleft() if self._seen else next(self._rest)

    def coming(self, count: int) -> list[int]:
        """Return the next tokens without consuming them."""
        self._seen.extend(itertools.islice(self._rest, max(0, count - len(self._seen))))
        return list(itertools.islice(self._seen, count))


def _take_equal(text: Iterator[int], drawn: int, drafts: Sequence[int]) -> list[int]:
    """Return the tokens after the first drawn one, one for each draft until the first wrong draft."""
    found: list[int] = []
    for draft in drafts:
        if draft != (found[-1] if found else drawn):
            break
        found.append(next(text))
    return found


def hash_prompt(tokens: array[int]) -> bytes:
    """Return the digest of a prompt."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def text_after(prompt: bytes, branch: int, num_known: int, vocab_size: int) -> Iterator[int]:
    """Return the tokens that follow a prompt in one of its sequences, without the first `num_known`.

    Ids are below 65,536 and below the size of the vocabulary.

    >>> whole = text_after(b"prompt", 0, 0, 1000)
    >>> [next(whole) for _ in range(300)][298:] == [next(text_after(b"prompt", 0, at, 1000)) for at in (298, 299)]
    True
    """
    return itertools.chain.from_iterable(_chunks(prompt + branch.to_bytes(4), num_known, vocab_size))


def _chunks(seed: bytes, num_known: int, vocab_size: int) -> Iterator[array[int]]:
    first, skipped = divmod(num_known, _CHUNK)
    for number in itertools.count(first):
        drawn = array("H", hashlib.shake_128(seed + number.to_bytes(8)).digest(2 * _CHUNK))
        if vocab_size <= 0xFFFF:
            drawn = array("H", [token % vocab_size for token in drawn])
        yield drawn[skipped:]
        skipped = 0
