"""`GET /live`: memory events as a stream."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidRequestError
from quire.serve.live import LIVE_HEADERS, LiveStream
from quire.serve.loading.model_set import ModelSet


async def live(request: Request) -> LiveStream | Response:
    """Answer with the memory events of a model, from now on; `?model=` names it, `?replica=` its engine."""
    models: ModelSet = request.app.state.models
    services = models.find(request.query_params.get("model"), request.state.context.tenant)
    replica = _replica(request, services.model.report.num_replicas)
    if request.method == "HEAD":
        return Response(headers={name.decode(): value.decode() for name, value in LIVE_HEADERS})
    return LiveStream(services.live, request.state.context.tenant, replica)


def _replica(request: Request, num_replicas: int) -> int:
    """Return the number of the requested engine; the first by default."""
    text = request.query_params.get("replica", "0")
    known = {str(number): number for number in range(num_replicas)}
    if text not in known:
        allowed = f"a number from 0 to {num_replicas - 1}" if num_replicas > 1 else "0: the model has one engine"
        raise InvalidRequestError("replica", text, allowed)
    return known[text]
