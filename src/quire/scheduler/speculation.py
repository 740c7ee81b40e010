"""DraftBudget: decides how many guesses of each request a step verifies, so that guessing pays.

A step generates one token for each request. With d guesses of a request's next tokens it computes 1 + d tokens, and
generates one more token than guesses were right. The text is the same either way: a guess counts only if it is the
token that would have been drawn. So only time matters.

    chance of a request   how often its recent guesses were right, separately for each kind of proposer
    t(r)                  the measured time of a step with r tokens; steps without guesses are measured separately

A guess is added to a step if its chance of being reached and right, divided by the time that it adds, beats the tokens
of the step so far, divided by its time. While memory binds, a few more tokens cost next to nothing; when arithmetic
binds, each token costs its full share, and no guess pays. A step with guesses also takes longer to plan and to sample
from, so it must beat the step without any.

Chances and times come from results, so the scheduler reads no clock, and a log can be replayed.
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
from quire.scheduler.search_trials import SearchTrials

FIRST_CHANCES: Final = {"forced": 0.9, "ngram": 0.6, "suffix": 0.6, "draft_model": 0.6}
"""How likely a guess is right, by its proposer, until requests have shown otherwise."""
MODEL: Final = "draft_model"
"""The kind of guesses of a draft model, or of a model's own layer: an engine has one of them at most."""
OF_MODELS: Final = frozenset({MODEL, "mtp"})
WEIGHT_OF_NEW: Final = 0.15
"""The weight of a new guess in the chance of its request, and of a new step in the mean time of such steps."""
ODD: Final = 1.5
"""A step that takes more than this multiple of the mean waited for something else, and counts as this multiple."""
WEIGHT_FOR_OTHERS: Final = 0.05
"""The weight of a new guess in the first chance of later requests."""
REST: Final = 16
"""Steps that a request rests if no guess pays; then one guess is tried, because texts change."""
LONGEST_REST: Final = 256
"""The most steps that a draft model rests; its rest doubles with each guess that is tried and wrong."""
FIRST_DEPTH: Final = 3
"""How many tokens a draft model guesses until steps have been measured."""
LEAST_GAIN: Final = 1.15
"""The speedup for which guesses are searched, if all are right: some will be wrong, and the search takes time."""
MARGIN: Final = 1.1
"""The factor by which a guess must be worth more than its time in the step: to find and check it takes time too."""
HOPE: Final = 0.7
"""A guess is tried after a rest only if a guess with this chance would pay."""


class StepTimes:
    """The times of steps by their number of tokens: measured, and interpolated linearly.

    >>> times = StepTimes()
    >>> for tokens, time in ((1, 100.0), (16, 130.0), (32, 200.0)):
    ...     times.note(tokens, time)
    >>> times.of(1), times.of(24), times.of(50)
    (100.0, 165.0, 200.0)
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # by the number's binary digits: mean tokens, mean time
        self._points: list[tuple[float, float]] = []

    def note(self, num_tokens: int, time: float) -> None:
        """Record a step's number of tokens, and its time. Mutates."""
        size = num_tokens.bit_length()
        tokens_before, before = self._means.get(size, (float(num_tokens), time))
        ratio = num_tokens / tokens_before
        time = min(time, ODD * before * max(1.0, ratio))
        before = min(before, ODD * time * max(1.0, 1 / ratio))
        self._means[size] = (
            tokens_before + WEIGHT_OF_NEW * (num_tokens - tokens_before),
            before + WEIGHT_OF_NEW * (time - before),
        )
        slowest, self._points = 0.0, []
        for tokens, mean in (self._means[each] for each in sorted(self._means)):
            slowest = max(slowest, mean)  # more tokens take no less time, whatever was measured
            self._points.append((tokens, slowest))

    def of(self, num_tokens: float) -> float:
        """Return the time of a step. A step larger than all measured ones counts as the largest, until it is tried."""
        points = self._points
        place = bisect_left(points, (float(num_tokens), 0.0))
        if place == 0:
            return points[0][1] if points else 0.0
        if place == len(points):
            return points[-1][1]
        (low, fast), (high, slow) = points[place - 1], points[place]
        return min(slow, fast + (slow - fast) * (num_tokens - low) / (high - low))

    @property
    def sizes(self) -> Iterable[float]:
        """The mean numbers of tokens of the measured steps, between which times are interpolated."""
        return (tokens for tokens, _ in self._points)

    def has(self, num_tokens: int) -> bool:
        """Return whether a step of about this many tokens was measured."""
        return num_tokens.bit_length() in self._means

    @property
    def least(self) -> float:
        """The number of tokens of the smallest measured steps; 0: no step was measured."""
        return self._points[0][0] if self._points else 0.0


@dataclass(slots=True)
class Foreseen:
    """The predicted times of the steps so far, in microseconds: with guesses, and without any for the same tokens.

    `gain` is the predicted speedup. It is compared with the measured speedup (`quire bench speculation`).
    """

    with_us: float = 0.0
    without_us: float = 0.0
    taken_us: float = 0.0  # the measured time of the same steps

    @property
    def gain(self) -> float:
        """The predicted speedup by guesses; 1 if no step was measured."""
        return self.without_us / self.with_us if self.with_us else 1.0


@dataclass(slots=True)
class GuessCounts:
    """How many guesses of a kind of proposer were verified, and how many were right, by their place in a draft."""

    verified: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    right: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    def note(self, num_drafts: int, num_right: int) -> None:
        """Count a draft. Mutates."""
        for place in range(num_drafts):
            self.verified[place] += 1
            self.right[place] += place < num_right


@dataclass(slots=True)
class Measured:
    """The measured times of one kind of steps."""

    plain_times: StepTimes = field(default_factory=StepTimes)  # steps that neither verify guesses nor search for any
    search_times: StepTimes = field(default_factory=StepTimes)  # steps that only search
    times: StepTimes = field(default_factory=StepTimes)  # steps with guesses, which take longer to plan and to sample
    trials: SearchTrials = field(default_factory=SearchTrials)


class DraftBudget:
    """Decides which guesses are verified, and records how often they were right and how long steps took."""

    def __init__(self) -> None:
        self._measured = Measured(), Measured()  # of steps without grammar masks, and with masks
        self.turn_to(has_masks=False)
        self.pass_times = StepTimes()  # of a draft model, by the number of rows
        self.foreseen = Foreseen()
        self._passes_us = 0.0  # of the draft model in a step, as last planned
        self._first_chances = dict(FIRST_CHANCES)
        self._chances: dict[tuple[Request, str], float] = {}  # by proposer
        self._rests: dict[Request, int] = {}  # steps until one guess of a request is tried, though it may not pay
        self._model_rest, self._model_rested = REST, 0  # steps that the draft model rests, and has rested
        self._tried: Request | None = None  # the request that the draft model last guessed for between two rests
        self.num_verified = 0  # drafts that were verified
        self.counts = {guesser: GuessCounts() for guesser in GUESSERS}

    def turn_to(self, *, has_masks: bool) -> None:
        """Switch to the times of steps with grammar masks, or without: they take different times. Mutates."""
        measured = self._measured[has_masks]
        self.plain_times, self.search_times = measured.plain_times, measured.search_times
        self.times, self.trials = measured.times, measured.trials

    def share_out(self, requests: Iterable[Request], num_running: int) -> None:
        """Cut the drafts of requests to those that pay in the next step. Mutates them."""
        drafters = [request for request in requests if request.drafts]
        if not drafters:
            return
        if not self.could_pay(num_running):
            for request in drafters:
                request.drafts = NO_DRAFTS
            return
        counts = [0] * len(drafters)
        total, expected = num_running, float(num_running)
        # The likeliest guess first: (chance that it is reached and right, negated; which request).
        queue = [(-self._chance(request), place) for place, request in enumerate(drafters)]
        heapify(queue)
        now = self._step_us(num_running, total)
        while queue and total - num_running < MAX_STEP_DRAFTS:
            negated, place = queue[0]
            then = self._step_us(num_running, total + 1)
            if not self._pays(-negated, expected, now, then):
                break
            now = then
            request = drafters[place]
            counts[place] += 1
            total += 1
            expected -= negated
            if counts[place] < len(request.drafts):
                heapreplace(queue, (negated * self._chance(request), place))
            else:
                heappop(queue)
        alone_us = self._step_us(num_running, num_running)
        if expected * alone_us < num_running * now:  # the step is faster without any
            counts, total, expected, now = [0] * len(drafters), num_running, float(num_running), alone_us
        hopeful = self._pays(HOPE, expected, now, self._step_us(num_running, total + 1))
        for place, request in enumerate(drafters):
            if not counts[place] and self._is_rested(request) and hopeful:
                counts[place] = 1
            request.drafts = request.drafts[: counts[place]] if counts[place] else NO_DRAFTS

    def depths(self, requests: Sequence[Request], num_running: int, most: int) -> dict[Request, int]:
        """Return how many tokens a draft model should guess for requests, at most `most`. Mutates its rest.

        Choose the number of requests, the likeliest first, and the number of passes that give the most tokens for the
        time of the passes and of the step that verifies the guesses. If no choice pays, the draft model rests and costs
        nothing, apart from one guess now and then.
        """
        self._passes_us = 0.0
        if not self.times.least:
            return dict.fromkeys(requests, min(most, FIRST_DEPTH, MAX_STEP_DRAFTS // max(1, len(requests))))
        chances = [self._chance_by(request, MODEL) for request in requests]
        likeliest = sorted(range(len(requests)), key=lambda place: -chances[place])
        count, depth = self._best_passes([chances[place] for place in likeliest], num_running, most)
        chosen = [requests[place] for place in likeliest[:count]]
        if chosen:
            self._model_rest, self._model_rested = REST, 0
        else:
            self._model_rested += 1
        if self._model_rested >= self._model_rest and self._best_passes([HOPE], num_running, most=1)[0]:
            self._model_rested, depth = 0, 1
            self._tried = min(requests, key=lambda request: len(request.tokens))  # the draft model reads least there
            self._rests[self._tried], chosen = 1, [self._tried]
        self._passes_us = depth * self._pass_us(len(chosen))
        return dict.fromkeys(chosen, depth)

    def _best_passes(self, chances: Sequence[float], num_running: int, most: int) -> tuple[int, int]:
        """Return for how many of the first requests how many passes pay most; (0, 0): no passes pay."""
        best, best_rate = (0, 0), num_running / self._step_us(num_running, num_running)
        reached, gained = [1.0] * len(chances), [0.0] * len(chances)
        for depth in range(1, most + 1):
            expected, is_better = float(num_running), False
            for place in range(min(len(chances), MAX_STEP_DRAFTS // depth)):
                reached[place] *= chances[place]
                gained[place] += reached[place]
                expected += gained[place]
                count = place + 1
                step_us = self._step_us(num_running, num_running + count * depth) + depth * self._pass_us(count)
                if expected > best_rate * step_us:
                    best, best_rate, is_better = (count, depth), expected / step_us, True
            if not is_better:
                break
        return best

    def _pass_us(self, num_rows: int) -> float:
        """Return the time of a pass of the draft model; with fewer rows than measured, it shrinks as steps do."""
        least, pass_us = self.pass_times.least, self.pass_times.of(num_rows)
        if not 0 < num_rows < least:
            return pass_us
        return pass_us * self._step_us(num_rows, num_rows) / self._step_us(round(least), round(least))

    def _step_us(self, num_running: int, num_tokens: float) -> float:
        """Return the time of a step of this many requests, whose other tokens are guesses; 0: no step was measured.

        With fewer guesses than were measured, it is interpolated from the step that searches for guesses and has none.
        """
        alone_us = self._plain_us(num_running)
        if self.search_times.has(num_running):
            alone_us = max(alone_us, self.search_times.of(num_running))
        if num_tokens <= num_running:
            return alone_us
        least, with_us = self.times.least, max(alone_us, self.times.of(num_tokens))
        share = (num_tokens - num_running) / (least - num_running) if num_tokens < least else 1.0
        return alone_us + share * (with_us - alone_us)

    def _plain_us(self, num_running: int) -> float:
        """Return the time of a step of this many requests that does not search for guesses; 0: not measured."""
        return self.plain_times.of(num_running) or self.times.of(num_running)

    def searches(self, num_running: int) -> bool:
        """Return whether steps of this many requests search for guesses: that could pay, and does. Does not mutate."""
        return self.could_pay(num_running) and self.trials.is_on(num_running)

    def could_pay(self, num_running: int) -> bool:
        """Return whether guesses could be worth a search in steps of this many requests. Does not mutate.

        They could if a step whose guesses are all right generated `LEAST_GAIN` times as many tokens for its time, and
        as long as no larger step has been measured.
        """
        alone_us = self._plain_us(num_running)
        most = num_running + min(MAX_STEP_DRAFTS, MOST_DRAFTS * num_running)
        sizes = [size for size in self.times.sizes if size > LEAST_GAIN * num_running]
        if not sizes:
            return True
        times = [(size, self._step_us(num_running, size)) for size in sizes if size < most]
        slope = (self._step_us(num_running, sizes[-1]) - alone_us) / (sizes[-1] - num_running)
        times.append((most, alone_us + slope * (most - num_running)))
        return any(alone_us * size >= LEAST_GAIN * num_running * step_us for size, step_us in times)

    def _pays(self, chance: float, expected: float, now: float, then: float) -> bool:
        """Return whether one more guess, right with this chance, gains more for its time than the step does so far."""
        return chance * (now + self._passes_us) >= expected * MARGIN * (then - now)

    def _is_rested(self, request: Request) -> bool:
        left = self._rests.get(request, 1) - 1
        self._rests[request] = left if left > 0 else REST
        return left <= 0

    def foresee(
        self,
        num_requests: int,
        drafts: Sequence[tuple[Request, int]],
        depths: Sequence[int] = (),
        *,
        took_us: int,
        is_search: bool,
    ) -> None:
        """Add a step of `took_us` to the predictions, by what was known before the step. Mutates.

        `depths`: how many tokens the draft model guessed, for each request that it guessed for.
        """
        plain_us = self._plain_us(num_requests)
        if not plain_us:
            return
        expected = float(num_requests)
        for request, count in drafts:
            chance = self._chance(request)
            expected += sum(chance**place for place in range(1, count + 1))
        num_tokens = num_requests + sum(count for _, count in drafts)
        step_us = self._step_us(num_requests, num_tokens) if drafts or is_search else plain_us
        self.foreseen.with_us += step_us + max(depths, default=0) * self._pass_us(len(depths))
        self.foreseen.without_us += plain_us * expected / num_requests
        self.foreseen.taken_us += took_us

    def note_step(self, num_requests: int, num_tokens: int, duration_us: int, *, is_search: bool = False) -> None:
        """Record the time of a step of decodes, with guesses if it has more tokens; 0: not measured. Mutates."""
        if duration_us > 0:
            without_guesses = self.search_times if is_search else self.plain_times
            times = self.times if num_tokens > num_requests else without_guesses
            times.note(num_tokens, float(duration_us))

    def note_plain(self, num_requests: int, num_running: int, duration_us: int) -> None:
        """Record the time of a step that neither searched for guesses nor verified any; 0: not measured. Mutates."""
        if duration_us > 0:
            plain_us = self._plain_us(num_requests)
            self.foreseen.with_us += plain_us
            self.foreseen.without_us += plain_us
            self.foreseen.taken_us += duration_us if plain_us else 0
            self.plain_times.note(num_requests, float(duration_us))
            self.trials.note(num_running, num_brought=0, duration_us=0, plain_us=0, is_search=False)

    def note_search(self, num_running: int, num_brought: int, duration_us: int, *, is_search: bool) -> None:
        """Record the tokens of a step of this many running requests, and its time with its draft passes. Mutates."""
        if duration_us > 0:
            plain_us = self._plain_us(num_running)
            self.trials.note(
                num_running, num_brought=num_brought, duration_us=duration_us, plain_us=plain_us, is_search=is_search
            )

    def note_pass(self, num_rows: int, duration_us: int) -> None:
        """Record the time of a draft model's pass for this many rows; 0: there was none. Mutates."""
        if duration_us > 0:
            self.pass_times.note(num_rows, float(duration_us))

    def note_verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a request's guesses were right; those after the first wrong one do not count. Mutates."""
        guesser, chance = kind_of(request.guesser), self._chance(request)
        for was_right in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            chance += WEIGHT_OF_NEW * (was_right - chance)
            self._first_chances[guesser] += WEIGHT_FOR_OTHERS * (was_right - self._first_chances[guesser])
        if not request.is_finished:  # it may have ended in this step, or while the step was in flight
            self._chances[request, guesser] = chance
            # After a right guess the next one is tried at once, after a wrong one later.
            self._rests[request] = 1 if num_accepted else REST
        if guesser == MODEL and request is self._tried:
            self._model_rest = 1 if num_accepted else min(max(REST, 2 * self._model_rest), LONGEST_REST)
            self._tried = None
        self.num_verified += 1
        self.counts[request.guesser].note(num_drafts, num_accepted)

    def _chance(self, request: Request) -> float:
        """Return how likely the request's current kind of guesses is right."""
        return self._chance_by(request, kind_of(request.guesser))

    def _chance_by(self, request: Request, guesser: str) -> float:
        return self._chances.get((request, guesser), self._first_chances[guesser])

    def forget(self, request: Request) -> None:
        """Forget a request that has ended. Mutates."""
        for kind in FIRST_CHANCES:
            self._chances.pop((request, kind), None)
        self._rests.pop(request, None)
        if request is self._tried:
            self._tried = None


def kind_of(guesser: str) -> str:
    """Return the kind of a proposer's guesses, as chances count them."""
    return MODEL if guesser in OF_MODELS else guesser
