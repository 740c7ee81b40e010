"""A trial: the requests of a log, simulated on an engine with other settings.

Requests arrive at their recorded times, whatever the engine does, and get their recorded answers, so the next turn of a
chat hits its earlier answers. Step times are fitted to the log's own steps. The simulated run is written to a log too,
in an unnamed temporary file, and read like the first log: the same code computes the figures of both.

Each trial replays the log, up to the record that was last when the log was first read. So memory use does not grow with
the length of the log, and all trials of a growing log see the same records.
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
    """The first `limit` requests in the first `num_records` of a log. `progress` shows the progress of a trial."""

    path: str
    num_records: int
    limit: int | None
    progress: ProgressLine

    def requests(self) -> Iterator[OfferedRequest]:
        """Yield the requests in their order, with numbers as ids. Reads the log."""
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
        """Simulate the requests on an engine; `name` names its settings in the progress line."""
        self.progress.begin(f"simulating {name}")
        source = _AnsweredRequests(self.requests())
        with tempfile.TemporaryFile(prefix="quire-report-") as log:
            Simulation([PagedEngine(setup, log=log, outputs=source.outputs)], source).run()
            log.seek(0)
            self.progress.begin(f"reading the run of {name}")
            with self.progress.follow(os.dup(log.fileno())) as file:
                return read_run(file).run


class _AnsweredRequests(OpenLoop):
    """A source that knows the recorded outputs of each running request."""

    def __init__(self, requests: Iterable[OfferedRequest]) -> None:
        super().__init__(requests)
        self.outputs: dict[str, tuple[array[int], ...]] = {}

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        taken = super().take()
        self.outputs[taken.request_id] = taken.outputs
        return taken

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Forget the outputs of a request. Mutates."""
        self.outputs.pop(request_id, None)


def read_run(file: BinaryIO) -> RunReader:
    """Read a log to its end, or up to a torn record; raises `StepLogError` if it has no records."""
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
