"""Who is well: paths for those who watch the server. None of them asks the engine, so none waits behind a prompt.

/livez                    the process answers
/readyz /health /ping     requests are let in: the engine is there, and the server does not drain
/version /load            what it is, and how much it has to do
/metrics                  everything in numbers; needs a key where keys are set, unless it was opened
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.serve.prometheus import CONTENT_TYPE, render
from quire.serve.services import Services


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
    services = _services(request)
    gate, stats = services.gate, services.model.stats
    return _json(
        {
            "server_load": gate.num_requests,
            "num_waiting": gate.num_waiting_requests,
            "num_waiting_tokens": gate.num_waiting_tokens,
            "num_running": stats.num_running,
            "kv_usage": stats.kv_usage,
        }
    )


async def _metrics(request: Request) -> Response:
    services = _services(request)
    model = services.model
    families = services.metrics.families(services.gate, model.state, model.stats, services.model_names[0])
    return Response(render(families), headers={"content-type": CONTENT_TYPE})


HEALTH_ROUTES: Final = (
    Route("/livez", _alive),
    Route("/readyz", _ready),
    Route("/health", _ready),
    Route("/ping", _ready, methods=["GET", "POST"]),
    Route("/version", _version),
    Route("/load", _load),
    Route("/metrics", _metrics),
)
