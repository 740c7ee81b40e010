"""A model that says what a test has written, behind the real services of a server, without a socket.

Script: what the engine yields for one prompt ──► ScriptedModel.deltas ──► Generation ──► the answer under test
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from quire.core.clock import ManualClock
from quire.core.sampling_params import SamplingParams
from quire.engine.commands import Add
from quire.engine.outputs import CompletionDelta, RequestDelta
from quire.engine.records.stats import ModelState
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.config import ServerConfig
from quire.serve.context import RequestContext
from quire.serve.run.generation import Generation
from quire.serve.run.request import GenerationRequest
from quire.serve.services import Services
from quire.serve.tenants import ANYBODY
from support.bare_server import FakeModel
from support.only_model import make_services

Script = Sequence[RequestDelta | Exception]


class ScriptedModel(FakeModel):
    """Yields the script of each prompt, one delta at a turn of the event loop; an exception in it is raised."""

    def __init__(self, scripts: Sequence[Script], tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.state = ModelState.READY
        self.scripts = scripts
        self.tokenizer = tokenizer  # type: ignore[assignment]
        self.num_open = 0
        self.given = [0] * len(scripts)

    async def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:  # type: ignore[override]
        index = int(prepared.request.request_id)
        self.num_open += 1
        try:
            for each in self.scripts[index]:
                await asyncio.sleep(0)
                if isinstance(each, Exception):
                    raise each
                self.given[index] += 1
                yield each
        finally:
            self.num_open -= 1


def generation_of(
    scripts: Sequence[Script],
    sampling: SamplingParams | None = None,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    tokenizer: Tokenizer | None = None,
    clock: ManualClock | None = None,
    **asked: Any,
) -> Generation:
    """Return a call that was admitted and prepared: a prompt for each script."""
    sampling = sampling or SamplingParams()
    clock = clock or ManualClock()
    model = ScriptedModel(scripts, tokenizer)
    services: Services = make_services(model, ServerConfig(), clock)
    prompts = prompts or [[1, 2, 3]] * len(scripts)
    prepared = [
        PreparedRequest(Add(str(index), array("i", ids), sampling), "shown", None, sampling)
        for index, ids in enumerate(prompts)
    ]
    visit = services.gate.enter(ANYBODY, sampling.n * len(scripts), sum(map(len, prompts)))
    context = RequestContext(
        "req-7", "", ANYBODY, clock.now(), "00-" + "a" * 32 + "-" + "b" * 16 + "-01", services.bodies.open(""), visit
    )
    request = GenerationRequest(prompts, sampling, {}, **asked)
    return Generation(services, context, visit, request, prepared, [None] * len(scripts))


def model_of(generation: Generation) -> ScriptedModel:
    """Return the model that a call is run by."""
    model = generation.services.model
    assert isinstance(model, ScriptedModel)
    return model


def delta(*outputs: CompletionDelta, generated: int = 0, prompt: int = 3, cached: int = 0, **more: Any) -> RequestDelta:
    """Return what an engine yields of one request; `generated` counts the tokens of all its texts so far."""
    return RequestDelta(list(outputs), False, prompt, cached, generated, **more)


def spoken(text: str, token_ids: Sequence[int] = (5,), index: int = 0, **more: Any) -> CompletionDelta:
    """Return a piece of a text."""
    return CompletionDelta(index, text, list(token_ids), **more)


def ended(text: str = "", token_ids: Sequence[int] = (), index: int = 0, reason: str = "stop", **more: Any) -> Any:
    """Return the last piece of a text."""
    return CompletionDelta(index, text, list(token_ids), finish_reason=reason, **more)
