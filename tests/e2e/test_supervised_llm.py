"""SupervisedLLM: the engine in a process of its own, killed, hung and orphaned."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, EngineConfig, ExecutionError, InvalidConfigError, InvalidRequestError, SamplingParams
from quire.engine import supervised
from quire.engine.messages import Configure, Ready, body_length, frame, message_from_engine
from quire.engine.outputs import RequestDelta
from quire.engine.stats import ModelState
from quire.engine.supervised import SupervisedLLM
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

WANTED = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(n=3, seed=4, max_tokens=9, logprobs=3, prompt_logprobs=2, stop="a", logit_bias={7: 1.5}),
    SamplingParams(n=2, best_of=3, beam_search=True, temperature=0, max_tokens=6),
)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"kv_memory": "2MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen3(
        tmp_path_factory.mktemp("model"),
        settings={"vocab_size": 384, "eos_token_id": 383, "max_position_embeddings": 2000},
    )
    return write_chatml(folder)


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **(SETTINGS | settings))


async def read(llm: SupervisedLLM | AsyncLLM, prompt: Any, sampling: SamplingParams) -> list[RequestDelta]:
    return [delta async for delta in llm.deltas(await llm.prepare(prompt, sampling))]


def outputs_of(deltas: list[RequestDelta]) -> list[Any]:
    """The texts, each whole: how they were cut is a matter of time."""
    parts = [part for delta in deltas for part in delta.outputs]
    return [
        (
            index,
            [token for part in parts if part.index == index for token in part.token_ids],
            "".join(part.text for part in parts if part.index == index),
            [entry for part in parts if part.index == index for entry in part.logprobs or ()],
            [part.finish_reason for part in parts if part.index == index and part.finish_reason],
        )
        for index in sorted({part.index for part in parts})
    ]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(300):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


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
            await until(lambda: there.stats.num_running == 0 and there.stats.num_used_blocks == 0)
            assert there.stats.steps_total > 0
            with pytest.raises(InvalidRequestError, match="max_tokens"):
                await there.prepare("hello", SamplingParams(max_tokens=0))

    run(test)


def test_who_leaves_has_ended_the_request(folder: Path) -> None:
    async def test() -> None:
        async with SupervisedLLM(config(folder)) as llm:
            task = asyncio.create_task(read(llm, "hello", replace(ENDLESS, n=16, max_tokens=1300)))
            await until(lambda: llm.stats.num_used_blocks > 0)
            task.cancel()
            await until(lambda: llm.stats.num_used_blocks == 0)
            assert llm.stats.num_running == 0
            assert llm.stats.steps_total < 1300

    run(test)


def test_an_engine_that_is_killed_is_started_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with SupervisedLLM(config(folder)) as llm:
            expected = await read(llm, "hello", WANTED[0])
            waiting = [asyncio.create_task(read(llm, "hello", ENDLESS)) for _ in range(3)]
            await until(lambda: llm.stats.num_running == 3)
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
            assert llm.stats.restarts_total == 1
            assert outputs_of(await read(llm, "hello", WANTED[0])) == outputs_of(expected)

    run(test)
    assert "it is started again" in caplog.text


def test_an_engine_that_hangs_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "STALLED_S", 0.5)

    async def test() -> None:
        async with SupervisedLLM(config(folder)) as llm:
            task = asyncio.create_task(read(llm, "hello", ENDLESS))
            await until(lambda: llm.stats.num_running == 1)
            assert llm.engine_process_id is not None
            os.kill(llm.engine_process_id, signal.SIGSTOP)
            with pytest.raises(ExecutionError, match="said nothing"):
                await task
            await until(lambda: llm.state is ModelState.READY)

    run(test)


def test_an_engine_that_gives_up_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", "error:tokens=1")  # every step fails, whoever is in it

    async def test() -> None:
        async with SupervisedLLM(config(folder)) as llm:
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


def test_closing_ends_what_is_under_way(folder: Path) -> None:
    async def test() -> None:
        llm = SupervisedLLM(config(folder))
        llm.start()
        await llm.wait_ready()
        task = asyncio.create_task(read(llm, "hello", ENDLESS))
        await until(lambda: llm.stats.num_running == 1)
        process_id = llm.engine_process_id
        await llm.close()
        await llm.close()
        with pytest.raises(ExecutionError, match="closed"):
            await task
        assert process_id is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)

    run(test)


def test_an_orphan_ends_by_itself_and_ignores_signals_of_its_group(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "quire.engine.engine_host", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(300)
        ours.sendall(frame(Configure(config(folder))))
        while not isinstance(_receive(ours), Ready):
            pass
        for ignored in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(ignored)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        ours.close()
        assert process.wait(300) == 0


def test_what_is_no_message_ends_the_engine(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "quire.engine.engine_host", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()
        ours.sendall((3).to_bytes(4, "little") + b"\xc1\xc1\xc1")
        _, complaint = process.communicate(timeout=300)
        assert process.returncode == 1
        assert complaint.startswith(b"quire: error: ")
        assert complaint.count(b"\n") == 1


def _receive(connected: socket.socket) -> object:
    def read_all(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = connected.recv(count - len(data))
            assert piece, "the engine has ended"
            data += piece
        return data

    return message_from_engine(read_all(body_length(read_all(4))))
