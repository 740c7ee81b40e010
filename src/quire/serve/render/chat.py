"""The answer of /v1/chat/completions, in one piece or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final

from msgspec import UNSET

from quire.engine.outputs import CompletionDelta
from quire.serve.errors import ApiError
from quire.serve.reader import AnswerReader, ReadAnswer
from quire.serve.render.answer import chunks, shown_id, shown_model, shown_reason, usage_of
from quire.serve.render.events import NOTHING, Envelope, error_event
from quire.serve.render.logprobs import TokenNames, content_logprobs, prompt_logprobs, written
from quire.serve.run.generation import Generation, Results
from quire.serve.schemas.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from quire.serve.tools.base import CallBegun, Event, Reasoning, Text, Thinking

OBJECT: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"


class ChatAnswer:
    """The answer to one call. Mutable."""

    def __init__(self, fields: ChatRequest, generation: Generation) -> None:
        self._fields = fields
        self._generation = generation
        self._names = TokenNames(generation.services.model.tokenizer, bool(fields.return_tokens_as_token_ids))
        self._form = generation.request.form
        self._id = shown_id("chatcmpl-", generation.context, fields.request_id)
        self._thinking = Thinking.NO
        if self._form is not None:
            self._thinking = self._form.thinking(generation.prepared[0].request.prompt_token_ids)
        self._readers: dict[int, AnswerReader] = {}
        self._num_calls: dict[int, int] = {}  # by the index of an answer that has begun

    def whole(self, results: Results) -> ChatCompletion:
        """Return the answer in one piece. Mutates."""
        fields, known = self._fields, self._generation.prompt_logprobs.get(0)
        return ChatCompletion(
            id=self._id,
            object=OBJECT,
            created=self._generation.created_s,
            model=shown_model(fields, self._generation),
            choices=[self._choice(output) for _, output in results.texts],
            usage=usage_of(results.counts),
            prompt_token_ids=self._prompt_ids() if fields.return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if fields.prompt_logprobs is None or known is None
            else prompt_logprobs(known, fields.prompt_logprobs),
        )

    def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream. Mutates."""
        generation = self._generation
        model = shown_model(self._fields, generation)
        fixed: dict[str, object] = {"id": self._id, "object": CHUNK, "created": generation.created_s, "model": model}
        prompt = {"prompt_token_ids": self._prompt_ids()} if self._fields.return_token_ids else NOTHING
        envelope = Envelope(fixed, tells_usage=generation.request.stream_usage[0], once=prompt)
        return chunks(generation, envelope, self._new_choices)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. Does not mutate."""
        return error_event(error)

    def _prompt_ids(self) -> list[int]:
        return self._generation.prepared[0].request.prompt_token_ids.tolist()

    def _choice(self, output: CompletionDelta) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=self._message(output),
            logprobs=self._logprobs(output),
            finish_reason=self._reason(output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._fields.return_token_ids else UNSET,
        )

    def _new_choices(self, _: int, output: CompletionDelta) -> list[ChatChunkChoice]:
        """Return the new part of an answer: its role, its content, its end. Mutates."""
        index = output.index
        found = []
        if is_first := index not in self._num_calls:
            self._num_calls[index] = 0
            content = "" if self._form is None else None  # the answer may have no text
            found.append(ChatChunkChoice(index, ChatDelta("assistant", content), None, None))
        deltas = [self._delta(index, event) for event in self._events(output)]
        finish_reason, logprobs = self._reason(output), self._logprobs(output)
        tells_ids = bool(self._fields.return_token_ids and output.token_ids)
        # A token without new text also gets a chunk, so that clients see the pace; the first and last tokens have one
        # anyway.
        if not deltas and (tells_ids or (logprobs and logprobs.content) or not (is_first or finish_reason)):
            deltas = [ChatDelta(content="") if self._form is None else ChatDelta()]
        for number, delta in enumerate(deltas):
            own_logprobs = logprobs if number == 0 else None
            token_ids = output.token_ids if tells_ids and number == 0 else UNSET
            found.append(ChatChunkChoice(index, delta, own_logprobs, None, token_ids=token_ids))
        if finish_reason is not None:
            found.append(ChatChunkChoice(index, ChatDelta(), None, finish_reason, output.stop_reason))
        return found

    def _message(self, output: CompletionDelta) -> ChatMessage:
        if self._form is None:
            return ChatMessage("assistant", output.text)
        index = output.index
        answer = ReadAnswer.of(self._events(output))
        self._num_calls[index] = len(answer.calls)
        calls = [
            ToolCall(self._call_id(index, number), "function", FunctionCall(call.name, call.arguments))
            for number, call in enumerate(answer.calls)
        ]
        return ChatMessage(
            "assistant",
            answer.text,
            reasoning_content=UNSET if answer.reasoning is None else answer.reasoning,
            tool_calls=calls or UNSET,
        )

    def _events(self, output: CompletionDelta) -> Sequence[Event]:
        """Return the events of a piece of an answer. Mutates."""
        if self._form is None:
            return [Text(output.text)] if output.text else []
        reader = self._readers.get(output.index)
        if reader is None:
            reader = self._readers[output.index] = self._form.reader(self._thinking)
        return reader.read(output.text, is_last=output.finish_reason is not None)

    def _delta(self, index: int, event: Event) -> ChatDelta:
        if isinstance(event, Text):
            return ChatDelta(content=event.text)
        if isinstance(event, Reasoning):
            return ChatDelta(reasoning_content=event.text)
        number = self._num_calls[index]
        if isinstance(event, CallBegun):
            self._num_calls[index] += 1
            own_id, begun = self._call_id(index, number), FunctionDelta(name=event.name, arguments="")
            return ChatDelta(tool_calls=[ToolCallDelta(index=number, id=own_id, type="function", function=begun)])
        return ChatDelta(tool_calls=[ToolCallDelta(index=number - 1, function=FunctionDelta(arguments=event.text))])

    def _call_id(self, index: int, number: int) -> str:
        return "" if self._form is None else self._form.call_id(self._generation.context.request_id, index, number)

    def _reason(self, output: CompletionDelta) -> ChatFinishReason | None:
        """Return the finish reason. It is "stop" if the client named the function to call, as in OpenAI's API."""
        reason = shown_reason(output)
        is_named = self._form is not None and self._form.choice.mode == "named"
        return "tool_calls" if reason == "stop" and self._num_calls.get(output.index) and not is_named else reason

    def _logprobs(self, output: CompletionDelta) -> ChatLogprobs | None:
        if not self._fields.logprobs:
            return None
        num_top = self._fields.top_logprobs or 0
        return ChatLogprobs(written(content_logprobs(output.logprobs or [], num_top, self._names)))
