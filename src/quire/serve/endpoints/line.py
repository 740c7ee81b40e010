"""The line that a call goes along. Each verb is a room of its own, and each room is visited once, in this order.

    read        read/body.py              the bytes, within limits
    parse       schemas/parse.py          bytes ──► fields, with their types
    translate   translate/                fields ──► GenerationRequest, in the engine's words
    load        loading/                  the model, where it is not there: the call waits for its turn
    admit       gate.py                   a place in the queue, or when to come again
    run         run/                      prompts ──► tokens ──► what the engine generates
    render      render/                   that ──► an answer, or a stream of events

Where there is one model, its gate is asked once before: a call that finds no place even as the smallest is refused
before its body is read. A call is let in before its texts are tokenized. What the engine refuses is named in one place,
`named`. While a stream is read, it takes turns with the engine: run, render, run, render.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.context import RequestContext
from quire.serve.loading.model_set import ModelSet
from quire.serve.read.body import BodyLimits, read_json_body
from quire.serve.render.answer import Answer, whole_answer
from quire.serve.run.generation import Generation, prepare
from quire.serve.run.request import GenerationRequest, RefusedPrompt
from quire.serve.schemas.common import ModelFields, StreamFields
from quire.serve.schemas.parse import SHORT_BODY, parse
from quire.serve.services import Services
from quire.serve.sse import EventStream, unless_gone
from quire.serve.translate.names import named

Fields = TypeVar("Fields", bound=ModelFields)
TextFields = TypeVar("TextFields", bound=StreamFields)


async def answer_text(
    request: Request,
    kind: type[TextFields],
    translate: Callable[[TextFields, Services], GenerationRequest],
    render: Callable[[TextFields, Generation], Answer],
    answer_at_once: Callable[[Request, TextFields, Services], Response | None] = lambda *_: None,
) -> Response | EventStream:
    """Return the answer to a call that generates text; its work ends when the client goes, and when its time is over.

    `answer_at_once` returns the answer to a call that needs no model; None: it needs one. Raises `ApiError` for a call
    that is not of that kind, or that cannot be served at the moment.
    """
    models: ModelSet = request.app.state.models
    context: RequestContext = request.state.context
    models.require_place(context.tenant)
    fields, services = await fields_of(request, kind)
    answered = answer_at_once(request, fields, services)
    if answered is not None:
        return answered

    async def work() -> Response | EventStream:
        generation = await admitted(request, services, partial(translate, fields), streams=bool(fields.stream))
        if fields.stream:
            answer = render(fields, generation)
            return EventStream(answer.events(), services.config, answer.failed, kind.stream_type)
        results = await generation.collect()
        return await whole_answer(render(fields, generation), results, generation)

    return await unless_gone(request, work, services.config)


async def admitted(
    request: Request, services: Services, translate: Callable[[Services], GenerationRequest], *, streams: bool = False
) -> Generation:
    """Return a call that can be run: its model is loaded, it has a place, and its prompts are tokens. Mutates.

    `streams`: its answer comes in pieces.
    """
    models: ModelSet = request.app.state.models
    context: RequestContext = request.state.context
    context.stay = await models.stay(services, context.tenant)
    asked = translate(services)
    context.visit = services.gate.enter(context.tenant, asked.num_sequences, asked.num_tokens)
    try:
        generation = await prepare(services, context, asked)
        generation.require_few_logprobs(streams=streams)
        return generation
    except RefusedPrompt as refused:
        raise named(refused, asked) from refused


def require_ready(request: Request) -> ModelSet:
    """Return the models of a server that answers calls; raises the answer of one that does not."""
    models: ModelSet = request.app.state.models
    if models.closed() is not None:
        models.first.gate.require_ready()  # which counts it
    return models


async def fields_of(request: Request, kind: type[Fields]) -> tuple[Fields, Services]:
    """Read the body of a call and parse it, a long one off the event loop; return it with the model that it names."""
    models: ModelSet = request.app.state.models
    num_prompts = models.server.config.max_choices if kind.has_batch else kind.most_prompts
    # Which model it is for is in the body: until then the one that takes the longest counts.
    each = (BodyLimits.of(services, num_prompts=num_prompts, has_text=kind.has_text) for services in models.models)
    limits = max(each, key=lambda limits: limits.max_bytes)
    body = await read_json_body(request, limits, any_media_type=kind.any_media_type)
    if len(body) < SHORT_BODY:
        fields = parse(body, kind, limits.bounds)
    else:
        tenant = request.state.context.tenant.name
        pool = models.first.model.text_pool  # all models share it
        fields = await pool.run(tenant, partial(parse, body, kind, limits.bounds))
    services = models.find(fields.model, request.state.context.tenant)
    request.state.context.adapter = models.adapter_of(services, fields.model)
    return fields, services
