"""How many connections the limit of open files leaves room for.

    RLIMIT_NOFILE  =  connections  +  those accepted and not counted yet  +  what the server needs itself

A process that may open no more files can accept nothing, not even who asks whether it is ready, and cannot start its
engine again. So connections stop short of the limit, and who comes then is told so (`guard`). The limit is raised first
as far as the system lets us.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from typing import Final

from quire.core.errors import InvalidConfigError

ACCEPTED_AT_ONCE: Final = 16
UNCOUNTED: Final = 5 * ACCEPTED_AT_ONCE
"""Connections that are accepted, or closed, and not counted yet: some rounds of the event loop lie between."""
OTHER_FILES: Final = 64
"""What the server has open itself: its listener and logs, the engine, the trial of grammars, files that are read."""
FEWEST_CONNECTIONS: Final = 16

logger = logging.getLogger("quire.serve")


def allow_connections(wanted: int) -> int:
    """Raise the limit of open files as far as this many connections need; return how many it allows.

    Mutates the process. Raises `InvalidConfigError` where that is too few to serve anybody.
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
    """Return how many of the wanted connections a limit of open files has room for. Pure.

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
