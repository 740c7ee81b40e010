"""ShownMemory: the memory events of engines, for clients. An engine is watched only while it has a reader.

A restarted engine is watched again; its first frame has `begins` set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.engine.commands import Watch
from quire.engine.records.live import LiveFrame, ShowLive
from quire.engine.replicas.parts import request_id_of
from quire.engine.replicas.replica import Replica


class ShownMemory:
    """Starts and stops the watches of engines, and passes on their frames."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._watched: dict[int, tuple[float, ShowLive]] = {}  # the interval, and the receiver of frames

    def watch(self, index: int, every_s: float, show: ShowLive) -> None:
        """Call `show` with the memory events of an engine, at most once per `every_s` seconds. Mutates."""
        self._watched[index] = every_s, show
        self.begin(self._replicas[index])

    def unwatch(self, index: int) -> None:
        """Stop showing memory events of an engine. Mutates."""
        if self._watched.pop(index, None) is not None:
            self._replicas[index].send(Watch(None))

    def begin(self, replica: Replica) -> None:
        """Start the watch of an engine, if it has a reader and is ready. Mutates."""
        if replica.index in self._watched:
            replica.send(Watch(self._watched[replica.index][0]))

    def take(self, replica: Replica, frame: LiveFrame) -> None:
        """Pass a frame on if its engine is watched, with the request ids that callers know."""
        if replica.index in self._watched:
            self._watched[replica.index][1](replace(frame, ids=list(map(request_id_of, frame.ids))))
