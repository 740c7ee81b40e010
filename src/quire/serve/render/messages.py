"""The answer of /v1/messages, in one piece or as a stream.

message_start                       with the first token
  content_block_start               of reasoning, text or a call
    content_block_delta …
  content_block_stop
message_delta, message_stop         the stop reason and the usage

In one piece, a call that is cut off is left out, because its arguments are a JSON object.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.engine.outputs import CompletionDelta
from quire.serve.errors import ApiError
from quire.serve.reader import object_of
from quire.serve.render.answer import shown_id, shown_model, text_reader
from quire.serve.render.events import named_event
from quire.serve.run.generation import Generation, Results, TokenCounts
from quire.serve.schemas.messages import (
    BlockDelta,
    ContentBlock,
    Delta,
    InputDelta,
    MessageAnswer,
    MessagesRequest,
    MessageUsage,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from quire.serve.tools.base import CallBegun, Event, Reasoning, Text

Kind = Literal["thinking", "text", "tool_use"]


@dataclass(slots=True)
class Block:
    """One block, as far as it has been generated. `texts`: the parts of its text, or of the arguments of a call."""

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)


class MessageReply:
    """The answer to one call, complete or in progress. Mutable."""

    def __init__(self, fields: MessagesRequest, generation: Generation) -> None:
        self._fields = fields
        self._generation = generation
        self._id = shown_id("msg_", generation.context, fields.request_id)
        self._form = generation.request.form
        self._reader = text_reader(generation)
        self._blocks: list[Block] = []

    def whole(self, results: Results) -> MessageAnswer:
        """Return the answer in one piece. Mutates."""
        [(_, output)] = results.texts
        for event in self._read(output):
            self._take(event)
        content = [each for each in map(self._shown, self._blocks) if each is not None] or [TextBlock("")]
        return self._message(content, *self._ending(output, results.counts), results.counts)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream. Mutates."""
        ending: tuple[StopReason, str | None] = ("end_turn", None)
        has_begun = False
        async with aclosing(self._generation.steps()) as all_steps:
            async for steps in all_steps:
                events = [] if has_begun else self._beginning()
                has_begun = True
                for output in (output for _, delta in steps for output in delta.outputs):
                    events += [event for each in self._read(output) for event in self._written(each)]
                    if output.finish_reason is not None:
                        ending = self._ending(output, self._generation.counts)
                if events:
                    yield b"".join(events)
        yield b"".join(self._end(*ending))

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. Does not mutate."""
        return named_event("error", error.messages_body())

    def _read(self, output: CompletionDelta) -> Sequence[Event]:
        """Return the new parts of the answer. Mutates."""
        return self._reader.read(output.text, is_last=output.finish_reason is not None)

    def _take(self, event: Event) -> tuple[Block, bool]:
        """Add an event to its block; return that block, and whether it is new. Mutates."""
        kind: Kind = "text" if isinstance(event, Text) else "thinking" if isinstance(event, Reasoning) else "tool_use"
        is_new = isinstance(event, CallBegun) or not self._blocks or self._blocks[-1].kind != kind
        if is_new:
            self._blocks.append(Block(kind, len(self._blocks)))
        block = self._blocks[-1]
        if isinstance(event, CallBegun):
            block.name = event.name
            if self._form is not None:
                block.id = self._form.call_id(self._id, block.index)
        else:
            block.texts.append(event.text)
        return block, is_new

    def _shown(self, block: Block) -> ContentBlock | None:
        """Return a block for the client; None for a call that is cut off. Does not mutate."""
        text = "".join(block.texts)
        match block.kind:
            case "text":
                return TextBlock(text)
            case "thinking":
                return ThinkingBlock(text, self._id)
        arguments = object_of(text)
        return None if arguments is None else ToolUseBlock(block.id, block.name, arguments)

    def _ending(self, output: CompletionDelta, counts: TokenCounts) -> tuple[StopReason, str | None]:
        """Return the stop reason, and the stop sequence if there was one. Does not mutate."""
        if output.finish_reason == "length":
            return ("max_tokens" if counts.output >= self._fields.max_tokens else "model_context_window_exceeded"), None
        if any(isinstance(self._shown(block), ToolUseBlock) for block in self._blocks):
            return "tool_use", None
        stop = output.stop_reason
        if isinstance(stop, str) and stop in (self._fields.stop_sequences or ()):
            return "stop_sequence", stop
        return "end_turn", None

    def _message(
        self, content: list[ContentBlock], reason: StopReason | None, sequence: str | None, counts: TokenCounts
    ) -> MessageAnswer:
        model = shown_model(self._fields, self._generation)
        return MessageAnswer(self._id, "message", "assistant", model, content, reason, sequence, _usage(counts))

    # ---- events -----------------------------------------------------------------------------------------------------

    def _beginning(self) -> list[bytes]:
        message = self._message([], None, None, self._generation.counts)
        return [_event("message_start", message=message)]

    def _written(self, event: Event) -> Iterable[bytes]:
        """Yield the events of a part of the answer. Mutates."""
        last = self._blocks[-1:]
        block, is_new = self._take(event)
        if is_new:
            for each in last:
                yield from self._closed(each)
            yield self._opened(block)
        if isinstance(event, CallBegun):
            return
        delta: Delta = InputDelta(event.text)
        if block.kind != "tool_use":
            delta = TextDelta(event.text) if block.kind == "text" else ThinkingDelta(event.text)
        yield named_event("content_block_delta", BlockDelta(block.index, delta))

    def _opened(self, block: Block) -> bytes:
        match block.kind:
            case "text":
                empty: ContentBlock = TextBlock("")
            case "thinking":
                empty = ThinkingBlock("", "")
            case "tool_use":
                empty = ToolUseBlock(block.id, block.name, {})
        return _event("content_block_start", index=block.index, content_block=empty)

    def _closed(self, block: Block) -> Iterable[bytes]:
        if block.kind == "thinking":
            yield named_event("content_block_delta", BlockDelta(block.index, SignatureDelta(self._id)))
        yield _event("content_block_stop", index=block.index)

    def _end(self, reason: StopReason, sequence: str | None) -> Iterable[bytes]:
        if not self._blocks:
            self._blocks.append(Block("text", 0))
            yield self._opened(self._blocks[0])
        yield from self._closed(self._blocks[-1])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=_usage(self._generation.counts))
        yield _event("message_stop")


def _event(name: str, **data: Any) -> bytes:
    return named_event(name, {"type": name, **data})


def _usage(counts: TokenCounts) -> MessageUsage:
    return MessageUsage(counts.prompt - counts.cached, counts.cached, counts.output)
