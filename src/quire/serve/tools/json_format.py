"""JsonFormat: a tool format whose calls are JSON objects, defined by its shape and by the marks of its templates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.serve.tools.base import Mark, Message, Tool, ToolParser
from quire.serve.tools.json_calls import CallShape, JsonCallParser, json_call_rules


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A format; its templates contain all of `signs` and none of `others`. Immutable."""

    name: str
    shape: CallShape
    signs: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call."""
        return tuple(mark for mark in (self.shape.opener, self.shape.closer) if mark)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.others)

    @property
    def tells(self) -> bool:
        """Whether its templates need conversations in their own form."""
        return False

    def told(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[Sequence[Message], Sequence[Message] | None]:
        """Return the conversation unchanged: the templates support tools. Does not mutate."""
        return messages, tools

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls`, `opened` and `free`."""
        return json_call_rules(self.shape, tools, most, mark)

    def parser(self, names: Collection[str]) -> ToolParser:
        """Return a parser for calls of these functions."""
        return JsonCallParser(self.shape, names)

    def call_id(self, digits: str) -> str:
        """Return the id of a call."""
        return f"call_{digits[:24]}"
