"""Health and metrics: paths for monitoring. None sends a request to the engine, so none waits for a prompt.

/livez                    the process answers
/readyz /health /ping     requests are admitted: the engine runs, and the server does not drain
/version                  the server's version
/load                     the whole server's load for an operator, a tenant's own for a tenant
/metrics                  all metrics; if keys are set, needs an operator's key, unless open_metrics is set
"""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import quire
from quire.serve.endpoints.line import require_operator
from quire.serve.frame import METRICS_PATH
from quire.serve.loading.model_set import ModelSet
from quire.serve.metrics import body_families, joined_families, text_families
from quire.serve.prometheus import CONTENT_TYPE, Family, by_label, gauge, render
from quire.serve.render.answer import json_answer
from quire.serve.tenants import Tenant


def _models(request: Request) -> ModelSet:
    models: ModelSet = request.app.state.models
    return models


async def _alive(request: Request) -> Response:
    return json_answer({"status": "alive"})


async def _ready(request: Request) -> Response:
    answer = _models(request).closed()
    if answer is not None:
        raise answer
    return json_answer({"status": "ready"})


async def _version(request: Request) -> Response:
    return json_answer({"version": quire.__version__})


async def _load(request: Request) -> Response:
    models, tenant = _models(request), request.state.context.tenant
    if not tenant.is_operator:
        return json_answer(_own_load(models, tenant))
    gates, stats = [each.gate for each in models.models], [each.model.stats() for each in models.models]
    num_blocks = sum(each.num_blocks for each in stats)
    return json_answer(
        {
            "server_load": sum(gate.num_sequences for gate in gates),
            "num_waiting": sum(gate.num_waiting_sequences for gate in gates) + models.residency.num_waiting,
            "num_waiting_tokens": sum(gate.num_waiting_tokens for gate in gates),
            "num_running": sum(each.num_running for each in stats),
            "kv_usage": sum(each.num_used_blocks for each in stats) / num_blocks if num_blocks else 0.0,
        }
    )


def _own_load(models: ModelSet, tenant: Tenant) -> dict[str, Any]:
    """Return the load of one tenant's sequences. Does not mutate."""
    visits = [visit for each in models.models for visit in each.gate.visits_of(tenant)]
    waiting = [visit for visit in visits if visit.is_waiting]
    num_sequences, num_waiting = (sum(visit.num_sequences for visit in each) for each in (visits, waiting))
    return {
        "server_load": num_sequences,
        "num_waiting": num_waiting + models.residency.num_waiting_of(tenant.name),
        "num_waiting_tokens": sum(visit.num_tokens for visit in waiting),
        "num_running": num_sequences - num_waiting,
        "kv_usage": None,
    }


async def _metrics(request: Request) -> Response:
    require_operator(request)
    models = _models(request)
    families = [
        *models.server.calls.families(),
        *model_families(models),
        *body_families("body", models.server.bodies),
        *body_families("image", models.server.images),
        *text_families(models.first.model.text_pool),
    ]
    return Response(render(families), headers={"content-type": CONTENT_TYPE})


def model_families(models: ModelSet) -> list[Family]:
    """Return the models' metrics; with several models, each sample has its model's name. Does not mutate."""
    families = {
        each.name: each.metrics.families(each.gate, each.model.state, each.model.stats(), each.name)
        for each in models.models
    }
    if len(families) == 1:
        return families[models.first.name]
    loaded, residency = {each.name for each in models.loaded}, models.residency
    return [
        *joined_families(families),
        by_label(
            "quire_model_loaded",
            "gauge",
            "1 if the model is loaded.",
            "model_name",
            {name: float(name in loaded) for name in families},
        ),
        by_label(
            "quire_model_loads_total", "counter", "How often the model was loaded.", "model_name", models.num_loads
        ),
        gauge("quire_models_waiting", "Requests that wait for their model to be loaded.", residency.num_waiting),
        gauge("quire_models_bytes", "Memory planned for the loaded models.", residency.used_bytes),
        gauge("quire_models_bytes_max", "Memory that all loaded models may take.", residency.budget_bytes),
    ]


HEALTH_ROUTES: Final = (
    Route("/livez", _alive),
    Route("/readyz", _ready),
    Route("/health", _ready),
    Route("/ping", _ready, methods=["GET", "POST"]),
    Route("/version", _version),
    Route("/load", _load),
    Route(METRICS_PATH, _metrics),
)
