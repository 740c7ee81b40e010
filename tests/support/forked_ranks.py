"""Followers that are forked from a process that has imported torch: starting Python anew takes most of a short test.

They are processes of their own all the same, and run what a follower runs.
"""

from __future__ import annotations

import os
import socket
from multiprocessing import get_context
from subprocess import TimeoutExpired
from typing import Any

MODULE = "quire.compute.torch.parallel.follower"


class ForkedFollower:
    """What `ranks` asks of a follower's process."""

    def __init__(self, connection: socket.socket) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([MODULE])  # of the first follower of this process; forked from ever after
        self._process = context.Process(target=_follow, args=(connection,), daemon=True)
        self._process.start()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; return its exit status."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutExpired(MODULE, timeout_s or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def fork_follower(*arguments: str, pass_fds: list[int], **options: Any) -> ForkedFollower:
    """Fork a follower; in the place of `start_python` of `ranks`."""
    assert arguments[:2] == ("-m", MODULE), arguments
    with socket.socket(fileno=os.dup(pass_fds[0])) as connection:
        return ForkedFollower(connection)


def _follow(connection: socket.socket) -> None:
    from quire.compute.torch.parallel import follower

    os._exit(follower.main(connection.detach()))
