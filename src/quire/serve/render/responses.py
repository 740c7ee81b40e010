"""The answer of /v1/responses, in one piece or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from quire.engine.outputs import CompletionDelta
from quire.serve.errors import ApiError
from quire.serve.render.answer import shown_id, shown_model, text_reader
from quire.serve.render.logprobs import TokenNames, content_logprobs, written
from quire.serve.render.response_events import ResponseEvents, status_of
from quire.serve.render.response_items import Items
from quire.serve.run.generation import Generation, Results, TokenCounts
from quire.serve.schemas.common import ContentLogprob
from quire.serve.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseRequest,
    ResponseUsage,
    Status,
    TextSettings,
)


class ResponseReply:
    """The answer to one call, complete or in progress. Mutable."""

    def __init__(self, fields: ResponseRequest, generation: Generation) -> None:
        self._generation = generation
        form = generation.request.form
        self._reader = None if form is None else text_reader(generation)
        self._items = Items(shown_id("", generation.context), form)
        # No methods: the events would lead back to this reply, and both would live until cycles are collected.
        self._as_far = partial(_as_far, fields, generation)
        self._logprobs = partial(_logprobs, fields.top_logprobs or 0, TokenNames(generation.services.model.tokenizer))
        self._events = ResponseEvents(self._items, self._reader, self._as_far, self._logprobs)

    def whole(self, results: Results) -> ResponseAnswer:
        """Return the answer in one piece. Mutates."""
        [(_, output)] = results.texts
        if self._reader is None:
            item = self._items.open("message")
            item.text, item.logprobs = output.text, self._logprobs(output)
        else:
            self._items.read(self._reader.read(output.text, is_last=True))
        return self._as_far(status_of(output), self._items, results.counts)

    def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream. Mutates."""
        return self._events.of(self._generation)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. Mutates."""
        return self._events.failed(error)


def _logprobs(most: int, names: TokenNames, output: CompletionDelta) -> list[ContentLogprob]:
    if output.logprobs is None:
        return []
    return written(content_logprobs(output.logprobs, most, names))


def _as_far(
    fields: ResponseRequest, generation: Generation, status: Status, items: Items, counts: TokenCounts | None
) -> ResponseAnswer:
    """Return the answer so far. Does not mutate."""
    return ResponseAnswer(
        id=shown_id("resp_", generation.context, fields.request_id),
        object="response",
        created_at=generation.created_s,
        status=status,
        model=shown_model(fields, generation),
        output=[] if status == "in_progress" else items.told(status),
        usage=None if counts is None else _usage(counts),
        incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        temperature=generation.request.sampling.temperature,
        top_p=generation.request.sampling.top_p,
        metadata=fields.metadata or {},
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        text=TextSettings(fields.wanted_format),
        tool_choice=fields.tool_choice or ("auto" if fields.tools else "none"),
        tools=fields.shown_tools,
    )


def _usage(counts: TokenCounts) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=counts.prompt,
        input_tokens_details=InputTokensDetails(counts.cached),
        output_tokens=counts.output,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=counts.prompt + counts.output,
    )
