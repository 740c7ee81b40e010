"""A proxy that makes a model do what a test wants: in the first call run one command, in the next say one sentence.

program ──► call ──► with a tool that must be called, whose arguments have one value each ──► server
                     with a format that allows one text, once the tool has answered

The built-in model knows no tools, but it follows every schema; so a program runs through its whole loop. Only the
fields of the tool, the choice and the format are changed: all others arrive as the program has sent them.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Change = Callable[[dict[str, Any]], None]

SENTENCE = "All done."
SAID = {"const": SENTENCE}
PASSED_ON = ("accept", "authorization", "content-type", "user-agent", "x-api-key")


def only(arguments: dict[str, str]) -> dict[str, Any]:
    """The schema of these arguments and no others."""
    properties = {name: {"const": value} for name, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}


def direct_messages(tool: str, arguments: dict[str, str]) -> Change:
    """Direct calls of /v1/messages."""

    def change(fields: dict[str, Any]) -> None:
        if any("tool_result" in json.dumps(message["content"]) for message in fields["messages"]):
            fields |= {"tool_choice": {"type": "none"}}
            fields |= {"output_config": {"format": {"type": "json_schema", "schema": SAID}}}
            return
        [wanted] = [each for each in fields["tools"] if each["name"] == tool]
        wanted["input_schema"] = only(arguments)
        fields["tool_choice"] = {"type": "tool", "name": tool, "disable_parallel_tool_use": True}

    return change


def direct_responses(tool: str, arguments: dict[str, str]) -> Change:
    """Direct calls of /v1/responses."""

    def change(fields: dict[str, Any]) -> None:
        if any(item["type"] == "function_call_output" for item in fields["input"]):
            fields |= {"tool_choice": "none"}
            fields |= {"text": {"format": {"type": "json_schema", "name": "said", "schema": SAID}}}
            return
        [wanted] = [each for each in fields["tools"] if each.get("name") == tool]
        wanted["parameters"] = only(arguments)
        fields |= {"tool_choice": {"type": "function", "name": tool}, "parallel_tool_calls": False}

    return change


@contextmanager
def directed(server: str, change: Change) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a proxy, and a list to which it adds each call with the status of its answer."""
    calls: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.command == "POST":
                fields = json.loads(body)
                change(fields)
                body = json.dumps(fields).encode()
            headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED_ON}
            with closing(http.client.HTTPConnection(server.removeprefix("http://"), timeout=300)) as upstream:
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
                calls.append(f"{self.command} {self.path} {answer.status}")
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers.get_content_type())
                self.send_header("connection", "close")
                self.end_headers()
                while piece := answer.read1():
                    self.wfile.write(piece)

        do_GET = do_HEAD = do_POST = _pass_on

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}", calls
        proxy.shutdown()
        thread.join()
