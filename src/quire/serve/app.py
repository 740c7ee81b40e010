"""The application: all routes, and the frame around them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from quire.core.errors import ExecutionError, InvalidRequestError, TooManyJobsError
from quire.serve.dashboard import dashboard_routes
from quire.serve.endpoints import ROUTES
from quire.serve.errors import ApiError
from quire.serve.frame import Frame, answer_error
from quire.serve.health import HEALTH_ROUTES
from quire.serve.loading.model_set import ModelSet

EXPECTED = (ApiError, HTTPException, ClientDisconnect, InvalidRequestError, TooManyJobsError, ExecutionError)
"""Exceptions that endpoints raise on purpose. Any other is answered too, and logged as a bug in the server."""


def make_app(models: ModelSet, routes: Sequence[BaseRoute] = ROUTES) -> ASGIApp:
    """Return a server's application: `routes`, and the routes of the dashboard, health and metrics."""
    page = dashboard_routes() if models.server.config.dashboard else ()
    app = Starlette(
        routes=[*HEALTH_ROUTES, *page, *routes],
        exception_handlers=dict.fromkeys((*EXPECTED, Exception), answer_error),
    )
    app.router.redirect_slashes = False  # a redirect would contain the client's Host header
    app.state.models = models
    return Frame(app, models.server, open_paths=frozenset(route.path for route in page))
