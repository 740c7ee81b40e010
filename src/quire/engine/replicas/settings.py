"""Settings: how many engines a model has, and whether texts continue when one dies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from quire.engine.process.heartbeat import PATIENCE, Patience

if TYPE_CHECKING:  # a command that only checks settings does not import messages
    from quire.engine.process.connection import StartElsewhere
    from quire.engine.process.waiting_host import WaitingHost
    from quire.engine.records.report import EngineReport
    from quire.engine.replicas.fetches import Courier

CONTINUE_ON: Final = ("same", "any", "never")
LOST_S: Final = 10.0
"""Seconds of silence after which an engine counts as lost, if the model has several."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How many engines a model has, which of them continue the texts of one that died, and their time limits.

    `continue_on`: "same" for engines that compute the same bits, "any", or "never". `start`: starts an engine on
    another machine; None: engines are processes of this machine. `least`: the fewest engines, if their number
    follows the load. `courier`: copies prefixes between engines; None: each computes the blocks that it lacks. `host`:
    a process that was started early, for the first engine; the caller closes it.
    """

    num_replicas: int = 1
    continue_on: str = "same"
    patience: Patience = PATIENCE
    start: StartElsewhere | None = None
    least: int | None = None
    courier: Courier | None = None
    host: WaitingHost | None = None

    @property
    def text(self) -> str:
        """The number of engines, for the start-up table."""
        where = "" if self.start is None else " on a Ray cluster"
        if self.least is None:
            return f"{self.num_replicas}{where}"
        return f"{self.least} to {self.num_replicas}{where}, by load"

    def shown_in(self, report: EngineReport) -> EngineReport:
        """Return the start-up table of an engine, with the number of engines. Pure."""
        return replace(report, replicas=self.text, num_replicas=self.num_replicas)

    @property
    def silence_s(self) -> float | None:
        """Seconds of silence after which an engine counts as lost; None: no limit."""
        limit_s = self.patience.max_silence_s
        return limit_s if limit_s is None or self.num_replicas == 1 else min(limit_s, LOST_S)


ONE_REPLICA: Final = ReplicaSettings()
