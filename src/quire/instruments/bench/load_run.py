"""LoadRun: sends requests to a server, in an open or a closed loop, and records each result.

    0 ──────────── duration ──────────── duration + patience
      requests start       running requests can end   the rest is cut off: its client disconnects

A failed request has an outcome and raises no exception: overload is part of the measurement.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.errors import ExecutionError
from quire.instruments.bench.offered_load import PATHS, request_body
from quire.instruments.bench.streams import Outcome, StreamReading
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.instruments.http.connection import HttpClient, Reply

MAX_PAUSE_S = 1.0
"""The longest wait of a closed loop's client before it retries, whatever the server requests."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server that requests go to."""

    url: str
    model: str
    endpoint: str
    api_key: str = ""

    def client(self) -> HttpClient:
        """Return a client for this server, for the running event loop."""
        return HttpClient(self.url, headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else None)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The outcomes of a run, in the order in which requests were due, and its costs."""

    outcomes: list[Outcome]
    duration_s: float
    processor_s: float  # processor time of this process, which only sends the load

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last end."""
        return max((outcome.end_s for outcome in self.outcomes), default=0.0)

    def require_done(self, num_tokens: int | None = None) -> None:
        """Raise `ExecutionError` if a request has failed, or does not have this many output tokens."""
        for outcome in self.outcomes:
            if not outcome.is_done:
                raise ExecutionError(f"a request has failed: {outcome.error}")
            if num_tokens not in (None, outcome.num_output_tokens):
                raise ExecutionError(f"the server sent {outcome.num_output_tokens} tokens, not {num_tokens}")


def run_open(
    target: Target, requests: Iterator[WorkloadRequest], arrivals: Sequence[float], duration_s: float, patience_s: float
) -> LoadResult:
    """Send one request at each of the times, whatever the server does."""
    return asyncio.run(LoadRun(target, requests, duration_s).run(arrivals, 0, patience_s))


def run_closed(
    target: Target, requests: Iterator[WorkloadRequest], concurrency: int, duration_s: float, patience_s: float
) -> LoadResult:
    """Keep this many requests running."""
    return asyncio.run(LoadRun(target, requests, duration_s).run((), concurrency, patience_s))


def run_batch(target: Target, requests: Sequence[WorkloadRequest]) -> LoadResult:
    """Send all requests at once and wait for them to end."""
    return run_open(target, iter(requests), [0.0] * len(requests), 0.0, float("inf"))


class LoadRun:
    """One run with one server. Belongs to the event loop that uses it."""

    def __init__(self, target: Target, requests: Iterator[WorkloadRequest], duration_s: float) -> None:
        self._target = target
        self._requests = requests
        self._duration_s = duration_s
        self.outcomes: list[Outcome] = []  # of the requests sent so far

    async def run(self, arrivals: Sequence[float], concurrency: int, patience_s: float) -> LoadResult:
        """Offer the load and return the results. Mutates."""
        self._client = self._target.client()
        bodies = [self._next_request() for _ in arrivals]  # made before the clock runs
        processor_s = time.process_time()
        self._started = time.perf_counter()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._repeat()) for _ in range(concurrency)]
        for due_s, body in zip(arrivals, bodies, strict=True):
            if due_s > self.now():
                await asyncio.sleep(due_s - self.now())
            tasks.append(asyncio.create_task(self._send(due_s, body)))
        await self._wait_for(tasks, patience_s)
        processor_s = time.process_time() - processor_s
        self._client.close()
        return LoadResult(sorted(self.outcomes, key=lambda found: found.due_s), self._duration_s, processor_s)

    async def _wait_for(self, tasks: Sequence[asyncio.Task[Any]], patience_s: float) -> None:
        """Wait until all tasks have ended; after the patience, cancel the rest."""
        if not tasks:
            return
        left_s = self._duration_s + patience_s - self.now()
        _, late = await asyncio.wait(tasks, timeout=None if left_s == float("inf") else max(left_s, 0.0))
        for task in late:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found

    async def _repeat(self) -> None:
        """Send one request after another until the duration is over."""
        while self.now() < self._duration_s:
            reply = await self._send(self.now(), self._next_request())
            if reply is not None and reply.status in (429, 503):
                await asyncio.sleep(min(retry_after_s(reply), MAX_PAUSE_S))

    async def _send(self, due_s: float, request: bytes) -> Reply | None:
        """Send a request and read its answer; None without an answer."""
        outcome = Outcome(due_s, self.now())
        self.outcomes.append(outcome)
        reading = StreamReading(outcome)
        reply = None
        try:
            reply = await self._client.exchange(request, lambda piece: reading.take(piece, self.now()))
            outcome.status = reply.status
            if reply.status != 200:
                outcome.error = error_message(reply)
            elif not reading.is_ended:
                outcome.error = outcome.error or "the stream ended early"
        except asyncio.CancelledError:
            outcome.is_cut_off = True
            raise
        except OSError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            outcome.end_s = self.now()
        return reply

    def _next_request(self) -> bytes:
        body = request_body(next(self._requests), self._target.endpoint, self._target.model)
        return self._client.post_request(PATHS[self._target.endpoint], body)

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._started


def retry_after_s(reply: Reply) -> float:
    """Return the time after which a busy server requests a retry; 0.1 s by default.

    >>> retry_after_s(Reply(503, {"retry-after": "2"})), retry_after_s(Reply(503, {"retry-after-ms": "250"}))
    (2.0, 0.25)
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            told_s = float(reply.headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if 0 <= told_s < float("inf"):
            return told_s
    return 0.1


def error_message(reply: Reply) -> str:
    """Return the error message of a reply.

    >>> error_message(Reply(400, {}, bytearray(b'{"error": {"message": "no"}}')))
    '400: no'
    """
    try:
        return f"{reply.status}: {json.loads(reply.body)['error']['message']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{reply.status}: {bytes(reply.body[:200]).decode(errors='replace')}"
