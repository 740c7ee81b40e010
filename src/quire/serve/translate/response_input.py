"""Turns the input of /v1/responses into messages of a chat template.

Items in a row are one message if they are of one role: many templates allow a system message only at the start, and
some require that user and assistant alternate. Programs such as Codex send several items of each.
"""

from __future__ import annotations

from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.serve.errors import unsupported
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.tools.base import full_name

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


def messages_of(fields: ResponseRequest) -> list[Message]:
    """Return the conversation of a request: the instructions first, as a system message. Does not mutate.

    Reasoning, text and calls in a row become one message, as the model wrote them; texts of others, one with several
    lines.

    >>> messages_of(ResponseRequest(input="Hi", instructions="Be brief."))
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    messages: list[Message] = []
    lines: dict[int, list[str]] = {}  # of messages made from several items, joined once: thousands may follow
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    if not fields.input:
        raise InvalidRequestError("input", fields.input, "a text, or at least one message")
    for index, item in enumerate(fields.input):
        message = _message(item, f"input[{index}]")
        if messages and _same_speaker(message, messages[-1]):
            lines.setdefault(len(messages) - 1, [messages[-1]["content"]]).append(message["content"])
        elif messages and _belongs_to(message, messages[-1]):
            calls = messages[-1].get("tool_calls", [])  # made here: it grows in place, thousands of items may follow
            calls += message.get("tool_calls", [])
            messages[-1] |= message | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
    for index, texts in lines.items():
        messages[index]["content"] = "\n".join(texts)
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


def _message(item: dict[str, Any], where: str) -> Message:
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
            "content": _result(item.get("output"), f"{where}.output"),
        }
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _thought(item.get("content"), f"{where}.content")}
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(f"{where}.role", role, "user, assistant, system or developer")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _call(item: dict[str, Any], where: str) -> Message:
    namespace = _named(item, "namespace", where) if item.get("namespace") else None
    name = full_name(namespace, _named(item, "name", where))
    function = {"name": name, "arguments": item.get("arguments")}
    if not isinstance(function["arguments"], str):
        raise InvalidRequestError(f"{where}.arguments", function["arguments"], "a JSON object, as text")
    call = {"id": _named(item, "call_id", where), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


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


def _result(output: object, where: str) -> str:
    """Return the text of a tool's result. An image becomes a sentence for the model, which has called for it.

    Codex offers every model a tool that shows images, and sends the result with each later call: if it were refused,
    the conversation could not continue.
    """
    if isinstance(output, list):
        return "".join(
            NO_IMAGE
            if isinstance(part, dict) and part.get("type") == "input_image"
            else _part(part, f"{where}[{index}]", TEXT_PARTS)
            for index, part in enumerate(output)
        )
    return _text(output, where)


def _text(content: object, where: str) -> str:
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}[{index}]", TEXT_PARTS) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequestError(where, content, "a text, or a list of text parts")
    return content


def _part(part: object, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds:
        raise unsupported(f"{where}.type", "this server supports text parts only")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where}.text", part.get("text"), "a text")
    return str(part["text"])
