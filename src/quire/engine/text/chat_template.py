"""Renders a conversation as the text that a model was trained on, with the Jinja template in its folder.

A template is a program from a downloaded folder, and its input comes from a client. So

- it runs in a sandbox (`template_sandbox`), on plain JSON data only, with bounded time and memory; the clock is an
  argument;
- messages, tools and variables are validated first, and a client's variable never replaces a name that the template or
  the renderer relies on;
- every failure in it is an `InvalidRequestError` of one line.

Templates are rendered as `transformers` renders them: the same options, filters and globals, without keys that are
None. There are two additions: arguments of a tool call that are JSON text (as OpenAI sends them) are parsed, because
templates expect an object; and a "developer" message becomes a "system" message for a template that does not know that
role.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from quire.core.errors import CheckpointError, InvalidRequestError
from quire.core.json_bounds import JsonBounds, require_bounded
from quire.engine.text.client_text import ClientText, joined

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES: Final = 4096
MAX_RENDERED_CHARACTERS: Final = 8 << 20
MAX_DEPTH: Final = 64
MAX_ARGUMENT_VALUES: Final = 1 << 15

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt. `variables`: for the chat template; `template`: the name of another one.

    `continue_final_message`: the answer continues the last message, and there is no generation prompt.
    """

    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] | None = None
    template: str = ""
    continue_final_message: bool = False


ANSWERED: Final = ChatOptions()
"""The options of a conversation that the model answers."""


class ChatTemplate:
    """A compiled template. Immutable; threads can share it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        where: str = "chat_template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `special_tokens` are variables such as bos_token, `where` names the template in errors."""
        from quire.engine.text.template_sandbox import GLOBALS, compile_template

        try:
            self._template, named = compile_template(source, now)
        except Exception as error:  # errors of Jinja, and of Python in the code that Jinja generates
            raise CheckpointError(where, _one_line(error), "a Jinja template that compiles") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._taken = {"messages", "tools", "add_generation_prompt", *special_tokens, *GLOBALS}
        self.variables = named - self._taken
        """Names that the template looks up and that the renderer does not set: a client can set them."""
        self.uses_tools = "tools" in named

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of a conversation that `validate_messages` returned. Does not mutate.

        The text knows which characters come from each `ClientText` in the messages, tools and variables.
        """
        for name in variables or {}:
            if name in self._taken or not name.isidentifier():
                raise InvalidRequestError("template_variables", name, "names that the renderer does not use")
        if "developer" not in self.source:
            messages = [_as_system(message) for message in messages]
        context = {"documents": None, **self._special_tokens, **(variables or {})}
        context |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return joined("", list(_bounded(self._template.generate(context))))
        except InvalidRequestError:
            raise
        except Exception as error:  # a template can raise any exception
            roles = ", ".join(str(message["role"]) for message in messages)
            allowed = f"messages that the chat template accepts; its error: {_one_line(error)}"
            raise InvalidRequestError("messages", roles, allowed) from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error or type(error).__name__}"[:2000].split())[:200]


def _as_system(message: Message) -> Message:
    return message | {"role": "system"} if message["role"] == "developer" else message


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED_CHARACTERS:
            allowed = f"a conversation of at most {MAX_RENDERED_CHARACTERS} characters after rendering"
            raise InvalidRequestError("messages", f"rendered to {length} characters or more", allowed)
        yield piece


# --- validation of a client's input --------------------------------------------------------------


def validate_messages(messages: object, *, images: bool = False) -> list[Message]:
    """Return the messages as plain data: contents joined to one text, arguments parsed, without keys that are None.

    With `images`, a content may have parts that stand for images: then it is a list of parts.

    >>> validate_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}])
    [{'role': 'user', 'content': 'Hi'}]
    >>> validate_messages([{"role": "user", "content": 7}])
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidRequestError: messages[0].content is 7; allowed: a string, or a list of text parts
    """
    if not isinstance(messages, list | tuple) or not 0 < len(messages) <= MAX_MESSAGES:
        shown = f"{len(messages)} messages" if isinstance(messages, list | tuple) else messages
        raise InvalidRequestError("messages", shown, f"a list of 1 to {MAX_MESSAGES} messages")
    arguments = _Arguments()
    return [_message(message, f"messages[{index}]", arguments, images) for index, message in enumerate(messages)]


def validate_tools(tools: object) -> list[Message] | None:
    """Return the tools as plain data; None without tools."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError("tools", tools, "a list of objects")
    return [plain_object(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def plain_object(value: object, where: str) -> dict[str, object]:
    """Return a copy of a mapping, which must be JSON data; `where` names it in errors."""
    plain = _plain(value, where, MAX_DEPTH)
    if not isinstance(plain, dict):
        raise InvalidRequestError(where, value, "an object")
    return plain


def require_unicode(text: str, where: str) -> None:
    """Raise if `text` has half a surrogate pair, which is not a character and has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair at character {error.start}"
        raise InvalidRequestError(where, found, "text of complete Unicode characters") from None


class _Arguments:
    """Reads the arguments of tool calls, which can be JSON text. Mutable: its limits are for a whole conversation."""

    def __init__(self) -> None:
        self._num_left = MAX_ARGUMENT_VALUES

    def read(self, arguments: object, where: str) -> dict[str, object]:
        """Return arguments as plain data; raises `InvalidRequestError` if they are not an object. Mutates."""
        if isinstance(arguments, str):
            text = (arguments or "{}").encode("utf-8", "surrogatepass")
            try:
                self._num_left -= require_bounded(text, JsonBounds(self._num_left, self._num_left), where)
                arguments = json.loads(text)
            except InvalidRequestError:
                raise
            except (ValueError, RecursionError):
                raise InvalidRequestError(where, arguments, "a JSON object") from None
        return plain_object(arguments, where)


def _message(message: object, where: str, arguments: _Arguments, images: bool) -> Message:
    plain = {key: value for key, value in plain_object(message, where).items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls", arguments)
        if not plain["tool_calls"]:
            del plain["tool_calls"]  # some templates only look whether there is a list
    if role == "tool" and not (isinstance(plain.get("tool_call_id"), str) and plain["tool_call_id"]):
        raise InvalidRequestError(f"{where}.tool_call_id", plain.get("tool_call_id"), "the id of the call it answers")
    if "content" in plain or role != "assistant":
        plain["content"] = _content(plain.get("content"), f"{where}.content", images)
    elif "tool_calls" not in plain:
        plain["content"] = ""  # the answer was only reasoning, or nothing; templates need a text
    return plain


def _content(content: object, where: str, images: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(where, content, "a string, or a list of text parts")
    texts, parts = list[str](), list[dict[str, str]]()
    for index, part in enumerate(content):
        if images and isinstance(part, dict) and part.get("type") == "image":
            parts.append({"type": "image"})
            continue
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            only = "'text', 'image' or 'image_url': other parts are not supported"
            allowed = only if images else "'text': this model reads text only"
            raise InvalidRequestError(f"{where}[{index}].type", kind, allowed)
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{index}].text", text, "a string")
        texts.append(text)
        parts.append({"type": "text", "text": text})
    return "".join(texts) if len(texts) == len(parts) else parts


def _tool_calls(calls: object, where: str, arguments: _Arguments) -> list[object]:
    if not isinstance(calls, list):
        raise InvalidRequestError(where, calls, "a list of tool calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{where}[{index}]", call, "an object with function.name and function.arguments")
        place = f"{where}[{index}].function.arguments"
        given = function.pop("arguments", None)
        plain = arguments.read("" if given is None else given, place)
        call["function"] = {"name": function.pop("name"), "arguments": plain, **function}  # in models' order
    return calls


def _plain(value: object, where: str, depth: int) -> object:
    """Copy JSON data; an instance of a subclass of str or dict becomes the plain type, without extra methods.

    A text that already knows which of its characters a client wrote stays as it is.
    """
    if depth == 0:
        raise InvalidRequestError(where, "nested too deeply", f"data of at most {MAX_DEPTH} levels")
    if isinstance(value, str):
        require_unicode(value, where)
        return value if type(value) is ClientText else str.__str__(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{str(key)[:40]}", depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", depth - 1) for index, item in enumerate(value)]
    raise InvalidRequestError(where, value, "JSON data")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequestError(where, key, "an object whose keys are strings")
    require_unicode(key, where)
    return str.__str__(key)
