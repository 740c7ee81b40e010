"""StreamReading: one streamed answer as a client sees it, with the time of each event.

The definitions are those of other tools for OpenAI-compatible servers. The time to first token ends with the first
event that has a token. The latency between tokens is the time between two events of one text. The time per output token
is the time after the first event, divided by the remaining tokens of the usage. If a request is sent late, its time
still counts from when it was due, so a slow load generator does not hide delays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.instruments.http.events import DONE, EventReader


class Delta(msgspec.Struct):
    """The part of a chat event with text."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct):
    """The part of an event that belongs to one text."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The text of the event; empty if it has none."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def brings_token(self) -> bool:
        """Whether the event has a token, and is not only the beginning or the end of a text."""
        if self.content:
            return True
        return self.finish_reason is None and (self.delta is None or self.delta.role is None)


class PromptDetails(msgspec.Struct):
    """Details of the usage."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The usage of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One event of a stream, of completions or chat; other fields are ignored."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


READER = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class Outcome:
    """The outcome of a request. Times are seconds of the run's clock; `status` 0: no reply.

    `events_s` are the times of the events with tokens, `gaps_s` the times between two events of one text, and `pieces`
    the texts of the events.
    """

    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    events_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    is_cut_off: bool = False
    pieces: list[str] = field(default_factory=list, repr=False)

    @property
    def is_done(self) -> bool:
        """Whether the request was completed."""
        return self.status == 200 and not self.error and not self.is_cut_off

    @property
    def is_rejected(self) -> bool:
        """Whether the server was busy and rejected the request."""
        return self.status in (429, 503)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from when the request was due to its first token."""
        return self.events_s[0] - self.due_s if self.events_s else None

    @property
    def token_s(self) -> float | None:
        """Seconds per output token after the first."""
        if self.num_output_tokens < 2 or not self.events_s:
            return None
        return (self.events_s[-1] - self.events_s[0]) / (self.num_output_tokens - 1)

    @property
    def whole_s(self) -> float:
        """Seconds from when the request was due to its end."""
        return self.end_s - self.due_s

    @property
    def first_s(self) -> float:
        """Seconds from when the request was due to its first token, or to its end if it has none."""
        return self.first_token_s or self.whole_s


class StreamReading:
    """Reads the events of one answer into its outcome."""

    __slots__ = ("_events", "_last_s", "_outcome", "is_ended")

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._events = EventReader()
        self._last_s: dict[int, float] = {}
        self.is_ended = False

    def take(self, piece: bytes, now: float) -> None:
        """Read a piece that has just arrived. Mutates; never raises, whatever a server sends."""
        for data in self._events.feed(piece):
            if data == DONE:
                self.is_ended = True
                continue
            try:
                chunk = READER.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                self._outcome.error = self._outcome.error or f"an event cannot be read: {error}"
                continue
            self._note(chunk, now)

    def _note(self, chunk: Chunk, now: float) -> None:
        outcome = self._outcome
        if chunk.error:
            outcome.error = outcome.error or f"an error in the stream: {chunk.error}"
        if chunk.usage is not None:
            outcome.num_prompt_tokens = chunk.usage.prompt_tokens
            outcome.num_output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            outcome.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0
        for choice in chunk.choices:
            outcome.pieces.append(choice.content)
            if choice.brings_token:
                outcome.events_s.append(now)
                if choice.index in self._last_s:
                    outcome.gaps_s.append(now - self._last_s[choice.index])
                self._last_s[choice.index] = now
