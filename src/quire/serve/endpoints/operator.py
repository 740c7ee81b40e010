"""What an operator can have the engine do: a path for each of `OPERATOR_COMMANDS`, and a restart."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.commands import OPERATOR_COMMANDS
from quire.serve.endpoints.line import require_ready
from quire.serve.errors import operator_required


async def operator_command(request: Request) -> Response:
    """Have the command done that the path names, before the next step of each loaded model; answers at once."""
    if not request.state.context.tenant.is_operator:
        raise operator_required(request.url.path)
    for services in require_ready(request).loaded:
        services.model.send(OPERATOR_COMMANDS[request.url.path.removeprefix("/")])
    return _done()


async def restart_engines(request: Request) -> Response:
    """Restart the engines of each loaded model, one after another, while requests go on; answers when all are back."""
    if not request.state.context.tenant.is_operator:
        raise operator_required(request.url.path)
    for services in require_ready(request).loaded:
        await services.model.restart()
    return _done()


def _done() -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")
