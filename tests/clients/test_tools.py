"""Calls of functions, as programs made for OpenAI's service ask for them and read them, whole and streamed.

The built-in model knows nothing of any function: what it must call it calls with arguments that its schema allows.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import litellm

SCRIPT = Path(__file__).with_name("tools.mjs")
CITIES = ("Oslo", "Paris", "Rome")


class Temperature(BaseModel):
    """How warm it is in a city."""

    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


TOOL: Any = openai.pydantic_function_tool(Temperature)
MESSAGES: Any = [{"role": "user", "content": "How warm is it?"}]
WANTED: Any = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
WANTED |= {"temperature": 0, "max_tokens": 200}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        yield client


def require_allowed(arguments: Any) -> None:
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in CITIES
    assert 1 <= arguments["days"] <= 7


def test_openai_python_reads_calls(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="guide", **WANTED).choices[0]
    [call] = whole.message.tool_calls or []
    require_allowed(json.loads(call.function.arguments))
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    parsed = client.chat.completions.parse(model="guide", **WANTED).choices[0].message
    assert isinstance(parsed.tool_calls[0].function.parsed_arguments, Temperature)
    with client.chat.completions.stream(model="guide", **WANTED) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(deltas) == call.function.arguments
    assert final.message.tool_calls[0].function.parsed_arguments == parsed.tool_calls[0].function.parsed_arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "19 degrees"}
    last = client.chat.completions.create(
        model="guide", messages=[*MESSAGES, whole.message, answer], tools=[TOOL], tool_choice="none", temperature=0
    )
    assert last.choices[0].message.content


def test_openai_python_reads_calls_of_responses(client: openai.OpenAI) -> None:
    tool = {"type": "function", **TOOL["function"]}
    wanted: Any = {"model": "guide", "input": MESSAGES, "tools": [tool], "tool_choice": "required", "temperature": 0}
    wanted |= {"parallel_tool_calls": False}
    whole = client.responses.create(**wanted)
    [call] = whole.output
    assert call.type == "function_call"
    require_allowed(json.loads(call.arguments))
    with client.responses.stream(**wanted) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output[0].arguments == call.arguments
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "19 degrees"}
    again = client.responses.create(**{**wanted, "input": [*MESSAGES, *whole.output, answer], "tool_choice": "none"})
    assert again.output_text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_reads_calls(provider: str, base_url: str) -> None:
    wanted = {"model": f"{provider}/guide", "api_base": base_url, "api_key": "none", **WANTED}
    choice = litellm.completion(**wanted).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    require_allowed(json.loads(call.function.arguments))
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**wanted, stream=True)))
    [again] = streamed.choices[0].message.tool_calls
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_langchain_binds_tools(base_url: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="none", model="guide", temperature=0, max_tokens=200)
    bound = model.bind_tools([Temperature], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("How warm is it?")
    [call] = answer.tool_calls
    assert call["name"] == "Temperature"
    require_allowed(call["args"])
    chunks = list(bound.stream("How warm is it?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert [(each["name"], each["args"]) for each in total.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage("19 degrees", tool_call_id=call["id"])
    assert model.invoke([("user", "How warm is it?"), answer, result]).content
    named = model.with_structured_output(Temperature, method="function_calling")
    assert isinstance(named.invoke("How warm is it?"), Temperature)


def test_openai_node_reads_calls(base_url: str) -> None:
    modules = Path(os.environ["QUIRE_NODE_MODULES"])
    script = modules.parent / SCRIPT.name  # a script finds its modules beside itself
    script.write_bytes(SCRIPT.read_bytes())
    done = subprocess.run(["node", script, base_url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["finish"] == "tool_calls"
    require_allowed(json.loads(found["whole"]["arguments"]))
    assert found["whole"] == found["streamed"] == found["helper"]
    assert found["events"] == found["response"]
    assert found["ran"] == [json.loads(found["whole"]["arguments"])]
    assert found["last"]
