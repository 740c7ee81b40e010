"""Engines behind relays, without Ray: calls that overtake one another, torn frames, lost relays and engines."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import EngineConfig, SamplingParams, cli
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.kept_block import FetchError
from quire.core.request import CacheScope
from quire.engine.process.connection import EngineConnection
from quire.engine.process.heartbeat import PATIENCE
from quire.engine.process.messages import Configure
from quire.engine.replicas import fetches
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM
from quire.serve.replicas import relay as relay_module
from quire.serve.replicas.access import address_of, require_reachable, require_token
from quire.serve.replicas.landing import Landed
from quire.serve.replicas.relay import Relay
from quire.serve.replicas.remote_engine import LandingStore, RemoteEngine
from quire.serve.replicas.store_courier import RelayCourier

CONFIG = EngineConfig(model="guide", kv_memory="8MiB", num_threads=1, max_num_seqs=16)
NUM_STREAMS = 8


class OddLink:
    """A relay in this process, whose calls overtake one another and whose frames are torn. Implements `RelayLink`."""

    def __init__(self, seed: int) -> None:
        self.num_ended = 0
        self.relay = Relay("/", self._note_end)
        self.is_lost = False
        self.lent = self.landed = tuple[Any, ...]()  # the last calls
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()

    async def frames(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.05)  # the first calls come before it
        stream = self.relay.frames()
        while True:
            frame = asyncio.ensure_future(anext(stream, b""))
            lost = asyncio.create_task(self._lost.wait())
            await asyncio.wait([frame, lost], return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if self.is_lost:
                frame.cancel()
                raise ExecutionError("its relay is gone: the test has ended it")
            if not await frame:
                return
            data = await frame
            while data:
                length = self._rng.randint(1, len(data))
                yield data[:length]
                data = data[length:]

    def send(self, number: int, data: bytes) -> None:
        self._later(self.relay.send(number, data))

    def _later(self, call: Coroutine[Any, Any, None]) -> None:
        async def make() -> None:
            await asyncio.sleep(self._rng.choice([0.0, 0.001, 0.02]))
            await call

        task = asyncio.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, patience_s: float) -> int:
        status = await self.relay.end(patience_s)
        if self.is_lost:
            raise ExecutionError("its relay is gone: the test has ended it")
        return status

    def lend(self, *blocks: Any) -> object:
        self.lent = blocks
        return asyncio.ensure_future(self.relay.lend(*blocks))

    async def land(self, number: int, lent: Any, store: LandingStore, scope: CacheScope) -> Landed:
        self.landed = store, scope
        return await self.relay.land(number, await lent, store, scope)

    def take_off(self, number: int) -> None:
        self._later(self.relay.take_off(number))

    def kill(self) -> None:
        pass  # it is no process

    def lose(self) -> None:
        """Do as if the process of the relay had been killed."""
        self.is_lost = True
        self._lost.set()

    def _note_end(self) -> None:
        self.num_ended += 1


class Links:
    """Starts engines behind such links, and keeps them all."""

    def __init__(self) -> None:
        self.links: list[OddLink] = []

    async def start(self, configure: Configure) -> EngineConnection:
        self.links.append(OddLink(len(self.links)))
        return RemoteEngine(self.links[-1], configure)

    def engine(self, index: int) -> int:
        process = self.links[index].relay._process
        assert process is not None
        return process.pid

    def status(self, link: OddLink) -> int | None:
        assert link.relay._process is not None
        return link.relay._process.poll()


async def read(llm: SupervisedLLM, number: int, begun: asyncio.Semaphore) -> list[Any]:
    sampling = SamplingParams(max_tokens=200, seed=number, temperature=0.9, ignore_eos=True, frequency_penalty=0.2)
    found: list[Any] = []
    prompt = f"Question {number}: what does a block table do?" * (1 + number % 3)
    async for delta in llm.deltas(await llm.prepare(prompt, sampling)):
        found += [(part.token_ids, part.text, part.finish_reason) for part in delta.outputs]
        begun.release()
    return [
        [token for tokens, _, _ in found for token in tokens],
        "".join(text for _, text, _ in found),
        [end for _, _, end in found if end],
    ]


async def all_ready(llm: SupervisedLLM) -> None:
    while not all(replica.is_ready for replica in llm.replicas.replicas):
        await asyncio.sleep(0.01)


async def texts(llm: SupervisedLLM, trouble: Callable[[SupervisedLLM], Awaitable[None]] | None = None) -> list[Any]:
    await all_ready(llm)
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(read(llm, number, begun)) for number in range(NUM_STREAMS)]
    for _ in streams:
        await begun.acquire()
    if trouble is not None:
        await trouble(llm)
    found = await asyncio.gather(*streams)
    llm.replicas.book.check()
    return found


def test_texts_arrive_whole_when_all_travels_oddly_and_when_engines_and_relays_are_lost() -> None:
    links, failures = Links(), list[str]()

    async def kill(llm: SupervisedLLM) -> None:
        os.kill(links.engine(0), signal.SIGKILL)

    async def lose(llm: SupervisedLLM) -> None:
        links.links[1].lose()
        replica = llm.replicas.replicas[1]
        while replica.is_ready:
            await asyncio.sleep(0.001)
        while "relay" not in replica.failure:
            await asyncio.sleep(0.001)
        failures.append(replica.failure)

    async def test() -> None:
        async with asyncio.timeout(300), SupervisedLLM(CONFIG) as llm:
            calm = await texts(llm)
        settings = ReplicaSettings(2, start=links.start)
        async with asyncio.timeout(300), SupervisedLLM(CONFIG, replicas=settings) as llm:
            assert await texts(llm) == calm
            assert [link.num_ended for link in links.links] == [0, 0]
            assert await texts(llm, kill) == calm
            assert await texts(llm, lose) == calm
            assert failures == ["the engine process: its relay is gone: the test has ended it"]
            await all_ready(llm)

    asyncio.run(test())
    killed, lost, *running = links.links
    assert len(running) == 2
    assert [link.num_ended for link in (killed, *running)] == [1, 1, 1]
    assert (links.status(killed), [links.status(link) for link in running]) == (-signal.SIGKILL, [0, 0])
    assert links.status(lost) is not None


def test_a_prefix_goes_from_relay_to_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links()
    monkeypatch.setattr(fetches.Fetches, "_limit_s", lambda *_: 300.0)
    settings = ReplicaSettings(2, start=links.start, courier=RelayCourier())
    sampling = SamplingParams(max_tokens=6, seed=3, temperature=0.9, ignore_eos=True)

    async def ask(llm: SupervisedLLM, prompt: list[int], index: int) -> list[int]:
        for each in llm.replicas.replicas:
            (llm.replicas.open_to_requests if each.index == index else llm.replicas.close_to_requests)(each)
        parts = [part async for delta in llm.deltas(await llm.prepare(prompt, sampling)) for part in delta.outputs]
        return [token for part in parts for token in part.token_ids]

    async def test() -> None:
        config = replace(CONFIG, disk_cache=str(tmp_path))
        async with asyncio.timeout(300), SupervisedLLM(config, replicas=settings) as llm:
            while not all(replica.is_ready and replica.stats.disk_store for replica in llm.replicas.replicas):
                await asyncio.sleep(0.005)
            for number in range(3):
                prompt = [5 + (number + index * index) % 200 for index in range(200)]
                if number == 2:
                    monkeypatch.setattr(relay_module, "MOST_LENT_BYTES", 1000)
                assert await ask(llm, prompt, 0) == await ask(llm, prompt, 1)
            stats = llm.stats()
            assert (stats.fetches, stats.fetched_blocks_total) == ({"done": 2, "too large": 1}, 24)

            monkeypatch.undo()
            source = next(link for link in links.links if link.lent)
            relay, target = next((link.relay, link.landed) for link in links.links if link.landed)
            bundle = await source.relay.lend(*source.lent)
            landed = await relay.land(98, bundle, *target)
            await relay.take_off(99)
            with pytest.raises(FetchError, match="left"):
                await relay.land(99, bundle, *target)
            assert [str(path) for path in tmp_path.glob("incoming-*")] == [landed.path], "what was taken off is gone"
            await relay.take_off(98)
            with pytest.raises(FetchError, match="damaged"):
                await relay.land(100, bundle[:-1], *target)
        assert not list(tmp_path.glob("incoming-*"))

    asyncio.run(test())


def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    links = Links()

    async def start(configure: Configure) -> EngineConnection:
        return await links.start(replace_model(configure, str(tmp_path / "gone")))

    async def test() -> None:
        async with SupervisedLLM(CONFIG, replicas=ReplicaSettings(1, start=start)):
            pass

    with pytest.raises(ExecutionError, match="gone"):
        asyncio.run(test())


class SilentLink:
    """A relay that says as much as it is told to. Implements `RelayLink`."""

    def __init__(self, frames: list[bytes]) -> None:
        self.patience_s: list[float] = []
        self.num_killed = 0
        self._frames = frames

    async def frames(self) -> AsyncIterator[bytes]:
        for frame in self._frames:
            yield frame
        await asyncio.Event().wait()

    def send(self, number: int, data: bytes) -> None:
        pass

    async def end(self, patience_s: float) -> int:
        self.patience_s.append(patience_s)
        return 0

    def kill(self) -> None:
        self.num_killed += 1


@pytest.mark.parametrize(("frames", "patience_s"), [([], 0.0), ([b"\0"], 12.0)])
def test_a_server_that_stops_waits_for_no_engine_that_has_no_machine(frames: list[bytes], patience_s: float) -> None:
    async def test() -> None:
        link = SilentLink(frames)
        engine = RemoteEngine(link, Configure(CONFIG, PATIENCE, b""))
        await asyncio.sleep(0)  # its frames are read
        assert await engine.end(12.0) == 0
        assert (link.patience_s, link.num_killed) == ([patience_s], 1)

    asyncio.run(test())


def replace_model(configure: Configure, model: str) -> Configure:
    return Configure(replace(configure.config, model=model), configure.patience, configure.hash_key)


def test_an_engine_does_not_get_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.serve.replicas.relay import engine_environment

    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert "secret" not in engine_environment().values()
    assert engine_environment()["CUDA_VISIBLE_DEVICES"] == "3"


# ---- access ---------------------------------------------------------------------------------------------------------


def test_a_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "token"
    environ = {"RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_MODE": "disabled"}
    assert require_token(environ, may_make=True) == str(path)
    assert environ["RAY_AUTH_MODE"] == "token"
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"
    token = path.read_text()
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    require_token(environ, may_make=True)
    assert path.read_text() == token


def test_a_token_of_the_environment_needs_no_file() -> None:
    assert require_token({"RAY_AUTH_TOKEN": "x" * 40}, may_make=False) == "RAY_AUTH_TOKEN"


def test_without_a_token_nobody_joins(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="copy it from the machine where quire cluster start ran"):
        require_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, may_make=False)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 40)
    path.chmod(mode)
    with pytest.raises(InvalidConfigError, match=f"a file that only this user can read: chmod go-rwx {path}"):
        require_token({"RAY_AUTH_TOKEN_PATH": str(path)}, may_make=True)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:70000", "ray://host:10001"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidConfigError, match="HOST:PORT"):
        require_reachable(address)


def test_an_address_where_nobody_listens_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"no cluster at 127\.0\.0\.1:1: Connection refused"):
        require_reachable("127.0.0.1:1")


def test_of_a_cluster_that_is_gone_an_address_may_be_left(tmp_path: Path) -> None:
    environ = {"RAY_TMPDIR": str(tmp_path)}
    assert address_of(environ) == ""
    (tmp_path / "ray").mkdir()
    left = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        left.write_text(address)
        assert address_of(environ) == address_of({"RAY_ADDRESS": address}) == address
        assert address_of(environ | {"RAY_ADDRESS": "local"}) == ""
    assert address_of(environ) == ""
    with pytest.raises(ExecutionError, match=f"no cluster at {address}"):
        address_of(environ | {"RAY_ADDRESS": address})


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "guide", "--replicas", "ray:2"],
        ["cluster", "start"],
        ["cluster", "join", "127.0.0.1:6379"],
        ["cluster", "status"],
    ],
)
def test_without_ray_a_line_says_how_to_install_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(command) == 1
    assert capsys.readouterr().err == "quire: error: engines on a cluster need Ray: pip install 'quire[ray]'\n"
