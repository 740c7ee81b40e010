"""How many connections fit under the limit of open files.

    RLIMIT_NOFILE  =  connections  +  accepted but not yet counted  +  the server's own files

A process at the limit accepts no connection, not even a readiness probe, and cannot restart its engine. So the server
accepts fewer connections than the limit allows, and refuses more with an answer (`guard`). First it raises the limit
as far as the system permits.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from typing import Final

from quire.core.errors import InvalidConfigError

ACCEPTED_AT_ONCE: Final = 16
UNCOUNTED: Final = 5 * ACCEPTED_AT_ONCE
"""Connections accepted or closed but not yet counted: counting lags by some rounds of the event loop."""
OTHER_FILES: Final = 64
"""The server's own open files: its listener and logs, the engine, the trial of grammars, files being read."""
FEWEST_CONNECTIONS: Final = 16

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
