"""ContentForm: how a chat template takes the contents of messages: as text, as a list of parts, or as both.

    TEXT     message.content is written as it is; an image becomes its marker in the text
    PARTS    the template goes through the parts of a content, and writes nothing of a text
    BOTH     a text, or parts for a message with images

The form is found by rendering two small conversations: their text and their image are in the result, or they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import ChatTemplate, Message
from quire.engine.text.client_text import ClientText, joined

TRIAL: Final = "a trial of the chat template"


class ContentForm(Enum):
    """What a chat template takes as the content of a message."""

    TEXT = "text"
    PARTS = "parts"
    BOTH = "both"


def form_of(template: ChatTemplate, marker: str) -> ContentForm:
    """Return the form of contents that a template takes; `marker` is what it writes for an image. Does not mutate."""
    parts = _rendered(template, [{"type": "image"}, {"type": "text", "text": TRIAL}])
    if parts.count(marker) != 1 or TRIAL not in parts:
        return ContentForm.TEXT
    return ContentForm.BOTH if TRIAL in _rendered(template, TRIAL) else ContentForm.PARTS


def in_form(messages: Sequence[Message], form: ContentForm, marker: str) -> list[Message]:
    """Return a valid conversation with its contents in this form. Does not mutate."""
    return [
        message if message.get("content") is None else message | {"content": _in_form(message["content"], form, marker)}
        for message in messages
    ]


def _in_form(content: Any, form: ContentForm, marker: str) -> Any:
    if form is ContentForm.PARTS and isinstance(content, str):
        return [{"type": "text", "text": content}]
    if form is ContentForm.TEXT and isinstance(content, list):
        return joined("", [ClientText(part["text"]) if "text" in part else f"{marker}\n" for part in content])
    return content


def _rendered(template: ChatTemplate, content: object) -> str:
    try:
        return template.render([{"role": "user", "content": content}])
    except InvalidRequestError:
        return ""
