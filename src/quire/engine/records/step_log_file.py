"""StepLogFile: the step log of a serving engine, in a new file.

    --step-log run.steplog     run.steplog │ run.steplog.1 │ run.steplog.2 …     one for each start of an engine

An existing file is never changed: an operator who restarts a server after a crash wants the log of the crash, and a
restarted engine begins a new run. The file holds prompts, so only its owner can read it.

Every record is one system write, without a buffer in this process: a killed engine loses no record, and the file ends
within a record only if the machine itself fails. Writing some hundred bytes takes microseconds of a step of
milliseconds. If a record cannot be written (the disk is full), the partial record is cut off, a warning is logged once,
and the engine goes on without a step log.
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
    """A step log with its own file; if a write fails, the log ends and the engine goes on.

    Raises `InvalidConfigError` if it cannot create the file.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._raw = _create(path)
        self._num_bytes = 0  # of complete records
        super().__init__(self._raw, clock)

    def _write(self, data: bytes) -> None:
        if self._raw.closed:
            return
        try:
            if self._raw.write(data) != len(data):
                raise OSError("no room for a complete record")
            self._num_bytes += len(data)
        except OSError as error:
            logger.warning("the step log %s ends here, and the engine goes on: %s", self._raw.name, error)
            with suppress(OSError):
                self._raw.truncate(self._num_bytes)
            self._raw.close()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._raw.close()


def step_log_notices(path: str | None) -> tuple[str, ...]:
    """Return the start-up notice about a log; raises `InvalidConfigError` for a folder, or in an unwritable one."""
    if path is None:
        return ()
    if os.path.isdir(path):
        raise InvalidConfigError("step_log", path, "a file, not a folder")
    if not os.access(os.path.dirname(path) or ".", os.W_OK | os.X_OK):
        raise InvalidConfigError("step_log", path, "a file in a writable folder")
    return (f"logging all prompts and outputs, as token ids, to {path} (or to {path}.1 and so on if it exists)",)


def _create(path: str) -> io.FileIO:
    """Create the file, or the first one with an unused number after its name."""
    number = 0
    while True:
        try:
            return io.FileIO(f"{path}.{number}" if number else path, "x", opener=partial(os.open, mode=0o600))
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InvalidConfigError("step_log", path, f"a file that can be written ({error.strerror})") from None
