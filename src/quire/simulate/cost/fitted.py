"""FittedCost: predicts the time of a step by a least-squares fit to measured steps.

    seconds = a · 1 + b · tokens + c · logits + d · tokens read + e · pairs + f · blocks moved

No part of a step takes negative time, so the weights are at least 0 (non-negative least squares). There are only six,
so the fit solves every subset of columns and takes the best solution without a negative weight: exact, and little code.
Errors are relative to the measured time: a step of 3 ms that is predicted as 6 ms is as wrong as one of 300 ms that is
predicted as 600 ms, and there are many more of the former.

A fit of relative errors alone predicts too low: a step that was delayed and took five times as long counts as an error
of only 0.8. So all weights are scaled at the end, until the prediction is right *on average*.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quire.core.errors import InvalidValueError
from quire.core.step import StepPlan
from quire.simulate.cost.features import StepFeatures

NUM_FEATURES = len(StepFeatures._fields)
LEAST_PIVOT = 1e-12


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A measured step."""

    features: StepFeatures
    seconds: float

    def as_json(self) -> str:
        """Return its line for a file of records."""
        return json.dumps({**self.features._asdict(), "seconds": self.seconds})


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Seconds per unit of each feature of a step.

    >>> cost = FittedCost((0.001, 0.0001, 0.0, 0.0, 0.0, 0.0))
    >>> from quire.core.step import column
    >>> cost.step_s(StepPlan(0, column(0), column(0), column(10), column(1)))
    0.002
    """

    weights: tuple[float, ...]

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate."""
        return self.seconds_of(StepFeatures.of(plan))

    def seconds_of(self, features: StepFeatures) -> float:
        """Return the seconds of a step with these features."""
        return sum(weight * count for weight, count in zip(self.weights, features, strict=True))

    @classmethod
    def fit(cls, steps: Sequence[RecordedStep]) -> FittedCost:
        """Return the model with the least relative errors for these steps, scaled to their mean."""
        gram = [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)]
        goal = [0.0] * NUM_FEATURES
        if len(steps) < NUM_FEATURES:
            raise InvalidValueError("recorded steps", len(steps), f"{NUM_FEATURES} or more")
        for step in steps:
            scaled = [count / step.seconds for count in step.features]
            for row, value in enumerate(scaled):
                goal[row] += value
                gram[row] = [known + value * other for known, other in zip(gram[row], scaled, strict=True)]
        least = cls(_least_squares(gram, goal))
        ratios = least.ratios(steps)
        mean = sum(ratios) / len(ratios)
        return cls(tuple(mean * weight for weight in least.weights))

    def ratios(self, steps: Iterable[RecordedStep]) -> array[float]:
        """Return the ratio of measured to fitted time of each step, without steps whose fitted time is 0.

        Does not mutate.
        """
        fitted = ((step.seconds, self.seconds_of(step.features)) for step in steps)
        return array("d", (seconds / expected for seconds, expected in fitted if expected))


def _least_squares(gram: list[list[float]], goal: list[float]) -> tuple[float, ...]:
    """Return the non-negative weights with the least sum of squares."""
    best, most = [0.0] * NUM_FEATURES, 0.0
    for size in range(1, NUM_FEATURES + 1):
        for chosen in itertools.combinations(range(NUM_FEATURES), size):
            found = _solve([[gram[row][column] for column in chosen] for row in chosen], [goal[row] for row in chosen])
            if found is None or min(found) < 0.0:
                continue
            explained = sum(weight * goal[row] for weight, row in zip(found, chosen, strict=True))
            if explained > most * (1 + 1e-9):
                most = explained
                best = [0.0] * NUM_FEATURES
                for weight, row in zip(found, chosen, strict=True):
                    best[row] = weight
    return tuple(best)


def _solve(matrix: list[list[float]], goal: Sequence[float]) -> list[float] | None:
    """Return the solution of a symmetric system; None if it is not unique."""
    size = len(goal)
    scale = [matrix[row][row] ** 0.5 or 1.0 for row in range(size)]
    rows = [
        [matrix[row][column] / scale[row] / scale[column] for column in range(size)] + [goal[row] / scale[row]]
        for row in range(size)
    ]
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        if abs(rows[pivot][place]) < LEAST_PIVOT:
            return None
        rows[place], rows[pivot] = rows[pivot], rows[place]
        for row in range(size):
            if row != place:
                factor = rows[row][place] / rows[place][place]
                rows[row] = [value - factor * other for value, other in zip(rows[row], rows[place], strict=True)]
    return [rows[row][size] / rows[row][row] / scale[row] for row in range(size)]


def read_steps(lines: Iterable[str], name: str) -> Iterator[RecordedStep]:
    """Yield the steps of a file, one JSON object per line; raises `InvalidValueError` that names the line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            fields = json.loads(line)
            features = StepFeatures(*(fields[field] for field in StepFeatures._fields))
            seconds = fields["seconds"]
        except (ValueError, TypeError, KeyError, RecursionError):
            allowed = f"a JSON object with {', '.join(StepFeatures._fields)} and seconds"
            raise InvalidValueError(where, line.strip(), allowed) from None
        numbers = [*features, seconds]
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
            raise InvalidValueError(where, line.strip(), "numbers")
        if not (all(0 <= value < 1e18 for value in numbers) and seconds > 0):
            raise InvalidValueError(where, line.strip(), "numbers of 0 or more, and more than 0 seconds")
        yield RecordedStep(features, float(seconds))
