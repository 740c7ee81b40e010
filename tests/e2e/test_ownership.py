"""`LLM` by two threads, and engines after a fork: refused at once, and never a wait or a wrong text."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from quire import LLM, RequestStateError, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("guide", kv_memory="4MiB", num_threads=1) as llm:
        yield llm


def tokens(llm: LLM, prompt: str, sampling: SamplingParams) -> list[int]:
    return list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)


def num_under_way(llm: LLM) -> int:
    return len(llm.engine.scheduler.requests)


def test_another_thread_is_refused_at_once_and_the_first_gets_its_own_text(llm: LLM) -> None:
    expected = tokens(llm, "A block", LONG)
    found: list[list[int]] = []
    first = threading.Thread(target=lambda: found.append(tokens(llm, "A block", LONG)))
    first.start()
    refusals = 0
    while first.is_alive():
        try:
            tokens(llm, "Another prompt", SHORT)
        except RequestStateError as error:
            refusals += 1
            assert "in use by another thread" in str(error)
    first.join()
    assert found == [expected]
    assert refusals > 10
    assert num_under_way(llm) == 0


@pytest.mark.parametrize("call", ["chat", "stream", "reset_prefix_cache", "close"])
def test_so_is_everything_that_touches_the_engine(llm: LLM, call: str) -> None:
    arguments = {"chat": ([{"role": "user", "content": "hello"}],), "stream": ("hello",)}.get(call, ())
    with llm._turn, pytest.raises(RequestStateError, match="in use by another thread"):
        getattr(llm, call)(*arguments)


def test_calls_between_two_snapshots_are_allowed(llm: LLM) -> None:
    expected = tokens(llm, "A block", SHORT)
    stream = llm.stream("The memory", LONG)
    next(stream)
    assert tokens(llm, "A block", SHORT) == expected
    next(stream)
    stream.close()
    assert num_under_way(llm) == 0


def test_a_stream_that_is_forgotten_within_a_step_is_ended_after_it(llm: LLM) -> None:
    """Python closes a forgotten iterator wherever it finds it: in another thread, or in the middle of a step."""
    stream = llm.stream("The memory", LONG)
    next(stream)
    with llm._turn:
        del stream
        gc.collect()
        assert num_under_way(llm) == 1
    tokens(llm, "A block", SHORT)
    assert num_under_way(llm) == 0


def test_a_stream_that_meets_another_thread_ends(llm: LLM) -> None:
    stream = llm.stream("The memory", LONG)
    next(stream)
    with llm._turn, pytest.raises(RequestStateError):
        next(stream)
    assert list(stream) == []
    tokens(llm, "A block", SHORT)
    assert num_under_way(llm) == 0


# ---- forks ----------------------------------------------------------------------------------------------------------

HEAD = """
import asyncio, gc, os, sys, time
from quire import LLM, AsyncLLM, EngineConfig, Grammar, RequestStateError, SamplingParams
from quire.engine.replicas.supervised import SupervisedLLM

SETTINGS = {"kv_memory": "4MiB", "num_threads": 2}
SAMPLING = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
HELD = SamplingParams(temperature=0, max_tokens=5, grammar=Grammar("regex", "[ab]+"))

def fork(child, leave=sys.exit):  # with all that Python does at its end
    process_id = os.fork()
    if process_id == 0:
        child()
        leave()
    end = time.monotonic() + 300
    while not os.waitpid(process_id, os.WNOHANG)[0]:
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.01)

def refused(call):
    try:
        call()
    except RequestStateError as error:
        assert "forked" in str(error)
        print("refused", flush=True)
"""

OF_LLM = """
llm = LLM("guide", **SETTINGS)
ask = lambda sampling: llm.generate("A block", sampling, use_tqdm=False)[0].outputs[0].token_ids
expected, held = ask(SAMPLING), ask(HELD)
stream = llm.stream("The memory", SAMPLING)
next(stream)

def child():
    global llm, stream
    refused(lambda: ask(SAMPLING))
    refused(lambda: next(stream))
    llm.close()
    llm.close()
    del llm, stream
    gc.collect()

fork(child)
fork(lambda: None)
next(stream)
stream.close()
assert ask(SAMPLING) == expected and ask(HELD) == held
assert ask(SamplingParams(max_tokens=5, grammar=Grammar("regex", "[cd]+")))
llm.close()
print("whole")
"""

OF_ASYNC_LLM = """
async def ask(llm, sampling=SAMPLING):
    return [output async for output in llm.generate("A block", sampling)][-1].outputs[0].token_ids

llm = AsyncLLM("guide", **SETTINGS)
expected = asyncio.run(ask(llm))
asyncio.run(ask(llm, HELD))

def child():
    refused(lambda: asyncio.run(ask(llm)))
    refused(lambda: asyncio.run(ask(llm, HELD)))
    asyncio.run(llm.close())

fork(child)
fork(lambda: None)
assert asyncio.run(ask(llm)) == expected
asyncio.run(llm.close())
print("whole")
"""

OF_SUPERVISED_LLM = """
async def ask(llm):
    deltas = [delta async for delta in llm.deltas(await llm.prepare("A block", SAMPLING))]
    return [token for delta in deltas for part in delta.outputs for token in part.token_ids]

async def main():
    async with SupervisedLLM(EngineConfig(**SETTINGS)) as llm:
        expected, engine = await ask(llm), llm.engine_process_id
        leave = lambda: os._exit(0)  # as multiprocessing does; the event loop of the parent cannot be left in order
        fork(lambda: refused(lambda: asyncio.run(ask(llm))), leave)
        fork(lambda: asyncio.run(llm.close()), leave)
        assert await ask(llm) == expected
        await asyncio.sleep(2)
        assert (llm.engine_process_id, llm.stats().restarts_total) == (engine, 0)

asyncio.run(main())
print("whole")
"""


@pytest.mark.parametrize(
    ("program", "num_refused"),
    [(OF_LLM, 2), (OF_ASYNC_LLM, 2), (OF_SUPERVISED_LLM, 1)],
    ids=["LLM", "AsyncLLM", "SupervisedLLM"],
)
def test_a_forked_process_is_refused_and_leaves_its_parent_whole(program: str, num_refused: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", HEAD + program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
        try:
            said, complaints = process.communicate(timeout=600)
        finally:
            with suppress(ProcessLookupError):  # forked processes hold the pipes, and outlive their parent
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, said) == (0, "refused\n" * num_refused + "whole\n"), complaints
