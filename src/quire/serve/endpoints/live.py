"""What happens in the memory, as a stream: `GET /live`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.live import HEADERS, LiveStream
from quire.serve.services import Services


async def live(request: Request) -> LiveStream | Response:
    """Answer with what happens in the memory, from now on."""
    services: Services = request.app.state.services
    if request.method == "HEAD":
        return Response(headers={name.decode(): value.decode() for name, value in HEADERS})
    return LiveStream(services.live, request.state.context.tenant)
