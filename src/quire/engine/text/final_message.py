r"""Prompts that end within the last message of a conversation, which the model continues instead of answering it.

    messages    … {"role": "assistant", "content": "A block is "}
    marked      … {"role": "assistant", "content": "A block is ▯"}      ▯: a mark that no client can guess
    rendered    …<|im_start|>assistant\nA block is ▯<|im_end|>\n
    cut         …<|im_start|>assistant\nA block is                      the prompt

The mark shows where the template writes the message, whatever it adds before and after, and keeps the template from
trimming space at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import Message

CONTINUABLE: Final = "a message of the assistant with a text and without tool calls, to be continued"


def random_mark() -> str:
    """Return a mark that is in no text: a private character and digits, which no template changes."""
    return f"\U00100000{secrets.randbelow(10**18):018}"


def with_end(conversation: Sequence[Message], mark: str) -> list[Message]:
    """Return a valid conversation with a mark at the end of its last message; raises if no model can continue it."""
    *before, last = conversation
    content: Any = last.get("content")
    if last["role"] != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
        raise InvalidRequestError(f"messages[{len(before)}]", last["role"], CONTINUABLE)
    return [*before, {**last, "content": content + mark}]


def up_to(rendered: str, mark: str) -> str:
    """Return a rendered conversation up to the mark, the last one if the template writes the message twice.

    >>> up_to("<user>hi<assistant>A block is |<end>", "|")
    '<user>hi<assistant>A block is '
    """
    text, found, _ = rendered.rpartition(mark)
    if not found:
        allowed = "a message that the chat template writes as it is, to be continued"
        raise InvalidRequestError("messages", "a last message that cannot be found in the prompt", allowed)
    return text.replace(mark, "")
