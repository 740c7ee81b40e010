"""Cluster: the machines that Ray connects, and the relays on them.

    RAY_ADDRESS ─► that cluster     quire cluster start ─► this machine's cluster     neither ─► a new one, here

Ray finds a machine for each relay, starts the relay and reports its end. It carries calls with bytes, and one stream of
bytes back. It restarts nothing, does not see requests, and shows no dashboard. It reads the environment when it is
imported, so each function here imports it after the environment is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from quire.core.errors import ExecutionError
from quire.core.kept_block import FetchError
from quire.core.request import CacheScope
from quire.engine.process.connection import EngineConnection, StartElsewhere
from quire.engine.process.messages import Configure
from quire.engine.replicas.fetches import FAILED
from quire.serve.replicas.access import HERE, address_of, require_ray, require_token
from quire.serve.replicas.landing import Landed
from quire.serve.replicas.relay import Relay
from quire.serve.replicas.remote_engine import LandingStore, RemoteEngine

logger = logging.getLogger("quire.engine")

LINGER_S: Final = 60.0
"""How long a relay outlives its engine, so that the server can read the last frames."""
PLACED_S: Final = 30.0
NO_ROOM: Final = "an engine has waited %g s for a machine of the cluster with enough room; see quire cluster status"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of a cluster, with the resources that Ray can assign there."""

    address: str
    num_cpus: int
    num_gpus: int
    memory_bytes: int


class Cluster:
    """The cluster that this process is connected to. A process has one cluster until it ends."""

    def __init__(self, machines: list[Machine]) -> None:
        self.machines = machines

    @classmethod
    def connect(cls, *, may_start: bool = True) -> Cluster:
        """Connect to the cluster of RAY_ADDRESS or of this machine, else start a cluster; raises `ExecutionError`.

        `may_start` False: start no cluster.
        """
        require_ray()
        address = address_of(os.environ)
        if not address and not may_start:
            raise ExecutionError("no cluster on this machine; see quire cluster start")
        token = require_token(os.environ, may_make=not address)
        import ray

        try:
            with _without_stderr():
                ray.init(
                    address=address or HERE,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            nodes = [node for node in ray.nodes() if node["Alive"]]
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError, AssertionError) as error:
            where = address or "this machine"
            raise ExecutionError(
                f"no cluster at {where} accepts the token in {token}: {_in_one_line(error)}"
            ) from error
        return cls([_machine(node) for node in nodes])

    def num_per_machine(self, num_replicas: int) -> int:
        """Return how many engines each machine must hold if all hold the same number. Does not mutate."""
        able = [each for each in self.machines if each.num_cpus]
        return -(-num_replicas // max(1, len(able)))

    def engines(self, num_cpus: int, num_gpus: int) -> StartElsewhere:
        """Return a function that starts engines, each on a machine with these free resources. Does not mutate."""
        import ray

        actor = ray.remote(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=-1,  # else a relay that was sent to a dying machine would never start
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )(Relay)
        return partial(_start, actor, os.getcwd())


async def _start(actor: Any, folder: str, configure: Configure) -> EngineConnection:
    return RemoteEngine(RayLink(actor.remote(folder, leave_later)), configure)


class RayLink:
    """The link to a relay that is a Ray actor. Implements `RelayLink`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def frames(self) -> AsyncIterator[bytes]:
        """Start the relay's engine, and yield its output; raises `ExecutionError` when the relay is gone."""
        from ray.exceptions import RayError

        notice = asyncio.get_running_loop().call_later(PLACED_S, logger.warning, NO_ROOM, PLACED_S)
        try:
            async for reference in self._actor.frames.options(num_returns="streaming").remote():
                notice.cancel()
                yield await reference
        except RayError as error:
            raise ExecutionError(f"its relay is gone: {_in_one_line(error)}") from error
        finally:
            notice.cancel()

    def send(self, number: int, data: bytes) -> None:
        """Send bytes; if the relay is gone, they are lost."""
        self._actor.send.options(num_returns=0).remote(number, data)

    async def end(self, patience_s: float) -> int:
        """End the relay's engine; return its exit status. Raises `ExecutionError` if the relay is gone."""
        from ray.exceptions import RayError

        try:
            return int(await self._actor.end.remote(patience_s))
        except RayError as error:
            raise ExecutionError(f"its relay is gone: {_in_one_line(error)}") from error

    def lend(self, store: str, slots: tuple[int, ...], tokens: bytes, scope: CacheScope) -> object:
        """Make the relay read blocks; return a reference to their bundle in Ray's object store."""
        return self._actor.lend.remote(store, slots, tokens, scope)

    async def land(self, number: int, lent: object, store: LandingStore, scope: CacheScope) -> Landed:
        """Make the relay write a lent bundle next to a store of its machine; raises `FetchError`, `ExecutionError`."""
        from ray.exceptions import RayError, RayTaskError

        try:
            landed: Landed = await self._actor.land.remote(number, lent, store, scope)
        except RayTaskError as error:
            raise FetchError(error.cause.reason if isinstance(error.cause, FetchError) else FAILED) from error
        except RayError as error:
            raise ExecutionError(f"its relay is gone: {_in_one_line(error)}") from error
        return landed

    def take_off(self, number: int) -> None:
        """Make the relay delete the bundle of a number, even if it lands later."""
        self._actor.take_off.options(num_returns=0).remote(number)

    def kill(self) -> None:
        """Kill the relay."""
        import ray

        ray.kill(self._actor)


def leave_later() -> None:
    """End this process, a relay, after its server has had time to read the last frames."""
    timer = threading.Timer(LINGER_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop the stderr of Ray's native code: a line for each second of refused connections. Mutates stderr."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _machine(node: dict[str, Any]) -> Machine:
    has = node["Resources"]
    return Machine(
        node["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0)), int(has.get("memory", 0))
    )


def _in_one_line(error: Exception) -> str:
    """Return the first sentence of Ray's error, which may be pages long."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
