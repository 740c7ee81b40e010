"""RequestContext: the data of a request, filled in on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.sampling_params import SamplingParams
from quire.serve.gate import Visit
from quire.serve.loading.stay import Stay
from quire.serve.read.body_budget import HeldBody
from quire.serve.tenants import Tenant


@dataclass(slots=True)
class GeneratedText:
    """A request's generation, for its trace: its parameters and the times of its events, on the clock.

    `started_s` is the time of its first step, `first_token_s` the time when each of its prompts had a token; None: the
    request ended before that.
    """

    is_chat: bool
    model: str
    sampling: SamplingParams
    admitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0


@dataclass(slots=True)
class RequestContext:
    """A request's context, `request.state.context`. Endpoints fill in `stay`, `visit` and the last five fields.

    They also fill in `adapter`, the name of the requested adapter. The stay at a model and the visit at the gate end
    with the request at the latest, even if it fails. `parent_id` is the caller's span; empty: the trace begins here.
    """

    request_id: str
    client_request_id: str
    tenant: Tenant
    arrival_s: float
    traceparent: str
    body: HeldBody
    visit: Visit | None = None
    stay: Stay | None = None
    adapter: str | None = None
    parent_id: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""
    generated: GeneratedText | None = None
    images: HeldBody | None = None  # the pixels of its images

    @property
    def trace_id(self) -> str:
        """The id that all requests of one trace share."""
        return self.traceparent[3:35]
