"""ModelSet: the models of a server, found by name and loaded for the calls that need them.

    body names a model ── find ──► Services ── stay ──► loaded? ──► Stay: not unloaded until the call ends
                          404                     └──► waits: `Residency` decides what to load next, one task loads it

A server with one model has a set of one entry: it is loaded at once and never unloaded, so no call ever waits here.
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
from quire.serve.gate import MIN_RETRY_S
from quire.serve.loading.residency import MIN_RESIDENCY_S, Load, Phase, Residency, Unload
from quire.serve.loading.stay import Stay
from quire.serve.model_names import same_model
from quire.serve.services import ServerServices, Services
from quire.serve.tenants import ANYBODY, Tenant

logger = logging.getLogger("quire.serve")

MAX_WAITING: Final = 256
"""Calls that may wait for models to be loaded, unless `max_queued_sequences` is set."""

FAILED_FOR_S: Final = 30.0
"""A model that could not be loaded is not tried again before this time, however many calls need it."""

LONGEST_LOOK_S: Final = 3600.0
MAX_REASON: Final = 500
NEAR: Final = 0.5
MAX_NAMES_SHOWN: Final = 5


def names_for(services: Services, tenant: Tenant) -> tuple[str, ...]:
    """Return the names of a model and its adapters that a tenant may call. Does not mutate."""
    return tuple(name for name in (*services.model_names, *services.adapter_names) if tenant.may_call(name))


class _Waiter:
    """A call that waits for a model."""

    __slots__ = ("future", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.future: asyncio.Future[Stay] = asyncio.get_running_loop().create_future()


class ModelSet:
    """The models of a server. Use it in one event loop.

    `broken`: names of models that cannot be served, with reasons. `loads_first`: load the first when the server starts.
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
        self.residency = residency
        self.broken = tuple(broken)
        self.loads_first = loads_first
        self._by_name = {each.name: each for each in self.models}
        self._waiters: dict[str, deque[_Waiter]] = {name: deque() for name in self._by_name}
        self._failures: dict[str, tuple[float, str]] = {}  # until when, and why
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_draining = False
        self.num_loads = dict.fromkeys(self._by_name, 0)

    # ---- models -----------------------------------------------------------------------------------------------------

    @property
    def first(self) -> Services:
        """The model for calls that name no model."""
        return self.models[0]

    @property
    def loaded(self) -> list[Services]:
        """The loaded models."""
        return [each for each in self.models if self.residency.phase(each.name) is Phase.LOADED]

    @property
    def num_visits(self) -> int:
        """Calls that wait for a model, or are inside a gate."""
        return self.residency.num_waiting + sum(each.gate.num_visits for each in self.models)

    def table(self) -> str:
        """Return the table of models and their memory that a server prints at its start. Does not mutate."""
        rows = [(each.name, format_bytes(each.model.report.plan.engine_bytes)) for each in self.models]
        rows += [(name, f"cannot be served: {reason}") for name, reason in self.broken]
        width = max(len(name) for name, _ in rows)
        budget = format_bytes(self.residency.budget_bytes)
        head = f"{len(self.models)} models, loaded on demand within {budget}"
        return "\n".join([head, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def find(self, name: str | None, tenant: Tenant) -> Services:
        """Return the model for a tenant's call; raises `ApiError` for an unknown name. Does not mutate.

        A call without a name is for the first model; a tenant that may not call the first model must give a name.
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
        """Return the adapter that a name refers to, or None for the model itself. Does not mutate."""
        return next((each for each in services.adapter_names if name is not None and same_model(name, each)), None)

    def is_taken(self, services: Services, name: str) -> bool:
        """Return whether an adapter of a model could take calls from another model or adapter. Does not mutate.

        A name may be loaded again, because that of the same adapter is no change.
        """
        own = {name} & {*services.adapter_names}
        others = [each for served in self.models for each in (*served.model_names, *served.adapter_names)]
        return any(same_model(name, each) for each in others if each not in own)

    def closed(self) -> ApiError | None:
        """Return the error answer if the server can serve no model at the moment, else None. Does not mutate."""
        if self.is_draining:
            return draining()
        if len(self.models) > 1 or self.first.gate.is_ready:
            return None
        return engine_unavailable()

    def require_place(self, tenant: Tenant) -> None:
        """Refuse a call that no model can take, before its body is read, which names the model."""
        if len(self.models) == 1:
            self.first.gate.require_place(tenant)
        elif self.is_draining:
            self.first.gate.require_ready()

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def stay(self, services: Services, tenant: Tenant) -> Stay:
        """Wait until a model is loaded; it stays loaded until the `Stay` is left. Mutates.

        Raises `ApiError` if it cannot be loaded, or not in time, or if too many calls wait.
        """
        self._require_alive(services)
        if self.residency.admits(services.name):
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
        """Return whether a tenant may decide how long models stay: an operator, or the only tenant. Does not mutate.

        The only model of a server always stays.
        """
        return len(self.models) > 1 and (tenant.is_operator or len(self.server.tenants.each) <= 1)

    def keep(self, services: Services, seconds: float) -> None:
        """Set how long a model stays after its last call; holds until it is unloaded. Mutates."""
        self.residency.keep(services.name, seconds)
        self._changed.set()

    def unload_when_idle(self, services: Services) -> None:
        """Unload a model after its running calls; no effect if it is not loaded. Mutates."""
        if self.residency.phase(services.name) in (Phase.LOADED, Phase.LOADING):
            self.keep(services, 0.0)

    def drain(self) -> None:
        """Admit no more calls, and refuse those that wait for a model. Mutates."""
        self.is_draining = True
        for each in self.models:
            each.gate.drain()
            self._refuse_all(each.name, draining())

    # ---- the task ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load and unload models from now on, until `close`. Mutates."""
        self._task = asyncio.create_task(self._run(), name="quire-models")

    async def load(self, services: Services) -> None:
        """Load a model before a call needs it; raises the error if loading fails. Mutates."""
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
            match self.residency.next_step():
                case Load(name):
                    await self._load(self._by_name[name])
                case Unload(name):
                    await self._unload(self._by_name[name])
                case None:
                    await self._news()

    async def _news(self) -> None:
        """Wait until something has changed, or until `Residency` has more to do."""
        look_s = self.residency.next_look_s()
        seconds = LONGEST_LOOK_S if look_s is None else max(look_s - self.server.clock.now(), 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _load(self, services: Services) -> None:
        """Load a model; if that fails, refuse the calls that wait for it. Mutates."""
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
            self.residency.note_unloaded(name)
        else:
            self.num_loads[name] += 1
            self.residency.note_loaded(name)
            logger.info("loaded %s after %.2f s", name, clock.now() - began_s)

    async def _unload(self, services: Services) -> None:
        await services.model.unload()
        self.residency.note_unloaded(services.name)
        logger.info("unloaded %s", services.name)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    async def _turn(self, name: str, tenant: Tenant) -> Stay:
        """Wait until a model admits a call. Mutates."""
        waiter = _Waiter(tenant)
        self._waiters[name].append(waiter)
        self.residency.wait(name, tenant.name)
        self._changed.set()
        try:
            return await waiter.future
        except BaseException:
            self._give_up(name, waiter)
            raise

    def _begin(self, name: str) -> Stay:
        self.residency.begin(name)
        return Stay(lambda: self._end(name))

    def _end(self, name: str) -> None:
        self.residency.end(name)
        self._changed.set()

    def _grant(self) -> None:
        """Give a `Stay` to the waiting calls that their model admits. Mutates."""
        for name, waiters in self._waiters.items():
            while waiters and self.residency.admits(name):
                waiter = waiters.popleft()
                self.residency.stop_waiting(name, waiter.tenant.name)
                if not waiter.future.done():
                    waiter.future.set_result(self._begin(name))

    def _give_up(self, name: str, waiter: _Waiter) -> None:
        """Stop waiting for a model; leave the stay that may have been granted meanwhile. Mutates."""
        if waiter in self._waiters[name]:
            self._waiters[name].remove(waiter)
            self.residency.stop_waiting(name, waiter.tenant.name)
            self._changed.set()
        elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            waiter.future.result().leave()

    def _refuse_all(self, name: str, answer: ApiError) -> None:
        """Refuse all calls that wait for a model. Mutates."""
        waiters = self._waiters[name]
        while waiters:
            waiter = waiters.popleft()
            self.residency.stop_waiting(name, waiter.tenant.name)
            if not waiter.future.done():
                waiter.future.set_exception(answer)

    def _require_alive(self, services: Services) -> None:
        """Raise `ApiError` if the server drains, or if loading the model failed recently. Mutates."""
        if self.is_draining:
            raise draining()
        until_s, reason = self._failures.get(services.name, (-math.inf, ""))
        if self.server.clock.now() < until_s:
            raise model_not_loadable(services.name, reason)
        if services.model.state is ModelState.FAILED and len(self.models) > 1:
            self.residency.note_lost(services.name)

    def _require_room(self, services: Services, tenant: Tenant) -> None:
        """Raise `ApiError` if too many calls wait, in total or of the tenant. Does not mutate."""
        own = self.residency.num_waiting_of(tenant.name)
        if tenant.max_sequences is not None and own >= tenant.max_sequences:
            raise too_many_requests(MIN_RETRY_S)
        most = self.server.config.max_queued_sequences or MAX_WAITING
        # As in the gate, a tenant may have as much as is still free, so some room is always left.
        held = own if len(self.server.tenants.each) > 1 else 0
        if own and self.residency.num_waiting + held + 1 > most:
            raise overloaded(MIN_RETRY_S)
