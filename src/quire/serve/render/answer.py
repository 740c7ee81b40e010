"""Shared by the answers of all endpoints that generate text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec
from starlette.responses import Response

from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionDelta
from quire.serve.context import RequestContext
from quire.serve.errors import ApiError
from quire.serve.reader import AnswerReader
from quire.serve.render.events import DONE, Envelope
from quire.serve.run.generation import Generation, Results, TokenCounts
from quire.serve.schemas.common import FinishReason, ModelFields, PromptTokensDetails, Usage

LONG_ANSWER: Final = 4_000
"""An answer or event with this many tokens and log-probabilities or more is encoded off the event loop."""

Written = TypeVar("Written")


class Answer(Protocol):
    """Writes the answer to one call. Mutable; call either `whole` or `events`, once."""

    def whole(self, results: Results) -> msgspec.Struct:
        """Return the answer in one piece. Mutates."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream, those of one engine step together. Mutates."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. Mutates."""
        ...


def text_reader(generation: Generation) -> AnswerReader:
    """Return the reader of a call's only text; of a call that only loads a model, of no text. Does not mutate."""
    form, prepared = generation.request.form, generation.prepared
    if form is None or not prepared:
        return AnswerReader(())
    return form.reader(form.thinking(prepared[0].request.prompt_token_ids))


async def whole_answer(answer: Answer, results: Results, generation: Generation) -> Response:
    """Return a complete answer; a long one, with possibly much data per token, is encoded off the event loop."""
    counts, num_shown = results.counts, 1 if generation.request.chat else generation.request.sampling.n
    count = num_values(generation.request.sampling, counts.prompt * num_shown, counts.output)
    return await off_loop_if_many(generation, count, lambda: json_answer(answer.whole(results)))


def num_values(sampling: SamplingParams, num_prompt: int, num_output: int) -> int:
    """Return the number of tokens and log-probabilities to encode. Does not mutate."""
    asked = ((num_prompt, sampling.prompt_logprobs), (num_output, sampling.logprobs))
    return sum(count * (1 if num_likely is None else 2 + num_likely) for count, num_likely in asked)


async def off_loop_if_many(generation: Generation, count: int, write: Callable[[], Written]) -> Written:
    """Return the result of `write`, which encodes this many values; many are encoded off the event loop."""
    if count < LONG_ANSWER:
        return write()
    return await generation.services.model.text_pool.run(generation.context.tenant.name, write)


def json_answer(value: msgspec.Struct | dict[str, Any]) -> Response:
    """Return an answer in one piece."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def chunks(
    generation: Generation,
    envelope: Envelope,
    render: Callable[[int, CompletionDelta], Iterable[msgspec.Struct]],
    num_shown: Callable[[int, CompletionDelta], int] = lambda *_: 0,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream of chunks, those of one engine step together.

    `render` returns the choices for the new part of a text, given the index of its prompt; `num_shown` returns the
    number of prompt tokens in them.
    """
    at_end, always = generation.request.stream_usage
    async with aclosing(generation.steps()) as all_steps:
        async for steps in all_steps:
            usage = usage_of(generation.counts) if always else None
            outputs = [(prompt_index, output) for prompt_index, delta in steps for output in delta.outputs]

            def write(outputs: Sequence[tuple[int, CompletionDelta]] = outputs, usage: Usage | None = usage) -> bytes:
                return b"".join([envelope.chunk(choice, usage) for each in outputs for choice in render(*each)])

            num_tokens = sum(len(output.token_ids) for _, output in outputs)
            count = num_values(generation.request.sampling, sum(num_shown(*each) for each in outputs), num_tokens)
            if events := await off_loop_if_many(generation, count, write):
                yield events
    yield envelope.usage(usage_of(generation.counts)) + DONE if at_end else DONE


def usage_of(counts: TokenCounts) -> Usage:
    """Return the token counts of a call in OpenAI's form. Does not mutate."""
    below = {name: count for name, count in (("host", counts.from_host), ("disk", counts.from_disk)) if count}
    tiers = {"device": counts.cached - sum(below.values()), **below} if below else msgspec.UNSET
    details = PromptTokensDetails(counts.cached, tiers)
    return Usage(counts.prompt, counts.output, counts.prompt + counts.output, details)


def shown_model(fields: ModelFields, generation: Generation) -> str:
    """Return the model's name in an answer: the name that the client used. Does not mutate."""
    return fields.model or generation.services.model_names[0]


def shown_id(prefix: str, context: RequestContext, chosen: str | None = None) -> str:
    """Return the id of an answer; an id chosen by the client is only shown. Does not mutate."""
    return prefix + (chosen or context.request_id.removeprefix("req-"))


def shown_reason(output: CompletionDelta) -> FinishReason | None:
    """Return a text's finish reason for the client; failed texts have raised before. Does not mutate."""
    return cast("FinishReason | None", output.finish_reason)  # quoted: this runs for every token
