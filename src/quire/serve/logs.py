"""Logs: events and requests, as lines of text or JSON, never with a prompt or an output.

    2026-01-31T12:00:00.000Z INFO quire.serve.access call request_id=req-1f… method=GET path=/livez status=200
    {"time": "2026-01-31T12:00:00.000Z", "level": "INFO", "logger": "quire.serve.access", "message": "call", …}

Pass fields as `extra={"fields": …}`. A value that a client has chosen (a path, an id) is quoted if it could look like
several fields or lines.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from quire.core.clock import Clock, SystemClock

AGAIN_AFTER_S: Final = 10.0
MAX_MESSAGES: Final = 100
PLAIN: Final = re.compile(r"[!-<>-~]+")
"""Visible ASCII without the equals sign."""


class TextFormatter(logging.Formatter):
    """A record as a line that people can read and grep."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        parts = [_time(record), record.levelname, record.name, record.getMessage()]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """A record as a JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        value: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            value["exception"] = self.formatException(record.exc_info)
        return json.dumps(value)


class Seldom(logging.Filter):
    """Passes a message at most once per `AGAIN_AFTER_S`; messages with equal first lines count as equal.

    >>> from quire.core.clock import ManualClock
    >>> seldom = Seldom(ManualClock())
    >>> record = logging.makeLogRecord({"msg": "no more files"})
    >>> seldom.filter(record), seldom.filter(record)
    (True, False)
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._next_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the message. Mutates."""
        text, now = record.getMessage().partition("\n")[0], self._clock.now()
        if now < self._next_s.get(text, 0.0):
            return False
        if len(self._next_s) >= MAX_MESSAGES:
            self._next_s.clear()
        self._next_s[text] = now + AGAIN_AFTER_S
        return True


def configure_logs(log_format: str, stream: TextIO) -> None:
    """Log quire to a stream, and silence uvicorn, whose messages quire replaces. Mutates loggers."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger("quire")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logging.INFO)
    logging.getLogger("quire.engine").setLevel(logging.WARNING)  # the server prints the engine's start as a table
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    seldom = logging.StreamHandler(stream)
    seldom.setFormatter(handler.formatter)
    seldom.addFilter(Seldom(SystemClock()))
    # At the limit of open files, asyncio logs an error for each connection; opentelemetry for each batch not sent.
    for other in map(logging.getLogger, ("asyncio", "opentelemetry")):
        other.handlers, other.propagate = [seldom], False


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = record.__dict__.get("fields")
    return fields if isinstance(fields, dict) else {}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def _shown(value: object) -> str:
    text = str(value)
    return text if PLAIN.fullmatch(text) and '"' not in text else json.dumps(text)
