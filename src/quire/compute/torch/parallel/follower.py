"""A follower: a process that loads its shard, executes the leader's frames, and ends when the leader is gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quire.compute.models import read_model
from quire.compute.models.hub import resolve_model
from quire.compute.torch.parallel.frames import (
    Allocate,
    Begin,
    Inbox,
    Measure,
    Measured,
    Moves,
    Prepare,
    Ready,
    Step,
    send_frame,
)
from quire.compute.torch.parallel.group import GONE, RankGroup
from quire.compute.torch.parallel.loading import load_shard
from quire.compute.torch.parallel.ranks import RankModel, RankRunner
from quire.compute.torch.parallel.split import Rank
from quire.core.errors import ExecutorLostError, QuireError

LEAVING_S: Final = 5.0
"""How long a follower may compute after the leader is gone. An exchange on a GPU would wait forever."""


class Follower:
    """Executes the leader's frames with the shard of another rank."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._cache = model.cache
        self._runner: RankRunner | None = None

    def do(self, frame: object) -> Measured | None:
        """Execute a frame; return the answer, if the frame requires one. Mutates."""
        match frame:
            case Measure():
                from quire.compute.torch.cuda_memory import CudaMemory

                return Measured(self._model.measured(CudaMemory(str(self._cache.device))))
            case Allocate(num_blocks, num_host_blocks):
                self._cache.resize(num_blocks, num_host_blocks)
                self._cache.allocate()
                self._runner = self._model.runner(self._model.new_graphs(None))
            case Prepare():
                self._running().prepare(self._cache)
            case Moves():
                self._cache.apply(frame.to_plan())
            case Step():
                self._running().follow(frame.to_inputs(), self._cache)
        return None

    def _running(self) -> RankRunner:
        if self._runner is None:
            raise ExecutorLostError("the leader of tensor_parallel sent a step before it allocated memory")
        return self._runner


def follow(connection: socket.socket, load: Callable[[Begin], RankModel], note_end: Callable[[], None]) -> None:
    """Execute the leader's frames until it is gone. Another thread then calls `note_end` at once."""
    inbox = Inbox(connection, note_end)
    begin = inbox.take()
    if not isinstance(begin, Begin):
        return
    send_frame([connection], Ready())
    follower = Follower(load(begin))
    while (frame := inbox.take()) is not None:
        answer = follower.do(frame)
        if answer is not None:
            send_frame([connection], answer)


def load_follower(begin: Begin) -> RankModel:
    """Join the group, and return the shard of a rank."""
    settings = begin.settings
    group = RankGroup(Rank(begin.rank, settings.tensor_parallel), Path(begin.meeting), settings.device)
    model = read_model(resolve_model(begin.model), settings.max_model_len)
    return RankModel(load_shard(model, settings, group), group, settings, frozenset())


def leave() -> None:
    """End this process in `LEAVING_S` seconds, even if another thread still waits."""
    time.sleep(LEAVING_S)
    os._exit(1)


def main(descriptor: int) -> int:
    """Follow the leader at the other end of an inherited socket; returns the exit status."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            follow(connection, load_follower, leave)
        except OSError:
            pass  # the leader is gone
        except QuireError as error:
            if str(error) != GONE:  # another rank reports the reason, or has ended normally
                print(f"quire: a rank of tensor_parallel has failed: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the leader
        signal.signal(ignored, signal.SIG_IGN)
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # at a normal exit, NCCL may wait for the other ranks
