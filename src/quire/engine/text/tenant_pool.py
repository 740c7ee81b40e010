"""TenantPool: a few threads for work on texts and grammars, shared fairly between tenants.

    tenant a   job job job …  ──► the oldest ─┐
    tenant b   job            ──► the oldest ─┴─► threads, one job of each tenant at a time

A job can occupy a thread for seconds: a text of megabytes, a conversation of thousands of messages, a large grammar. So
a tenant has one thread at a time, its jobs wait only for its own, and a job whose caller has left is dropped before it
starts. A job that has started goes on, because a thread cannot be stopped; until it ends, its tenant gets no other
thread. The threads are daemons: a program that exits does not wait for them.

Rejected: the pool of `asyncio.to_thread`. Other work shares it that must not wait for texts, it is first come, first
served, and the end of the event loop waits for its threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from quire.core.errors import ExecutionError, TooManyJobsError

Result = TypeVar("Result")

CLOSED: Final = "the engine is closed"


class TenantPool:
    """Threads for the jobs of tenants. Safe to use from several threads and event loops.

    Each thread starts when it is first needed. `max_waiting`: the most waiting jobs per tenant; None: no limit.
    """

    def __init__(self, name: str, *, num_threads: int, max_waiting: int | None = None) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, in the order of turns
        self._running: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def num_running(self) -> int:
        """The number of jobs that have started and not ended."""
        with self._changed:
            return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of jobs that have not started."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread of the pool, when it is the tenant's turn, and return its result. Mutates.

        Raises `TooManyJobsError` if too many jobs of the tenant wait. Cancelling the caller removes its job, unless the
        job has started.
        """
        job = _Job(tenant, work)
        self._add(job)
        try:
            result: Result = await asyncio.wrap_future(job.future)
            return result
        finally:
            self._take_back(job)
            del job  # else an error, this frame in its traceback, the job and its future would keep one another

    def close(self) -> None:
        """Drop the waiting jobs, and end each thread after its job. May be called twice. Mutates."""
        with self._changed:
            self._is_closed = True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._changed.notify_all()
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(ExecutionError(CLOSED))

    def _add(self, job: _Job) -> None:
        with self._changed:
            if self._is_closed:
                raise ExecutionError(CLOSED)
            num_waiting = len(self._waiting.get(job.tenant, ()))
            if self._max_waiting is not None and num_waiting >= self._max_waiting:
                raise TooManyJobsError(f"{num_waiting} jobs of this tenant are already waiting")
            if len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()  # it may fail: then the next job tries again, and no job waits for a thread that is not
                self._threads.append(thread)
            self._waiting.setdefault(job.tenant, deque()).append(job)
            self._changed.notify()

    def _take_back(self, job: _Job) -> None:
        """Remove a job that has not started, which frees its place and its text. Mutates."""
        with self._changed:
            jobs = self._waiting.get(job.tenant)
            if jobs and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._waiting[job.tenant]

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running.remove(job.tenant)
                if jobs := self._waiting.pop(job.tenant, None):
                    self._waiting[job.tenant] = jobs  # after the other tenants
                    self._changed.notify()
            del job  # frees its text

    def _next(self) -> _Job | None:
        """Wait for a job of a tenant that has no thread, and take it; return None if the pool is closed. Mutates."""
        with self._changed:
            while not self._is_closed:
                for tenant, jobs in self._waiting.items():
                    if jobs and tenant not in self._running:
                        self._running.add(tenant)
                        return jobs.popleft()
                self._changed.wait()
            return None


class _Job:
    """Work for a tenant, and the future of its result."""

    __slots__ = ("future", "tenant", "work")

    def __init__(self, tenant: str, work: Callable[[], Any]) -> None:
        self.tenant = tenant
        self.work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        """Do the work, unless its caller has left. Mutates."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # any exception goes to the caller
            self.future.set_exception(error)
            del self  # as in `TenantPool.run`
