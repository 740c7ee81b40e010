"""What a request returns: plain values with the fields that users of vLLM know.

    RequestOutput            one prompt, and how it went
    └── CompletionOutput     one text for it; there are n of them
        └── Logprob          how likely a token was, where that was asked for

While a request is under way the same values are snapshots: everything so far, `finished` False. Who passes a text on
as it grows takes differences instead, a `RequestDelta` with a `CompletionDelta` for each text that got further: what
is new since the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, by the model's own distribution; `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text.

    `finish_reason` is "stop", "length", "abort", "error", or None while it is growing. `stop_reason` says what stopped
    it: one of the stop strings, one of the stop tokens asked for, or None for the end of text. `logprobs` has an entry
    for each token: the token itself and the likeliest ones, by token id. `score` is by what a beam search has ranked
    the text: `cumulative_logprob` / length ^ length_penalty.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    score: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the text is whole."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When what happened to a request, in seconds of the engine's clock; None: not yet. And how many steps brought it.

    >>> metrics = RequestMetrics(arrival_s=10.0, first_token_s=10.5, finished_s=12.5, num_generated_tokens=41)
    >>> metrics.time_to_first_token_s, metrics.tokens_per_s
    (0.5, 20.0)
    """

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_generated_tokens: int = 0
    num_steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step brought on average, all sequences together: more than one each where guesses were right.

        >>> RequestMetrics(arrival_s=0.0, num_generated_tokens=9, num_steps=4).tokens_per_step
        2.25
        """
        return self.num_generated_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def duration_s(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s

    @property
    def tokens_per_s(self) -> float | None:
        """How fast tokens came after the first one, all sequences together; None where that is not known."""
        if self.first_token_s is None or self.finished_s is None or self.finished_s <= self.first_token_s:
            return None
        return (self.num_generated_tokens - 1) / (self.finished_s - self.first_token_s)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and the texts generated for it, best first where `best_of` was over `n`.

    `prompt` is the text, None where token ids were given. `num_cached_tokens` counts the tokens of the prompt whose
    keys and values were in the prefix cache; `num_disk_tokens` of them came from disk for this request, and
    `num_host_tokens` from the host's memory. `error` says what went wrong with a request that failed.
    `prompt_logprobs`, where they were asked for, are there with the first token: for each token of the prompt itself
    and the likeliest ones, by token id; None for the first, before which nothing stands.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_disk_tokens: int = 0
    num_host_tokens: int = 0

    @property
    def error(self) -> str:
        """What went wrong; empty where nothing did."""
        return next((output.error for output in self.outputs if output.error), "")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt and its vector, empty if the request failed; `error` says why. The other fields: see `RequestOutput`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A prompt and its labels, the likeliest first; empty if the request failed, and `error` says why."""

    request_id: str
    prompt: str | None
    shares: dict[str, float]
    error: str = ""

    @property
    def label(self) -> str:
        """The likeliest label."""
        return next(iter(self.shares), "")


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What is new of one text; the fields are those of `CompletionOutput`. That with a `finish_reason` is its last.

    Each entry of `logprobs` is made when it is read.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What is new of a request; `prompt_logprobs` come once. `num_generated_tokens` counts those of all its texts.

    `waited_s`: how long it waited for the engine's first step for it; None: it ended before that.
    """

    outputs: list[CompletionDelta]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    waited_s: float | None = None
    num_disk_tokens: int = 0
    num_host_tokens: int = 0
    vector: bytes = b""
