"""Turns the tools of /v1/responses into chat's.

    function            ──► a function
    namespace           ──► its functions, as NAMESPACE__NAME; a call in the answer has the two names apart
    web_search          ──► nothing, next to functions: Codex offers it with every call

A search alone is refused, because a client that offers nothing else wants its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.serve.errors import unsupported
from quire.serve.schemas.responses import SEARCH, ResponseRequest
from quire.serve.tools.base import ToolChoice, full_name
from quire.serve.translate.tools import tool_choice_of

SUPPORTED: Final = (
    "this server supports tools of the types function and namespace, and leaves out web_search next to them"
)

Entry = tuple[dict[str, Any], str, str]
"""A tool in chat's form, its place in the request, and its namespace."""


def response_tools(fields: ResponseRequest) -> ToolChoice:
    """Return the tools that the model may call; errors use this API's field names. Does not mutate."""
    entries = [each for index, tool in enumerate(fields.tools or []) for each in _entries(tool, f"tools[{index}]")]
    if fields.tools and not entries:
        raise unsupported("tools[0].type", SUPPORTED)
    choice = fields.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    try:
        found = tool_choice_of(
            [tool for tool, _, _ in entries], choice, fields.parallel_tool_calls, [place for _, place, _ in entries]
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(_own_place(error.field), error.value, error.allowed) from error
    spaces = {tool["function"].get("name"): namespace for tool, _, namespace in entries}
    tools = [replace(tool, place=_own_place(tool.place), namespace=spaces[tool.name]) for tool in found.tools]
    return replace(found, tools=tuple(tools))


def _own_place(place: str) -> str:
    """Return this API's name for a field of chat."""
    return place.replace(".function", "")


def _entries(tool: dict[str, Any], where: str) -> Iterator[Entry]:
    kind = tool.get("type")
    if kind == SEARCH:
        return
    if kind != "namespace":
        yield _entry(tool, where, "")
        return
    namespace, members = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequestError(f"{where}.name", namespace, "a text")
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        raise InvalidRequestError(f"{where}.tools", members, "a list of functions")
    for index, member in enumerate(members):
        yield _entry(member, f"{where}.tools[{index}]", namespace)


def _entry(tool: dict[str, Any], where: str, namespace: str) -> Entry:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", SUPPORTED)
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    if isinstance(function.get("name"), str):
        function["name"] = full_name(namespace, function["name"])
    return {"type": "function", "function": function}, where, namespace
