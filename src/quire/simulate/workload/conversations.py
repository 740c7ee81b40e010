"""Conversations: chats of several turns, in which each turn repeats the conversation so far.

    turn 1   [ system │ question 1 ]                                   ──► answer 1
    turn 2   [ system │ question 1 │ answer 1 │ question 2 ]           ──► answer 2

The answers are the tokens that the engine generated, so a prefix cache has the same hits on earlier turns as in a real
engine. A chat ends after `num_turns`, or when the next turn would not fit.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from dataclasses import dataclass

from quire.core.errors import InvariantError
from quire.core.setting_checks import require_int, require_number
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.drawn import DrawnPrompts, draw_tokens
from quire.simulate.workload.offered import OfferedRequest


@dataclass(frozen=True, slots=True)
class Turns:
    """The course of a chat: the number of turns, and the mean thinking time between an answer and the next question."""

    num_turns: int = 4
    thinking_s: float = 10.0

    def __post_init__(self) -> None:
        require_int("num_turns", self.num_turns, 1, 1 << 16)
        require_number("thinking_s", self.thinking_s, 1e-3, 1e9)


@dataclass(slots=True)
class _Chat:
    number: int
    rng: random.Random  # its own, so that a chat does not depend on the others
    history: array[int]
    num_turns_left: int
    num_turns_asked: int = 0
    num_output_tokens: int = 0


class Conversations:
    """A `RequestSource` of chats that begin at the times of `arrivals`, within `duration_s`; all run to their end."""

    def __init__(
        self, arrivals: Arrivals, prompts: DrawnPrompts, turns: Turns, *, duration_s: float, seed: int
    ) -> None:
        self._prompts = prompts
        self._turns = turns
        self._draws = prompts.draw(seed)
        self._seed = seed
        self._beginnings = enumerate(itertools.takewhile(lambda time_s: time_s < duration_s, arrivals.times(seed)))
        self._due: list[tuple[float, int, _Chat]] = []
        self._waiting: dict[str, _Chat] = {}
        self._begin_next()

    def _begin_next(self) -> None:
        """Add the chat that begins next to those that are due."""
        number, due_s = next(self._beginnings, (0, None))
        if due_s is not None:
            prompt, output = next(self._draws)
            rng = random.Random(f"chat {self._seed} {number}")
            chat = _Chat(number, rng, prompt, self._turns.num_turns, num_output_tokens=output)
            heapq.heappush(self._due, (due_s, number, chat))

    def next_due_s(self) -> float | None:
        """Return when the next turn is due; None while all chats wait for answers, and at the end."""
        return self._due[0][0] if self._due else None

    def take(self) -> OfferedRequest:
        """Return the next turn. Mutates."""
        due_s, _, chat = heapq.heappop(self._due)
        if not chat.num_turns_asked:
            self._begin_next()
        name = f"c{chat.number}.{chat.num_turns_asked}"
        chat.num_turns_asked += 1
        chat.num_turns_left -= 1
        self._waiting[name] = chat
        return self._prompts.offer(name, due_s, chat.history, chat.num_output_tokens)

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Schedule the next turn of a chat after an answer, if there is one. Mutates."""
        chat = self._waiting.pop(request_id, None)
        if chat is None:
            raise InvariantError(f"no chat waits for {request_id!r}")
        if not chat.num_turns_left or not output:
            return
        num_question_tokens, chat.num_output_tokens = self._prompts.lengths.draw(chat.rng, self._prompts.longest)
        history = chat.history + output + draw_tokens(chat.rng, num_question_tokens)
        if len(history) + chat.num_output_tokens > self._prompts.longest:
            return
        chat.history = history
        due_s = now_s + chat.rng.expovariate(1.0 / self._turns.thinking_s)
        heapq.heappush(self._due, (due_s, chat.number, chat))
