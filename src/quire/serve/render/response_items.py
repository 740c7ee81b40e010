"""The items of an answer of /v1/responses: reasoning, message and calls, in the order of the model's output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quire.serve.answer_form import AnswerForm
from quire.serve.schemas.common import ContentLogprob
from quire.serve.schemas.responses import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from quire.serve.tools.base import Arguments, CallBegun, Event, Reasoning

Kind = Literal["reasoning", "message", "call"]
PREFIXES = {"reasoning": "rs_", "message": "msg_", "call": "fc_"}


@dataclass(slots=True)
class Item:
    """One item, as far as it has been generated. `text`: of a message or reasoning, or the arguments of a call."""

    kind: Kind
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    logprobs: list[ContentLogprob] = field(default_factory=list)
    namespace: str = ""

    def part(self) -> OutputText:
        """Return the text as a part of a message. Does not mutate."""
        return OutputText("output_text", self.text, [], self.logprobs)

    def told(self, status: Status) -> OutputItem:
        """Return the item as the client sees it: without content while in progress. Does not mutate."""
        has_begun = status != "in_progress"
        if self.kind == "message":
            return OutputMessage(self.id, status, "assistant", [self.part()] if has_begun else [])
        if self.kind == "reasoning":
            return ReasoningItem(self.id, status, [ReasoningText("reasoning_text", self.text)] if has_begun else [])
        text = self.text if has_begun else ""
        return FunctionCallItem(self.id, status, self.call_id, self.name, text, self.namespace or msgspec.UNSET)


class Items:
    """The items of one answer. Mutable. `suffix` makes their ids unique."""

    def __init__(self, suffix: str, form: AnswerForm | None) -> None:
        self.all: list[Item] = []
        self._suffix = suffix
        self._form = form
        self._tools = {} if form is None else {tool.name: tool for tool in form.choice.tools}

    def open(self, kind: Kind, name: str = "") -> Item:
        """Add and return a new item. Mutates."""
        index = len(self.all)
        # The first item, often the only one, has an id without an index.
        own_id = PREFIXES[kind] + self._suffix + (f"_{index}" if index else "")
        call_id = "" if self._form is None or kind != "call" else self._form.call_id(self._suffix, index)
        tool = self._tools.get(name)
        names = (name, "") if tool is None else (tool.own_name, tool.namespace)
        self.all.append(Item(kind, own_id, index, names[0], call_id, namespace=names[1]))
        return self.all[-1]

    def take(self, event: Event) -> tuple[Item, bool]:
        """Add an event to its item; return that item, and whether it is new. Mutates."""
        if isinstance(event, CallBegun):
            return self.open("call", event.name), True
        kind: Kind = "call" if isinstance(event, Arguments) else "message"
        if isinstance(event, Reasoning):
            kind = "reasoning"
        is_new = not self.all or self.all[-1].kind != kind
        item = self.open(kind) if is_new else self.all[-1]
        item.text += event.text
        return item, is_new

    def told(self, status: Status) -> list[OutputItem]:
        """Return all items as the client sees them; the last has the status of the answer. Does not mutate."""
        last = len(self.all) - 1
        return [item.told(status if item.index == last else "completed") for item in self.all]

    def read(self, events: Iterable[Event]) -> None:
        """Add all events of an answer; an answer without items gets an empty message. Mutates."""
        for event in events:
            self.take(event)
        if not self.all:
            self.open("message")
