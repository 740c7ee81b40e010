"""POST /v1/responses: one answer, in the form of OpenAI's newer interface. Nothing is kept: the client sends it all."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionDelta
from quire.serve.answer_form import AnswerForm, answer_form
from quire.serve.endpoints.call import Call, answer_call, json_answer, now_s, shown_id
from quire.serve.endpoints.conversation import Conversation, chat_options, conversation_prompt, with_form
from quire.serve.endpoints.response_events import ResponseEvents, status_of
from quire.serve.endpoints.response_items import Items
from quire.serve.errors import unsupported
from quire.serve.generation import Generation, Wanted, prepare
from quire.serve.logprobs import TokenNames, content_logprobs
from quire.serve.reader import AnswerReader
from quire.serve.schemas.common import ContentLogprob, Usage
from quire.serve.schemas.formats import response_held_to
from quire.serve.schemas.response_input import messages_of, response_tools
from quire.serve.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseRequest,
    ResponseUsage,
    Status,
    TextSettings,
    effort_of,
    num_logprobs,
    require_supported,
)
from quire.serve.schemas.sampling import sampling_of
from quire.serve.sse import EventStream

NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


async def responses(request: Request) -> Response | EventStream:
    """Answer a call."""
    return await answer_call(request, ResponseRequest, _answer)


async def _answer(call: Call[ResponseRequest]) -> Response | EventStream:
    require_supported(call.fields)
    wanted, form = await _wanted(call)
    generation = await prepare(call.services, call.context, wanted)
    answer = _Answer(call, wanted.sampling, form)
    if call.fields.stream:
        items = answer.new_items()
        events = ResponseEvents(items, _reader(form, generation), answer.whole, answer.logprobs)
        return EventStream(events.of(generation), call.services.config, events.failed)
    [(_, output)] = await generation.collect()
    items = answer.read(output, _reader(form, generation))
    return json_answer(answer.whole(status_of(output), items, generation.usage))


async def _wanted(call: Call[ResponseRequest]) -> tuple[Wanted, AnswerForm | None]:
    """Return what is to be written, and how it is read; None: as plain text."""
    fields, model = call.fields, call.services.model
    messages, choice, held = messages_of(fields), response_tools(fields), response_held_to(fields.wanted_format)
    form = answer_form(call.services.config, model.tokenizer, choice)
    logprobs = num_logprobs(fields)
    if form is not None and logprobs is not None:
        raise unsupported(
            "top_logprobs", "log-probabilities are available for plain text, or from /v1/chat/completions"
        )
    sampling = sampling_of(
        fields,
        model.get_default_sampling_params(),
        max_tokens=fields.max_output_tokens,
        logprobs=logprobs,
        grammar=held.grammar,
    )
    options = chat_options(
        model.tokenizer,
        fields.chat_template_kwargs,
        effort=effort_of(fields),
        effort_field="reasoning.effort",
        tools=choice.shown,
    )
    call.admit([[messages, choice.shown]], sampling)
    prompt, sampling = await conversation_prompt(call, Conversation(messages, options, form), sampling, NAMES)
    wanted = Wanted(
        prompts=[prompt],
        sampling=sampling,
        chat=options,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        names={**NAMES, "grammar": "tools" if held.grammar is None else held.field},
    )
    return with_form(wanted, form), form


def _reader(form: AnswerForm | None, generation: Generation) -> AnswerReader | None:
    if form is None:
        return None
    return form.reader(form.thinking(generation.prepared[0].request.prompt_token_ids))


class _Answer:
    """The answer to one call, at any point of its way."""

    def __init__(self, call: Call[ResponseRequest], sampling: SamplingParams, form: AnswerForm | None) -> None:
        self._fields = call.fields
        self._model = call.model
        self._created_at = now_s()
        self._sampling = sampling
        self._form = form
        self._names = TokenNames(call.services.model.tokenizer)
        self._id = shown_id("resp_", call.context, call.fields.request_id)
        self._suffix = shown_id("", call.context)

    def new_items(self) -> Items:
        """Return the items of an answer of which nothing is there yet. Does not mutate."""
        return Items(self._suffix, self._form)

    def read(self, output: CompletionDelta, reader: AnswerReader | None) -> Items:
        """Return the items of a whole text. Mutates the reader."""
        items = self.new_items()
        if reader is None:
            item = items.open("message")
            item.text, item.logprobs = output.text, self.logprobs(output)
        else:
            items.read(reader.read(output.text, is_last=True))
        return items

    def logprobs(self, output: CompletionDelta) -> list[ContentLogprob]:
        """Return how likely the tokens of a piece were; nothing where that was not asked for. Does not mutate."""
        if output.logprobs is None:
            return []
        return content_logprobs(output.logprobs, self._fields.top_logprobs or 0, self._names)

    def whole(self, status: Status, items: Items, usage: Usage | None) -> ResponseAnswer:
        """Return the answer as far as it exists. Does not mutate."""
        fields = self._fields
        return ResponseAnswer(
            id=self._id,
            object="response",
            created_at=self._created_at,
            status=status,
            model=self._model,
            output=[] if status == "in_progress" else items.told(status),
            usage=None if usage is None else _usage(usage),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            metadata=fields.metadata or {},
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            text=TextSettings(fields.wanted_format),
            tool_choice=fields.tool_choice or ("auto" if fields.tools else "none"),
            tools=fields.tools or [],
        )


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )
