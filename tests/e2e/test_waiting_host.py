"""WaitingHost: a process that becomes an engine, or ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import EngineConfig
from quire.engine.process.waiting_host import WaitingHost
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM
from support.waiting import run

CONFIG = EngineConfig(model="guide", kv_memory="1MiB", num_threads=1, skip_tokenizer_init=True)


def children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.fixture
def host() -> Iterator[WaitingHost]:
    before = children()
    host = WaitingHost()
    yield host
    host.close()
    assert children() <= before


async def first_and_second(host: WaitingHost) -> list[int | None]:
    """The processes of a model's first engine and, after that one was killed, of the second."""
    async with SupervisedLLM(CONFIG, replicas=ReplicaSettings(host=host)) as llm:
        first = llm.engine_process_id
        assert first is not None and not host.waits
        os.kill(first, signal.SIGKILL)
        while llm.engine_process_id in (None, first):
            await asyncio.sleep(0.01)
        return [first, llm.engine_process_id]


def test_the_first_engine_is_in_it_and_the_next_in_another(host: WaitingHost) -> None:
    """Ctrl-C reaches it too, but is for the server."""
    [waiting] = children()
    os.kill(waiting, signal.SIGINT)
    os.kill(waiting, signal.SIGTERM)
    assert host.waits
    first, second = run(lambda: first_and_second(host))
    assert first == waiting != second


def test_if_it_dies_first_another_process_is_started(host: WaitingHost) -> None:
    [waiting] = children()
    os.kill(waiting, signal.SIGKILL)
    end = time.monotonic() + 300
    while host.waits and time.monotonic() < end:
        time.sleep(0.01)
    assert waiting not in run(lambda: first_and_second(host))


def test_closed_it_ends(host: WaitingHost) -> None:
    host.close()
    assert not host.waits
    host.close()
