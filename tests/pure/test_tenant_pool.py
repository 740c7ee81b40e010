"""The threads that tenants take turns at: no tenant waits behind another one's jobs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from quire.core.errors import ExecutionError, TooManyJobsError
from quire.engine.text.tenant_pool import TenantPool
from support.waiting import until


class Work:
    """Jobs that note when they start and wait for leave to end."""

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.started: list[str] = []

    def job(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.started.append(name)
            assert self.leave.acquire(timeout=20)
            return name

        return work


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.leave.release(1000)


def test_a_tenant_has_one_thread_and_others_have_theirs(work: Work) -> None:
    async def run() -> None:
        pool = TenantPool("test", num_threads=2)
        many = [asyncio.create_task(pool.run("a", work.job(f"a{index}"))) for index in range(6)]
        await until(lambda: work.started == ["a0"])
        small = asyncio.create_task(pool.run("b", lambda: "b at once"))
        assert await small == "b at once"
        assert work.started == ["a0"] and pool.num_waiting == 5
        work.leave.release(6)
        assert await asyncio.gather(*many) == work.started == [f"a{index}" for index in range(6)]
        await until(lambda: not pool.num_running)
        pool.close()

    asyncio.run(run())


def test_a_system_without_threads_for_a_moment_does_not_end_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        pool = TenantPool("test", num_threads=1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start"):
                await pool.run("a", lambda: None)
        assert not pool.num_waiting
        assert await asyncio.wait_for(pool.run("a", lambda: "done"), 20) == "done"
        pool.close()

    asyncio.run(run())


def test_tenants_take_turns_at_one_thread(work: Work) -> None:
    async def run() -> None:
        pool = TenantPool("test", num_threads=1)
        tasks = [asyncio.create_task(pool.run("a", work.job(f"a{index}"))) for index in range(4)]
        await until(lambda: work.started == ["a0"])
        tasks += [asyncio.create_task(pool.run(name[0], work.job(name))) for name in ("b0", "c0", "b1")]
        await until(lambda: pool.num_waiting == 6)
        work.leave.release(7)
        await asyncio.gather(*tasks)
        pool.close()

    asyncio.run(run())
    assert work.started == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_a_job_of_a_caller_who_leaves_is_dropped(work: Work) -> None:
    async def run() -> None:
        pool = TenantPool("test", num_threads=2)
        first = asyncio.create_task(pool.run("a", work.job("running")))
        await until(lambda: work.started == ["running"])
        gone = [asyncio.create_task(pool.run("a", work.job("gone"))) for _ in range(12)]
        last = asyncio.create_task(pool.run("a", lambda: work.started.append("last")))
        await until(lambda: pool.num_waiting == 13)
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        assert pool.num_waiting == 1
        first.cancel()  # it has started, so it goes on, and its tenant has no second thread meanwhile
        await asyncio.sleep(0.05)
        assert pool.num_running == 1 and work.started == ["running"]
        work.leave.release()
        await last
        pool.close()

    asyncio.run(run())
    assert work.started == ["running", "last"]


def test_what_waits_is_bounded_for_each_tenant(work: Work) -> None:
    async def run() -> None:
        pool = TenantPool("test", num_threads=1, max_waiting=2)
        tasks = [asyncio.create_task(pool.run("a", work.job("a")))]
        await until(lambda: len(work.started) == 1)
        tasks += [asyncio.create_task(pool.run("a", work.job("a"))) for _ in range(2)]
        await until(lambda: pool.num_waiting == 2)
        with pytest.raises(TooManyJobsError):
            await pool.run("a", work.job("a"))
        tasks.append(asyncio.create_task(pool.run("b", work.job("b"))))
        work.leave.release(4)
        await asyncio.gather(*tasks)
        pool.close()

    asyncio.run(run())


def test_what_a_job_raises_reaches_its_caller_and_the_thread_goes_on() -> None:
    async def run() -> None:
        pool = TenantPool("test", num_threads=1)
        for error in (ZeroDivisionError, KeyboardInterrupt):

            def fail(error: type[BaseException] = error) -> None:
                raise error

            with pytest.raises(error):
                await pool.run("a", fail)
        assert await pool.run("a", lambda: 7) == 7
        pool.close()

    asyncio.run(run())


def test_a_closed_pool_ends_its_callers(work: Work) -> None:
    async def run() -> None:
        pool = TenantPool("test", num_threads=1)
        tasks = [asyncio.create_task(pool.run("a", work.job("a"))) for _ in range(2)]
        await until(lambda: pool.num_waiting == 1)
        pool.close()
        pool.close()
        with pytest.raises(ExecutionError):
            await tasks[1]
        with pytest.raises(ExecutionError):
            await pool.run("a", lambda: None)
        work.leave.release()
        assert await tasks[0] == "a"

    asyncio.run(run())


def test_a_program_ends_though_a_job_does_not() -> None:
    program = """
import asyncio, time
from quire.engine.text.tenant_pool import TenantPool

async def run():
    task = asyncio.create_task(TenantPool("test", num_threads=1).run("a", lambda: time.sleep(300)))
    await asyncio.sleep(0.1)
    task.cancel()

asyncio.run(run())
"""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert time.monotonic() - started < 100
