"""How a request wants its tokens chosen, and when it wants to stop.

A plain value: lists become tuples, and nothing is checked here. `quire.core.validate` checks every field, whatever
door the request came through, and it is the only place that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.core.grammar import Grammar


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling and stopping parameters of one request.

    `n` sequences are returned out of `best_of` (default: `n`) that are generated. With `beam_search` the
    `best_of` sequences are the beams of one search: the likeliest texts, by the sum of their log-probabilities over
    length ^ `length_penalty`. `early_stopping` True ends it as soon as `best_of` texts have ended, "never" only when no
    better one can come. `max_tokens` None means: as many as fit.

    Tokens are drawn from the softmax of logits / temperature, 0 meaning the likeliest token, after the filters in the
    order min_p, top_k (0 or -1: off), top_p. Sequence i of a request draws with seed + i, so that n sequences of one
    request are those of n requests with their own seeds.

    Before that, logits are changed by rules, in this order. Only `allowed_token_ids` may be chosen, where they are
    given. `bad_words` are not written: their strings become `bad_words_ids` at the door, and a sequence of tokens bans
    its last one where the others stand before it. `logit_bias` is added to the logits of tokens, by id. Tokens that
    stand in the text, prompt and output, have their logit divided by `repetition_penalty` if it is positive, else
    multiplied by it. From tokens of the output, `presence_penalty` is taken once and `frequency_penalty` as often as
    they stand there.

    A `grammar` holds the text to what it allows: at every place only those tokens may be chosen that can still become a
    text of the grammar, and the text may end only where it is one. Then comes everything else.

    The text ends before the first of the `stop` strings, or with it where `include_stop_str_in_output`. `logprobs`
    asks for the log-probabilities of each token and of so many of the likeliest, `prompt_logprobs` for those of the
    tokens of the prompt.

    >>> SamplingParams(n=2, best_of=4, stop="END").num_sequences
    4
    >>> SamplingParams(logit_bias={7: 1.5, 3: -100}).logit_bias
    ((3, -100), (7, 1.5))
    """

    n: int = 1
    best_of: int | None = None
    beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for field in ("stop", "bad_words"):
            if isinstance(getattr(self, field), str):
                object.__setattr__(self, field, (getattr(self, field),))
        for field in ("stop", "stop_token_ids", "bad_words", "bad_words_ids", "allowed_token_ids"):
            if isinstance(getattr(self, field), list):
                object.__setattr__(self, field, tuple(getattr(self, field)))
        if isinstance(self.bad_words_ids, tuple) and list in map(type, self.bad_words_ids):
            words = tuple(tuple(word) if isinstance(word, list) else word for word in self.bad_words_ids)
            object.__setattr__(self, "bad_words_ids", words)
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", _sorted_pairs(self.logit_bias))

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated side by side."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_beams(self) -> int:
        """How many beams move together; 1 where nothing is searched. A search of one beam is greedy decoding."""
        return self.num_sequences if self.beam_search else 1

    def ending_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a text, as soon as `min_tokens` are there."""
        ends = frozenset(self.stop_token_ids)
        return ends if self.ignore_eos else ends | eos_token_ids

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: pairs of a token and what is added to its logit."""
        return _sorted_pairs(self.logit_bias) if isinstance(self.logit_bias, Mapping) else self.logit_bias

    @property
    def has_rules(self) -> bool:
        """Whether anything changes logits before a token is chosen."""
        is_limited = self.allowed_token_ids is not None
        return is_limited or self.has_penalties or bool(self.logit_bias or self.bad_words_ids or self.min_tokens)

    @property
    def has_penalties(self) -> bool:
        """Whether it counts which tokens stand in the text."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _sorted_pairs(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(sorted(biases.items()))
    except TypeError:  # not numbers all of them: validation says so
        return tuple(biases.items())
