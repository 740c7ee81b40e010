"""The messages of Ollama's interface become those that chat templates know.

Ollama's calls have no ids, and the answers of tools name a function or nothing. Templates want ids, and some want nine
letters and digits. So calls are numbered, and an answer belongs to the first call of that function that has none yet. A
message has as many calls as an answer can have, because each answer of a tool is compared with all of them.
"""

from __future__ import annotations

from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.serve.errors import unsupported
from quire.serve.tools.base import MAX_CALLS

UNASKED: Final = "call00000"
"""The id in an answer to a call that is not in the conversation."""


def messages_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as chat has them; raises for one with pictures. Does not mutate.

    >>> call = {"function": {"name": "now", "arguments": {}}}
    >>> said = messages_of([{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "12:00"}])
    >>> [said[0]["tool_calls"][0]["id"], said[1]["tool_call_id"]]
    ['call00001', 'call00001']
    """
    found, open_calls, num_calls = [], list[tuple[str, str]](), 0
    for index, message in enumerate(messages):
        told = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
        if message.get("images"):
            raise unsupported(f"messages[{index}].images", "this server supports text only")
        if message.get("thinking"):
            told["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            calls = _calls(message["tool_calls"], f"messages[{index}].tool_calls", num_calls)
            num_calls, open_calls = num_calls + len(calls), [(call["id"], call["function"]["name"]) for call in calls]
            told["tool_calls"] = calls
        elif message.get("role") == "tool":
            name = message.get("tool_name")
            if name is not None:
                told["name"] = name
            answered = next((call for call in open_calls if name in (None, call[1])), (UNASKED, ""))
            if answered in open_calls:
                open_calls.remove(answered)
            told["tool_call_id"] = message.get("tool_call_id") or answered[0]
        found.append(told)
    return found


def _calls(calls: object, where: str, num_before: int) -> list[dict[str, Any]]:
    """Return calls with ids; what else they must be, the check of all conversations says."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequestError(where, calls, f"a list of at most {MAX_CALLS} tool calls")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{where}[{index}]", call, "an object with function.name and function.arguments")
        told = {key: value for key, value in function.items() if key != "index"}
        own_id = call.get("id") or f"call{num_before + index + 1:05d}"
        found.append({"id": own_id, "type": "function", "function": told})
    return found
