"""What a client makes of the events of a stream of Anthropic's interface, and the rules of their order."""

from __future__ import annotations

import json
from typing import Any


def added_up(events: list[Any]) -> Any:
    """The message that a client makes of a stream, in the order that the interface promises."""
    first, *middle, last, stop = events
    assert (first["type"], last["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    arguments: dict[int, str] = {}
    open_block: Any = None
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["content_block"]
                message["content"].append(open_block)
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                change = event["delta"]
                kind = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}
                assert open_block["type"] == kind.get(change["type"], "tool_use")
                match change:
                    case {"type": "input_json_delta", "partial_json": part}:
                        arguments[event["index"]] = arguments.get(event["index"], "") + part
                    case {"type": "signature_delta", "signature": signature}:
                        open_block["signature"] = signature
                    case {"type": type_, **rest}:
                        [(name, part)] = rest.items()
                        assert part, type_
                        open_block[name] += part
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                open_block = None
            case other:
                raise AssertionError(other)
    assert open_block is None
    content = []
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(arguments.get(index, ""))
            except ValueError:
                continue  # a call that is cut off
        content.append(block)
    return message | last["delta"] | {"usage": last["usage"], "content": content or [{"type": "text", "text": ""}]}
