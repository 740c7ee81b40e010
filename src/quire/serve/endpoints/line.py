"""The line that a call goes along. Each verb is a room of its own, and each room is visited once, in this order.

    read        read/body.py              the bytes, within limits
    parse       schemas/parse.py          bytes ──► fields, with their types
    translate   translate/                fields ──► GenerationRequest, in the engine's words
    admit       gate.py                   a place in the queue, or when to come again
    run         run/                      prompts ──► tokens ──► what the engine generates
    render      render/                   that ──► an answer, or a stream of events

The gate is asked once before: a call that finds no place even as the smallest is refused before its body is read. A
call is let in before its texts are tokenized. What the engine refuses is named in one place, `named`. While a stream is
read, it takes turns with the engine: run, render, run, render.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.context import RequestContext
from quire.serve.errors import model_not_found
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
) -> Response | EventStream:
    """Return the answer to a call that generates text; its work ends when the client goes, and when its time is over.

    Raises `ApiError` for a call that is not of that kind, or that cannot be served at the moment.
    """
    services: Services = request.app.state.services
    context: RequestContext = request.state.context
    services.gate.require_place(context.tenant)
    fields = await fields_of(request, kind)

    async def work() -> Response | EventStream:
        asked = translate(fields, services)
        context.visit = services.gate.enter(context.tenant, asked.num_sequences, asked.num_tokens)
        try:
            generation = await prepare(services, context, asked)
        except RefusedPrompt as refused:
            raise named(refused, asked) from refused
        if fields.stream:
            answer = render(fields, generation)
            return EventStream(answer.events(), services.config, answer.failed, kind.stream_type)
        results = await generation.collect()
        return await whole_answer(render(fields, generation), results, generation)

    return await unless_gone(request, work, services.config)


async def fields_of(request: Request, kind: type[Fields]) -> Fields:
    """Read the body of a call and parse it, a long one off the event loop; it must be for a model that is served."""
    services: Services = request.app.state.services
    num_prompts = services.config.max_choices if kind.has_batch else 1
    limits = BodyLimits.of(services, num_prompts=num_prompts, has_text=kind.has_text)
    body = await read_json_body(request, limits, any_media_type=kind.any_media_type)
    if len(body) < SHORT_BODY:
        fields = parse(body, kind, limits.bounds)
    else:
        tenant = request.state.context.tenant.name
        fields = await services.model.text_pool.run(tenant, partial(parse, body, kind, limits.bounds))
    if not fields.is_for(services.model_names):
        raise model_not_found(fields.model or "")
    return fields
