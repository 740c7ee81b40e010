"""Builds the models of a server from the settings of their engines: planned together, not loaded yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from quire.core.clock import Clock
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.engine.process.connection import StartElsewhere
from quire.engine.process.heartbeat import Patience
from quire.engine.process.waiting_host import WaitingHost
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.shares import share_of
from quire.engine.replicas.supervised import SupervisedLLM, server_text_pool
from quire.engine.text.tenant_pool import TenantPool
from quire.serve.config import ServerConfig
from quire.serve.loading.budget import plan_fleet
from quire.serve.loading.loadable import LoadableModel, PlannedModel
from quire.serve.loading.model_set import ModelSet
from quire.serve.loading.residency import Residency
from quire.serve.model import SupervisedModel
from quire.serve.model_names import LATEST, same_model
from quire.serve.replicas.store_courier import RelayCourier, StoreCourier
from quire.serve.services import make_server_services, model_name, services_of

if TYPE_CHECKING:
    from quire.engine.factory import EngineBlueprint

MAX_READING: Final = 16
"""Requests of a tenant that may wait to open models that are not loaded."""


def make_model_set(
    configs: Sequence[EngineConfig],
    config: ServerConfig,
    clock: Clock,
    *,
    num_named: int = 1,
    host: WaitingHost | None = None,
) -> ModelSet:
    """Return the models with these settings; raises for wrong settings, and for two models with the same name.

    The user has named the first `num_named`: they must be possible, and the first one is loaded at once. `host`: a
    process for its engine; the caller closes it.
    """
    _require_different_names(configs, config)
    start = None
    if config.is_on_cluster:
        configs, start = _on_cluster(configs, config.least_replicas)  # machines for more engines may join later
    elif config.num_replicas > 1:
        configs = [_share_of(configs, config.num_replicas)]
    fleet = plan_fleet(configs, num_named, config.models_at_once)
    disk_cache = next((each.disk_cache for each in configs if each.disk_cache is not None), None)
    server = make_server_services(config, clock, disk_cache)
    maker = _ModelMaker(config, start, host)
    models = [
        services_of(server, maker.model(blueprint, opens=not index and num_named > 0))
        for index, blueprint in enumerate(fleet.blueprints)
    ]
    sizes = {
        each.name: blueprint.report.plan.engine_bytes for each, blueprint in zip(models, fleet.blueprints, strict=True)
    }
    keep_alive_s = math.inf if len(models) == 1 else config.keep_alive_s
    return ModelSet(
        server,
        models,
        Residency(clock, fleet.budget_bytes, sizes, keep_alive_s),
        broken=[(model_name(path), reason) for path, reason in fleet.broken],
        loads_first=num_named > 0,
    )


def _share_of(configs: Sequence[EngineConfig], num_replicas: int) -> EngineConfig:
    """Return the settings of each engine of the only model."""
    from quire.engine.factory import plan_engine  # imported late, because it imports numpy

    if len(configs) > 1:
        raise InvalidConfigError("replicas", num_replicas, "1 with several models")
    return share_of(plan_engine(configs[0]), num_replicas)


def _on_cluster(configs: Sequence[EngineConfig], num_replicas: int) -> tuple[list[EngineConfig], StartElsewhere]:
    """Connect to a cluster; return the settings of each engine of the only model, and the function that starts one."""
    from quire.engine.factory import plan_engine
    from quire.serve.replicas.cluster import Cluster

    cluster = Cluster.connect()
    each = _share_of(configs, cluster.num_per_machine(num_replicas))
    facts = plan_engine(each).backend.facts
    if facts.device == "cpu":
        return [each], cluster.engines(max(1, facts.num_threads), 0)
    return [each], cluster.engines(1, each.tensor_parallel)


class _ModelMaker:
    """Makes models that share thread pools."""

    def __init__(self, config: ServerConfig, start: StartElsewhere | None, host: WaitingHost | None) -> None:
        patience = Patience(config.max_step_s, config.max_silence_s)
        least = config.least_replicas if config.least_replicas < config.num_replicas else None
        courier = None if config.num_replicas == 1 else StoreCourier() if start is None else RelayCourier()
        self._replicas = ReplicaSettings(config.num_replicas, config.continue_on, patience, start, least, courier, host)
        self._sampling_defaults: dict[str, Any] = dict(config.sampling_defaults())
        self._text_pool = server_text_pool()
        self._load_pool = TenantPool("quire-load", num_threads=1, max_waiting=MAX_READING)

    def model(self, blueprint: EngineBlueprint, *, opens: bool) -> LoadableModel:
        """Return a model; `opens` reads its tokenizer now, so that the server refuses to start with a broken one."""
        report = self._replicas.shown_in(blueprint.report)
        sampling = replace(blueprint.default_sampling, **self._sampling_defaults)
        plan = PlannedModel(blueprint.config, report, blueprint.limits, sampling)
        return LoadableModel(
            plan,
            partial(self._open, blueprint.config),
            text_pool=self._text_pool,
            load_pool=self._load_pool,
            opened=self._open(blueprint.config, blueprint) if opens else None,
        )

    def _open(self, config: EngineConfig, blueprint: EngineBlueprint | None = None) -> SupervisedModel:
        return SupervisedLLM(config, replicas=self._replicas, text_pool=self._text_pool, blueprint=blueprint)


def _require_different_names(configs: Sequence[EngineConfig], config: ServerConfig) -> None:
    """Raise `InvalidConfigError` if clients could not tell two models apart."""
    if len(configs) > 1 and config.served_model_name:
        allowed = "one model; several models keep their own names"
        raise InvalidConfigError("served_model_name", config.served_model_name[0], allowed)
    if len(configs) > 1 and (named := next((each.adapter for each in configs if each.adapter), None)):
        raise InvalidConfigError("adapter", named[0], "none with several models")
    for name in configs[0].adapter_folders if configs else ():
        if any(same_model(name, own) for own in (*config.served_model_name, model_name(configs[0].model))):
            raise InvalidConfigError("adapter", name, "a name that the model does not have")
    seen: dict[str, str] = {}
    for each in configs:
        name = model_name(each.model)
        other = seen.setdefault(name.removesuffix(LATEST), each.model)
        if other is not each.model:
            raise InvalidConfigError("model", each.model, f"a name other than {name!r}, which {other} already has")
