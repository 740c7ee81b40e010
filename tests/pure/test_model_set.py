"""The models of a server: found by name, loaded for calls, with models that are made up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.core.clock import SystemClock
from quire.core.errors import ExecutionError
from quire.core.request import CacheScope
from quire.engine.records.stats import ModelState
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError
from quire.serve.loading import model_set
from quire.serve.loading.loadable import LoadableModel, PlannedModel
from quire.serve.loading.model_set import ModelSet
from quire.serve.loading.residency import Phase, Residency
from quire.serve.services import make_server_services, services_of
from quire.serve.tenants import ANYBODY, Tenant
from support.bare_server import FakeModel


class Loadable(FakeModel):
    """A model that is loaded when the test says so."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(model=name)
        self.name, self.events = name, events
        self.state = ModelState.UNLOADED
        self.may_load = asyncio.Event()
        self.may_load.set()

    def start(self) -> None:
        self.state = ModelState.STARTING
        self.events.append(f"load {self.name}")

    async def wait_ready(self) -> None:
        await self.may_load.wait()
        if self.failure is not None:
            self.state = ModelState.UNLOADED
            raise self.failure
        self.state = ModelState.READY

    async def unload(self) -> None:
        self.state = ModelState.UNLOADED
        self.events.append(f"unload {self.name}")


class Stage:
    """Models of 6 bytes within a budget, which fits one or all."""

    def __init__(self, budget: int = 100, keep_alive_s: float = math.inf, names: str = "ab", **config: Any) -> None:
        self.events: list[str] = []
        self.model = {name: Loadable(name, self.events) for name in names}
        clock = SystemClock()
        server = make_server_services(ServerConfig(**config), clock)
        models = [services_of(server, model) for model in self.model.values()]  # type: ignore[arg-type]
        residency = Residency(clock, budget, dict.fromkeys(names, 6), keep_alive_s)
        self.models = ModelSet(server, models, residency, broken=[("torn", "no weights")])

    def stay(self, name: str, tenant: Tenant = ANYBODY) -> Awaitable[Any]:
        return self.models.stay(self.models.find(name, ANYBODY), tenant)


def play(test: Callable[[Stage], Awaitable[None]], **settings: Any) -> Stage:
    """Run a test in an event loop of its own, with models that are tended."""

    async def run() -> Stage:
        stage = Stage(**settings)
        stage.models.start()
        try:
            async with asyncio.timeout(300):
                await test(stage)
        finally:
            await stage.models.close()
        stage.models.residency.check()
        return stage

    return asyncio.run(run())


async def settle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_calls_for_one_model_load_it_once() -> None:
    async def test(stage: Stage) -> None:
        stays = await asyncio.gather(*(stage.stay("a") for _ in range(5)))
        assert [each.name for each in stage.models.loaded] == ["a"]
        for each in stays:
            each.leave()
            each.leave()  # the second time does nothing

    assert play(test).events == ["load a"]


def test_calls_to_a_loaded_model_go_on_while_another_is_loaded() -> None:
    async def test(stage: Stage) -> None:
        with await stage.stay("a"):
            stage.model["b"].may_load.clear()
            waiting = asyncio.ensure_future(stage.stay("b"))
            await settle()
            assert stage.model["b"].state is ModelState.STARTING
            for _ in range(3):
                (await stage.stay("a")).leave()  # which would wait for ever if it waited for b
            assert not waiting.done()
            stage.model["b"].may_load.set()
            (await waiting).leave()

    play(test)


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def test(stage: Stage) -> None:
        stage.model["a"].may_load.clear()
        waiting = [asyncio.ensure_future(stage.stay("a")) for _ in range(3)]
        await settle()
        assert stage.models.num_visits == 3
        for task in waiting[:2]:
            task.cancel()
        await settle()
        assert stage.models.num_visits == 1
        stage.model["a"].may_load.set()
        stay = await waiting[2]
        assert stage.models.num_visits == 0
        stay.leave()
        stage.models.keep(stage.models.first, 0.0)
        await settle()
        assert stage.models.loaded == [], "a stay of a client that left would have kept it"

    play(test)


def test_a_model_that_cannot_be_loaded_fails_alone_and_is_not_tried_with_every_call() -> None:
    async def test(stage: Stage) -> None:
        stage.model["a"].failure = ExecutionError("the weights\nare torn")
        for _ in range(3):
            with pytest.raises(ApiError, match="model 'a' cannot be loaded: the weights are torn"):
                await stage.stay("a")
        (await stage.stay("b")).leave()

    assert play(test).events == ["load a", "load b"]


def test_a_call_that_waits_too_long_is_told_to_come_again() -> None:
    async def test(stage: Stage) -> None:
        with await stage.stay("a"):
            with pytest.raises(ApiError, match=r"not loaded within 0\.01 seconds") as refused:
                await stage.stay("b")
            assert refused.value.status == 503
            assert "retry-after" in refused.value.headers
            (await stage.stay("a")).leave()

    assert play(test, budget=10, max_load_wait_s=0.01).events == ["load a"]


def test_few_calls_wait_and_one_of_each_tenant_always_may() -> None:
    async def test(stage: Stage) -> None:
        ada, bob = (Tenant(name, CacheScope(tenant=name)) for name in ("ada", "bob"))
        stage.model["a"].may_load.clear()
        waiting = [asyncio.ensure_future(stage.stay("a", ada)) for _ in range(2)]
        await settle()
        with pytest.raises(ApiError, match="overloaded"):
            await stage.stay("a", ada)
        waiting.append(asyncio.ensure_future(stage.stay("b", bob)))
        await settle()
        stage.model["a"].may_load.set()
        for each in waiting:
            (await each).leave()

    play(test, max_queued_sequences=2)


def test_a_server_that_drains_sends_those_away_who_wait() -> None:
    async def test(stage: Stage) -> None:
        stage.model["a"].may_load.clear()
        waiting = asyncio.ensure_future(stage.stay("a"))
        await settle()
        stage.models.drain()
        for refused in (waiting, stage.stay("b")):
            with pytest.raises(ApiError, match="shutting down"):
                await refused
        assert stage.models.closed() is not None
        stage.model["a"].may_load.set()

    play(test)


class EndsSlowly(FakeModel):
    """A model that is loaded at once, and whose end takes a moment, as that of a process does."""

    async def close(self) -> None:
        await settle()
        await super().close()


def test_a_server_that_ends_while_a_model_is_unloaded_waits_for_the_end_of_it() -> None:
    async def test() -> None:
        opened: Any = EndsSlowly(model="a")
        none: Any = None
        plan = PlannedModel(opened.config, opened.report, none, none)
        model = LoadableModel(plan, none, text_pool=opened.text_pool, load_pool=opened.text_pool, opened=opened)
        clock = SystemClock()
        residency = Residency(clock, 100, {"a": 6}, math.inf)
        server = make_server_services(ServerConfig(), clock)
        models = ModelSet(server, [services_of(server, model)], residency)
        models.start()
        await models.load(models.first)
        models.keep(models.first, 0.0)
        while residency.phase("a") is not Phase.UNLOADING:
            await asyncio.sleep(0)
        async with asyncio.timeout(300):
            await models.close()
        assert opened.num_closed == 1
        assert model.state is ModelState.CLOSED

    asyncio.run(test())


def test_an_engine_that_is_lost_for_good_is_loaded_again_for_the_next_call() -> None:
    async def test(stage: Stage) -> None:
        (await stage.stay("a")).leave()
        stage.model["a"].state = ModelState.FAILED
        (await stage.stay("a")).leave()

    assert play(test).events == ["load a", "unload a", "load a"]


def test_a_model_is_unloaded_after_its_last_call() -> None:
    async def test(stage: Stage) -> None:
        stay = await stage.stay("a")
        await settle()
        assert stage.events == ["load a"]
        stay.leave()
        while stage.events != ["load a", "unload a"]:
            await asyncio.sleep(0.001)

    play(test, keep_alive_s=0.0)


def test_of_several_tenants_only_an_operator_decides_how_long_models_stay() -> None:
    async def test(stage: Stage) -> None:
        assert not stage.models.may_keep(Tenant("ada", CacheScope(tenant="ada")))
        assert stage.models.may_keep(Tenant("owner", CacheScope(tenant="owner"), is_operator=True))

    play(test, api_key=("k1", "k2"))

    async def only(stage: Stage) -> None:
        assert not stage.models.may_keep(ANYBODY)

    play(only, names="a")


def test_a_name_leads_to_its_model_or_to_near_names() -> None:
    async def names() -> None:
        stage = Stage(names="ab")
        assert stage.models.find("b:latest", ANYBODY).name == "b"
        assert stage.models.find(None, ANYBODY).name == "a"
        with pytest.raises(ApiError, match="cannot be loaded: no weights"):
            stage.models.find("torn", ANYBODY)
        with pytest.raises(ApiError, match="this server serves 'a', 'b'") as refused:
            stage.models.find("gpt", ANYBODY)
        assert refused.value.status == 404

    asyncio.run(names())


def test_near_names_are_looked_for_only_for_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    looked_for = model_set.get_close_matches

    def noted(word: str, *args: Any, **options: Any) -> list[str]:
        lengths.append(len(word))
        return looked_for(word, *args, **options)

    monkeypatch.setattr(model_set, "get_close_matches", noted)

    async def names() -> None:
        stage = Stage(names="ab")
        for length in (256, 257, 1 << 16):
            with pytest.raises(ApiError, match="this server serves 'a', 'b'"):
                stage.models.find("x" * length, ANYBODY)

    asyncio.run(names())
    assert lengths == [256]
