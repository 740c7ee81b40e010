"""What endpoints that write text have in common: from a body to prompts, and from steps to an answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionDelta
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.body import BodyLimits, read_body
from quire.serve.errors import model_not_found, unsupported_media_type
from quire.serve.frame import RequestContext
from quire.serve.generation import Generation, admit
from quire.serve.schemas.common import FinishReason, ModelFields, Usage
from quire.serve.schemas.parse import SHORT_BODY, parse
from quire.serve.schemas.sampling import SamplingFields
from quire.serve.services import Services
from quire.serve.sse import DONE, Envelope, EventStream, unless_gone

LONG_TEXT: Final = 10_000
"""Bytes of a body from which on its texts are encoded or decoded off the event loop."""

LONG_ANSWER: Final = 2_000
"""Tokens from which on an answer is made off the event loop."""

AS_MANY_AS_FIT: Final = -1

Fields = TypeVar("Fields", bound=ModelFields)
Answer = TypeVar("Answer", bound=Response | EventStream)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Fields]):
    """A call that has been read: what it says, who serves it, whose it is, its name for the model, and its size."""

    fields: Fields
    services: Services
    context: RequestContext
    model: str
    num_bytes: int

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Return what `work` on the texts returns; for a long body it runs off the event loop, in turn."""
        return await self.in_turn(work) if self.num_bytes >= LONG_TEXT else work()

    async def in_turn(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, done off the event loop when it is the tenant's turn."""
        return await self.services.model.text_pool.run(self.context.tenant.name, work)

    def admit(self, prompts: Sequence[object], sampling: SamplingParams) -> None:
        """Let the call in; raises `ApiError` where it must come again. Mutates its context."""
        admit(self.services, self.context, prompts, sampling)


async def answer_call(
    request: Request, kind: type[Fields], answer: Callable[[Call[Fields]], Awaitable[Answer]], *, generates: bool = True
) -> Answer:
    """Return what `answer` makes of a call; its work ends when the client goes, and when its time is over.

    Raises `ApiError` for a call that is not of that kind, or that cannot be served at the moment. A call that
    `generates` and that finds no place in the queue is refused before its body is read.
    """
    if generates:
        services: Services = request.app.state.services
        services.gate.require_place(request.state.context.tenant)
    call = await _open_call(request, kind)

    async def work() -> Answer:
        return await answer(call)

    return await unless_gone(request, work, call.services.config)


async def _open_call(request: Request, kind: type[Fields]) -> Call[Fields]:
    services: Services = request.app.state.services
    context: RequestContext = request.state.context
    services.gate.require_ready()  # of a server that answers nobody no body is read
    _require_json(request)
    num_prompts = services.config.max_choices if kind.has_batch else 1
    limits = BodyLimits.of(services, num_prompts=num_prompts, has_text=kind.has_text)
    body = await read_body(request, limits)
    num_bytes = len(body)
    if num_bytes < SHORT_BODY:
        fields = parse(body, kind, limits.bounds)
    else:
        read = partial(parse, body, kind, limits.bounds)
        fields = await services.model.text_pool.run(context.tenant.name, read)
        del read
    del body  # the parsed fields are enough
    model = shown_model(services, fields.model)
    return Call(fields, services, context, model, num_bytes)


def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise unsupported_media_type("the body must be JSON, with the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise unsupported_media_type("the body must not be compressed (no Content-Encoding)")


def shown_model(services: Services, name: str | None) -> str:
    """Return the name by which an answer calls the model; raises `ApiError` for one that is not served."""
    if name is None:
        return services.model_names[0]
    if name not in services.model_names:
        raise model_not_found(name)
    return name


def shown_id(prefix: str, context: RequestContext, wanted: str | None = None) -> str:
    """Return the id of an answer; one that the client chose is shown, and used for nothing else."""
    return prefix + (wanted or context.request_id.removeprefix("req-"))


def now_s() -> int:
    """Return the time of day, in seconds as Unix counts them."""
    return int(time.time())


def json_answer(value: msgspec.Struct) -> Response:
    """Return an answer in one piece."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def long_answer(call: Call[Fields], build: Callable[[], msgspec.Struct], usage: Usage) -> Response:
    """Return a complete answer, which may have much data per token; a long one is built off the event loop."""
    if usage.total_tokens < LONG_ANSWER:
        return json_answer(build())
    return await call.in_turn(lambda: json_answer(build()))


def told_reason(output: CompletionDelta) -> FinishReason | None:
    """Return why a text has ended, for the client; those that did not end well were raised. Does not mutate."""
    return cast("FinishReason | None", output.finish_reason)  # quoted: it is asked for with every token


# ---- prompts --------------------------------------------------------------------------------------------------------


def needs_truncation(fields: SamplingFields) -> bool:
    """Return whether a prompt may have to be cut; raises `InvalidRequestError` for a length that is none."""
    length = fields.truncate_prompt_tokens
    if length is not None and length < 1 and length != AS_MANY_AS_FIT:
        allowed = "a number of tokens from 1, or -1 for as many as fit"
        raise InvalidRequestError("truncate_prompt_tokens", length, allowed)
    return length is not None


def truncated(
    token_ids: Sequence[int], fields: SamplingFields, services: Services, max_tokens: int | None
) -> list[int]:
    """Return the end of a prompt, or its beginning, as long as the request wants it. Does not mutate."""
    length = fields.truncate_prompt_tokens
    if length == AS_MANY_AS_FIT:
        length = max(1, services.model.limits.max_model_len - (max_tokens or 1))
    if length is None or len(token_ids) <= length:
        return list(token_ids)
    return list(token_ids[:length] if fields.truncation_side == "right" else token_ids[-length:])


async def encoded(call: Call[Fields], tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text; a long one is encoded off the event loop."""
    return await call.beside(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


# ---- streams --------------------------------------------------------------------------------------------------------


async def chunks(
    generation: Generation,
    envelope: Envelope,
    render: Callable[[int, CompletionDelta], Iterable[msgspec.Struct]],
    tells_usage: tuple[bool, bool],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream of chunks, those of one step together.

    `render` returns what a client is told of what is new of a text, given the index of its prompt. `tells_usage` says
    whether the usage is told at the end, and whether in every chunk.
    """
    at_end, always = tells_usage
    async with aclosing(generation.steps()) as all_steps:
        async for steps in all_steps:
            usage = generation.usage if always else None
            events = [
                envelope.chunk(choice, usage)
                for prompt_index, delta in steps
                for output in delta.outputs
                for choice in render(prompt_index, output)
            ]
            if events:
                yield b"".join(events)
    yield envelope.usage(generation.usage) + DONE if at_end else DONE
