"""The steps of a call. Each verb has its own module, and a call passes each once, in this order.

    read        read/body.py              the bytes, within limits
    parse       schemas/parse.py          bytes ──► fields, with their types
    translate   translate/                fields ──► GenerationRequest, in the engine's terms
    load        loading/                  the model, if it is not loaded: the call waits for its turn
    admit       gate.py                   a place in the queue, or a time to retry
    run         run/                      prompts ──► tokens ──► the engine's output
    render      render/                   output ──► an answer, or a stream of events

With one model, its gate is also checked first: if even the smallest call has no place, the call is refused before its
body is read. A call is admitted before its texts are tokenized. One function, `named`, gives the engine's refusals the
client's field names. A stream alternates between two steps: run, render, run, render.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.context import RequestContext
from quire.serve.errors import operator_required
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
    """Return the answer to a call that generates text; its work ends when the client leaves or its time is up.

    `answer_at_once` returns the answer to a call that needs no model, else None. Raises `ApiError` for a call that is
    not of this kind, or that cannot be served at the moment.
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
    """Return a call that can run: its model is loaded, it is admitted, and its prompts are tokenized. Mutates.

    `streams`: the answer is a stream.
    """
    models: ModelSet = request.app.state.models
    context: RequestContext = request.state.context
    context.stay = await models.stay(services, context.tenant)
    asked = translate(services)
    num_tokens = asked.num_tokens(services.model.limits.max_model_len)
    context.visit = services.gate.enter(context.tenant, asked.num_sequences, num_tokens)
    try:
        generation = await prepare(services, context, asked)
        generation.require_few_logprobs(streams=streams)
        return generation
    except RefusedPrompt as refused:
        raise named(refused, asked) from refused


def require_ready(request: Request) -> ModelSet:
    """Return the server's models; raises `ApiError` if the server answers no calls at the moment."""
    models: ModelSet = request.app.state.models
    if models.closed() is not None:
        models.first.gate.require_ready()  # raises, and counts the refusal
    return models


def require_operator(request: Request) -> None:
    """Raise `ApiError` unless the caller is an operator."""
    if not request.state.context.tenant.is_operator:
        raise operator_required(request.scope["path"])


async def answer_loaded(
    request: Request,
    kind: type[Fields],
    answer: Callable[[Fields, Services, RequestContext], Coroutine[Any, Any, Response]],
) -> Response:
    """Return the answer to a call that generates nothing, so it needs a loaded model but no place in the queue.

    Its work ends when the client leaves or its time is up.
    """
    models = require_ready(request)
    context: RequestContext = request.state.context
    fields, services = await fields_of(request, kind)

    async def work() -> Response:
        context.stay = await models.stay(services, context.tenant)
        services.gate.require_ready()
        return await answer(fields, services, context)

    return await unless_gone(request, work, services.config)


async def fields_of(request: Request, kind: type[Fields]) -> tuple[Fields, Services]:
    """Read and parse the body of a call, a long one off the event loop; return its fields and its model."""
    models: ModelSet = request.app.state.models
    num_prompts = models.server.config.max_choices if kind.has_batch else kind.most_prompts
    # The body names the model: until it is read, the largest limit of all models applies.
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
