"""RetryingClient: calls servers in turn, and retries like OpenAI's Python client."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from quire.instruments.http.plain import Answer, ask

MAX_RETRIES = 2
RETRIED = frozenset({408, 409, 429})
MAX_TOLD_S = 120.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 8.0


class RetryingClient:
    """A client for several threads. `urls`: the current servers; a retry goes to another server than the first try."""

    def __init__(self, urls: Callable[[], Sequence[str]], *, seed: int) -> None:
        self._urls = urls
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._turn = 0
        self.num_served = 0
        self.num_retries = 0
        self.failures: list[str] = []

    def call_on(self, over: threading.Event) -> None:
        """Call until `over` is set. Mutates."""
        while not over.is_set():
            why = self._call()
            with self._lock:
                if why:
                    self.failures.append(why)
                else:
                    self.num_served += 1

    def _call(self) -> str:
        """Make one call with its retries; return why it failed, or an empty text."""
        why, pause = "", threading.Event()
        with self._lock:
            self._turn += 1
            first = self._turn
        for attempt in range(MAX_RETRIES + 1):
            urls = self._urls()
            url = urls[(first + attempt) % len(urls)]
            with self._lock:
                self.num_retries += attempt > 0
            try:
                answer = ask(f"{url}/v1/completions", {"prompt": "A block is", "max_tokens": 16}, timeout_s=60.0)
            except OSError as error:
                why, wait_s = f"{type(error).__name__}: {error}", None
            else:
                if answer.status == 200:
                    return ""
                why, wait_s = f"{answer.status}: {answer.error.get('message')}", retry_after_s(answer)
                if not should_retry(answer):
                    return why
            if attempt < MAX_RETRIES:
                pause.wait(self._pause_s(attempt) if wait_s is None else wait_s)
        return why

    def _pause_s(self, attempt: int) -> float:
        longest = min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S)
        with self._lock:
            return float(longest * (1 - 0.25 * self._random.random()))


def should_retry(answer: Answer) -> bool:
    """Return whether OpenAI's client would retry after an answer."""
    said = answer.headers.get("x-should-retry")
    return said == "true" if said in ("true", "false") else answer.status in RETRIED or answer.status >= 500


def retry_after_s(answer: Answer) -> float | None:
    """Return the wait in Retry-After; None without one.

    >>> retry_after_s(Answer(503, {"retry-after": "2"}, b"", 0.0)), retry_after_s(Answer(503, {}, b"", 0.0))
    (2.0, None)
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(answer.headers[name]) * unit
        except (KeyError, ValueError):
            continue
        return seconds if 0 < seconds <= MAX_TOLD_S else None
    return None
