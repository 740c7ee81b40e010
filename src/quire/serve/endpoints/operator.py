"""Operators' commands to the engines: a path for each of `OPERATOR_COMMANDS`, and a restart."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.commands import OPERATOR_COMMANDS
from quire.serve.endpoints.line import require_operator, require_ready


async def operator_command(request: Request) -> Response:
    """Send the path's command to each loaded model, to run before its next step; answer at once."""
    require_operator(request)
    for services in require_ready(request).loaded:
        services.model.send(OPERATOR_COMMANDS[request.scope["path"].removeprefix("/")])
    return _done()


async def restart_engines(request: Request) -> Response:
    """Restart the engines of each loaded model one by one, while requests continue; answer when all are ready."""
    require_operator(request)
    for services in require_ready(request).loaded:
        await services.model.restart()
    return _done()


def _done() -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")
