"""JsonFormat: a tool format whose calls are JSON objects, defined by its shape and by the marks of its templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.serve.tools.base import AnswerParser, Mark, Tool
from quire.serve.tools.json_calls import CallShape, JsonCallParser, json_call_rules
from quire.serve.tools.template_format import TemplateFormat


@dataclass(frozen=True, slots=True)
class JsonFormat(TemplateFormat):
    """A format whose calls have a shape. Immutable."""

    shape: CallShape

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call."""
        return tuple(mark for mark in (self.shape.opener, self.shape.closer) if mark)

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls`, `opened` and `free`."""
        return json_call_rules(self.shape, tools, most, mark)

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions."""
        return JsonCallParser(self.shape, tools)
