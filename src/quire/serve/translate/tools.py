"""Clients' tools: which functions the model may or must call, and the form of answers with calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.config import ServerConfig
from quire.serve.errors import unsupported
from quire.serve.reasoning import create_reasoning_format
from quire.serve.schemas.forms import MAX_TOOLS
from quire.serve.tools import NONE, TOOL_FORMATS, create_tool_format
from quire.serve.tools.base import MAX_CALLS, MAX_NAME_LENGTH, Mode, Tool, ToolChoice

NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
IGNORE: Final = 'set tool_choice to "none" to ignore the tools'
TOOLS_OFF: Final = f"this server was started with --tool-format {NONE}; {IGNORE}"
NO_TOOLS: Final = f"the chat template of this model does not support tools; {IGNORE}"
UNKNOWN_CALLS: Final = (
    "the chat template of this model shows tools, but not in which format the model writes calls. If it is one of "
    f"{', '.join(each.name for each in TOOL_FORMATS)}, start the server with --tool-format NAME; otherwise {IGNORE}"
)
_NAME: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_LENGTH}}}")

_MODES: Final[tuple[Mode, ...]] = ("none", "auto", "required")


def tool_choice_of(
    tools: list[dict[str, Any]] | None, choice: object, parallel: bool | None, places: Sequence[str] | None = None
) -> ToolChoice:
    """Return the tools that the model may call; raises `InvalidRequestError` for invalid tools. Does not mutate.

    `places`: where each tool is in the request; by default in `tools`, in this order.

    >>> tool = {"type": "function", "function": {"name": "now"}}
    >>> tool_choice_of([tool], None, None).mode, tool_choice_of([tool], "none", None).tools
    ('auto', ())
    """
    shown = tools or []
    if len(shown) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(shown)} tools", f"at most {MAX_TOOLS}")
    if places is None:
        places = [f"tools[{index}]" for index in range(len(shown))]
    known = [_tool(tool, place) for tool, place in zip(shown, places, strict=True)]
    _require_unique(known, places)
    mode, name = _mode(choice, bool(known))
    if mode in ("required", "named") and not known:
        raise InvalidRequestError("tool_choice", choice, "'none' or 'auto' without tools")
    if name is not None and name not in {tool.name for tool in known}:
        raise InvalidRequestError("tool_choice.function.name", name, "the name of one of the tools")
    called = tuple(tool for tool in known if mode != "none" and name in (None, tool.name))
    max_calls = 1 if parallel is False or mode == "named" else MAX_CALLS
    return ToolChoice(mode if called else "none", called, shown or None, max_calls)


def answer_form(config: ServerConfig, tokenizer: Tokenizer | None, choice: ToolChoice) -> AnswerForm | None:
    """Return the form of the answers, or None for plain text; raises `ApiError` if the model cannot write calls."""
    template = "" if tokenizer is None else tokenizer.template_source(with_tools=choice.shown is not None)
    known = create_tool_format(config.tool_format, template)
    tools = None if choice.mode == "none" else known
    if choice.mode != "none" and tools is None:
        raise unsupported("tools", _why_no_calls(config, tokenizer))
    adapt = None if known is None else known.adapt
    reasoning = create_reasoning_format(config.reasoning_format, template)
    if tools is not None and tools.reasoning is not None:
        reasoning = tools.reasoning
    if tokenizer is None or (tools is None and adapt is None and reasoning is None):
        return None
    return AnswerForm(choice, tools, reasoning, tokenizer, adapt)


def unanswered_form(
    config: ServerConfig, tokenizer: Tokenizer | None, tools: list[dict[str, Any]] | None
) -> tuple[ToolChoice, AnswerForm | None]:
    """Return the tools of a prompt that nobody answers, and the form that adapts it as that of a chat; raises as those.

    Does not mutate.
    """
    choice = tool_choice_of(tools, "none", None)
    return choice, answer_form(config, tokenizer, choice)


def _why_no_calls(config: ServerConfig, tokenizer: Tokenizer | None) -> str:
    if config.tool_format == NONE:
        return TOOLS_OFF
    return UNKNOWN_CALLS if tokenizer is not None and tokenizer.uses_tools else NO_TOOLS


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", "this server supports function tools only")
    function, place = tool.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise InvalidRequestError(place, function, "an object with name, description and parameters")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{place}.name", name, f"1 to {MAX_NAME_LENGTH} letters, digits, _ and -")
    if not (description is None or isinstance(description, str)):
        raise InvalidRequestError(f"{place}.description", description, "a text")
    strict = function.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise InvalidRequestError(f"{place}.strict", strict, "true or false")
    parameters = f"{place}.parameters"
    return Tool(name, _parameters(function.get("parameters"), parameters), bool(strict), parameters)


def _parameters(parameters: object, where: str) -> Mapping[str, Any]:
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(where, parameters, "a JSON Schema of an object")
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{where}.type", parameters["type"], "'object': arguments have names")
    for name in ("properties", "$defs", "definitions"):
        if not isinstance(parameters.get(name, {}), Mapping):
            raise InvalidRequestError(f"{where}.{name}", parameters[name], "an object")
    return parameters


def _require_unique(tools: Sequence[Tool], places: Sequence[str]) -> None:
    seen: set[str] = set()
    for tool, place in zip(tools, places, strict=True):
        if tool.name in seen:
            raise InvalidRequestError(f"{place}.function.name", tool.name, "a name that no other tool has")
        seen.add(tool.name)


def _mode(choice: object, has_tools: bool) -> tuple[Mode, str | None]:
    """Return the mode of a choice, and the name of the function that must be called, if any."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    for mode in _MODES:
        if choice == mode:
            return mode, None
    allowed = "'none', 'auto', 'required', or an object with the type 'function' and function.name"
    if not isinstance(choice, Mapping):
        raise InvalidRequestError("tool_choice", choice, allowed)
    if choice.get("type") != "function":
        raise InvalidRequestError("tool_choice.type", choice.get("type"), "'function'")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError("tool_choice.function.name", name, "the name of one of the tools")
    return "named", name
