"""Axes: the positions of ticks and the format of numbers. `format.mjs` writes numbers by the same rule."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from quire.reporting.document.content import LOG, Axis

NUM_TICKS = 5
ROUND = (1.0, 2.0, 5.0, 10.0)
FEW_DECADES = 2.5


def show_number(value: float, unit: str = "") -> str:
    """Return a number with at most three digits, or as an integer from a thousand on, with its unit.

    >>> show_number(0.03251, "s"), show_number(1234567.0, "tok/s"), show_number(38.25, "%"), show_number(0.0)
    ('32.5 ms', '1,234,567 tok/s', '38.2 %', '0')
    """
    if unit == "s" and 0 < abs(value) < 0.9995:
        value, unit = 1000 * value, "ms"
    text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Range:
    """The part of an axis that is drawn.

    >>> y_axis = Range.around(Axis("latency", "s", LOG), [0.013, 0.8])
    >>> y_axis.low, y_axis.high, [show_number(tick, "s") for tick in y_axis.ticks()][:3]
    (0.01, 1.0, ['10 ms', '20 ms', '50 ms'])
    >>> round(y_axis.share(0.1), 3)
    0.5
    """

    low: float
    high: float
    scale: str

    @classmethod
    def of(cls, axis: Axis, values: Collection[float]) -> Range:
        """Return the range from the minimum to the maximum, for an x axis."""
        low, high = min(values, default=1.0), max(values, default=2.0)
        return cls(low, high, axis.scale) if low < high else cls.around(axis, values)

    @classmethod
    def around(cls, axis: Axis, values: Collection[float]) -> Range:
        """Return a range for a y axis, which includes 0 if it is linear.

        It begins and ends on a tick, unless there are values on both sides of 0.
        """
        if axis.scale == LOG:
            low, high = _round_down(min(values, default=1.0)), _round_up(max(values, default=10.0))
            return cls(low, high if low < high else 10 * low, LOG)
        low, high = min([0.0, *values]), max([0.0, *values]) or 1.0
        step = _step(high - low)
        return cls(math.floor(low / step) * step, math.ceil(high / step * (1 - 1e-9)) * step, axis.scale)

    def share(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at its beginning, 1 at its end."""
        if self.scale == LOG:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the positions of the ticks: about five round numbers.

        A logarithmic axis that would have at most one tick gets those of a linear axis.

        >>> [show_number(tick) for tick in Range(5.1, 6.0, LOG).ticks()]
        ['5.2', '5.4', '5.6', '5.8', '6']
        """
        ticks = self._log_ticks() if self.scale == LOG else []
        if len(ticks) > 1:
            return ticks
        step = _step(self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        decades = math.log10(self.high / self.low)
        steps = ROUND[:3] if decades <= FEW_DECADES else ROUND[:1]
        stride = max(1, round(decades / NUM_TICKS))
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        found = [step * 10.0**power for power in range(first, last + 1, stride) for step in steps]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def _step(length: float) -> float:
    return _round_up(length / NUM_TICKS)


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in ROUND if step * power >= value * (1 - 1e-9))


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    return next(step * power for step in reversed(ROUND) if step * power <= value * (1 + 1e-9))
