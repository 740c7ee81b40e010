"""ModelSet: the models of a server, found by name, loaded for the calls that need them.

    body names a model ── find ──► Services ── stay ──► loaded? ──► Stay: not unloaded until the call ends
                          404                     └──► waits: `Residency` says what is loaded next, one task does it

A server of one model is the same with one entry: it is loaded at once and never unloaded, so no call ever waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from quire.core.byte_sizes import format_bytes
from quire.core.errors import QuireError
from quire.core.validate import MAX_NAME_LENGTH
from quire.engine.records.stats import ModelState
from quire.serve.errors import (
    ApiError,
    draining,
    engine_unavailable,
    model_not_found,
    model_not_loadable,
    model_not_loaded_in_time,
    overloaded,
    too_many_requests,
)
from quire.serve.gate import DRAINING_RETRY_S, ENGINE_RETRY_S, MIN_RETRY_S
from quire.serve.loading.residency import MIN_RESIDENCY_S, Load, Phase, Residency, Unload
from quire.serve.loading.stay import Stay
from quire.serve.model_names import same_model
from quire.serve.services import ServerServices, Services
from quire.serve.tenants import ANYBODY, Tenant

logger = logging.getLogger("quire.serve")

MAX_WAITING: Final = 256
"""Calls that may wait for models to be loaded, unless `max_queued_sequences` is given."""

FAILED_FOR_S: Final = 30.0
"""A model that could not be loaded is tried again after this time, however many ask for it."""

LONGEST_LOOK_S: Final = 3600.0
MAX_REASON: Final = 500
NEAR: Final = 0.5
MAX_NAMES_SHOWN: Final = 5


def names_for(services: Services, tenant: Tenant) -> tuple[str, ...]:
    """Return the names by which a tenant may call a model and its adapters. Does not mutate."""
    return tuple(name for name in (*services.model_names, *services.adapter_names) if tenant.may_call(name))


class _Waiter:
    """A call that waits for a model."""

    __slots__ = ("future", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.future: asyncio.Future[Stay] = asyncio.get_running_loop().create_future()


class ModelSet:
    """The models of a server. Use it in one event loop.

    `broken`: names of models that cannot be served, and why. `loads_first`: the first is loaded when the server starts.
    """

    def __init__(
        self,
        server: ServerServices,
        models: Sequence[Services],
        residency: Residency,
        *,
        broken: Sequence[tuple[str, str]] = (),
        loads_first: bool = True,
    ) -> None:
        self.server = server
        self.models = tuple(models)
        self._residency = residency
        self.broken = tuple(broken)
        self.loads_first = loads_first
        self._by_name = {each.name: each for each in self.models}
        self._waiters: dict[str, deque[_Waiter]] = {name: deque() for name in self._by_name}
        self._failures: dict[str, tuple[float, str]] = {}  # until when, and why
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_draining = False
        self.num_loads = dict.fromkeys(self._by_name, 0)

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def first(self) -> Services:
        """The model of calls that name none."""
        return self.models[0]

    @property
    def loaded(self) -> list[Services]:
        """The models that are loaded."""
        return [each for each in self.models if self._residency.phase(each.name) is Phase.LOADED]

    @property
    def num_visits(self) -> int:
        """Calls that wait for a model, or have come in and not left."""
        return self._residency.num_waiting + sum(each.gate.num_visits for each in self.models)

    @property
    def residency(self) -> Residency:
        """Which models are loaded, and for how long: to read."""
        return self._residency

    def table(self) -> str:
        """Return the models and their memory as the start of a server shows them. Does not mutate."""
        rows = [(each.name, format_bytes(each.model.report.plan.engine_bytes)) for each in self.models]
        rows += [(name, f"cannot be served: {reason}") for name, reason in self.broken]
        width = max(len(name) for name, _ in rows)
        budget = format_bytes(self._residency.budget_bytes)
        head = f"{len(self.models)} models are loaded when they are asked for, within {budget}"
        return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def find(self, name: str | None, tenant: Tenant) -> Services:
        """Return the model that a call of a tenant is for; raises `ApiError` for a name that is none. Does not mutate.

        A call without a name is for the first model; a tenant that may not call that one must give a name.
        """
        asked = self.first.name if name is None else name
        for each in self.models:
            if any(same_model(asked, served) for served in names_for(each, tenant)):
                return each
        for broken, reason in self.broken if tenant.models is None else ():
            if same_model(asked, broken):
                raise model_not_loadable(broken, reason)
        names = [served for each in self.models for served in names_for(each, tenant)]
        # The time of a comparison grows with the name: one in a path or a query may be as long as the head allows.
        near = get_close_matches(asked, names, n=3, cutoff=NEAR) if len(asked) <= MAX_NAME_LENGTH else []
        raise model_not_found(asked, near or names[:MAX_NAMES_SHOWN])

    @staticmethod
    def adapter_of(services: Services, name: str | None) -> str | None:
        """Return the adapter of a model that a call for a name gets; None: the model itself. Does not mutate."""
        return next((each for each in services.adapter_names if name is not None and same_model(name, each)), None)

    def closed(self) -> ApiError | None:
        """Return the answer of a server that can serve no model at the moment; None: it can. Does not mutate."""
        if self.is_draining:
            return draining(DRAINING_RETRY_S)
        if len(self.models) > 1 or self.first.gate.is_ready:
            return None
        return engine_unavailable(ENGINE_RETRY_S)

    def require_place(self, tenant: Tenant) -> None:
        """Raise the answer to a call that no model can take, before its body is read: there the model is named."""
        if len(self.models) == 1:
            self.first.gate.require_place(tenant)
        elif self.is_draining:
            self.first.gate.require_ready()

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def stay(self, services: Services, tenant: Tenant) -> Stay:
        """Return when a model is loaded; it stays until the `Stay` is left. Mutates.

        Raises `ApiError` where it cannot be loaded, not in time, or where too many calls wait.
        """
        self._require_alive(services)
        if self._residency.admits(services.name):
            return self._begin(services.name)
        self._require_room(services, tenant)
        limit_s = self.server.config.max_load_wait_s
        try:
            async with asyncio.timeout(limit_s) as timeout:
                return await self._turn(services.name, tenant)
        except TimeoutError:
            if limit_s is None or not timeout.expired():
                raise
            raise model_not_loaded_in_time(services.name, limit_s, MIN_RESIDENCY_S) from None

    def may_keep(self, tenant: Tenant) -> bool:
        """Return whether a tenant decides how long models stay: of several tenants only an operator. Does not mutate.

        The only model of a server always stays.
        """
        return len(self.models) > 1 and (tenant.is_operator or len(self.server.tenants.each) <= 1)

    def keep(self, services: Services, seconds: float) -> None:
        """Keep a model for this long after its last call, until it is unloaded. Mutates."""
        self._residency.keep(services.name, seconds)
        self._changed.set()

    def unload_when_idle(self, services: Services) -> None:
        """Unload a model, after the calls that are at it; one that is not loaded stays so. Mutates."""
        if self._residency.phase(services.name) in (Phase.LOADED, Phase.LOADING):
            self.keep(services, 0.0)

    def drain(self) -> None:
        """Let no call in any more, and send away those that wait for a model. Mutates."""
        self.is_draining = True
        for each in self.models:
            each.gate.drain()
            self._refuse_all(each.name, draining(DRAINING_RETRY_S))

    # ---- the task ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load and unload models from now on, until `close`. Mutates."""
        self._task = asyncio.create_task(self._run(), name="quire-models")

    async def load(self, services: Services) -> None:
        """Load a model before anyone asks for it; raises what it cannot be loaded for. Mutates."""
        try:
            (await self._turn(services.name, ANYBODY)).leave()
        except ApiError as error:
            raise error.__cause__ or error from None

    async def close(self) -> None:
        """End all requests and all engines. May be called twice. Mutates."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(each.model.close() for each in self.models))

    async def _run(self) -> None:
        while True:
            self._grant()
            match self._residency.next_step():
                case Load(name):
                    await self._load(self._by_name[name])
                case Unload(name):
                    await self._unload(self._by_name[name])
                case None:
                    await self._news()

    async def _news(self) -> None:
        """Return when something has changed, or when time has."""
        look_s = self._residency.next_look_s()
        seconds = LONGEST_LOOK_S if look_s is None else max(look_s - self.server.clock.now(), 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _load(self, services: Services) -> None:
        """Load a model; where that fails, those who wait for it are told. Mutates."""
        name, clock = services.name, self.server.clock
        began_s, model = clock.now(), services.model
        try:
            model.start()
            await model.wait_ready()
        except Exception as error:
            if not isinstance(error, QuireError | OSError):
                logger.exception("loading %s failed", name)
            reason = " ".join(str(error).split())[:MAX_REASON]
            answer = model_not_loadable(name, reason)
            answer.__cause__ = error
            logger.error("%s", answer)
            self._failures[name] = (clock.now() + FAILED_FOR_S, reason)
            self._refuse_all(name, answer)
            self._residency.note_unloaded(name)
        else:
            self.num_loads[name] += 1
            self._residency.note_loaded(name)
            logger.info("loaded %s after %.2f s", name, clock.now() - began_s)

    async def _unload(self, services: Services) -> None:
        await services.model.unload()
        self._residency.note_unloaded(services.name)
        logger.info("unloaded %s", services.name)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    async def _turn(self, name: str, tenant: Tenant) -> Stay:
        """Return when a model admits a call. Mutates."""
        waiter = _Waiter(tenant)
        self._waiters[name].append(waiter)
        self._residency.wait(name, tenant.name)
        self._changed.set()
        try:
            return await waiter.future
        except BaseException:
            self._give_up(name, waiter)
            raise

    def _begin(self, name: str) -> Stay:
        self._residency.begin(name)
        return Stay(lambda: self._end(name))

    def _end(self, name: str) -> None:
        self._residency.end(name)
        self._changed.set()

    def _grant(self) -> None:
        """Let those stay who wait for a model that admits them. Mutates."""
        for name, waiters in self._waiters.items():
            while waiters and self._residency.admits(name):
                waiter = waiters.popleft()
                self._residency.stop_waiting(name, waiter.tenant.name)
                if not waiter.future.done():
                    waiter.future.set_result(self._begin(name))

    def _give_up(self, name: str, waiter: _Waiter) -> None:
        """A call waits no longer; what it was given meanwhile is given back. Mutates."""
        if waiter in self._waiters[name]:
            self._waiters[name].remove(waiter)
            self._residency.stop_waiting(name, waiter.tenant.name)
            self._changed.set()
        elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            waiter.future.result().leave()

    def _refuse_all(self, name: str, answer: ApiError) -> None:
        """Send away all who wait for a model. Mutates."""
        waiters = self._waiters[name]
        while waiters:
            waiter = waiters.popleft()
            self._residency.stop_waiting(name, waiter.tenant.name)
            if not waiter.future.done():
                waiter.future.set_exception(answer)

    def _require_alive(self, services: Services) -> None:
        """Raise the answer where the server ends, or where the model could not be loaded lately. Mutates."""
        if self.is_draining:
            raise draining(DRAINING_RETRY_S)
        until_s, reason = self._failures.get(services.name, (-math.inf, ""))
        if self.server.clock.now() < until_s:
            raise model_not_loadable(services.name, reason)
        if services.model.state is ModelState.FAILED and len(self.models) > 1:
            self._residency.note_lost(services.name)

    def _require_room(self, services: Services, tenant: Tenant) -> None:
        """Raise the answer where too many calls wait: of all, of the tenant, or of its key. Does not mutate."""
        own = self._residency.num_waiting_of(tenant.name)
        if tenant.max_sequences is not None and own >= tenant.max_sequences:
            raise too_many_requests(MIN_RETRY_S)
        most = self.server.config.max_queued_sequences or MAX_WAITING
        # As at the gate, a tenant may have as much as is still free, so that something always is.
        held = own if len(self.server.tenants.each) > 1 else 0
        if own and self._residency.num_waiting + held + 1 > most:
            raise overloaded(MIN_RETRY_S)
