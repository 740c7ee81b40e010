"""Services: the objects that endpoints work with, in `request.app.state.services`."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from quire.core.clock import Clock
from quire.serve.config import ServerConfig
from quire.serve.gate import Gate, gate_limits
from quire.serve.hosts import Hosts, make_hosts
from quire.serve.live import Live
from quire.serve.live_places import live_places
from quire.serve.metrics import Metrics
from quire.serve.model import ServedModel
from quire.serve.read.body_budget import BodyBudget
from quire.serve.tenants import Tenants, read_tenants
from quire.serve.traces import Traces

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Services:
    """The model and what stands around it. A call for any name but one of `model_names` is for another model.

    `traces` None: none are sent.
    `created_s` is the time of day at which it began to be served, as Unix counts seconds.
    """

    model: ServedModel
    model_names: tuple[str, ...]
    config: ServerConfig
    gate: Gate
    bodies: BodyBudget
    hosts: Hosts
    tenants: Tenants
    metrics: Metrics
    live: Live
    clock: Clock
    created_s: int
    traces: Traces | None = None


def make_services(model: ServedModel, config: ServerConfig, clock: Clock) -> Services:
    """Return the services of a model; raises `InvalidConfigError` for keys that cannot be read and names that are none.

    The model need not be loaded: the gate opens when it is ready.
    """
    names = config.served_model_name or (model_name(model.config.model),)
    tenants = read_tenants(config, secrets.token_bytes(SECRET_BYTES))
    gate = Gate(clock, gate_limits(config, model, len(tenants.each) or 1), lambda: model.state)
    return Services(
        model=model,
        model_names=names,
        config=config,
        gate=gate,
        bodies=BodyBudget(config.max_bodies_bytes, config.max_bodies_bytes_per_key),
        hosts=make_hosts(config),
        tenants=tenants,
        metrics=Metrics(config.metrics_compat),
        live=Live(model, names[0], gate, live_places(config.max_live_readers, tenants.each), clock),
        clock=clock,
        created_s=int(time.time()),
        traces=None if config.otlp_traces_endpoint is None else Traces(config.otlp_traces_endpoint, clock),
    )


def model_name(model: str) -> str:
    """Return what clients call a model: the name of its folder, or the whole name where it is none.

    >>> model_name("guide"), model_name("owner/name"), model_name("/models/small/")
    ('guide', 'owner/name', 'small')
    """
    path = Path(model)
    return path.resolve().name if path.is_absolute() or path.is_dir() else model
