"""ShownMemory: the memory of one of several engines, for those who watch.

It is that of the first engine that takes requests. When that engine is gone, it is another one's, which begins again:
frames say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.engine.commands import Watch
from quire.engine.records.live import LiveFrame, ShowLive
from quire.engine.replicas.parts import request_id_of
from quire.engine.replicas.replica import Replica


class ShownMemory:
    """Chooses whose memory is watched, and passes on its frames."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._watched: tuple[float, ShowLive] | None = None  # how often, and the receiver of frames
        self._shown: Replica | None = None

    def watch(self, every_s: float, show: ShowLive) -> None:
        """Call `show` with the events in the memory, at most once per `every_s` seconds. Mutates."""
        self._watched, self._shown = (every_s, show), None
        self.choose()

    def unwatch(self) -> None:
        """Show nothing more. Mutates."""
        if self._shown is not None:
            self._shown.send(Watch(None))
        self._watched = self._shown = None

    def choose(self) -> None:
        """Watch an engine, if one is to be shown and none is. Mutates."""
        if self._watched is not None and self._shown is None:
            self._shown = next((replica for replica in self._replicas if replica.is_ready), None)
            if self._shown is not None:
                self._shown.send(Watch(self._watched[0]))

    def lose(self, replica: Replica) -> None:
        """An engine is gone. Mutates."""
        if replica is self._shown:
            self._shown = None
            self.choose()

    def take(self, replica: Replica, frame: LiveFrame) -> None:
        """Pass a frame on if it is of the engine that is watched; requests have the names that callers know."""
        if replica is self._shown and self._watched is not None:
            self._watched[1](replace(frame, ids=list(map(request_id_of, frame.ids))))
