"""Bystanders: requests unrelated to a case, which must not notice it.

Each is drawn with a seed, so its tokens, text and log-probabilities are known from an undisturbed run. Threads send
them over and over to every server of a case: whatever its memory, load and faults, the same bits must come back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.instruments.http.plain import Answer, ask

PROMPTS = (
    "A block is",
    "What is a block table?",
    "The scheduler gives each request",
    "Pages are shared when",
    "A request that yields its memory",
    "The prefix cache keeps",
    "When the pool is empty,",
    "Two requests that begin alike",
)
NUM_BYSTANDERS = 12
NUM_THREADS = 2
TIMEOUT_S = 120.0
TURNED_AWAY = (429, 503)
PAUSE_S = 0.2


def bystander_body(index: int) -> dict[str, Any]:
    """Return one of the requests: sampled or greedy, with one text or two, of different lengths."""
    return {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": 12 + 6 * (index % 4),
        "temperature": 0.0 if index % 3 == 0 else 0.9,
        "seed": 1000 + index,
        "n": 2 if index % 4 == 1 else 1,
        "logprobs": 2,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class ChoiceOutcome(NamedTuple):
    """The parts of a text that must not change."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str


Outcome = list[ChoiceOutcome]


def outcome_of(answer: Answer) -> Outcome:
    """Return the parts of an answer that must not change."""
    return [
        ChoiceOutcome(
            tuple(choice["token_ids"]),
            choice["text"],
            tuple(choice["logprobs"]["token_logprobs"]),
            choice["finish_reason"],
        )
        for choice in answer.json()["choices"]
    ]


@dataclass(slots=True)
class BystanderCounts:
    """The results of bystanders. `lost`: no answer, or a server error."""

    num_same: int = 0
    num_turned_away: int = 0
    changed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class Bystanders:
    """Sends requests to a server, between `start` and `stop`."""

    def __init__(
        self, url: str, model: str, expected: Sequence[Outcome], headers: dict[str, str] | None = None
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._expected = expected
        self._headers = headers
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._threads: list[threading.Thread] = []
        self.counts = BystanderCounts()

    def start(self) -> None:
        """Start sending requests. Mutates."""
        self._over.clear()
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for pending answers; send no more requests. Mutates."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _ask_on(self) -> None:
        while not self._over.is_set():
            with self._lock:
                index, self._next = self._next % len(self._expected), self._next + 1
            self._ask(index)

    def _ask(self, index: int) -> None:
        try:
            body = {"model": self._model, **bystander_body(index)}
            answer = ask(self._url, body, headers=self._headers, timeout_s=TIMEOUT_S)
            found = outcome_of(answer) if answer.status == 200 else None
        except Exception as error:  # every error is recorded
            self._note_lost(f"{type(error).__name__}: {error}")
            return
        with self._lock:
            if found == self._expected[index]:
                self.counts.num_same += 1
            elif found is not None:
                self.counts.changed.append(f"bystander {index} got other tokens")
            elif answer.status in TURNED_AWAY:
                self.counts.num_turned_away += 1
        if found is None and answer.status not in TURNED_AWAY:
            self._note_lost(f"{answer.status}: {answer.error.get('message', '')}")
        elif found is None:
            self._over.wait(PAUSE_S)

    def _note_lost(self, why: str) -> None:
        with self._lock:
            self.counts.lost.append(why)
        self._over.wait(PAUSE_S)


def expected_outcomes(url: str, model: str, headers: dict[str, str] | None = None) -> list[Outcome]:
    """Return the outcomes of bystanders on an undisturbed server."""
    return [
        outcome_of(ask(f"{url}/v1/completions", {"model": model, **bystander_body(index)}, headers=headers))
        for index in range(NUM_BYSTANDERS)
    ]
