"""A blocking client, with one request at a time, for everything that is not measured."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from quire.core.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server, and the time from the first byte sent to the last one received."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    seconds: float

    @classmethod
    def read(cls, response: HTTPResponse, started_s: float) -> Answer:
        """Read the body of a response; return the answer to a request that began at this time."""
        headers = {name.lower(): value for name, value in response.getheaders()}
        return cls(response.status, headers, response.read(), time.perf_counter() - started_s)

    def json(self) -> Any:
        """Return the body as JSON; raises `ExecutionError` if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ExecutionError(f"the server answered {self.status} with a body that is not JSON: {error}") from None

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body; if it is a text, as for Ollama, with the text as its message; else empty."""
        try:
            found = json.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        return {"message": found} if isinstance(found, str) else found if isinstance(found, dict) else {}


def ask(url: str, body: object = None, *, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Answer:
    """Get a URL, or post a body to it: bytes unchanged, anything else as JSON. Raises `OSError` if that fails."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    fields = {} if body is None else {"Content-Type": "application/json"}
    started = time.perf_counter()
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request("GET" if body is None else "POST", target or "/", payload, {**fields, **(headers or {})})
        return Answer.read(connection.getresponse(), started)
    except HTTPException as error:
        raise ConnectionResetError(f"the reply is not HTTP: {error!r}") from error
    finally:
        connection.close()
