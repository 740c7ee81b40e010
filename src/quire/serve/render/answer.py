"""What the answers of all endpoints that write text have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Final, Protocol, cast

import msgspec
from starlette.responses import Response

from quire.engine.outputs import CompletionDelta
from quire.serve.context import RequestContext
from quire.serve.errors import ApiError
from quire.serve.render.events import DONE, Envelope
from quire.serve.run.generation import Generation, Results, TokenCounts
from quire.serve.schemas.common import FinishReason, ModelFields, PromptTokensDetails, Usage

LONG_ANSWER: Final = 2_000
"""Tokens from which on an answer is written off the event loop."""


class Answer(Protocol):
    """How the answer to one call is written. Mutable; use one of the two ways, once."""

    def whole(self, results: Results) -> msgspec.Struct:
        """Return the answer in one piece. Mutates."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream, those of one step of the engine together. Mutates."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which went wrong. Mutates."""
        ...


async def whole_answer(answer: Answer, results: Results, generation: Generation) -> Response:
    """Return a complete answer, which may have much data per token; a long one is written off the event loop."""

    def write() -> Response:
        return json_answer(answer.whole(results))

    if results.counts.prompt + results.counts.output < LONG_ANSWER:
        return write()
    return await generation.services.model.text_pool.run(generation.context.tenant.name, write)


def json_answer(value: msgspec.Struct) -> Response:
    """Return an answer in one piece."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def chunks(
    generation: Generation, envelope: Envelope, render: Callable[[int, CompletionDelta], Iterable[msgspec.Struct]]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream of chunks, those of one step together.

    `render` returns what the client gets of the new part of a text, given the index of its prompt.
    """
    at_end, always = generation.request.stream_usage
    async with aclosing(generation.steps()) as all_steps:
        async for steps in all_steps:
            usage = usage_of(generation.counts) if always else None
            events = [
                envelope.chunk(choice, usage)
                for prompt_index, delta in steps
                for output in delta.outputs
                for choice in render(prompt_index, output)
            ]
            if events:
                yield b"".join(events)
    yield envelope.usage(usage_of(generation.counts)) + DONE if at_end else DONE


def usage_of(counts: TokenCounts) -> Usage:
    """Return the tokens of a call, as a client reads them. Does not mutate."""
    below = {name: count for name, count in (("host", counts.from_host), ("disk", counts.from_disk)) if count}
    tiers = {"device": counts.cached - sum(below.values()), **below} if below else msgspec.UNSET
    details = PromptTokensDetails(counts.cached, tiers)
    return Usage(counts.prompt, counts.output, counts.prompt + counts.output, details)


def shown_model(fields: ModelFields, generation: Generation) -> str:
    """Return the name by which an answer calls the model: the client's own. Does not mutate."""
    return fields.model or generation.services.model_names[0]


def shown_id(prefix: str, context: RequestContext, chosen: str | None = None) -> str:
    """Return the id of an answer; one that the client chose is shown, and used for nothing else. Does not mutate."""
    return prefix + (chosen or context.request_id.removeprefix("req-"))


def shown_reason(output: CompletionDelta) -> FinishReason | None:
    """Return why a text has ended, for the client; those that did not end well were raised. Does not mutate."""
    return cast("FinishReason | None", output.finish_reason)  # quoted: it is asked for with every token
