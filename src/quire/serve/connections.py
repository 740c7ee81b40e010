"""How many connections fit under the limit of open files.

    RLIMIT_NOFILE  =  connections  +  accepted but not yet counted  +  the server's own files

A process at the limit accepts no connection, not even a readiness probe, and cannot restart its engine. So the server
accepts fewer connections than the limit allows, and refuses more with an answer (`guard`). First it raises the limit
as far as the system permits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import sys
from contextlib import suppress
from typing import Any, Final

from quire.core.errors import InvalidConfigError

ACCEPTED_AT_ONCE: Final = 16
UNCOUNTED: Final = 5 * ACCEPTED_AT_ONCE
"""Connections accepted or closed but not yet counted: counting lags by some rounds of the event loop."""
OTHER_FILES: Final = 64
"""The server's own open files: its listener and logs, the engine, the trial of grammars, files being read."""
FEWEST_CONNECTIONS: Final = 16
LONGEST_S: Final = 32_767
"""The longest time before a probe that the system takes."""

logger = logging.getLogger("quire.serve")


def allow_connections(wanted: int) -> int:
    """Raise the limit of open files as far as this many connections need; return how many it allows.

    Mutates the process. Raises `InvalidConfigError` if it allows fewer than `FEWEST_CONNECTIONS`.
    """
    beside = UNCOUNTED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + beside:
        raised = wanted + beside if hard == resource.RLIM_INFINITY else min(wanted + beside, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = connections_within(soft, wanted)
    if allowed < wanted:
        logger.warning("at most %d connections, not %d: the limit of open files is %d", allowed, wanted, soft)
    return allowed


def connections_within(max_files: int, wanted: int) -> int:
    """Return how many of the wanted connections fit under a limit of open files. Pure.

    >>> connections_within(1024, 4096), connections_within(8192, 4096), connections_within(-1, 4096)
    (880, 4096, 4096)
    """
    beside = UNCOUNTED + OTHER_FILES
    if max_files == resource.RLIM_INFINITY or max_files >= wanted + beside:
        return wanted
    if max_files < FEWEST_CONNECTIONS + beside:
        least = f"{FEWEST_CONNECTIONS + beside} or more: ulimit -n 4096"
        raise InvalidConfigError("limit of open files", max_files, least)
    return max_files - beside


def end_with_client(connected: socket.socket | None, seconds: float) -> None:
    """Let the system end a connection whose client has vanished, within this time if data is on its way, else twice it.

    Mutates the socket.
    """
    if sys.platform != "linux" or connected is None:
        return
    whole = min(max(1, math.ceil(seconds)), LONGEST_S)
    with suppress(OSError):  # it has ended already
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * whole)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, whole)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, whole)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Handshakes:
    """TLS handshakes in progress. asyncio makes a connection of each only when it has ended, so nothing else counts it.

    Use it in one event loop.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}  # the oldest first

    def begin(self, most: int) -> None:
        """Count the handshake of the current task; above this number, end the oldest. Mutates.

        asyncio calls the factory of protocols in the task that waits for the handshake.
        """
        task = asyncio.current_task()
        if task is None:
            return
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        while len(self._tasks) > most:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
