"""What happens in the memory, as a stream: `GET /live`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.live import HEADERS, LiveStream
from quire.serve.loading.model_set import ModelSet


async def live(request: Request) -> LiveStream | Response:
    """Answer with what happens in the memory of a model, from now on; `?model=` names it."""
    models: ModelSet = request.app.state.models
    services = models.find(request.query_params.get("model"), request.state.context.tenant)
    if request.method == "HEAD":
        return Response(headers={name.decode(): value.decode() for name, value in HEADERS})
    return LiveStream(services.live, request.state.context.tenant)
