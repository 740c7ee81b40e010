"""Services: the objects that endpoints work with.

ServerServices   settings, tenants, hosts, bodies, images, counts of calls       one per server: `ModelSet.server`
Services         these, and a model with its gate, metrics and live      one per model, found by `ModelSet`
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from pathlib import Path

from quire.core.clock import Clock
from quire.engine.records.stats import ModelState
from quire.serve.bundles import Bundles
from quire.serve.config import ServerConfig
from quire.serve.gate import Gate
from quire.serve.gate_limits import gate_limits
from quire.serve.hosts import Hosts, make_hosts
from quire.serve.live import Live
from quire.serve.live_places import LiveShared, live_places
from quire.serve.metrics import CallMetrics, Metrics
from quire.serve.model import ReloadableModel
from quire.serve.read.body_budget import BodyBudget
from quire.serve.tenant_secret import kept_secret
from quire.serve.tenants import Tenants, read_tenants
from quire.serve.traces import Traces


@dataclass(frozen=True, slots=True)
class ServerServices:
    """The objects that a server has once, for all its models.

    `traces`: None if no traces are sent. `created_s`: the Unix time of the server's start.
    """

    config: ServerConfig
    bodies: BodyBudget
    images: BodyBudget
    hosts: Hosts
    tenants: Tenants
    calls: CallMetrics
    live_shared: LiveShared
    clock: Clock
    created_s: int
    traces: Traces | None
    bundles: Bundles


@dataclass(frozen=True, slots=True)
class Services(ServerServices):
    """The server's objects, with a model and its own objects.

    Only requests for `model_names`, or for one of its adapters, are for this model.
    """

    model: ReloadableModel
    model_names: tuple[str, ...]
    gate: Gate
    metrics: Metrics
    live: Live

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.model_names[0]

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of its adapters, which clients use like model names."""
        return tuple(self.model.adapters)


def make_server_services(config: ServerConfig, clock: Clock, disk_cache: str | None = None) -> ServerServices:
    """Return a server's objects; raises `InvalidConfigError` for unreadable keys and invalid names.

    `disk_cache`: the folder of the disk cache, which also stores the secret for salts. Does not mutate.
    """
    tenants = read_tenants(config, kept_secret(disk_cache))
    return ServerServices(
        config=config,
        bodies=BodyBudget(config.max_bodies_bytes, config.max_bodies_bytes_per_key),
        images=BodyBudget(config.image_memory_bytes, config.image_memory_bytes_per_key, "images"),
        hosts=make_hosts(config),
        tenants=tenants,
        calls=CallMetrics(),
        live_shared=LiveShared(live_places(config.max_live_readers, tenants.each)),
        clock=clock,
        created_s=int(time.time()),
        traces=None if config.otlp_traces_endpoint is None else Traces(config.otlp_traces_endpoint, clock),
        bundles=Bundles(),
    )


def services_of(server: ServerServices, model: ReloadableModel) -> Services:
    """Return the services of a model, which need not be loaded: its gate opens when the model is ready.

    Mutates `server.live_shared`: adds the model's name.
    """
    names = server.config.served_model_name or (model_name(model.config.model),)
    gate = Gate(
        server.clock,
        gate_limits(server.config, model, len(server.tenants.each) or 1),
        lambda: model.state,
        lambda: sum(each.state is ModelState.READY for each in model.stats().replicas),
    )
    return Services(
        **{each.name: getattr(server, each.name) for each in fields(server)},
        model=model,
        model_names=names,
        gate=gate,
        metrics=Metrics(server.config.metrics_compat),
        live=Live(model, names, gate, server.live_shared, server.clock),
    )


def model_name(model: str) -> str:
    """Return the name of a model for clients: that of its folder or file, or the whole text if it is no path.

    A link has its own name: it may lead to a file of Ollama or a folder of the hub, which are named by a digest.

    >>> model_name("guide"), model_name("owner/name"), model_name("/models/small/")
    ('guide', 'owner/name', 'small')
    """
    path = Path(model)
    return os.path.basename(os.path.abspath(path)) if path.is_absolute() or path.exists() else model
