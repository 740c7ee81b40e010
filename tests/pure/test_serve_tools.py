"""Tools as clients send them: what is taken, what is refused by name, and what becomes of them in a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.serve.errors import ApiError
from quire.serve.schemas.forms import MAX_TOOLS
from quire.serve.tools.base import MAX_CALLS, Tool
from quire.serve.tools.rules import arguments_schema
from quire.serve.translate.tools import tool_choice_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: Any = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def test_who_may_be_called() -> None:
    both = [tool("add"), tool("now", parameters=None, description="The time.", strict=True)]
    free = tool_choice_of(both, None, None)
    assert (free.mode, [each.name for each in free.tools], free.shown) == ("auto", ["add", "now"], both)
    assert free.tools[1].strict
    assert free.tools[1].parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert free.max_calls == MAX_CALLS
    assert tool_choice_of(both, "required", False).max_calls == 1
    named = tool_choice_of(both, {"type": "function", "function": {"name": "now"}}, True)
    assert (named.mode, [each.name for each in named.tools], named.max_calls) == ("named", ["now"], 1)
    assert named.shown == both
    nobody = tool_choice_of(both, "none", None)
    assert (nobody.mode, nobody.tools, nobody.shown) == ("none", (), both)
    for nothing in (None, []):
        for choice in (None, "none", "auto"):
            assert tool_choice_of(nothing, choice, None).mode == "none"


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([{"type": "web_search"}], None, "tools[0].type"),
        ([tool(), {}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "function": 3}], None, "tools[0].function"),
        ([tool(None)], None, "tools[0].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("a" * 129)], None, "tools[0].function.name"),
        ([tool("é")], None, "tools[0].function.name"),
        ([tool(description=3)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], None, "tools[0].function.parameters.properties"),
        ([tool(), tool()], None, "tools[1].function.name"),
        ([tool(f"f{index}") for index in range(MAX_TOOLS + 1)], None, "tools"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "add"}}, "tool_choice"),
        ([tool()], "perhaps", "tool_choice"),
        ([tool()], 3, "tool_choice"),
        ([tool()], {"type": "custom"}, "tool_choice.type"),
        ([tool()], {"type": "function"}, "tool_choice.function.name"),
        ([tool()], {"type": "function", "function": {"name": "now"}}, "tool_choice.function.name"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, choice: Any, field: str) -> None:
    for wanted in (choice, "none") if choice is None else (choice,):
        with pytest.raises((InvalidRequestError, ApiError)) as caught:
            tool_choice_of(tools, wanted, None)
        error = caught.value
        assert (error.detail.param if isinstance(error, ApiError) else error.field) == field


KEYWORDS = st.sampled_from(
    ["type", "properties", "required", "items", "$defs", "$ref", "anyOf", "allOf", "description"]
)
SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=10,
)


@given(schema=st.dictionaries(KEYWORDS, SCHEMAS), strict=st.booleans())
def test_whatever_a_schema_is_it_becomes_a_rule(schema: dict[str, Any], strict: bool) -> None:
    """What is wrong with it the compiler says."""
    before = json.dumps(schema)
    kind, _, text = arguments_schema(Tool("f", schema, strict)).partition(" ")
    value = json.loads(text)
    assert (kind, value["type"], value["x-guidance"]["lenient"]) == ("%json", "object", not strict)
    assert "description" not in value
    assert json.dumps(schema) == before
