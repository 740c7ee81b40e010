"""The models of a server that has exactly one, made by the test: it has all the memory."""

from __future__ import annotations

import math
from typing import Any

from quire.core.clock import Clock
from quire.serve.config import ServerConfig
from quire.serve.loading.model_set import ModelSet
from quire.serve.loading.residency import Residency
from quire.serve.services import Services, make_server_services, services_of


def make_services(model: Any, config: ServerConfig, clock: Clock) -> Services:
    """Return the services of a server's only model, which may be a fake one."""
    return services_of(make_server_services(config, clock), model)


def only_model(model: Any, config: ServerConfig, clock: Clock) -> ModelSet:
    """Return the set of one model, which may be a fake one."""
    services = make_services(model, config, clock)
    return ModelSet(services, [services], Residency(clock, 0, {services.name: 0}, math.inf))
