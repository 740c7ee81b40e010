"""TemplateFormat: what most tool formats share: the marks of their templates, and ids in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quire.engine.text.client_text import ClientText, joined
from quire.serve.tools.base import Adapt, Message, ReasoningFormat
from quire.serve.tools.json_calls import CallShape

NO_PARAMETERS: Final[Message] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A format; its templates contain all of `signs` and none of `others`. Immutable."""

    name: str
    signs: tuple[str, ...] = field(kw_only=True)
    others: tuple[str, ...] = field(default=(), kw_only=True)
    adapt: Adapt | None = field(default=None, kw_only=True)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.others)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the reasoning; None: the parser of calls does not separate it."""
        return None

    def call_id(self, digits: str) -> str:
        """Return the id of a call."""
        return f"call_{digits[:24]}"


def with_all_fields(tools: Sequence[Message] | None) -> Sequence[Message] | None:
    """Return tools with a description and parameters, for templates that require both. Does not mutate.

    The keys that a client sent stay first, in its order: some templates write the whole object, as models saw it in
    training, with the name first.
    """
    if tools is None:
        return None
    functions = [{key: value for key, value in tool["function"].items() if value is not None} for tool in tools]
    default = {"description": "", "parameters": NO_PARAMETERS}
    return [{**tool, "function": own | default | own} for tool, own in zip(tools, functions, strict=True)]


def with_calls_as_text(message: Message, shape: CallShape, write: Callable[[Mapping[str, Any]], str]) -> Message:
    """Return a message with a list of its calls in its content, as the model wrote it. Does not mutate.

    The marks around the list are the template's, so they become the tokens that the model wrote.
    """
    calls = ", ".join(write(call["function"]) for call in message.get("tool_calls", ()))
    if not calls:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    before = ClientText(str(message.get("content", "")))
    return rest | {"content": joined("", [before, f"{shape.opener}[", ClientText(calls), f"]{shape.closer}"])}
