"""The cost of the dashboard: the same load on a server without a reader of /live, and with one.

    no reader          requests ──► server ──► engine
    one reader         requests ──► server ──► engine      and GET /live, read as fast as it arrives

The order of the two changes from run to run, and ratios are within each run. The reader is a thread of this process
that only counts lines.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from quire.core.errors import ExecutionError
from quire.instruments.bench.load_run import Target, run_batch
from quire.instruments.bench.measured_server import MeasuredServer
from quire.instruments.bench.offered_load import DrawnShape, drawn_requests
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell
from quire.reporting.samples import ratios, summarize

MIN_RATIO = 0.99
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A run: seconds to the last token of all requests, and the frames and bytes of a reader, if there was one."""

    wall_s: float
    num_frames: int = 0
    num_bytes: int = 0

    @property
    def frames_per_s(self) -> float:
        """Frames per second that the reader got."""
        return self.num_frames / self.wall_s


class LiveReading:
    """Reads `GET /live` of a server within a `with` block, in a separate thread."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.num_frames = 0
        self.num_bytes = 0
        self._begun = threading.Event()

    def __enter__(self) -> LiveReading:
        """Start, and wait for the first line. Raises `ExecutionError` if no line arrives."""
        host = urlsplit(self._target.url)
        self._connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        self._connection.request("GET", "/live", headers=headers)
        answer = self._connection.getresponse()
        if answer.status != http.client.OK:
            raise ExecutionError(f"{self._target.url}/live answered {answer.status}")
        self._thread = threading.Thread(target=self._read, args=(answer,), daemon=True)
        self._thread.start()
        if not self._begun.wait(PATIENCE_S):
            raise ExecutionError(f"{self._target.url}/live sent nothing")
        return self

    def __exit__(self, *_: object) -> None:
        with closing(self._connection):
            if self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(PATIENCE_S)

    def _read(self, answer: http.client.HTTPResponse) -> None:
        with suppress(OSError, http.client.HTTPException):
            while line := answer.readline():
                self.num_bytes += len(line)
                self.num_frames += line.startswith(b'{"type":"frame"')
                self._begun.set()


def measure_live_cost(server: MeasuredServer, options: argparse.Namespace, tell: Tell) -> Section:
    """Measure the throughput at this many streams with and without a reader, in turn."""
    shape = DrawnShape(options.prompt_tokens, options.output_tokens)
    source = drawn_requests(shape, server.vocab_size, options.load_seed)
    _run(server.target, [next(source)])
    runs: list[tuple[Watched, Watched]] = []
    for index in range(options.repeat):
        tell(f"cost of the dashboard: run {index + 1} of {options.repeat}")
        mine, others = ([next(source) for _ in range(options.streams)] for _ in range(2))
        if index % 2:
            watched = _run_watched(server.target, others)
            runs.append((_run(server.target, mine), watched))
        else:
            runs.append((_run(server.target, mine), _run_watched(server.target, others)))
    return _section(runs, options)


def _run(target: Target, requests: list[WorkloadRequest]) -> Watched:
    result = run_batch(target, requests)
    result.require_done()
    return Watched(result.wall_s)


def _run_watched(target: Target, requests: list[WorkloadRequest]) -> Watched:
    with LiveReading(target) as reading:
        wall_s = _run(target, requests).wall_s
        return Watched(wall_s, reading.num_frames, reading.num_bytes)


def _section(runs: Sequence[tuple[Watched, Watched]], options: argparse.Namespace) -> Section:
    num_tokens = options.streams * options.output_tokens
    alone_s, watched_s = [alone.wall_s for alone, _ in runs], [watched.wall_s for _, watched in runs]
    ratio = summarize(ratios(alone_s, watched_s))
    rows = [
        ("nobody watches, tok/s", cell(summarize([num_tokens / seconds for seconds in alone_s]))),
        ("one reader, tok/s", cell(summarize([num_tokens / seconds for seconds in watched_s]))),
        ("one reader to nobody", cell(ratio)),
        ("frames per second", cell(summarize([watched.frames_per_s for _, watched in runs]))),
        ("kB per second", cell(summarize([watched.num_bytes / watched.wall_s / 1e3 for _, watched in runs]))),
    ]
    text = (
        f"{options.streams} requests at once, {options.prompt_tokens} tokens of prompt and {options.output_tokens} of "
        f"output each, streamed, without and with a reader of `/live`. In turn, median of {len(runs)} runs (min–max)."
    )
    goals = [Goal("throughput with one reader to that without", ratio.median, MIN_RATIO, at_least=True)]
    samples: dict[str, object] = {
        "nobody": [asdict(alone) for alone, _ in runs],
        "one reader": [asdict(watched) for _, watched in runs],
    }
    return Section("What watching costs", text, ("what", "value"), rows, samples, goals)
