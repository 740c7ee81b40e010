"""Turns the input of /v1/responses into messages of a chat template.

Items in a row are one message if they are of one role: many templates allow a system message only at the start, and
some require that user and assistant alternate. Programs such as Codex send several items of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from quire.core.errors import InvalidRequestError
from quire.serve.errors import unsupported
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.tools.base import full_name
from quire.serve.translate.conversation import image_part

TEXT_PARTS: Final = ("input_text", "output_text", "text")
NO_IMAGE: Final = "(an image, left out because this model reads text only)"
KEYS: Final = {
    "message": frozenset({"content", "id", "phase", "role", "status", "type"}),
    "function_call": frozenset({"arguments", "call_id", "id", "name", "namespace", "status", "type"}),
    "function_call_output": frozenset({"call_id", "id", "output", "status", "type"}),
    "reasoning": frozenset({"content", "encrypted_content", "id", "status", "summary", "type"}),
}
"""The supported keys of items, by type."""

Message = dict[str, Any]
Content = str | list[Message]


def messages_of(fields: ResponseRequest, *, images: bool = False) -> list[Message]:
    """Return the conversation of a request: the instructions first, as a system message. Does not mutate.

    Reasoning, text and calls in a row become one message, as the model wrote them; texts of others, one with several
    lines. `images`: the model reads them.

    >>> messages_of(ResponseRequest(input="Hi", instructions="Be brief."))
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    messages: list[Message] = []
    lines: dict[int, list[Content]] = {}  # of messages made from several items, joined once: thousands may follow
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    if not fields.input:
        raise InvalidRequestError("input", fields.input, "a text, or at least one message")
    for index, item in enumerate(fields.input):
        message = _message(item, f"input[{index}]", images)
        if messages and _same_speaker(message, messages[-1]):
            lines.setdefault(len(messages) - 1, [messages[-1]["content"]]).append(message["content"])
        elif messages and _belongs_to(message, messages[-1]):
            calls = messages[-1].get("tool_calls", [])  # made here: it grows in place, thousands of items may follow
            calls += message.get("tool_calls", [])
            messages[-1] |= message | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    for index, contents in lines.items():
        messages[index]["content"] = _joined(contents, "\n")
    return [
        message if "content" in message or "tool_calls" in message else message | {"content": ""}
        for message in messages
    ]


def _same_speaker(message: Message, last: Message) -> bool:
    """Return whether both are texts of the user, or of the developer, whom some clients call system."""
    speakers = ("user",), ("system", "developer")
    return any(message["role"] in roles and last["role"] in roles for roles in speakers)


def _belongs_to(message: Message, last: Message) -> bool:
    """Return whether a message continues the model's previous one."""
    if not message["role"] == last["role"] == "assistant":
        return False
    if "tool_calls" in message:
        return True
    return "content" in message and last.keys() == {"role", "reasoning_content"}


def _message(item: dict[str, Any], where: str, images: bool) -> Message:
    """Return the message, or part of a message, of an input item."""
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in KEYS:
        raise unsupported(f"{where}.type", f"this server supports items of these types: {', '.join(KEYS)}")
    for key in item.keys() - KEYS[kind]:
        if item[key] is not None:
            raise InvalidRequestError(f"{where}.{key[:80]}", item[key], f"one of {', '.join(sorted(KEYS[kind]))}")
    if kind == "function_call":
        return _call(item, where)
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": _named(item, "call_id", where),
            "content": _result(item.get("output"), f"{where}.output", images),
        }
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _thought(item.get("content"), f"{where}.content")}
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(f"{where}.role", role, "user, assistant, system or developer")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content", images and role == "user")}


def _call(item: dict[str, Any], where: str) -> Message:
    namespace = _named(item, "namespace", where) if item.get("namespace") else None
    name = full_name(namespace, _named(item, "name", where))
    function = {"name": name, "arguments": item.get("arguments")}
    if not _is_object(function["arguments"]):
        raise InvalidRequestError(f"{where}.arguments", function["arguments"], "a JSON object, as text")
    call = {"id": _named(item, "call_id", where), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _is_object(arguments: object) -> bool:
    """Return whether arguments are an object as text, or empty; builds no values.

    The check of conversations reads them, but knows only places in the messages made here.
    """
    if not isinstance(arguments, str):
        return False
    try:
        msgspec.json.decode(arguments or "{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _named(item: dict[str, Any], key: str, where: str) -> str:
    name = item.get(key)
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.{key}", name, "a text")
    return name


def _thought(content: object, where: str) -> str:
    """Return the text of reasoning; a summary, or encrypted reasoning, is ignored."""
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError(where, content, "a list of parts")
    return "".join(_part(part, f"{where}[{index}]", ("reasoning_text", "text")) for index, part in enumerate(content))


def _result(output: object, where: str, images: bool) -> Content:
    """Return a tool's result. For a model without images, one becomes a sentence for the model, which called for it.

    Codex offers every model a tool that shows images, and sends the result with each later call: if it were refused,
    the conversation could not continue.
    """
    if isinstance(output, list) and not images:
        return "".join(
            NO_IMAGE if _is_image(part) else _part(part, f"{where}[{index}]", TEXT_PARTS)
            for index, part in enumerate(output)
        )
    return _content(output, where, images)


def _content(content: object, where: str, images: bool) -> Content:
    """Return a text, or the parts of a content if there are images among them."""
    if isinstance(content, list):
        parts = ((part, f"{where}[{index}]") for index, part in enumerate(content))
        return _joined([_image(*each) if images and _is_image(each[0]) else _part(*each, TEXT_PARTS) for each in parts])
    if not isinstance(content, str):
        raise InvalidRequestError(where, content, "a text, or a list of text parts")
    return content


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: dict[str, Any], where: str) -> list[Message]:
    return [image_part(part.get("image_url"), f"{where}.image_url")]


def _joined(contents: Sequence[Content], between: str = "") -> Content:
    """Return contents as one: a text, or parts if one of them has images."""
    if all(isinstance(each, str) for each in contents):
        return between.join(cast(Sequence[str], contents))
    parts = list[Message]()
    for each in contents:
        if parts and between:
            parts.append({"type": "text", "text": between})
        parts += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return parts


def _part(part: object, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds:
        raise unsupported(f"{where}.type", "this server supports text parts only")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where}.text", part.get("text"), "a text")
    return str(part["text"])
