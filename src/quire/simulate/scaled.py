"""ScalingPlan: a number of replicas that follows the load, by the product's own rule (`quire.routing.scaling`).

An added replica takes requests after `start_s`, the time to load its model. A removed replica drains as before an
update: its requests that are left after 5 s continue in others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.core.setting_checks import require_int, require_number
from quire.simulate.replica import SimulatedEngine

LOOK_S: Final = 1.0
"""Seconds between two checks of the load, as in a server."""


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """At least `least` of the replicas run at any time; `make_engine` makes the next engine of a removed replica."""

    least: int
    make_engine: Callable[[], SimulatedEngine]
    start_s: float = 30.0

    def require_for(self, num_replicas: int) -> None:
        """Raise `InvalidConfigError` unless there are at least this many replicas."""
        require_int("least replicas", self.least, 1, num_replicas)
        require_number("start time", self.start_s, 0.0, 1e6)
