"""SearchTrials: decides whether steps search for guesses at all, by trying whether that is faster.

A search costs each request time, whether its guesses are verified or not: a grammar must check them, and a request
waits for the result of its step before it is planned again. The time of one step does not show this cost, so trials
measure it, separately for steps of about equally many requests:

    pause ──► trial: do its tokens take less time than in steps without a search? ──┬─► yes: continue, sometimes a pause
                ▲                                                                   └─► no: rest, longer each time
                └───────────────────────────────────────────────────────────────────────────────┘

In pauses and rests, steps without a search are measured. Times come from results, so a log can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TRIAL: Final = 8
"""Steps of a trial."""
GOOD_TRIALS: Final = 8
"""Successful trials between two pauses."""
PAUSE: Final = 2
"""Steps of a pause: the first may still verify guesses."""
FIRST_REST: Final = 8
"""Steps of a rest after a failed trial; each further failure in a row makes it twice as long."""
LONGEST_REST: Final = 128
LONGEST_EACH: Final = 32
"""The most steps of a rest for each running request: with fewer of them, a search costs less and may gain more."""
LEAST_GAIN: Final = 1.05
"""The speedup that a search must reach, because measurements have errors."""
ODD: Final = 3.0
"""A step that takes more than this multiple of a plain one waited for something else, and counts as this multiple."""
KEPT: Final = 0.7
"""The weight of earlier trials in a new one: trials are short, and right guesses come in bursts."""


@dataclass(slots=True)
class Trial:
    """The recent results of searches in steps of about equally many requests."""

    is_on: bool = False
    steps_left: int = PAUSE
    num_good: int = 0
    rest: int = FIRST_REST
    plain_us: float = 0.0  # the time of the trials' tokens without a search, older trials weighted less
    spent_us: float = 0.0  # the time that they took

    def judge(self, num_running: int) -> None:
        """Choose the next phase, after the last step of this one. Mutates."""
        if not self.is_on:
            self.is_on, self.steps_left = True, TRIAL
        elif self.plain_us < LEAST_GAIN * self.spent_us:
            self.is_on, self.steps_left, self.num_good = False, self.rest, 0
            self.rest = min(2 * self.rest, LONGEST_REST, LONGEST_EACH * num_running)
        else:
            self.rest, self.num_good = FIRST_REST, self.num_good + 1
            self.is_on = self.num_good % GOOD_TRIALS > 0
            self.steps_left = TRIAL if self.is_on else PAUSE
        if self.is_on:
            self.plain_us *= KEPT
            self.spent_us *= KEPT


class SearchTrials:
    """The trials, by the number of binary digits of the number of requests.

    >>> trials = SearchTrials()
    >>> for _ in range(PAUSE):
    ...     trials.note(4, num_brought=4, duration_us=100, plain_us=100.0, is_search=False)
    >>> for _ in range(TRIAL):  # the search takes longer than its guesses save
    ...     trials.note(4, num_brought=5, duration_us=150, plain_us=100.0, is_search=True)
    >>> trials.is_on(4), trials.is_on(1)
    (False, True)
    """

    def __init__(self) -> None:
        self._trials: dict[int, Trial] = {}

    def is_on(self, num_running: int) -> bool:
        """Return whether steps of this many requests search now; they do until one is measured. Does not mutate."""
        trial = self._trials.get(num_running.bit_length())
        return trial is None or trial.is_on

    def note(self, num_running: int, *, num_brought: int, duration_us: float, plain_us: float, is_search: bool) -> None:
        """Record a measured step: the tokens that it generated for all requests together, and its time. Mutates.

        `plain_us`: the time of a step without a search, if known. A step that only waits for masks does not count.
        """
        if is_search and not num_brought:
            return
        trial = self._trials.setdefault(num_running.bit_length(), Trial())
        if is_search:
            trial.plain_us += plain_us * num_brought / num_running
            trial.spent_us += min(duration_us, ODD * plain_us) if plain_us else duration_us
        trial.steps_left -= 1
        if trial.steps_left <= 0:
            trial.judge(num_running)
