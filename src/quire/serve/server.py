"""The server, from its settings to its shutdown.

    settings checked ──► keys read ──► port taken ──► listening ──► model loads ──► ready ──► drains ──► closed
         exit status 2 if one of these fails              /livez 200, /readyz 503        │ SIGTERM, SIGINT
                                                                                         └─ a second one: at once

The server listens while the model loads, so that a monitor can tell a start from a crash. It also listens while it
drains: new requests are refused with a time to retry, running ones have `drain_timeout_s`, and then the rest end with
an error. uvicorn handles connections; we handle signals, because uvicorn would stop listening at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final, NoReturn

import uvicorn
from starlette.types import ASGIApp

from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.threaded_output import drain_output
from quire.engine.records.stats import ModelState
from quire.serve.app import make_app
from quire.serve.connections import ACCEPTED_AT_ONCE, Handshakes, allow_connections
from quire.serve.frame import NO_ROUTE
from quire.serve.greeting import greeting, kv_memory_hint, use_of
from quire.serve.guard import GuardLimits, guarded
from quire.serve.host_names import is_loopback
from quire.serve.loading.model_set import ModelSet
from quire.serve.services import ServerServices, Services
from quire.serve.stats_line import StatsLine
from quire.serve.tls import make_tls_context

Announce = Callable[[str], None]

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
BACKLOG: Final = 1024
LOOK_EVERY_S: Final = 0.02
LAST_WORDS_S: Final = 5
"""How long clients have to read their answers, after all requests have ended."""

ENDED_BY_FORCE: Final = 1
END_S: Final = 20.0
"""How long shutdown may take after the drain: the last answers, and the end of the engine's process."""

STATS_EVERY_S: Final = 10.0
LOOK_AT_MODEL_S: Final = 0.5
THREAD_TURN_S: Final = 0.0005
"""How long the event loop waits for a thread that works on a text, after each read or write: a tenth of Python's
default, with which a tenant that sends large texts makes the loop wait for most of every second."""

GC_THRESHOLDS: Final = (5_000, 10, 50)
"""A collection of old objects looks at those of all calls while the event loop stands. It comes with 2,500,000 new
objects. With 70,000, as Python has it, there were 11 in a call with 670,000 log-probabilities, of up to 1.2 s."""

logger = logging.getLogger("quire.serve")


def run_server(models: ModelSet, announce: Announce) -> bool:
    """Serve models until a signal; return whether the shutdown was orderly.

    `announce` gets the start-up table, the server's address, and a greeting when it is ready. Raises
    `InvalidConfigError` for wrong settings, before anything is loaded, and `ExecutionError` if the only engine is lost
    for good.
    """
    sys.setswitchinterval(THREAD_TURN_S)
    config = models.server.config
    with closing(listen(config.host, config.port)) as listener:
        server = Server(models, make_app(models), announce, end_at_latest=end_at_latest)
        gc.collect()
        gc.freeze()  # what there is now stays, and no collection needs to look at it again
        gc.set_threshold(*GC_THRESHOLDS)
        asyncio.run(server.run(listener))
    if models.server.traces is not None and not server.was_forced:
        models.server.traces.close()
    return not server.was_forced


class Server:
    """Serves models on a socket. `end_at_latest` sets the time limit of the process when it has to stop."""

    def __init__(
        self,
        models: ModelSet,
        app: ASGIApp,
        announce: Announce,
        *,
        end_at_latest: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._models = models
        self._services = services = models.server
        self._announce = announce
        self._end_at_latest = end_at_latest
        self._failure: Exception | None = None
        self._stopping: asyncio.Task[None] | None = None
        tls = make_tls_context(services.config)
        self._scheme = "http" if tls is None else "https"
        most = allow_connections(services.config.max_connections)
        self._http = _HttpServer(_uvicorn_config(services, app, most), tls, services.config.header_timeout_s, most)
        self.was_forced = False

    async def run(self, listener: socket.socket) -> None:
        """Listen, load, and serve until `stop`; raises the error if the only model cannot be loaded or is lost."""
        with self._signals():  # before the line that says that the server listens
            address = address_of(listener, self._scheme)
            self._introduce(address)
            tasks = [asyncio.create_task(self._load(address)), asyncio.create_task(self._tell())]
            try:
                await self._http.serve(sockets=[listener])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, *filter(None, [self._stopping]), return_exceptions=True)
                await self._models.close()
        if self._failure is not None:
            raise self._failure

    def _introduce(self, address: str) -> None:
        """Show the tables and the address; warn if anyone can use the server."""
        if self._models.loads_first:
            first = self._models.first.model
            self._announce(f"{first.report}{kv_memory_hint(first.config, first.report.plan)}")
        if len(self._models.models) > 1 or self._models.broken:
            self._announce(self._models.table())
        self._announce(f"listening on {address}")
        config = self._services.config
        if not self._services.tenants.has_keys and not is_loopback(config.host):
            logger.warning(
                "anyone who can reach %s can use this server: --api-key requires a key, --allowed-host keeps out web "
                "pages on other host names",
                config.host,
            )

    def stop(self) -> None:
        """Drain, then end; on a second call, end now. Mutates."""
        if self._stopping is None:
            self._end_at_latest(self._services.config.drain_timeout_s + END_S)
            self._stopping = asyncio.create_task(self._drain())
            return
        self.was_forced = True
        self._end_at_latest(END_S)
        self._stopping.cancel()
        for each in self._models.models:
            each.model.kill()  # a step can take long
        self._http.end_now()

    async def _load(self, address: str) -> None:
        clock, models = self._services.clock, self._models
        began_s, first = clock.now(), models.first
        models.start()
        if models.loads_first:
            try:
                await models.load(first)
            except Exception as error:
                if models.is_draining:
                    return  # the load was given up because the server stops
                if len(models.models) == 1:
                    self._failure = error
                    self._end()
                    return
            else:
                if first.model.report.plan.needs.host_bytes is not None:  # on a GPU, loading has measured the memory
                    self._announce(str(first.model.report))
        self._announce(f"ready after {clock.now() - began_s:.2f} s")
        self._announce(self._greeting(address))
        if len(models.models) == 1:
            await self._end_with_model(first)

    def _greeting(self, address: str) -> str:
        model, services = self._models.first.model, self._services
        return greeting(
            address,
            self._models.first.name,
            has_dashboard=services.config.dashboard,
            has_keys=services.tenants.has_keys,
            use=use_of(model.config, has_chat=model.tokenizer is None or model.tokenizer.has_chat_template),
        )

    async def _end_with_model(self, only: Services) -> None:
        """End when the only engine is lost for good: a supervisor can start the server again, which may help."""
        while only.model.state is not ModelState.FAILED:
            await asyncio.sleep(LOOK_AT_MODEL_S)
        self._failure = ExecutionError("the engine could not be restarted; the log has the reason")
        self._end()

    async def _tell(self) -> None:
        """Log the load every `STATS_EVERY_S`."""
        line = StatsLine(self._models)
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            fields = line.take()
            if fields is not None:
                logger.info("lately", extra={"fields": fields})

    def _end(self) -> None:
        """Stop listening, and end the endless streams of /live. Mutates."""
        for each in self._models.models:
            each.live.close()
        self._http.should_exit = True

    async def _drain(self) -> None:
        """Wait for running requests, up to the limit, then end."""
        models, seconds = self._models, self._services.config.drain_timeout_s
        models.drain()
        if models.num_visits:
            have = "request has" if models.num_visits == 1 else "requests have"
            logger.info("stopping: %d running %s %g s to finish", models.num_visits, have, seconds)
        else:
            logger.info("stopping: no request is running")
        try:
            async with asyncio.timeout(seconds):
                while models.num_visits:
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            logger.warning("stopping: ending %d requests that did not finish in time", models.num_visits)
            await models.close()
        self._end()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop the server on signals; only the main thread gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def end_at_latest(seconds: float) -> None:
    """Kill the process after this many seconds, even if its threads hang. Mutates the process."""

    def end() -> None:
        logger.error("stopping: killing the process, which did not end within %g s", seconds)
        end_process(ENDED_BY_FORCE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)  # if even the timer hangs, SIGALRM ends the process


def end_process(status: int) -> NoReturn:
    """End the process without waiting for any thread."""
    logging.shutdown()
    sys.stdout.flush()
    drain_output()
    os._exit(status)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with a time limit for TLS handshakes."""

    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext | None, handshake_timeout_s: float, max_connections: int
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s
        self._max_connections = max_connections

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Many connections can wait in the system's queue, though few are accepted at once. Mutates."""
        handshakes, connections = Handshakes(), self.server_state.connections

        def connection() -> asyncio.Protocol:
            if self._tls is not None:
                handshakes.begin(max(ACCEPTED_AT_ONCE, self._max_connections - len(connections)))
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state={}, _loop=None
            )

        self.servers = []
        for listener in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                connection,
                sock=listener,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
                backlog=self.config.backlog,
            )
            self.servers.append(server)
            listener.listen(BACKLOG)
        self.started = True

    def end_now(self) -> None:
        """End without waiting for clients. Mutates."""
        self.force_exit = self.should_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _uvicorn_config(services: ServerServices, app: ASGIApp, max_connections: int) -> uvicorn.Config:
    config, calls = services.config, services.calls
    limits = GuardLimits.of(config, max_connections, lambda status: calls.note_request(NO_ROUTE, status))
    return uvicorn.Config(
        app,
        interface="asgi3",
        loop="asyncio",
        http=guarded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # a client's address decides nothing here
        server_header=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=math.ceil(config.keep_alive_timeout_s),
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises `InvalidConfigError` if the address or port cannot be used."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        raise InvalidConfigError("host", host, "an address of this machine, or its name") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidConfigError("port", port, "a port that no other program uses; 0: any free port") from None
        if error.errno == errno.EACCES:
            raise InvalidConfigError("port", port, "a port that this user may listen on, such as 8000") from None
        raise InvalidConfigError("host", host, f"an address of this machine ({error.strerror})") from None
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
