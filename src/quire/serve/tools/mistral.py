"""Mistral: a mark that is a token, then all calls as one list. Its template requires call ids of nine letters.

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]

From 2025 on (Magistral, Mistral Small 3.2) each call has its own mark, then its name, then a second mark; some
models write an id in between:

    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.serve.tools.base import AnswerParser, Mark, Tool
from quire.serve.tools.json_calls import CallShape, NamedCallParser
from quire.serve.tools.json_format import JsonFormat
from quire.serve.tools.rules import arguments_schema, free_text, literal, repeated, text_before

OPENER: Final = "[TOOL_CALLS]"
OWN_ID: Final = "[CALL_ID]"
NAMED: Final = "[ARGS]"
ID_LENGTH: Final = 9


@dataclass(frozen=True, slots=True)
class MistralFormat(JsonFormat):
    """Calls as a list of objects."""

    def call_id(self, digits: str) -> str:
        """Return the id of a call: nine letters and digits."""
        return digits[:ID_LENGTH]


@dataclass(frozen=True, slots=True)
class MistralArgsFormat(MistralFormat):
    """Calls as a name before the arguments."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call."""
        return (OPENER, OWN_ID, NAMED)

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls`, `opened` and `free`."""
        rules = [f"arguments_{index}: {arguments_schema(tool)}" for index, tool in enumerate(tools)]
        named = [f"{literal(tool.name)} own_id? {mark(NAMED)} arguments_{index}" for index, tool in enumerate(tools)]
        more = repeated(f"{mark(OPENER)} call", most)
        rules.append(f"own_id: {mark(OWN_ID)} /[a-zA-Z0-9]{{{ID_LENGTH}}}/")
        rules += [f"call: {' | '.join(named)}", f"calls: {mark(OPENER)} call{more}"]
        rules += [f"opened: {text_before(OPENER, mark)} call{more}", free_text(OPENER)]
        return "\n".join(rules)

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions."""
        return NamedCallParser(self.shape, tools, OWN_ID, NAMED)


MISTRAL: Final = MistralFormat(
    "mistral", CallShape(OPENER, before='" "?', is_list=True, has_id=True), signs=(OPENER,), others=(NAMED,)
)
MISTRAL_ARGS: Final = MistralArgsFormat("mistral_args", CallShape(OPENER), signs=(OPENER, NAMED))
