"""The end of the demonstration: serves the guide with its dashboard, to a crowd of clients.

This is `quire serve` on a free port, with little memory, so that the memory fills up. It ends with Ctrl-C or after a
given time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import closing

from quire.cli.demo.crowd import crowd
from quire.compute.models.hub import GUIDE
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.serve.app import make_app
from quire.serve.config import ServerConfig
from quire.serve.loading.build import make_model_set
from quire.serve.loading.model_set import ModelSet
from quire.serve.server import Server, address_of, listen

KV_MEMORY = "9MiB"
"""384 blocks of the guide: room for a class, not for a rush."""

MAX_SEQUENCES = 16
LOOK_S = 0.02

Say = Callable[[str], None]


def serve_guide(say: Say, seconds: float | None) -> None:
    """Serve the guide for this many seconds; None: until a signal arrives. Calls `say` with the address when ready."""
    engine = EngineConfig(model=GUIDE, kv_memory=KV_MEMORY, max_num_seqs=MAX_SEQUENCES)
    config = ServerConfig(port=0, access_log=False, drain_timeout_s=0.0)
    models = make_model_set([engine], config, SystemClock())
    logging.getLogger("quire").setLevel(logging.ERROR)  # the demonstration prints its own messages
    with closing(listen(config.host, config.port)) as listener:
        server = Server(models, make_app(models), announce=lambda _: None)
        asyncio.run(_run(server, listener, models, say, seconds))


async def _run(server: Server, listener: socket.socket, models: ModelSet, say: Say, seconds: float | None) -> None:
    guests = asyncio.create_task(_show(server, listener, models, say, seconds))
    try:
        await server.run(listener)
    finally:
        guests.cancel()
        await asyncio.wait([guests])


async def _show(server: Server, listener: socket.socket, models: ModelSet, say: Say, seconds: float | None) -> None:
    """Wait until the server is ready, report its address, and act as its crowd."""
    while not models.first.gate.is_ready:
        await asyncio.sleep(LOOK_S)
    say(address_of(listener))
    host, port = listener.getsockname()[:2]
    try:
        async with asyncio.timeout(seconds):
            await crowd(host, port)
    except TimeoutError:
        server.stop()
