"""A trial: the requests of a log, simulated on an engine with other settings.

They are due when they came, whatever the engine does, and are answered what they were answered: so a chat that repeats
its answers hits them. How long a step takes is what the log's own steps say. The run is written to a log as well, in a
file without a name, and read like the first one: the figures of both are made by the same lines.

The log is replayed for each trial, up to the record that was the last one when it was first read: nothing is held that
grows with its length, and a log that is still being written is the same for all.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from quire.cli.report.recorded import RecordedRun, RunReader
from quire.cli.simulate.progress import ProgressLine
from quire.core.errors import StepLogError
from quire.engine.records.step_log import replayed
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.simulation import Simulation
from quire.simulate.workload.offered import OfferedRequest, OpenLoop
from quire.simulate.workload.step_log import RequestsInLog, up_to_tear


@dataclass(frozen=True, slots=True)
class LoggedTraffic:
    """The requests of a log: of its first `num_records`, at most `limit`. `progress` is told how far a trial is."""

    path: str
    num_records: int
    limit: int | None
    progress: ProgressLine

    def requests(self) -> Iterator[OfferedRequest]:
        """Yield them in their order, named by number. Reads the log."""
        numbered = zip(itertools.count(), self._all(), strict=False)
        for number, request in itertools.islice(numbered, self.limit):
            yield replace(request, request_id=str(number))

    def _all(self) -> Iterator[OfferedRequest]:
        requests = RequestsInLog()
        with self.progress.follow(self.path) as file:
            for record in itertools.islice(replayed(file), self.num_records):
                yield from requests.after(record)
        yield from requests.left()

    def try_on(self, setup: EngineSetup, name: str) -> RecordedRun:
        """Return what becomes of them on an engine of these settings, which have a name."""
        self.progress.begin(f"simulating {name}")
        source = _AnsweredRequests(self.requests())
        with tempfile.TemporaryFile(prefix="quire-report-") as log:
            Simulation([PagedEngine(setup, log=log, outputs=source.outputs)], source).run()
            log.seek(0)
            self.progress.begin(f"reading the run of {name}")
            with self.progress.follow(os.dup(log.fileno())) as file:
                return read_run(file).run


class _AnsweredRequests(OpenLoop):
    """A source that says, of each request under way, what it is to be answered."""

    def __init__(self, requests: Iterable[OfferedRequest]) -> None:
        super().__init__(requests)
        self.outputs: dict[str, tuple[array[int], ...]] = {}

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        taken = super().take()
        self.outputs[taken.request_id] = taken.outputs
        return taken

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Forget what it was to be answered. Mutates."""
        self.outputs.pop(request_id, None)


def read_run(file: BinaryIO) -> RunReader:
    """Read a log to its end, or to where it is torn; raises `StepLogError` for one in which nothing happens."""
    torn: list[str] = []
    records = up_to_tear(replayed(file), torn.append)
    first = next(records, None)
    if first is None:
        raise StepLogError("this log contains no requests")
    reader = RunReader(first)
    for record in itertools.chain([first], records):
        reader.note(record)
    reader.run.torn = "".join(torn)
    return reader
