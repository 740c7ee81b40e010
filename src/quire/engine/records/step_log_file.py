"""StepLogFile: the step log of an engine that serves, in a file of its own.

    --step-log run.steplog     run.steplog │ run.steplog.1 │ run.steplog.2 …     one for each engine that was started

An existing file is never touched: an operator who restarts a server after a crash wants the log of the crash, and an
engine that its supervisor starts again begins a run of its own. It holds prompts, so nobody but its owner may read it.

Every record is one write of the system, with no buffer in this process: an engine that is killed has lost nothing, and
the file does not end within a record unless the machine itself went down. A write of some hundred bytes costs
microseconds of a step of milliseconds. When a record cannot be written (the disk is full), the partial record is cut
off, a line says so once, and the engine goes on without a log.
"""

from __future__ import annotations

import io
import logging
import os
from contextlib import suppress
from functools import partial

from quire.core.clock import Clock
from quire.core.errors import InvalidConfigError
from quire.engine.records.step_log import StepLogWriter

logger = logging.getLogger("quire.engine")


class StepLogFile(StepLogWriter):
    """A step log that owns its file, and ends rather than fail. Raises `InvalidConfigError` where there can be none."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._raw = _create(path)
        self._num_bytes = 0  # of whole records
        super().__init__(self._raw, clock)

    def _write(self, data: bytes) -> None:
        if self._raw.closed:
            return
        try:
            if self._raw.write(data) != len(data):
                raise OSError("no room for a complete record")
            self._num_bytes += len(data)
        except OSError as error:
            logger.warning("the step log %s ends here, the engine goes on: %s", self._raw.name, error)
            with suppress(OSError):
                self._raw.truncate(self._num_bytes)
            self._raw.close()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._raw.close()


def step_log_notices(path: str | None) -> tuple[str, ...]:
    """Return what the start-up table says of a log; raises `InvalidConfigError` for a folder that takes no file."""
    if path is None:
        return ()
    if not os.access(os.path.dirname(path) or ".", os.W_OK | os.X_OK):
        raise InvalidConfigError("step_log", path, "a file in a folder that can be written to")
    return (f"logging all prompts and outputs, as token ids, to {path} (or to {path}.1 and so on if it exists)",)


def _create(path: str) -> io.FileIO:
    """Create the file, or the first with a number behind its name that nobody has."""
    number = 0
    while True:
        try:
            return io.FileIO(f"{path}.{number}" if number else path, "x", opener=partial(os.open, mode=0o600))
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InvalidConfigError("step_log", path, f"a file that can be written ({error.strerror})") from None
