"""The answers of Ollama's API, in one piece or as lines of JSON.

A call is sent only when complete, because its arguments are a JSON object. A call that is cut off is left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET

from quire.engine.outputs import CompletionDelta
from quire.serve.errors import ApiError, OllamaErrorBody
from quire.serve.json_line import encode
from quire.serve.reader import ReadAnswer, ReadCall, object_of
from quire.serve.render.answer import shown_model, shown_reason, text_reader
from quire.serve.render.logprobs import TokenNames, content_logprobs, written
from quire.serve.run.generation import Generation, Results, TokenCounts
from quire.serve.schemas.ollama import (
    CalledFunction,
    DoneReason,
    OllamaAnswer,
    OllamaCall,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateAnswer,
    OllamaMessage,
)
from quire.serve.tools.base import Arguments, CallBegun, Event, merged

NANOSECONDS: Final = 1_000_000_000


class OllamaReply:
    """The answer to one call, of either endpoint. Mutable."""

    def __init__(self, fields: OllamaFields, generation: Generation) -> None:
        self._fields = fields
        self._generation = generation
        self._names = TokenNames(generation.services.model.tokenizer)
        self._created_at = datetime.fromtimestamp(generation.created_s, UTC)
        self._form = generation.request.form
        self._reader = text_reader(generation)
        self._held: list[Event] = []  # of an incomplete call
        self._num_calls = 0

    def whole(self, results: Results) -> OllamaAnswer:
        """Return the answer in one piece. Mutates."""
        if not results.texts:
            return self._answer(ReadAnswer(), None, "load", results.counts)
        [(_, output)] = results.texts
        return self._answer(self._read(output), self._logprobs(output), shown_reason(output), results.counts)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the lines of its stream. Mutates."""
        reason: DoneReason = "load"
        async with aclosing(self._generation.steps()) as all_steps:
            async for steps in all_steps:
                lines = []
                for output in (output for _, delta in steps for output in delta.outputs):
                    reason = shown_reason(output) or reason
                    answer, logprobs = self._read(output), self._logprobs(output)
                    if answer.text or answer.reasoning or answer.calls or logprobs:
                        lines.append(_line(self._answer(answer, logprobs)))
                if lines:
                    yield b"".join(lines)
        yield _line(self._answer(ReadAnswer(), None, reason, self._generation.counts))

    def failed(self, error: ApiError) -> bytes:
        """Return the line that ends a failed stream. Does not mutate."""
        return _line(OllamaErrorBody(error.detail.message))

    def _read(self, output: CompletionDelta) -> ReadAnswer:
        """Return the new part of the answer, without a call that is still incomplete. Mutates."""
        is_last = output.finish_reason is not None
        events = merged([*self._held, *self._reader.read(output.text, is_last=is_last)])
        length = len(events) if is_last else _without_open_call(events)
        self._held = events[length:]
        return ReadAnswer.of(events[:length])

    def _answer(
        self,
        answer: ReadAnswer,
        logprobs: list[Any] | None,
        reason: DoneReason | None = None,
        counts: TokenCounts | None = None,
    ) -> OllamaAnswer:
        """Return an answer, or a part of one; the last part has the reason and the counts. Mutates."""
        text, thinking = answer.text or "", answer.reasoning or UNSET
        common: dict[str, Any] = {
            "model": shown_model(self._fields, self._generation),
            "created_at": self._created_at,
            "done": counts is not None,
            "logprobs": logprobs or UNSET,
        }
        if counts is not None:
            common |= {"done_reason": reason, **self._figures(counts)}
        if not isinstance(self._fields, OllamaChatRequest):
            return OllamaGenerateAnswer(**common, response=text, thinking=thinking)
        return OllamaChatAnswer(
            **common, message=OllamaMessage("assistant", text, thinking, self._calls(answer.calls) or UNSET)
        )

    def _calls(self, calls: Sequence[ReadCall]) -> list[OllamaCall]:
        """Return the complete calls. Mutates: counts them."""
        found = []
        for call in calls:
            arguments = object_of(call.arguments)
            if arguments is not None and self._form is not None:
                own_id = self._form.call_id(self._generation.context.request_id, 0, self._num_calls)
                found.append(OllamaCall(own_id, CalledFunction(self._num_calls, call.name, arguments)))
                self._num_calls += 1
        return found

    def _figures(self, counts: TokenCounts) -> dict[str, int]:
        """Return the counts and times, from the arrival on: the wait in the queue counts as prompt time."""
        generation = self._generation
        began, first, now = generation.context.arrival_s, generation.first_token_s, generation.services.clock.now()
        return {
            "total_duration": _nanoseconds(now - began),
            "load_duration": 0,
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": _nanoseconds(first - began),
            "eval_count": counts.output,
            "eval_duration": _nanoseconds(now - first),
        }

    def _logprobs(self, output: CompletionDelta) -> list[Any] | None:
        if not self._fields.logprobs:
            return None
        return written(content_logprobs(output.logprobs or [], self._fields.top_logprobs or 0, self._names))


def _without_open_call(events: Sequence[Event]) -> int:
    """Return how many events come before an incomplete call."""
    length = len(events)
    if events and isinstance(events[-1], CallBegun | Arguments):
        length = next(index for index in reversed(range(length)) if isinstance(events[index], CallBegun))
    return length


def _nanoseconds(seconds: float) -> int:
    """Return a time in nanoseconds: never 0, because clients divide by it."""
    return max(1, round(seconds * NANOSECONDS))


def _line(value: msgspec.Struct) -> bytes:
    return encode(value) + b"\n"
