"""POST /v1/chat/completions: a conversation, and one answer to it or several."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.outputs import CompletionDelta
from quire.serve.endpoints.call import (
    Call,
    chunks,
    long_answer,
    now_s,
    open_call,
    shown_id,
    told_reason,
)
from quire.serve.endpoints.conversation import chat_options, conversation_prompt
from quire.serve.errors import ApiError
from quire.serve.generation import Generation, Wanted, prepare
from quire.serve.logprobs import TokenNames, content_logprobs, prompt_logprobs
from quire.serve.schemas.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    num_logprobs,
    require_plain_messages,
    shown_tools,
)
from quire.serve.schemas.formats import held_to
from quire.serve.schemas.sampling import include_usage, max_tokens_of, sampling_of
from quire.serve.sse import Envelope, EventStream, unless_gone

OBJECT: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"


async def chat_completions(request: Request) -> Response | EventStream:
    """Answer a call."""
    call = await open_call(request, ChatRequest)
    fields, services = call.fields, call.services
    tells_usage = include_usage(fields)
    if fields.stream and fields.prompt_logprobs is not None:
        message = "prompt_logprobs are told only where stream is false"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")
    wanted = await _wanted(call)
    generation = await prepare(services, call.context, wanted)
    texts = _Texts(fields, generation, TokenNames(services.model.tokenizer, bool(fields.return_tokens_as_token_ids)))
    answer_id, created = shown_id("chatcmpl-", call.context, fields.request_id), now_s()
    if fields.stream:
        fixed: dict[str, object] = {"id": answer_id, "object": CHUNK, "created": created, "model": call.model}
        if fields.return_token_ids:
            fixed["prompt_token_ids"] = _prompt_ids(generation)
        envelope = Envelope(fixed, tells_usage=tells_usage[0])
        return EventStream(chunks(generation, envelope, texts.render, tells_usage), services.config)
    found = await unless_gone(request, generation.collect, services.config)
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

    return await long_answer(answer, usage)


async def _wanted(call: Call[ChatRequest]) -> Wanted:
    fields, model = call.fields, call.services.model
    require_plain_messages(fields.messages)
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
        tools=shown_tools(fields.tools, fields.tool_choice),
        add_generation_prompt=fields.add_generation_prompt,
    )
    names = {
        "prompt": "messages",
        "template_variables": "chat_template_kwargs",
        "logprobs": "top_logprobs",
        "max_tokens": "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        "beam_search": "use_beam_search",
        "grammar": held.field,
    }
    prompt = await conversation_prompt(call, fields.messages, options, max_tokens, names)
    return Wanted(
        prompts=[prompt],
        sampling=sampling,
        chat=options,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        names=names,
    )


def _prompt_ids(generation: Generation) -> list[int]:
    return generation.prepared[0].request.prompt_token_ids.tolist()


class _Texts:
    """What the client of one call is told of its answers, as they grow."""

    def __init__(self, fields: ChatRequest, generation: Generation, names: TokenNames) -> None:
        self._fields = fields
        self._generation = generation
        self._names = names
        self._num_top = fields.top_logprobs or 0
        self._begun: set[int] = set()

    def choice(self, output: CompletionDelta) -> ChatChoice:
        """Return what is told of a whole answer. Does not mutate."""
        return ChatChoice(
            index=output.index,
            message=ChatMessage("assistant", output.text),
            logprobs=self._logprobs(output),
            finish_reason=told_reason(output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._fields.return_token_ids else UNSET,
        )

    def render(self, prompt_index: int, output: CompletionDelta) -> list[ChatChunkChoice]:
        """Return what is told of what is new of an answer: who speaks, the text, the end, each by itself. Mutates."""
        index, finish_reason = output.index, told_reason(output)
        found = []
        if is_first := index not in self._begun:
            self._begun.add(index)
            found.append(ChatChunkChoice(index, ChatDelta("assistant", ""), None, None))
        logprobs = self._logprobs(output)
        tells_ids = bool(self._fields.return_token_ids and output.token_ids)
        # A token that has brought no text is told of as well, so that clients can see the pace; the first and the last
        # ones have a chunk anyway.
        if output.text or tells_ids or (logprobs and logprobs.content) or not (is_first or finish_reason):
            token_ids = output.token_ids if tells_ids else UNSET
            found.append(
                ChatChunkChoice(index, ChatDelta(content=output.text), logprobs, None, token_ids=token_ids),
            )
        if finish_reason is not None:
            found.append(ChatChunkChoice(index, ChatDelta(), None, finish_reason, output.stop_reason))
        return found

    def _logprobs(self, output: CompletionDelta) -> ChatLogprobs | None:
        if not self._fields.logprobs:
            return None
        return ChatLogprobs(content_logprobs(output.logprobs or [], self._num_top, self._names))
