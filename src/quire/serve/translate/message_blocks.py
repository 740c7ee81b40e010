"""Turns the conversation and the tools of Anthropic's API into those of chat templates.

    system ─────────────────────────────────► a system message
    user       tool_result, text ───────────► tool messages, then a user message
    assistant  thinking, text, tool_use ────► one message with reasoning_content, content and tool_calls

Messages in a row with the same role are one turn. A system message after the first message is a text of the user's
turn, because many chat templates allow a system message only at the start. Everything that a block may have is checked
here, where its place in the request is known. A last message of the assistant is the beginning of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from quire.core.errors import InvalidRequestError, shortened
from quire.engine.text.chat_template import plain_object
from quire.serve.errors import unsupported
from quire.serve.schemas.messages import MessagesRequest, WantedTool
from quire.serve.tools.base import ToolChoice
from quire.serve.translate.conversation import image_part
from quire.serve.translate.tools import tool_choice_of

ROLES: Final = ("user", "assistant", "system")
KEYS: Final = {
    "text": frozenset({"cache_control", "citations", "text", "type"}),
    "image": frozenset({"cache_control", "source", "type"}),
    "thinking": frozenset({"signature", "thinking", "type"}),
    "redacted_thinking": frozenset({"data", "type"}),
    "tool_use": frozenset({"cache_control", "caller", "id", "input", "name", "toolset_name", "type"}),
    "tool_result": frozenset({"cache_control", "content", "is_error", "tool_use_id", "toolset_name", "type"}),
    "tool_reference": frozenset({"cache_control", "tool_name", "type"}),
}
"""The supported keys of content blocks, by type."""

TEXT_ONLY: Final = ("text",)
RESULT: Final = ("text", "tool_reference")
ALLOWED: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": TEXT_ONLY,
}
"""The types of the blocks of each role; for a model that reads images, also images of the user and in results."""

TOOL_KEYS: Final = frozenset(
    {"allowed_callers", "cache_control", "defer_loading", "description", "eager_input_streaming", "input_examples"}
    | {"input_schema", "name", "strict", "type"}
)
ATTRIBUTION: Final = "x-anthropic-billing-header:"
"""The start of a system block that Claude Code changes with every call: no later block would be a cache hit."""

Message = dict[str, Any]
Block = tuple[str, dict[str, Any]]
"""A block and its place in the request."""


def messages_of(fields: MessagesRequest, *, images: bool = False) -> list[Message]:
    """Return the conversation of a request: the system prompt first; `images`: the model reads them. Does not mutate.

    >>> request = MessagesRequest(messages=[{"role": "user", "content": "Hi"}], system="Be brief.", max_tokens=1)
    >>> messages_of(request)
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    if not fields.messages:
        raise InvalidRequestError("messages", fields.messages, "at least one message")
    system, found, calls = _system(fields.system), list[Message](), set[str]()
    for role, blocks in _turns(fields.messages, images):
        match role:
            case "assistant":
                message, calls = _assistant(blocks)
                found.append(message)
            case "user":
                found += _user(blocks, calls, images)
            case _:
                system += blocks
    last = len(fields.messages) - 1
    if calls and fields.messages[last]["role"] == "assistant":
        allowed = "a last message without tool_use, which the answer continues; or a message with the results after it"
        raise InvalidRequestError(f"messages[{last}].content", "a call without a result", allowed)
    text = _joined(system)
    return [{"role": "system", "content": text}, *found] if text else found


def message_tools(fields: MessagesRequest) -> ToolChoice:
    """Return the tools that the model may call; errors use this API's field names. Does not mutate."""
    tools = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or [])]
    wanted = fields.tool_choice or WantedTool("auto")
    if wanted.type in ("any", "tool") and not tools:
        raise InvalidRequestError("tool_choice.type", wanted.type, "'auto' or 'none' without tools")
    modes: dict[str, object] = {"auto": "auto", "any": "required", "none": "none"}
    choice = modes.get(wanted.type, {"type": "function", "function": {"name": wanted.name}})
    try:
        found = tool_choice_of(tools, choice, False if wanted.disable_parallel_tool_use else None)
    except InvalidRequestError as error:
        raise InvalidRequestError(_own_place(error.field), error.value, error.allowed) from error
    return replace(found, tools=tuple(replace(tool, place=_own_place(tool.place)) for tool in found.tools))


def _own_place(place: str) -> str:
    """Return this API's name for a field of chat."""
    return place.replace(".function.parameters", ".input_schema").replace(".function", "")


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", "this server supports only tools with an input_schema, of the type 'custom'")
    _require_known(tool, TOOL_KEYS, where)
    if tool.get("input_schema") is None:
        raise InvalidRequestError(f"{where}.input_schema", None, "a JSON Schema of an object")
    named = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    function = {ours: tool[theirs] for ours, theirs in named.items() if tool.get(theirs) is not None}
    return {"type": "function", "function": function}


def _system(system: str | Sequence[dict[str, Any]] | None) -> list[Block]:
    if system is None or isinstance(system, str):
        return [("system", {"type": "text", "text": system})] if system else []
    blocks = _blocks(system, TEXT_ONLY, "system")
    return [(where, block) for where, block in blocks if not _text(where, block).startswith(ATTRIBUTION)]


def _turns(messages: Sequence[Message], images: bool) -> Iterator[tuple[str, list[Block]]]:
    """Yield the role and the blocks of each turn; a later system message is part of the user's turn."""
    roles = [_role(message, f"messages[{index}]") for index, message in enumerate(messages)]
    turns = groupby(range(len(messages)), lambda index: "user" if index and roles[index] == "system" else roles[index])
    for role, indices in turns:
        yield role, [block for index in indices for block in _content(messages[index], f"messages[{index}]", images)]


def _role(message: Message, where: str) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    _require_known(message, frozenset({"content", "role"}), where)
    return str(role)


def _content(message: Message, where: str, images: bool) -> list[Block]:
    content, place = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    kinds = ALLOWED[message["role"]]
    return _blocks(content, (*kinds, "image") if images and message["role"] == "user" else kinds, place)


def _blocks(content: object, kinds: Sequence[str], where: str, variant: str = "") -> list[Block]:
    """Return content whose blocks have one of these types, and only known keys.

    The error for another type names its place as Anthropic's service does: `variant`, or else `where`, and the type.
    Claude Code finds an image or a document by it, removes it and repeats the call; otherwise every later call of the
    conversation would fail.
    """
    if not isinstance(content, list):
        raise InvalidRequestError(where, content, "a text, or a list of content blocks")
    found = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequestError(place, block, "a content block: an object with a type")
        if kind not in kinds:
            name = f"{variant or where}[{index}].{shortened(kind) if kind.isidentifier() else 'type'}"
            raise unsupported(name, f"allowed here: {', '.join(kinds)}")
        _require_known(block, KEYS[kind], place)
        found.append((place, block))
    return found


def _require_known(value: dict[str, Any], known: frozenset[str], where: str) -> None:
    for key in value.keys() - known:
        if value[key] is not None:
            raise InvalidRequestError(f"{where}.{key[:80]}", value[key], f"one of {', '.join(sorted(known))}")


def _user(blocks: Sequence[Block], calls: set[str], images: bool) -> list[Message]:
    """Return the messages of a turn: results come first, directly after their calls. Mutates `calls`: the open ones."""
    results, texts = [], []
    for where, block in blocks:
        if block["type"] in ("text", "image"):
            texts.append((where, block))
            continue
        call_id, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(call_id, str) or call_id not in calls:
            allowed = "the id of a tool_use block of the turn before, once"
            raise InvalidRequestError(f"{where}.tool_use_id", call_id, allowed)
        calls.remove(call_id)
        if content is None or isinstance(content, str):
            found: object = content or ""
        else:
            kinds = (*RESULT, "image") if images else RESULT
            found = _with_images(_blocks(content, kinds, f"{where}.content", f"{where}.tool_result.content"))
        results.append({"role": "tool", "tool_call_id": call_id, "content": found})
    return [*results, {"role": "user", "content": _with_images(texts)}] if texts or not results else results


def _assistant(blocks: Sequence[Block]) -> tuple[Message, set[str]]:
    """Return the message of a turn, and the ids of its calls."""
    texts, thoughts, calls = [], [], dict[str, Message]()
    for where, block in blocks:
        match block["type"]:
            case "text":
                texts.append((where, block))
            case "thinking":
                thoughts.append(_required_text(block, "thinking", where, may_be_empty=True))
            case "tool_use":
                call = _call(block, where)
                if call["id"] in calls:
                    raise InvalidRequestError(f"{where}.id", call["id"], "an id that no other call of the turn has")
                calls[call["id"]] = call
    message: Message = {"role": "assistant"}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if texts or not calls:
        message["content"] = _joined(texts)
    if calls:
        message["tool_calls"] = list(calls.values())
    return message, set(calls)


def _call(block: dict[str, Any], where: str) -> Message:
    arguments = plain_object(block.get("input"), f"{where}.input")
    function = {"name": _required_text(block, "name", where), "arguments": arguments}
    return {"id": _required_text(block, "id", where), "type": "function", "function": function}


def _with_images(blocks: Sequence[Block]) -> str | list[Message]:
    """Return the text of blocks, or the parts of a content if there are images among them."""
    if not any(block["type"] == "image" for _, block in blocks):
        return _joined(blocks)
    parts = list[Message]()
    for is_image, group in groupby(blocks, lambda each: each[1]["type"] == "image"):
        run = list(group)
        parts += [_image(*each) for each in run] if is_image else [{"type": "text", "text": _joined(run)}]
    return parts


def _image(where: str, block: dict[str, Any]) -> Message:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        found = source.get("type") if isinstance(source, dict) else source
        raise InvalidRequestError(f"{where}.source.type", found, "base64: this server fetches no images")
    return image_part(source.get("data"), f"{where}.source.data")


def _joined(blocks: Sequence[Block]) -> str:
    return "\n".join(_text(where, block) for where, block in blocks)


def _text(where: str, block: dict[str, Any]) -> str:
    if block["type"] == "tool_reference":  # from the client's search for tools: its later calls have the tool
        return f"The tool {_required_text(block, 'tool_name', where)} is available."
    return _required_text(block, "text", where, may_be_empty=True)


def _required_text(block: dict[str, Any], key: str, where: str, *, may_be_empty: bool = False) -> str:
    text = block.get(key)
    if not isinstance(text, str) or not (text or may_be_empty):
        raise InvalidRequestError(f"{where}.{key}", text, "a text")
    return text
