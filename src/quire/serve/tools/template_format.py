"""TemplateFormat: what most tool formats share: the marks of their templates, and ids in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.serve.tools.base import Message, ReasoningFormat


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A format; its templates contain all of `signs` and none of `others`. Immutable."""

    name: str
    signs: tuple[str, ...] = field(kw_only=True)
    others: tuple[str, ...] = field(default=(), kw_only=True)

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

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the reasoning; None: the parser of calls does not separate it."""
        return None

    def call_id(self, digits: str) -> str:
        """Return the id of a call."""
        return f"call_{digits[:24]}"
