"""The outputs of a request: plain values with the fields of vLLM's outputs.

    RequestOutput            one prompt and its result
    └── CompletionOutput     one of its n texts
        └── Logprob          the log-probability of a token, if requested

While a request runs, the same values are snapshots: the output so far, with `finished` False. For streaming, a
`RequestDelta` has only what is new since the previous delta, with a `CompletionDelta` for each text that advanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token in the model's own distribution; `rank` is 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text.

    `finish_reason` is "stop", "length", "abort", "error", or None while the text grows. `stop_reason` is the stop
    string or the requested stop token that ended the text, or None for the model's end of text. `logprobs` has an entry
    for each token: the token itself and the likeliest ones, by token id. `score` is the value by which a beam search
    ranked the text: `cumulative_logprob` / length ^ length_penalty.
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
        """Whether the text is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request, in seconds of the engine's clock (None: not yet), and its numbers of tokens and steps.

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
        """Average tokens per step, summed over all sequences; speculation can make it more than one per sequence.

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
        """Tokens per second after the first token, summed over all sequences; None if not known."""
        if self.first_token_s is None or self.finished_s is None or self.finished_s <= self.first_token_s:
            return None
        return (self.num_generated_tokens - 1) / (self.finished_s - self.first_token_s)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and the texts generated for it, best first if `best_of` is greater than `n`.

    `prompt` is the text; None if token ids were given. `num_cached_tokens` counts the tokens of the prompt whose keys
    and values were in the prefix cache; `num_disk_tokens` of them came from disk for this request, and
    `num_host_tokens` from the host's memory. `error` is the cause if the request failed. `prompt_logprobs`, if
    requested, are set from the first token on: for each prompt token, the token itself and the likeliest ones, by token
    id; None for the first prompt token, which follows no other.
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
        """The cause if the request failed, else empty."""
        return next((output.error for output in self.outputs if output.error), "")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt and its vector; if the request failed, it is empty and `error` is the cause. See `RequestOutput`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A prompt and its labels, the likeliest first; if the request failed, empty, and `error` is the cause."""

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
    """The new part of one text, with the fields of `CompletionOutput`. The last delta has a `finish_reason`.

    An entry of `logprobs` is made when it is read.
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
    """The new part of a request's output; `prompt_logprobs` come once. `num_generated_tokens` is a total of all texts.

    `waited_s`: seconds from arrival to the first step; None: it ended before that.
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
