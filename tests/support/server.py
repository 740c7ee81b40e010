"""A whole server in a thread of the test: a model in this process, behind a real socket on a free port.

A test leaves it in order: no request is under way, every block is back, and the gate is empty.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from openai import OpenAI

from quire import AsyncLLM
from quire.core.adapters import AdapterFacts
from quire.core.clock import SystemClock
from quire.core.request import CacheScope
from quire.engine.commands import AnyCommand
from quire.engine.records.live import ShowLive
from quire.serve.app import make_app
from quire.serve.config import ServerConfig
from quire.serve.model import SupervisedModel
from quire.serve.server import Server, listen
from quire.serve.services import Services
from support.only_model import only_model
from support.server_thread import Answer, in_thread

SETTINGS: Mapping[str, Any] = {"kv_memory": "8MiB", "num_threads": 1}
JSON: Mapping[str, str] = {"content-type": "application/json"}

Result = TypeVar("Result")


class ServedLLM(AsyncLLM):
    """A model in this process, as a server wants it."""

    def start(self) -> None:
        pass

    def send_to(self, replica: int, command: AnyCommand) -> None:
        self.send(command)

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        return 0

    async def load_adapter(self, name: str, find: Callable[[], str]) -> AdapterFacts:  # type: ignore[override]
        return await self._door.adapters.load(name, find, self.send, self.stats)

    def watch(self, every_s: float, show: ShowLive, replica: int = 0) -> None:
        super().watch(every_s, show)

    def unwatch(self, replica: int = 0) -> None:
        super().unwatch()

    async def wait_ready(self) -> None:
        pass

    async def restart(self) -> None:
        pass

    async def opened(self, tenant: str) -> SupervisedModel:
        return self

    async def unload(self) -> None:
        await self.close()


@dataclass
class RunningServer:
    """A server, and ways to ask it."""

    port: int
    services: Services
    llm: ServedLLM
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def client(self, **options: Any) -> Iterator[OpenAI]:
        with OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options)) as client:
            yield client

    def post(self, path: str, fields: Mapping[str, Any]) -> Answer:
        return self.ask("POST", path, json.dumps(fields).encode(), JSON)

    def get(self, path: str) -> Answer:
        return self.ask("GET", path, None, {})

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            connection.request(method, path, body, dict(headers))
            return Answer.of(connection.getresponse())

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function in the event loop of the server."""

        async def called() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(300)

    @property
    def num_under_way(self) -> int:
        """Requests in the engine, and calls within the gate."""
        return len(self.llm.engine.scheduler.requests) + self.call(lambda: self.services.gate.num_visits)

    def wait_until_idle(self, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while self.num_under_way:
            assert time.monotonic() < end, "requests are still under way"
            time.sleep(0.005)

    def check(self) -> None:
        """Fail unless everything is back where it was."""
        self.wait_until_idle()
        self.call(self.services.gate.check)
        self.llm.engine.scheduler.check()
        assert self.llm.engine.scheduler.memory.pool.num_in_use == 0


@contextmanager
def running_server(
    model: Any = "guide",
    settings: Mapping[str, Any] | None = None,
    *,
    send_buffer: int | None = None,
    **config: Any,
) -> Iterator[RunningServer]:
    """A server that has ended when the context is left; nobody may leave it in disorder.

    `send_buffer`: how many bytes the system holds for a client that reads nothing.
    """
    llm = ServedLLM(model, **{**SETTINGS, **(settings or {})})
    # On a busy machine every call may wait long: none is refused because of that.
    defaults = {"port": 0, "drain_timeout_s": 0.0, "access_log": False, "max_wait_s": None}
    server_config = ServerConfig(**(defaults | config))
    models = only_model(llm, server_config, SystemClock())
    listener = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(models, make_app(models), announce=lambda _: None)
    port = listener.getsockname()[1]
    with in_thread(server, listener) as running_thread:
        running = RunningServer(port, models.first, llm, running_thread.loop)
        yield running
        running.check()
