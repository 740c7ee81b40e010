"""A server without an engine: the frame, the guard and the gate over real sockets, with a model that is made up."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import InvalidRequestError
from quire.core.memory_needs import MemoryNeeds
from quire.engine.memory_plan import MemoryPlan
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.text.tenant_pool import TenantPool
from quire.serve.app import make_app
from quire.serve.config import ServerConfig
from quire.serve.read.body import BodyLimits, read_body
from quire.serve.server import Server, listen
from quire.serve.services import Services
from support.only_model import only_model
from support.server_thread import Answer, in_thread

PART = b"a part of a text\n"
NUM_PARTS = 20
PAUSE_S = 0.05
NO_TEXT = "what stands around the endpoints asked the model for text"


class FakeModel:
    """A model that is where a test says it is, and computes nothing."""

    def __init__(self, **settings: Any) -> None:
        self.config = EngineConfig(**settings).resolved()
        self.state = ModelState.STARTING
        self.counts = EngineStats(num_running=2, num_blocks=64, num_used_blocks=16, steps_total=7)
        self.tokenizer = None
        self.adapters: dict[str, Any] = {}
        self.text_pool = TenantPool("text", num_threads=1)
        self.report = _report(self.config)
        self.failure: Exception | None = None
        self.is_slow = False
        self.num_closed = self.num_killed = 0

    @property
    def limits(self) -> Any:
        raise AssertionError(NO_TEXT)

    def stats(self) -> EngineStats:
        return self.counts

    def get_default_sampling_params(self) -> Any:
        raise AssertionError(NO_TEXT)

    async def prepare(self, *_: Any, **__: Any) -> Any:
        raise AssertionError(NO_TEXT)

    def deltas(self, *_: Any) -> Any:
        raise AssertionError(NO_TEXT)

    def start(self) -> None:
        pass

    async def wait_ready(self) -> None:
        while self.is_slow:
            await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        self.state = ModelState.READY

    def kill(self) -> None:
        self.num_killed += 1

    async def close(self) -> None:
        self.state = ModelState.CLOSED
        self.num_closed += 1


def _report(config: EngineConfig) -> EngineReport:
    plan = MemoryPlan(MemoryNeeds(0, 0), 1024, num_blocks=64, num_host_blocks=0, max_model_len=64, num_full_sequences=1)
    return EngineReport(
        model=config.model,
        architecture="None",
        num_layers=0,
        backend="none",
        dtype="float32",
        weights="auto",
        kv_dtype="auto",
        instruction_set="none",
        num_threads=1,
        block_size=config.block_size,
        context_length=64,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        plan=plan,
    )


# ---- endpoints ------------------------------------------------------------------------------------------------------


async def _measure(request: Request) -> Response:
    body = await read_body(request, BodyLimits(request.app.state.models.server.config.max_body_bytes))
    return JSONResponse({"length": len(body)})


async def _stream(request: Request) -> Response:
    """Parts of a text, until there are enough or the engine is closed."""
    services: Services = request.app.state.models.first
    visit = services.gate.enter(request.state.context.tenant, 1, 10)

    async def parts() -> Any:
        with visit:
            for _ in range(NUM_PARTS):
                if services.model.state is ModelState.CLOSED:
                    yield b"cut off\n"
                    return
                yield PART
                visit.begin()
                await asyncio.sleep(PAUSE_S)

    return StreamingResponse(parts())


async def _wait(request: Request) -> Response:
    """A call that waits in the queue for as long as its client stays."""
    with request.app.state.models.first.gate.enter(request.state.context.tenant, 1, 10):
        while (await request.receive())["type"] != "http.disconnect":
            pass
    return Response()


async def _fail(_: Request) -> Response:
    raise ZeroDivisionError("secret")


async def _refuse(_: Request) -> Response:
    raise InvalidRequestError("n", 0, "1 or more")


async def _large(_: Request) -> Response:
    return Response(bytes(16 << 20))


async def _tenant(request: Request) -> Response:
    context = request.state.context
    return JSONResponse({"tenant": context.tenant.name, "request_id": context.request_id})


ROUTES: Sequence[BaseRoute] = (
    Route("/v1/measure", _measure, methods=["POST"]),
    Route("/v1/stream", _stream),
    Route("/v1/wait", _wait),
    Route("/v1/fail", _fail),
    Route("/v1/refuse", _refuse),
    Route("/v1/large", _large),
    Route("/v1/models", _tenant),
)


# ---- the server -----------------------------------------------------------------------------------------------------


@dataclass
class BareServer:
    """A server in a thread of this process."""

    port: int
    services: Services
    model: FakeModel
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    said: list[str]

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, **headers)

    def ask(self, method: str, path: str, body: Any, **headers: str) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            return Answer.of(connection.getresponse())

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=300)) as connection:
            yield connection

    def send(self, data: bytes) -> Answer:
        """Send bytes and read an answer."""
        with self.connected() as connection:
            connection.sendall(data)
            return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    response = http.client.HTTPResponse(connection)
    with closing(response):
        response.begin()
        return Answer.of(response)


@contextmanager
def serving(model: FakeModel | None = None, **settings: Any) -> Iterator[BareServer]:
    """A server on a free port; it has ended when the context is left."""
    model = model or FakeModel()
    config = ServerConfig(**({"port": 0, "drain_timeout_s": 0.0} | settings))
    models = only_model(model, config, SystemClock())
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    said: list[str] = []
    server = Server(models, make_app(models, ROUTES), announce=said.append)
    with in_thread(server, listener) as running:
        yield BareServer(port, models.first, model, server, running.loop, running.thread, said)
