"""POST /v1/responses: one answer, in the form of OpenAI's newer interface. Nothing is kept: the client sends it all."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionDelta
from quire.serve.endpoints.call import Call, json_answer, now_s, open_call, shown_id
from quire.serve.endpoints.conversation import chat_options, conversation_prompt
from quire.serve.errors import ApiError
from quire.serve.generation import Generation, Wanted, joined, prepare
from quire.serve.logprobs import TokenNames, content_logprobs
from quire.serve.schemas.chat import shown_tools
from quire.serve.schemas.common import ContentLogprob, Usage
from quire.serve.schemas.formats import response_held_to
from quire.serve.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseRequest,
    ResponseUsage,
    Status,
    TextDelta,
    TextSettings,
    effort_of,
    messages_of,
    num_logprobs,
    require_supported,
)
from quire.serve.schemas.sampling import sampling_of
from quire.serve.sse import EventStream, named_event, unless_gone

NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
PLACE: Final = {"output_index": 0, "content_index": 0}
DELTA: Final = "response.output_text.delta"


async def responses(request: Request) -> Response | EventStream:
    """Answer a call."""
    call = await open_call(request, ResponseRequest)
    require_supported(call.fields)
    wanted = await _wanted(call)
    generation = await prepare(call.services, call.context, wanted)
    names = TokenNames(call.services.model.tokenizer)
    answer = _Answer(call, wanted.sampling, names)
    if call.fields.stream:
        events = _Events(answer)
        return EventStream(events.of(generation), call.services.config, events.failed)
    [(_, output)] = await unless_gone(request, generation.collect, call.services.config)
    return json_answer(answer.whole(output, generation.usage))


async def _wanted(call: Call[ResponseRequest]) -> Wanted:
    fields, model = call.fields, call.services.model
    messages = messages_of(fields)
    held = response_held_to(fields.wanted_format)
    sampling = sampling_of(
        fields,
        model.get_default_sampling_params(),
        max_tokens=fields.max_output_tokens,
        logprobs=num_logprobs(fields),
        grammar=held.grammar,
    )
    options = chat_options(
        model.tokenizer,
        fields.chat_template_kwargs,
        effort=effort_of(fields),
        effort_field="reasoning.effort",
        tools=shown_tools(fields.tools, fields.tool_choice),
    )
    prompt = await conversation_prompt(call, messages, options, sampling.max_tokens, NAMES)
    return Wanted(
        prompts=[prompt],
        sampling=sampling,
        chat=options,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        names={**NAMES, "grammar": held.field},
    )


class _Answer:
    """The answer to one call, at any point of its way."""

    def __init__(self, call: Call[ResponseRequest], sampling: SamplingParams, names: TokenNames) -> None:
        self._fields = call.fields
        self._model = call.model
        self._created_at = now_s()
        self._sampling = sampling
        self._names = names
        self._id = shown_id("resp_", call.context, call.fields.request_id)
        self.item_id = shown_id("msg_", call.context)

    def logprobs(self, output: CompletionDelta) -> list[ContentLogprob]:
        """Return how likely the tokens of a piece were; nothing where that was not asked for. Does not mutate."""
        if output.logprobs is None:
            return []
        return content_logprobs(output.logprobs, self._fields.top_logprobs or 0, self._names)

    def text(self, output: CompletionDelta) -> OutputText:
        """Return the text as a part of a message. Does not mutate."""
        return OutputText("output_text", output.text, [], self.logprobs(output))

    def message(self, output: CompletionDelta) -> OutputMessage:
        """Return the message that a whole text is. Does not mutate."""
        return OutputMessage(self.item_id, "message", _status(output), "assistant", [self.text(output)])

    def begun(self) -> ResponseAnswer:
        """Return the answer before anything of it is there. Does not mutate."""
        return self._answer("in_progress", [], None, None)

    def whole(self, output: CompletionDelta, usage: Usage) -> ResponseAnswer:
        """Return the answer that a whole text is. Does not mutate."""
        status = _status(output)
        why = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        return self._answer(status, [self.message(output)], why, usage)

    def _answer(
        self, status: Status, output: list[OutputMessage], why: IncompleteDetails | None, usage: Usage | None
    ) -> ResponseAnswer:
        return ResponseAnswer(
            id=self._id,
            object="response",
            created_at=self._created_at,
            status=status,
            model=self._model,
            output=output,
            usage=None if usage is None else _usage(usage),
            incomplete_details=why,
            instructions=self._fields.instructions,
            max_output_tokens=self._fields.max_output_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            metadata=self._fields.metadata or {},
            text=TextSettings(self._fields.wanted_format),
        )


class _Events:
    """The events of one stream, numbered."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._place = {"item_id": answer.item_id, **PLACE}
        self._num_told = 0

    async def of(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events: the beginning with the first token, the end with the last."""
        parts: list[CompletionDelta] = []
        async with aclosing(generation.steps()) as all_steps:
            async for steps in all_steps:
                new = [output for _, delta in steps for output in delta.outputs]
                parts += new
                events = [] if self._num_told else self._beginning()
                events += [self._delta(output) for output in new if output.text or output.logprobs]
                if events:
                    yield b"".join(events)
        yield self._end(joined(parts), generation.usage)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which went wrong; clients look for one of its two forms. Mutates."""
        detail = error.detail
        told = {"code": detail.code, "message": detail.message, "param": detail.param, "error": detail}
        return self._event("error", told)

    def _beginning(self) -> list[bytes]:
        begun, item_id = self._answer.begun(), self._answer.item_id
        item = OutputMessage(item_id, "message", "in_progress", "assistant", [])
        part = OutputText("output_text", "", [], [])
        return [
            self._event("response.created", {"response": begun}),
            self._event("response.in_progress", {"response": begun}),
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", {**self._place, "part": part}),
        ]

    def _delta(self, output: CompletionDelta) -> bytes:
        answer, number = self._answer, self._num_told
        self._num_told += 1
        return named_event(DELTA, TextDelta(DELTA, number, answer.item_id, 0, 0, output.text, answer.logprobs(output)))

    def _end(self, output: CompletionDelta, usage: Usage) -> bytes:
        part, message = self._answer.text(output), self._answer.message(output)
        text = {"text": part.text, "logprobs": part.logprobs}
        return b"".join(
            [
                self._event("response.output_text.done", {**self._place, **text}),
                self._event("response.content_part.done", {**self._place, "part": part}),
                self._event("response.output_item.done", {"output_index": 0, "item": message}),
                self._event(f"response.{message.status}", {"response": self._answer.whole(output, usage)}),
            ]
        )

    def _event(self, name: str, told: dict[str, Any]) -> bytes:
        number = self._num_told
        self._num_told += 1
        return named_event(name, {"type": name, "sequence_number": number, **told})


def _status(output: CompletionDelta) -> Status:
    return "incomplete" if output.finish_reason == "length" else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )
