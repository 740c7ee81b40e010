"""Turns the messages of Ollama's API into those of chat templates.

Ollama's calls have no ids, and tool results name a function or nothing. Templates need ids, and some need nine letters
and digits. So calls are numbered, and a result belongs to the first call of its function that has no result yet. A
message can have at most `MAX_CALLS` calls, because each result is compared with all of them.
"""

from __future__ import annotations

from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.serve.errors import unsupported
from quire.serve.tools.base import MAX_CALLS
from quire.serve.translate.conversation import image_part

TEXT_ONLY: Final = "this model reads text only"
UNASKED: Final = "call00000"
"""The id of a result whose call is not in the conversation."""


def messages_of(messages: list[dict[str, Any]], *, images: bool = False) -> list[dict[str, Any]]:
    """Return the messages in chat's form; raises for one with images unless the model reads `images`. Does not mutate.

    >>> call = {"function": {"name": "now", "arguments": {}}}
    >>> result = messages_of([{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "12:00"}])
    >>> [result[0]["tool_calls"][0]["id"], result[1]["tool_call_id"]]
    ['call00001', 'call00001']
    """
    found, open_calls, num_calls = [], list[tuple[str, str]](), 0
    for index, message in enumerate(messages):
        converted = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        if message.get("images"):
            if not images:
                raise unsupported(f"messages[{index}].images", TEXT_ONLY)
            converted["content"] = with_images(message["images"], message.get("content"), f"messages[{index}].images")
        if message.get("thinking"):
            converted["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            calls = _calls(message["tool_calls"], f"messages[{index}].tool_calls", num_calls)
            num_calls, open_calls = num_calls + len(calls), [(call["id"], call["function"]["name"]) for call in calls]
            converted["tool_calls"] = calls
        elif message.get("role") == "tool":
            name = message.get("tool_name")
            if name is not None:
                converted["name"] = name
            answered = next((call for call in open_calls if name in (None, call[1])), (UNASKED, ""))
            if answered in open_calls:
                open_calls.remove(answered)
            converted["tool_call_id"] = message.get("tool_call_id") or answered[0]
        found.append(converted)
    return found


def with_images(images: object, text: object, where: str) -> list[dict[str, Any]]:
    """Return the parts of a content: images, then the text. Does not mutate."""
    if not isinstance(images, list) or not isinstance(text or "", str):
        raise InvalidRequestError(where, images, "a list of images as base64, with a text as content")
    parts = [image_part(image, f"{where}[{index}]") for index, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _calls(calls: object, where: str, num_before: int) -> list[dict[str, Any]]:
    """Return calls with ids; the check of conversations covers the rest."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequestError(where, calls, f"a list of at most {MAX_CALLS} tool calls")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{where}[{index}]", call, "an object with function.name and function.arguments")
        own_function = {key: value for key, value in function.items() if key != "index"}
        own_id = call.get("id") or f"call{num_before + index + 1:05d}"
        found.append({"id": own_id, "type": "function", "function": own_function})
    return found
