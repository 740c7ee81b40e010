"""DraftBudget: how many guesses of each request a step verifies, so that guessing pays.

A step brings each request one token. With d guesses of its next tokens it computes 1 + d, and brings as many tokens as
guesses were right, and one more. The text is the same either way: a guess counts only if it is the token that would
have been drawn. So the one question is time.

    chance of a request   how often its guesses were right lately, those of each kind of proposer by themselves
    t(r)                  how long a step with r tokens takes, measured

The next guess of a request is verified while its chance of being reached and right, for the time that it adds, beats
what the step brings so far for the time that it takes. While memory binds, a few tokens more cost next to nothing; when
arithmetic binds, each costs its full share, and guesses vanish by themselves.

Chances and times come from results, so the scheduler reads no clock, and a log replays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Final

from quire.core.config import MOST_DRAFTS
from quire.core.guesses import GUESSERS
from quire.core.request import NO_DRAFTS, Request
from quire.core.step import MAX_STEP_DRAFTS

FIRST_CHANCES: Final = {"forced": 0.9, "ngram": 0.6, "suffix": 0.6, "draft_model": 0.6}
"""How likely a guess is right, by its proposer, until a request has shown otherwise."""
WEIGHT_OF_NEW: Final = 0.15
"""How much one guess, right or wrong, changes the chance of a request; a step, what such steps are taken to cost."""
REST: Final = 16
"""Steps that a request without a worthy guess rests; then one guess is tried, because texts change."""
FIRST_DEPTH: Final = 3
"""How many tokens a draft model guesses until steps have been measured."""
PATIENCE: Final = 4
"""Drafts of a draft model that lose time in a row until it reads a text no more."""
HOPE: Final = 0.7
"""A guess is tried only where one with this chance would pay."""


class StepTimes:
    """How long steps take, by their number of tokens: measured ones, and straight lines between them.

    >>> times = StepTimes()
    >>> for tokens, time in ((1, 100.0), (16, 130.0), (32, 200.0)):
    ...     times.note(tokens, time)
    >>> times.of(1), times.of(24), times.of(50)
    (100.0, 165.0, 200.0)
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # of sizes with as many binary digits: tokens, time
        self._points: list[tuple[float, float]] = []

    def note(self, num_tokens: int, time: float) -> None:
        """Take a step's number of tokens, and its time. Mutates."""
        size = num_tokens.bit_length()
        tokens_before, before = self._means.get(size, (float(num_tokens), time))
        self._means[size] = (
            tokens_before + WEIGHT_OF_NEW * (num_tokens - tokens_before),
            before + WEIGHT_OF_NEW * (time - before),
        )
        slowest, self._points = 0.0, []
        for tokens, mean in (self._means[each] for each in sorted(self._means)):
            slowest = max(slowest, mean)  # more tokens take no less time, whatever was measured
            self._points.append((tokens, slowest))

    def of(self, num_tokens: int) -> float:
        """Return the time of a step. One larger than any measured is taken to cost no more, until it is tried."""
        points = self._points
        place = bisect_left(points, (float(num_tokens), 0.0))
        if place == 0:
            return points[0][1] if points else 0.0
        if place == len(points):
            return points[-1][1]
        (low, fast), (high, slow) = points[place - 1], points[place]
        return min(slow, fast + (slow - fast) * (num_tokens - low) / (high - low))


@dataclass(slots=True)
class Foreseen:
    """What was foreseen of the steps so far, in microseconds: with guesses, and without any for the same tokens.

    `gain` says what guesses bring by that. It is compared with what is measured (`quire bench speculation`).
    """

    with_us: float = 0.0
    without_us: float = 0.0

    @property
    def gain(self) -> float:
        """How many times as fast the steps bring tokens with guesses as without; 1 where no step was measured."""
        return self.without_us / self.with_us if self.with_us else 1.0


@dataclass(slots=True)
class GuessCounts:
    """The guesses of a kind of proposer that were verified, and those that were right, by their place in a draft."""

    verified: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    right: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def note(self, num_drafts: int, num_right: int) -> None:
        """Count a draft. Mutates."""
        for place in range(num_drafts):
            self.verified[place] += 1
            self.right[place] += place < num_right


class DraftBudget:
    """Decides which guesses are verified, and remembers how requests and steps have fared."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.pass_times = StepTimes()  # of a draft model, by the number of rows
        self.foreseen = Foreseen()
        self._passes_us = 0.0  # of the draft model in a step, as last planned
        self._num_worthless: dict[
            Request, int
        ] = {}  # verified drafts of the draft model in a row after which it lost time
        self._num_hopeless = 0  # steps in which not even a sure guess would have paid
        self._num_shallow = 0  # steps since the draft model was last let guess
        self._chances: dict[tuple[Request, str], float] = {}  # by proposer
        self._rests: dict[Request, int] = {}  # steps that a request still rests
        self.num_verified = 0  # sequences of steps that verified guesses
        self.counts = {guesser: GuessCounts() for guesser in GUESSERS}

    def share_out(self, requests: Iterable[Request], num_running: int) -> None:
        """Cut the drafts of requests to those that pay in the next step. Mutates them."""
        found = [request for request in requests if request.drafts]
        if not found:
            return
        counts = [0] * len(found)
        total, expected = num_running, float(num_running)
        # The likeliest guess first: (chance that it is reached and right, negated; which request).
        queue = [(-self._chance(request), place) for place, request in enumerate(found)]
        heapify(queue)
        while queue and total - num_running < MAX_STEP_DRAFTS:
            negated, place = queue[0]
            if not self._pays(-negated, total, expected):
                break
            request = found[place]
            counts[place] += 1
            total += 1
            expected -= negated
            if counts[place] < len(request.drafts):
                heapreplace(queue, (negated * self._chance(request), place))
            else:
                heappop(queue)
        for place, request in enumerate(found):
            if not counts[place] and self._is_rested(request) and self._pays(HOPE, total, expected):
                counts[place], total = 1, total + 1
            request.drafts = request.drafts[: counts[place]] if counts[place] else NO_DRAFTS

    def depth(self, requests: Sequence[Request], num_running: int, most: int) -> int:
        """Return how many tokens a draft model should guess for each request, at most `most`. Mutates its rest.

        It is the number that brings most tokens for the time of the passes and of the step that verifies the guesses.
        One pass is for free: without guesses too the draft model reads what the step has computed.
        """
        most = min(most, MAX_STEP_DRAFTS // max(1, len(requests)))
        if not self.times.of(num_running):
            return min(most, FIRST_DEPTH)
        chances = [self._chances.get((request, "draft_model"), FIRST_CHANCES["draft_model"]) for request in requests]
        found = self._best_depth(chances, num_running, most)
        self._num_shallow = 0 if found else self._num_shallow + 1
        if self._num_shallow >= REST:
            self._num_shallow = 0
            found = min(1, self._best_depth([HOPE] * len(chances), num_running, most))
        self._passes_us = max(1, found) * self.pass_times.of(num_running)
        return found

    def _best_depth(self, chances: Sequence[float], num_running: int, most: int) -> int:
        pass_us = self.pass_times.of(num_running)
        best, expected, reached = 0, float(num_running), [1.0] * len(chances)
        best_rate = expected / (self.times.of(num_running) + pass_us)
        for depth in range(1, most + 1):
            reached = [before * chance for before, chance in zip(reached, chances, strict=True)]
            expected += sum(reached)
            rate = expected / (self.times.of(num_running + depth * len(chances)) + depth * pass_us)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def followed(self, requests: Sequence[Request], num_running: int) -> list[Request]:
        """Return the requests whose texts a draft model should go on reading. Mutates: some steps decide, not one.

        A text that it does not read gets no guesses any more. So it stops only when no guess could pay for some steps,
        or when the guesses of a request would lose time, that of the pass without guesses included, again and again.
        """
        self._num_hopeless = 0 if self.could_pay(num_running) else self._num_hopeless + 1
        if self._num_hopeless >= REST:
            return []
        return [request for request in requests if self._num_worthless.get(request, 0) < PATIENCE]

    def _is_worthless(self, chance: float, num_running: int) -> bool:
        """Whether guesses with this chance bring less, at any depth, than doing without the draft model."""
        alone_us, pass_us = self.times.of(num_running), self.pass_times.of(num_running)
        if not (alone_us and pass_us):
            return False
        best, expected = 0.0, 1.0
        for depth in range(1, MOST_DRAFTS + 1):
            expected += chance**depth
            best = max(best, expected / (self.times.of(num_running + depth * num_running) + depth * pass_us))
        return best * alone_us < 1.0

    def could_pay(self, num_running: int) -> bool:
        """Return whether a guess that is surely right would pay in a step of this many requests. Does not mutate."""
        return self._pays(1.0, num_running, float(num_running))

    def _pays(self, chance: float, total: int, expected: float) -> bool:
        """Whether one more token in the step, right with this chance, brings more for its time than the step does."""
        now = self.times.of(total)
        return chance * (now + self._passes_us) >= expected * (self.times.of(total + 1) - now)

    def _is_rested(self, request: Request) -> bool:
        left = self._rests.get(request, REST) - 1
        self._rests[request] = left if left > 0 else REST
        return left <= 0

    def foresee(self, num_requests: int, drafts: Sequence[tuple[Request, int]], num_passes: int) -> None:
        """Add a step whose result is in to what is foreseen, by what was known before it. Mutates."""
        alone_us = self.times.of(num_requests)
        if not alone_us:
            return
        expected = float(num_requests)
        for request, count in drafts:
            chance = self._chance(request)
            expected += sum(chance**place for place in range(1, count + 1))
        num_tokens = num_requests + sum(count for _, count in drafts)
        self.foreseen.with_us += self.times.of(num_tokens) + num_passes * self.pass_times.of(num_requests)
        self.foreseen.without_us += alone_us * expected / num_requests

    def note_step(self, num_tokens: int, duration_us: int) -> None:
        """A step of decodes and guesses took so long; 0: nobody measured. Mutates."""
        if duration_us > 0:
            self.times.note(num_tokens, float(duration_us))

    def note_pass(self, num_rows: int, duration_us: int) -> None:
        """A pass of a draft model for this many rows took so long; 0: there was none. Mutates."""
        if duration_us > 0:
            self.pass_times.note(num_rows, float(duration_us))

    def note_verified(self, request: Request, num_drafts: int, num_accepted: int, num_running: int = 1) -> None:
        """Take how many of a request's guesses were right; those behind the first wrong one tell nothing. Mutates."""
        chance = self._chance(request)
        for was_right in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            chance += WEIGHT_OF_NEW * (was_right - chance)
        self._chances[request, request.guesser] = chance
        if request.guesser == "draft_model":
            before = self._num_worthless.get(request, 0)
            self._num_worthless[request] = before + 1 if self._is_worthless(chance, num_running) else 0
        self.num_verified += 1
        self.counts[request.guesser].note(num_drafts, num_accepted)

    def _chance(self, request: Request) -> float:
        """Return how likely a guess of the kind that the request has now is right."""
        return self._chances.get((request, request.guesser), FIRST_CHANCES[request.guesser])

    def forget(self, request: Request) -> None:
        """A request has ended. Mutates."""
        for guesser in GUESSERS:
            self._chances.pop((request, guesser), None)
        self._rests.pop(request, None)
        self._num_worthless.pop(request, None)
