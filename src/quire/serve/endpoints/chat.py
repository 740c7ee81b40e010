"""POST /v1/chat/completions: a conversation, and one answer to it or several."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.answer_form import AnswerForm, answer_form
from quire.serve.endpoints.call import Call, answer_call, chunks, long_answer, now_s, shown_id
from quire.serve.endpoints.chat_texts import ChatTexts
from quire.serve.endpoints.conversation import Conversation, chat_options, conversation_prompt, with_form
from quire.serve.errors import ApiError
from quire.serve.generation import Generation, Wanted, prepare
from quire.serve.logprobs import TokenNames, prompt_logprobs
from quire.serve.schemas.chat import (
    ChatCompletion,
    ChatRequest,
    num_logprobs,
    require_plain_messages,
)
from quire.serve.schemas.formats import held_to
from quire.serve.schemas.sampling import include_usage, max_tokens_of, sampling_of
from quire.serve.schemas.tools import tool_choice_of
from quire.serve.sse import Envelope, EventStream

OBJECT: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"


async def chat_completions(request: Request) -> Response | EventStream:
    """Answer a call."""
    return await answer_call(request, ChatRequest, _answer)


async def _answer(call: Call[ChatRequest]) -> Response | EventStream:
    fields, services = call.fields, call.services
    tells_usage = include_usage(fields)
    if fields.stream and fields.prompt_logprobs is not None:
        message = "prompt_logprobs need stream: false"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")
    wanted, form = await _wanted(call)
    generation = await prepare(services, call.context, wanted)
    names = TokenNames(services.model.tokenizer, bool(fields.return_tokens_as_token_ids))
    texts = ChatTexts(fields, generation, names, form)
    answer_id, created = shown_id("chatcmpl-", call.context, fields.request_id), now_s()
    if fields.stream:
        fixed: dict[str, object] = {"id": answer_id, "object": CHUNK, "created": created, "model": call.model}
        if fields.return_token_ids:
            fixed["prompt_token_ids"] = _prompt_ids(generation)
        envelope = Envelope(fixed, tells_usage=tells_usage[0])
        return EventStream(chunks(generation, envelope, texts.render, tells_usage), services.config)
    found = await generation.collect()
    known, usage = generation.prompt_logprobs.get(0), generation.usage

    def answer() -> ChatCompletion:
        return ChatCompletion(
            id=answer_id,
            object=OBJECT,
            created=created,
            model=call.model,
            choices=[texts.choice(output) for _, output in found],
            usage=usage,
            prompt_token_ids=_prompt_ids(generation) if fields.return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if fields.prompt_logprobs is None or known is None
            else prompt_logprobs(known, fields.prompt_logprobs),
        )

    return await long_answer(call, answer, usage)


async def _wanted(call: Call[ChatRequest]) -> tuple[Wanted, AnswerForm | None]:
    """Return what is to be written, and how it is read; None: as plain text."""
    fields, model = call.fields, call.services.model
    require_plain_messages(fields.messages)
    choice = tool_choice_of(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    form = answer_form(call.services.config, model.tokenizer, choice)
    held = held_to(fields.response_format, fields.structured_outputs)
    max_tokens = max_tokens_of(fields.max_tokens, fields.max_completion_tokens)
    sampling = sampling_of(
        fields,
        model.get_default_sampling_params(),
        max_tokens=max_tokens,
        logprobs=num_logprobs(fields.logprobs, fields.top_logprobs),
        grammar=held.grammar,
    )
    options = chat_options(
        model.tokenizer,
        fields.chat_template_kwargs,
        effort=fields.reasoning_effort,
        tools=choice.shown,
        add_generation_prompt=fields.add_generation_prompt,
    )
    names = {
        "prompt": "messages",
        "template_variables": "chat_template_kwargs",
        "logprobs": "top_logprobs",
        "max_tokens": "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        "beam_search": "use_beam_search",
        "grammar": "tools" if held.grammar is None else held.field,
    }
    call.admit([[fields.messages, choice.shown]], sampling)
    asked = Conversation(fields.messages, options, form)
    prompt, sampling = await conversation_prompt(call, asked, sampling, names)
    wanted = Wanted(
        prompts=[prompt],
        sampling=sampling,
        chat=options,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        names=names,
    )
    return with_form(wanted, form), form


def _prompt_ids(generation: Generation) -> list[int]:
    return generation.prepared[0].request.prompt_token_ids.tolist()
