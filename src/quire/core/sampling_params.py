"""The sampling and stopping parameters of a request.

A plain value: lists become tuples, without checks. Only `quire.core.validate` checks every field of every request.

A parameter is declared only here. Its check, wire form, flag, field of HTTP bodies, column in the draws of a step and
line in the documents are made from the declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from quire.core.grammar import Grammar
from quire.core.parameters import (
    Biases,
    Choice,
    HeldText,
    Integer,
    Number,
    Parameter,
    Place,
    Switch,
    Texts,
    TokenIds,
    TokenSequences,
    parameter,
    parameters_of,
)

MAX_INT32: Final = (1 << 31) - 1
MAX_SEED: Final = (1 << 63) - 1
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
FORBIDDEN: Final = -100.0
"""The bias against a token that must not be chosen."""
MAX_STOP_STRING_LENGTH: Final = 1024
MAX_STOP_STRINGS: Final = 64
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_TOKENS: Final = 32
USUAL_PENALTY_WINDOW: Final = 64
"""The penalty window of llama.cpp and Ollama for requests that name none."""

WHOLE_TEXT: Final = -1
"""The number of last tokens with which llama.cpp and Ollama mean penalties over the whole text; 0: no penalties."""

DRAW, TEXT, CHOICES, OWN = Place.DRAW, Place.TEXT, Place.CHOICES, Place.OWN


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling and stopping parameters of one request.

    `best_of` sequences (default: `n`) are generated, and the best `n` are returned. With `beam_search` the `best_of`
    sequences are the beams of one search: the likeliest texts, by the sum of their log-probabilities over
    length ^ `length_penalty`. `early_stopping` True ends the search as soon as `best_of` texts have ended, "never" only
    when no better text is possible. `max_tokens` None means: as many as fit.

    Tokens are drawn from the softmax of logits / temperature (0: the likeliest token), after the filters in the order
    top_n_sigma, min_p, top_k (0 or -1: off), top_p. Sequence i of a request draws with seed + i, so the n sequences of
    one request equal those of n requests with the seeds seed, seed + 1, ….

    Before that, rules change the logits, in this order. If `allowed_token_ids` are given, only these may be chosen.
    `bad_words` must not occur in the text: the door turns the strings into `bad_words_ids`, and each sequence bans its
    last token after its other tokens. `logit_bias` is added to the logits of tokens, by id. If a token occurs in the
    prompt or the output, its logit is divided by `repetition_penalty` if it is positive, else multiplied by it. If it
    occurs in the output, `presence_penalty` is subtracted once, and `frequency_penalty` once per occurrence. With a
    `penalty_window`, all three look at that many of the last tokens instead, in prompt and output.

    With a `grammar`, only tokens that can still lead to a text of the grammar may be chosen, and the text may end only
    where it is complete. All other rules still apply.

    The text ends before the first of the `stop` strings, or after it with `include_stop_str_in_output`. `logprobs`
    requests the log-probabilities of each token and of this many of the likeliest, `prompt_logprobs` the same for the
    prompt's tokens.

    >>> SamplingParams(n=2, best_of=4, stop="END").num_sequences
    4
    >>> SamplingParams(logit_bias={7: 1.5, 3: -100}).logit_bias
    ((3, -100), (7, 1.5))
    """

    n: int = parameter(Integer(1, 1 << 20), 1, CHOICES, "number of texts to return")
    best_of: int | None = parameter(
        Integer(1, 1 << 20), None, CHOICES, "number of texts to generate; the n best are returned; None: n"
    )
    beam_search: bool = parameter(Switch(), False, OWN, "generate the texts as the beams of one search")
    length_penalty: float = parameter(
        Number(-10.0, 10.0), 1.0, CHOICES, "beam search divides the score of a text by its length to this power"
    )
    early_stopping: bool | Literal["never"] = parameter(
        Choice(("never",)),
        False,
        CHOICES,
        'True ends a search as soon as best_of texts have ended, "never" only when no better text is possible',
    )
    temperature: float = parameter(Number(0.0, 1e6), 1.0, DRAW, "divides the logits; 0: always the likeliest token")
    top_p: float = parameter(
        Number(0.0, 1.0, is_above=True), 1.0, DRAW, "keep the likeliest tokens that together have this probability"
    )
    top_k: int = parameter(Integer(-1, MAX_INT32), 0, DRAW, "keep only this many of the likeliest tokens; 0, -1: all")
    min_p: float = parameter(
        Number(0.0, 1.0), 0.0, DRAW, "keep only tokens with at least this share of the likeliest token's probability"
    )
    top_n_sigma: float = parameter(
        Number(-1.0, 100.0),
        0.0,
        DRAW,
        "keep only tokens whose logit is at most this many standard deviations below the highest; 0 or less: all",
    )
    seed: int | None = parameter(
        Integer(0, MAX_SEED), None, TEXT, "seed of the random numbers: the same seed gives the same text", flag=True
    )
    max_tokens: int | None = parameter(
        Integer(1, MAX_INT32), None, OWN, "the most tokens to generate; by default as many as fit", flag=True
    )
    min_tokens: int = parameter(Integer(0, MAX_INT32), 0, TEXT, "the fewest tokens to generate before the text may end")
    stop: tuple[str, ...] = parameter(
        Texts(MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH), (), OWN, "end the text before any of these strings"
    )
    stop_token_ids: tuple[int, ...] = parameter(TokenIds(1024), (), TEXT, "tokens that end the text")
    ignore_eos: bool = parameter(Switch(), False, TEXT, "continue past the model's end-of-text token")
    include_stop_str_in_output: bool = parameter(Switch(), False, TEXT, "keep the stop string at the end of the text")
    skip_special_tokens: bool = parameter(Switch(), True, TEXT, "leave special tokens out of the text")
    logprobs: int | None = parameter(
        Integer(0, MAX_LOGPROBS),
        None,
        OWN,
        "report log-probabilities: of each token, and of this many of the likeliest",
    )
    prompt_logprobs: int | None = parameter(
        Integer(0, MAX_LOGPROBS), None, CHOICES, "report log-probabilities of the prompt's tokens too"
    )
    repetition_penalty: float = parameter(
        Number(0.01, 100.0), 1.0, DRAW, "above 1: tokens of prompt and text become less likely"
    )
    presence_penalty: float = parameter(Number(-2.0, 2.0), 0.0, DRAW, "above 0: tokens of the text become less likely")
    frequency_penalty: float = parameter(
        Number(-2.0, 2.0), 0.0, DRAW, "above 0: tokens become less likely each time they occur in the text"
    )
    penalty_window: int = parameter(
        Integer(0, MAX_INT32),
        0,
        TEXT,
        "penalties look at only this many of the last tokens, in prompt and text; 0: at the whole text",
        flag=True,
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = parameter(
        Biases(MAX_BIASES, Number(-100.0, 100.0)),
        (),
        TEXT,
        "numbers to add to the logits of tokens, by token id",
    )
    bad_words: tuple[str, ...] = parameter(Texts(MAX_BAD_WORDS, 256), (), TEXT, "strings that must not be generated")
    bad_words_ids: tuple[tuple[int, ...], ...] = parameter(
        TokenSequences(2 * MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), (), OWN, "token sequences that must not be generated"
    )
    allowed_token_ids: tuple[int, ...] | None = parameter(TokenIds(), None, TEXT, "the only tokens that may be chosen")
    grammar: Grammar | None = parameter(HeldText(), None, OWN, "the grammar that the text must follow")

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
        """The number of sequences that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_beams(self) -> int:
        """The number of beams; 1 without a beam search. A search of one beam is greedy decoding."""
        return self.num_sequences if self.beam_search else 1

    def ending_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a text once it has `min_tokens`."""
        ends = frozenset(self.stop_token_ids)
        return ends if self.ignore_eos else ends | eos_token_ids

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of a token and the number added to its logit."""
        return _sorted_pairs(self.logit_bias) if isinstance(self.logit_bias, Mapping) else self.logit_bias

    @property
    def has_rules(self) -> bool:
        """Whether anything changes logits before a token is chosen."""
        is_limited = self.allowed_token_ids is not None
        return is_limited or self.has_penalties or bool(self.logit_bias or self.bad_words_ids or self.min_tokens)

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty needs counts of the tokens in the text."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


PARAMETERS: Final[Mapping[str, Parameter]] = parameters_of(SamplingParams)
"""The parameters declared above, by name."""

DRAW_PARAMETERS: Final = tuple(name for name, declared in PARAMETERS.items() if declared.place is DRAW)
"""The parameters of each draw, in the order of their columns."""


def _sorted_pairs(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(sorted(biases.items()))
    except TypeError:  # the keys are not all numbers; validation reports that
        return tuple(biases.items())
