"""SupervisedLLM: the engine in a process of its own, killed, hung and orphaned."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, EngineConfig, ExecutionError, InvalidConfigError, InvalidRequestError, SamplingParams
from quire.core.clock import SystemClock
from quire.engine.outputs import RequestDelta
from quire.engine.process.engine_host import ORPHANED
from quire.engine.process.heartbeat import QUIET_S, Patience
from quire.engine.process.messages import Configure, Ready, body_length, encode_message, message_from_engine
from quire.engine.records.stats import ModelState
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM
from support.deltas import outputs_of
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml
from support.waiting import run, until

WANTED = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(n=3, seed=4, max_tokens=9, logprobs=3, prompt_logprobs=2, stop="a", logit_bias={7: 1.5}),
    SamplingParams(n=2, best_of=3, beam_search=True, temperature=0, max_tokens=6),
)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"kv_memory": "2MiB", "num_threads": 1}
NEVER = ReplicaSettings(continue_on="never")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen3(
        tmp_path_factory.mktemp("model"),
        settings={"vocab_size": 384, "eos_token_id": 383, "max_position_embeddings": 2000},
    )
    return write_chatml(folder)


class JumpingClock(SystemClock):
    """The time of the machine, some hours later if one likes."""

    jump_s = 0.0

    def now(self) -> float:
        return super().now() + self.jump_s


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **(SETTINGS | settings))


async def read(llm: SupervisedLLM | AsyncLLM, prompt: Any, sampling: SamplingParams) -> list[RequestDelta]:
    return [delta async for delta in llm.deltas(await llm.prepare(prompt, sampling))]


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step take 50 ms longer, so that an endless request lasts as long as a test on a busy machine."""
    monkeypatch.setenv("QUIRE_FAILPOINTS", "sleep0.05:tokens=1")


def test_it_says_what_an_engine_in_this_process_says(folder: Path) -> None:
    prompts = ["hello", [(7 * i) % 120 for i in range(40)], [{"role": "user", "content": "hello"}]]

    async def test() -> None:
        async with AsyncLLM(folder, **SETTINGS) as here, SupervisedLLM(config(folder)) as there:
            assert there.limits == here.limits
            assert there.report.plan.num_blocks == here.report.plan.num_blocks
            for prompt in prompts:
                for wanted in WANTED:
                    expected, found = await read(here, prompt, wanted), await read(there, prompt, wanted)
                    assert outputs_of(found) == outputs_of(expected)
                    assert found[-1].num_cached_tokens == expected[-1].num_cached_tokens
            await until(lambda: there.stats().num_running == 0 and there.stats().num_used_blocks == 0)
            assert there.stats().steps_total > 0
            with pytest.raises(InvalidRequestError, match="max_tokens"):
                await there.prepare("hello", SamplingParams(max_tokens=0))

    run(test)


def test_who_leaves_has_ended_the_request(folder: Path) -> None:
    async def test() -> None:
        async with SupervisedLLM(config(folder)) as llm:
            task = asyncio.create_task(read(llm, "hello", replace(ENDLESS, n=16, max_tokens=1300)))
            await until(lambda: llm.stats().num_used_blocks > 0)
            task.cancel()
            await until(lambda: llm.stats().num_used_blocks == 0)
            assert llm.stats().num_running == 0
            assert llm.stats().steps_total < 1300

    run(test)


@pytest.mark.usefixtures("slow_steps")
def test_an_engine_that_is_killed_is_started_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with SupervisedLLM(config(folder), replicas=NEVER) as llm:
            expected = await read(llm, "hello", WANTED[0])
            waiting = [asyncio.create_task(read(llm, "hello", ENDLESS)) for _ in range(3)]
            await until(lambda: llm.stats().num_running == 3)
            first = llm.engine_process_id
            assert first is not None
            os.kill(first, signal.SIGKILL)
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(result) for result in results] == [ExecutionError] * 3
            assert "status -9" in str(results[0])
            assert llm.state is ModelState.RESTARTING
            with pytest.raises(ExecutionError, match="status -9"):
                await read(llm, "hello", WANTED[0])
            await until(lambda: llm.state is ModelState.READY)
            assert llm.engine_process_id != first
            assert llm.stats().restarts_total == 1
            assert outputs_of(await read(llm, "hello", WANTED[0])) == outputs_of(expected)

    run(test)
    assert "restarting it" in caplog.text


@pytest.mark.usefixtures("slow_steps")
def test_an_engine_that_is_stopped_is_told_apart_and_started_again(folder: Path) -> None:
    async def test() -> None:
        async with SupervisedLLM(
            config(folder), replicas=replace(NEVER, patience=Patience(max_silence_s=QUIET_S + 2))
        ) as llm:
            task = asyncio.create_task(read(llm, "hello", ENDLESS))
            await until(lambda: llm.stats().num_running == 1)
            first = llm.engine_process_id
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            await until(lambda: llm.state is ModelState.UNRESPONSIVE)
            with pytest.raises(ExecutionError, match="silent"):
                await read(llm, "hello", WANTED[0])
            with pytest.raises(ExecutionError, match="max_silence_s"):
                await task
            await until(lambda: llm.state is ModelState.READY)
            assert llm.engine_process_id != first

    run(test)


def test_an_engine_that_was_only_held_goes_on(folder: Path) -> None:
    async def test() -> None:
        async with SupervisedLLM(config(folder)) as llm:
            expected = await read(llm, "hello", WANTED[0])
            first = llm.engine_process_id
            assert first is not None
            os.kill(first, signal.SIGSTOP)  # with nothing under way: an idle engine is watched, too
            await until(lambda: llm.state is ModelState.UNRESPONSIVE)
            os.kill(first, signal.SIGCONT)
            await until(lambda: llm.state is ModelState.READY)
            assert llm.failure == ""
            assert outputs_of(await read(llm, "hello", WANTED[0])) == outputs_of(expected)
            assert (llm.engine_process_id, llm.stats().restarts_total) == (first, 0)

    run(test)


def test_neither_an_idle_hour_nor_a_long_step_is_silence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step takes longer than the engine may be silent, after an hour in which nothing was asked."""
    monkeypatch.setenv("QUIRE_FAILPOINTS", "sleep12:token=77")
    clock = JumpingClock()

    async def test() -> None:
        async with SupervisedLLM(
            config(folder), replicas=ReplicaSettings(patience=Patience(60.0, 8.0)), clock=clock
        ) as llm:
            await asyncio.sleep(1.5)  # a beat or two
            clock.jump_s = 3600.0
            await asyncio.sleep(1.5)
            deltas = await read(llm, [5, 77, 6], WANTED[0])
            assert deltas[-1].finished
            assert llm.stats().restarts_total == 0

    run(test)


def test_a_step_longer_than_the_limit_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", "sleep600:token=77")

    async def test() -> None:
        async with SupervisedLLM(config(folder), replicas=replace(NEVER, patience=Patience(max_step_s=5.0))) as llm:
            with pytest.raises(ExecutionError, match=r"a step took more than 5 s \(max_step_s\)"):
                await read(llm, [5, 77, 6], WANTED[0])
            await until(lambda: llm.state is ModelState.READY)
            assert (await read(llm, [5, 7, 6], WANTED[0]))[-1].finished

    run(test)


def test_an_engine_whose_server_is_silent_ends(folder: Path) -> None:
    """Its connection stays open: another process may hold it."""
    with engine_process(folder, Patience(max_silence_s=2.0)) as (ours, process):
        _receive(ours)
        assert process.wait(300) == ORPHANED


def test_an_engine_that_gives_up_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", "error:tokens=1")  # every step fails, whoever is in it

    async def test() -> None:
        async with SupervisedLLM(config(folder), replicas=NEVER) as llm:
            results = await asyncio.gather(
                *(read(llm, [token], WANTED[0]) for token in range(20)), return_exceptions=True
            )
            lost = [str(result) for result in results if isinstance(result, ExecutionError)]
            assert lost
            assert all("every request fails" in message for message in lost)

    run(test)


def test_what_cannot_be_built_is_said_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="kv_memory"):
        SupervisedLLM(EngineConfig(model=str(folder), kv_memory=1))
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)

    async def test() -> None:
        llm = SupervisedLLM(config(spoilt))
        (spoilt / "model.safetensors").write_bytes(b"")
        llm.start()
        with pytest.raises(ExecutionError, match="safetensors"):
            await llm.wait_ready()
        assert llm.state is ModelState.FAILED
        with pytest.raises(ExecutionError, match="safetensors"):
            await llm.prepare("hello", ENDLESS)
        await llm.close()

    run(test)


@pytest.mark.usefixtures("slow_steps")
def test_closing_ends_what_is_under_way(folder: Path) -> None:
    async def test() -> None:
        llm = SupervisedLLM(config(folder))
        llm.start()
        await llm.wait_ready()
        task = asyncio.create_task(read(llm, "hello", ENDLESS))
        await until(lambda: llm.stats().num_running == 1)
        process_id = llm.engine_process_id
        await llm.close()
        await llm.close()
        with pytest.raises(ExecutionError, match="closed"):
            await task
        assert process_id is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)

    run(test)


def test_a_killed_model_is_not_started_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        llm = SupervisedLLM(config(folder))
        llm.start()
        await llm.wait_ready()
        replica, process_id = llm.replicas.replicas[0], llm.engine_process_id
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)  # as if a step took long
        llm.kill()
        await until(lambda: replica.connection is None)
        await llm.close()
        assert replica.epoch == 1
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)

    run(test)
    assert "restarting" not in caplog.text


@pytest.mark.parametrize("starts", [False, True])
def test_a_closed_model_is_freed_at_once(folder: Path, starts: bool) -> None:
    """A server looks for unreachable objects only now and then."""

    async def test() -> None:
        llm = SupervisedLLM(config(folder))
        if starts:
            async with llm:
                pass
        else:
            await llm.close()
        kept = weakref.ref(llm.tokenizer)
        del llm
        assert kept() is None

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


def test_an_orphan_ends_by_itself_and_ignores_signals_of_its_group(folder: Path) -> None:
    with engine_process(folder, Patience()) as (ours, process):
        for ignored in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(ignored)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        ours.close()
        assert process.wait(300) == 0


def test_what_is_no_message_ends_the_engine(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "quire.engine.process.engine_host", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()
        ours.sendall((3).to_bytes(4, "little") + b"\xc1\xc1\xc1")
        ours.shutdown(socket.SHUT_WR)  # the engine waits for it, up to its limit
        _, complaint = process.communicate(timeout=300)
        assert process.returncode == 1
        assert complaint.startswith(b"quire: error: ")
        assert complaint.count(b"\n") == 1


@contextmanager
def engine_process(folder: Path, patience: Patience) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A process of an engine that is ready, and the server's end of its connection, which sends no beats."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "quire.engine.process.engine_host", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(300)
        ours.sendall(encode_message(Configure(config(folder), patience)))
        while not isinstance(_receive(ours), Ready):
            pass
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()


def _receive(connected: socket.socket) -> object:
    def read_all(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = connected.recv(count - len(data))
            assert piece, "the engine has ended"
            data += piece
        return data

    return message_from_engine(read_all(body_length(read_all(4))))


def test_whoever_is_cancelled_while_it_closes_an_engine_is_told_so(folder: Path) -> None:
    async def run() -> None:
        llm = SupervisedLLM(config(folder))
        llm.start()
        await llm.wait_ready()
        closing = asyncio.create_task(llm.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        await llm.close()
        assert llm.engine_process_id is None

    asyncio.run(run())
