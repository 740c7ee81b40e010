"""ContentForm: how a chat template takes the contents of messages: as text, as a list of parts, or as both.

    TEXT     message.content is written as it is; an image becomes its marker in the text
    PARTS    the template goes through the parts of a content, and writes nothing of a text
    BOTH     a text, or parts for a message with images

The form is found by rendering two small conversations: their text and their image are in the result, or they are not.
Some templates of models that read images take no texts; without images, they still need parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import ChatTemplate, Message
from quire.engine.text.client_text import ClientText, from_template, joined

TRIAL: Final = "a trial of the chat template"


class ContentForm(Enum):
    """What a chat template takes as the content of a message."""

    TEXT = "text"
    PARTS = "parts"
    BOTH = "both"


def form_of(template: ChatTemplate, marker: str = "") -> ContentForm:
    """Return the form of contents that a template takes. Does not mutate.

    `marker`: what it writes for an image; empty: there are no images.
    """
    takes_text = _rendered(template, TRIAL) != _rendered(template, TRIAL[::-1])  # it may change what it writes
    if takes_text and not marker:
        return ContentForm.TEXT
    image = [{"type": "image"}] if marker else []
    parts = _rendered(template, [*image, {"type": "text", "text": TRIAL}])
    if TRIAL not in parts or (marker and parts.count(marker) != 1):
        return ContentForm.TEXT
    return ContentForm.BOTH if takes_text else ContentForm.PARTS


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
        text = joined("", [ClientText(part["text"]) if "text" in part else f"{marker}\n" for part in content])
        return text if isinstance(text, ClientText) else from_template(text)  # a plain text would be the client's
    return content


def _rendered(template: ChatTemplate, content: object) -> str:
    try:
        return template.render([{"role": "user", "content": content}])
    except InvalidRequestError:
        return ""
