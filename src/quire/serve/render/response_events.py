"""The stream of /v1/responses: numbered events that open each item, extend it and close it.

created, in_progress                        with the first token
  output_item.added                         of reasoning, a message or a call
    content_part.added                      of a message
      output_text.delta …                   or reasoning_text.delta, function_call_arguments.delta
    output_text.done, content_part.done     or reasoning_text.done, function_call_arguments.done
  output_item.done
completed, or incomplete                    the whole answer
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from quire.engine.outputs import CompletionDelta
from quire.serve.errors import ApiError
from quire.serve.reader import AnswerReader
from quire.serve.render.answer import num_values, off_loop_if_many
from quire.serve.render.events import named_event
from quire.serve.render.response_items import Item, Items
from quire.serve.run.generation import Generation, TokenCounts
from quire.serve.schemas.common import ContentLogprob
from quire.serve.schemas.responses import OutputText, ResponseAnswer, Status, TextDelta
from quire.serve.tools.base import CallBegun, Event

DELTA: Final = "response.output_text.delta"
GROWS: Final = {"reasoning": "response.reasoning_text", "call": "response.function_call_arguments"}

Whole = Callable[[Status, Items, TokenCounts | None], ResponseAnswer]
Logprobs = Callable[[CompletionDelta], list[ContentLogprob]]


class ResponseEvents:
    """Makes the events of one stream. Mutable. `whole` returns the answer so far, `logprobs` those of a piece."""

    def __init__(self, items: Items, reader: AnswerReader | None, whole: Whole, logprobs: Logprobs) -> None:
        self._items = items
        self._reader = reader
        self._whole = whole
        self._logprobs = logprobs
        self._num_sent = 0

    async def of(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events: the first ones with the first token, the last ones with the last."""
        status: Status = "completed"
        async with aclosing(generation.steps()) as all_steps:
            async for steps in all_steps:
                events = [] if self._num_sent else self._beginning()
                for output in (output for _, delta in steps for output in delta.outputs):
                    status = status_of(output)
                    events += self._piece(output)
                if events:
                    yield b"".join(events)
        counts = generation.counts
        count = num_values(generation.request.sampling, 0, counts.output)
        yield await off_loop_if_many(generation, count, lambda: b"".join(self._end(status, counts)))

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream, in both forms that clients look for. Mutates."""
        detail = error.detail
        data = {"code": detail.code, "message": detail.message, "param": detail.param, "error": detail}
        return self._event("error", data)

    def _beginning(self) -> list[bytes]:
        begun = self._whole("in_progress", self._items, None)
        events = [
            self._event("response.created", {"response": begun}),
            self._event("response.in_progress", {"response": begun}),
        ]
        if self._reader is None:  # the answer is one message
            events += self._opened(self._items.open("message"))
        return events

    def _piece(self, output: CompletionDelta) -> list[bytes]:
        """Return the events of a piece of the answer. Mutates."""
        if self._reader is None:
            logprobs = self._logprobs(output)
            [item] = self._items.all
            item.text += output.text
            item.logprobs += logprobs
            return [self._text_delta(item, output.text, logprobs)] if output.text or logprobs else []
        pieces = self._reader.read(output.text, is_last=output.finish_reason is not None)
        return [event for each in pieces for event in self._taken(each)]

    def _taken(self, event: Event) -> list[bytes]:
        last = self._items.all[-1:]
        item, is_new = self._items.take(event)
        events = [closing for each in last if is_new for closing in self._closed(each, "completed")]
        events += self._opened(item) if is_new else []
        if isinstance(event, CallBegun):
            return events
        if item.kind == "message":
            return [*events, self._text_delta(item, event.text, [])]
        return [*events, self._event(f"{GROWS[item.kind]}.delta", {**_place(item), "delta": event.text})]

    def _end(self, status: Status, counts: TokenCounts) -> list[bytes]:
        events = []
        if not self._items.all:
            events += self._opened(self._items.open("message"))
        events += self._closed(self._items.all[-1], status)
        whole = self._whole(status, self._items, counts)
        return [*events, self._event(f"response.{status}", {"response": whole})]

    def _opened(self, item: Item) -> list[bytes]:
        data = {"output_index": item.index, "item": item.told("in_progress")}
        events = [self._event("response.output_item.added", data)]
        if item.kind == "message":
            part = OutputText("output_text", "", [], [])
            events.append(self._event("response.content_part.added", {**_place(item), "part": part}))
        return events

    def _closed(self, item: Item, status: Status) -> list[bytes]:
        place = _place(item)
        if item.kind == "message":
            text = {"text": item.text, "logprobs": item.logprobs}
            events = [
                self._event("response.output_text.done", {**place, **text}),
                self._event("response.content_part.done", {**place, "part": item.part()}),
            ]
        elif item.kind == "reasoning":
            events = [self._event("response.reasoning_text.done", {**place, "text": item.text})]
        else:
            data = {**place, "name": item.name, "arguments": item.text}
            events = [self._event("response.function_call_arguments.done", data)]
        done = {"output_index": item.index, "item": item.told(status)}
        return [*events, self._event("response.output_item.done", done)]

    def _text_delta(self, item: Item, text: str, logprobs: list[ContentLogprob]) -> bytes:
        number = self._num_sent
        self._num_sent += 1
        return named_event(DELTA, TextDelta(DELTA, number, item.id, item.index, 0, text, logprobs))

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        number = self._num_sent
        self._num_sent += 1
        return named_event(name, {"type": name, "sequence_number": number, **data})


def status_of(output: CompletionDelta) -> Status:
    """Return the status of an answer, given its last piece. Does not mutate."""
    return "incomplete" if output.finish_reason == "length" else "completed"


def _place(item: Item) -> dict[str, Any]:
    place = {"item_id": item.id, "output_index": item.index}
    return place if item.kind == "call" else place | {"content_index": 0}
