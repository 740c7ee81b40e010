"""RequestContext: what is known of a call, filled in on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.sampling_params import SamplingParams
from quire.serve.gate import Visit
from quire.serve.loading.stay import Stay
from quire.serve.read.body_budget import HeldBody
from quire.serve.tenants import Tenant


@dataclass(slots=True)
class GeneratedText:
    """What a call generates, for its trace: how that was asked for, and when what happened, as the clock has it.

    `started_s` is the time of the first step for it, `first_token_s` when each of its prompts had a token; None: it
    ended before that.
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
    """A call, as `request.state.context`. Endpoints fill in the last five, for log and trace, `stay` and `visit`.

    They also fill in `adapter`, the name of the adapter that it asks for. Its stay at a model and its visit at the gate
    end with the call at the latest, however that ends. `parent_id` is the caller's span; empty: the trace begins with
    this call.
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

    @property
    def trace_id(self) -> str:
        """What all calls of one trace have in common."""
        return self.traceparent[3:35]
