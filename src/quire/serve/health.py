"""Health and metrics: paths for monitoring. None of them asks the engine, so none waits behind a prompt.

/livez                    the process answers
/readyz /health /ping     requests are let in: the engine is there, and the server does not drain
/version                  what it is
/load                     its load: the whole server's for an operator, its own for a tenant
/metrics                  everything in numbers; needs an operator's key where keys are set, unless it was opened
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.serve.errors import operator_required
from quire.serve.frame import METRICS_PATH
from quire.serve.gate import Gate
from quire.serve.metrics import body_families, text_families
from quire.serve.prometheus import CONTENT_TYPE, render
from quire.serve.services import Services
from quire.serve.tenants import Tenant


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _alive(request: Request) -> Response:
    return _json({"status": "alive"})


async def _ready(request: Request) -> Response:
    answer = _services(request).gate.closed()
    if answer is not None:
        raise answer
    return _json({"status": "ready"})


async def _version(request: Request) -> Response:
    return _json({"version": quire.__version__})


async def _load(request: Request) -> Response:
    services, tenant = _services(request), request.state.context.tenant
    gate, stats = services.gate, services.model.stats()
    if not tenant.is_operator:
        return _json(_own_load(gate, tenant))
    return _json(
        {
            "server_load": gate.num_sequences,
            "num_waiting": gate.num_waiting_sequences,
            "num_waiting_tokens": gate.num_waiting_tokens,
            "num_running": stats.num_running,
            "kv_usage": stats.kv_usage,
        }
    )


def _own_load(gate: Gate, tenant: Tenant) -> dict[str, Any]:
    """Return the same numbers, counting the sequences of one tenant only. Does not mutate."""
    visits = gate.visits_of(tenant)
    waiting = [visit for visit in visits if visit.is_waiting]
    num_sequences, num_waiting = (sum(visit.num_sequences for visit in each) for each in (visits, waiting))
    return {
        "server_load": num_sequences,
        "num_waiting": num_waiting,
        "num_waiting_tokens": sum(visit.num_tokens for visit in waiting),
        "num_running": num_sequences - num_waiting,
        "kv_usage": None,
    }


async def _metrics(request: Request) -> Response:
    services = _services(request)
    if not request.state.context.tenant.is_operator:
        raise operator_required(METRICS_PATH)
    model = services.model
    families = services.metrics.families(services.gate, model.state, model.stats(), services.model_names[0])
    families += [*body_families(services.bodies), *text_families(model.text_pool)]
    return Response(render(families), headers={"content-type": CONTENT_TYPE})


HEALTH_ROUTES: Final = (
    Route("/livez", _alive),
    Route("/readyz", _ready),
    Route("/health", _ready),
    Route("/ping", _ready, methods=["GET", "POST"]),
    Route("/version", _version),
    Route("/load", _load),
    Route(METRICS_PATH, _metrics),
)
