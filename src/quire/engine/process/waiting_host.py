"""WaitingHost: the process of an engine, started before its settings are known.

The server starts it and then imports its own modules and plans, while the process imports what any engine needs. So
this module imports little itself.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.core.python_process import start_python
from quire.engine.process.interrupts import MEANT_FOR_SERVER

if TYPE_CHECKING:
    from quire.engine.process.connection import LocalEngine
    from quire.engine.process.messages import Configure


class WaitingHost:
    """A process that waits for the settings of an engine. `environment`: None for that of this process.

    Raises `OSError` if no process can be started.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        # The process ignores these signals, but only once it has imported its first modules.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_SERVER)
        try:
            arguments = ("-m", "quire.engine.process.engine_host", str(theirs.fileno()))
            self._process = start_python(
                *arguments, environment=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._socket: socket.socket | None = ours

    @property
    def waits(self) -> bool:
        """Whether the process can still become an engine."""
        return self._socket is not None and self._process.poll() is None

    async def engine(self, configure: Configure) -> LocalEngine:
        """Let the process build an engine. Only while it waits. Mutates."""
        import asyncio

        from quire.engine.process.connection import LocalEngine

        connected, self._socket = self._socket, None
        engine = LocalEngine(self._process, *await asyncio.open_connection(sock=connected))
        engine.send(configure)
        return engine

    def close(self) -> None:
        """End the process, unless it has become an engine. Mutates; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._process.kill()
            self._process.wait()
