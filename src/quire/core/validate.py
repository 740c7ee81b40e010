"""The one check of what comes from outside.

`validate(request, limits)` is pure: it reads, and raises a typed error that names the field, the value and what is
allowed. Every door calls it before it enqueues anything, and the scheduler calls it again, so that no door can be
weaker than another.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.grammar import GRAMMAR_KINDS, Grammar
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams

MAX_NAME_LENGTH = 256
MAX_SALT_LENGTH = 1024
MAX_EXTRA_KEYS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_BAD_WORDS_IDS = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 32
MAX_GRAMMAR_BYTES = 256 << 10
MAX_PRIORITY = 1_000_000
MAX_SEED = (1 << 63) - 1
LARGEST = sys.float_info.max
# A search ranks texts by what the model says of them, and ends them by itself.
NOT_IN_A_SEARCH: Final = MappingProxyType(
    {
        "stop": (),
        "logprobs": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "bad_words": (),
        "bad_words_ids": (),
        "allowed_token_ids": None,
    }
)
# What may leave no token that the grammar allows, or would let the text go on behind its end.
NOT_BESIDE_A_GRAMMAR: Final = MappingProxyType(
    {
        "beam_search": False,
        "allowed_token_ids": None,
        "bad_words": (),
        "bad_words_ids": (),
        "min_tokens": 0,
        "ignore_eos": False,
    }
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the engine at hand can take.

    `max_model_len` counts prompt and output together. `max_sequence_tokens` is the number of tokens of one sequence
    that the KV memory can hold when it holds nothing else. `eos_token_ids` end a text.
    """

    vocab_size: int
    max_model_len: int
    max_sequence_tokens: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...] = ()


def validate(request: Request, limits: RequestLimits) -> None:
    """Raise `InvalidRequestError` unless the engine can serve the request. Does not mutate.

    >>> limits = RequestLimits(vocab_size=100, max_model_len=64, max_sequence_tokens=64, max_num_seqs=8)
    >>> validate(Request("r", [1, 2, 3]), limits)
    >>> validate(Request("r", [1, 2, 100]), limits)
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidRequestError: prompt[2] is 100; allowed: a token id from 0 to 99
    """
    _require_text("request_id", request.request_id, 1, MAX_NAME_LENGTH)
    _validate_scope(request.scope)
    _require_int("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _require_number("arrival_s", request.arrival_s, -LARGEST, LARGEST)
    validate_sampling(request.sampling, limits)
    validate_length(request, limits)  # first, as looking at each token of a prompt that is too long takes long
    _validate_prompt(request, limits)


def validate_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Raise `InvalidRequestError` unless every sampling field is allowed. Does not mutate."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError("sampling", sampling, "SamplingParams")
    _require_int("n", sampling.n, 1, limits.max_num_seqs)
    if sampling.best_of is not None:
        _require_int("best_of", sampling.best_of, sampling.n, limits.max_num_seqs)
    _require_bool("beam_search", sampling.beam_search)
    _require_bool("ignore_eos", sampling.ignore_eos)
    _require_number("temperature", sampling.temperature, 0.0, 1e6)
    _require_number("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0:
        raise InvalidRequestError("top_p", sampling.top_p, "a number above 0, at most 1")
    _require_int("top_k", sampling.top_k, -1, (1 << 31) - 1)
    _require_number("min_p", sampling.min_p, 0.0, 1.0)
    if sampling.seed is not None:
        _require_int("seed", sampling.seed, 0, MAX_SEED)
    if sampling.max_tokens is not None:
        _require_int("max_tokens", sampling.max_tokens, 1, (1 << 31) - 1)
    longest = limits.max_model_len if sampling.max_tokens is None else sampling.max_tokens
    _require_int("min_tokens", sampling.min_tokens, 0, longest)
    _validate_stop_token_ids(sampling, limits)
    _validate_stop_strings(sampling)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, field) is not None:
            _require_int(field, getattr(sampling, field), 0, min(MAX_LOGPROBS, limits.vocab_size))
    _validate_rules(sampling, limits)
    _validate_grammar(sampling)
    _validate_search(sampling, limits)


def _validate_grammar(sampling: SamplingParams) -> None:
    grammar = sampling.grammar
    if grammar is None:
        return
    if not isinstance(grammar, Grammar):
        raise InvalidRequestError("grammar", grammar, "None, or a Grammar")
    if grammar.kind not in GRAMMAR_KINDS:
        raise InvalidRequestError("grammar", grammar.kind, f"one of the kinds {', '.join(GRAMMAR_KINDS)}")
    if not isinstance(grammar.text, str):
        raise InvalidRequestError("grammar", grammar.text, "a text")
    try:
        num_bytes = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError("grammar", f"half a character at {error.start}", "Unicode text") from error
    if not 1 <= num_bytes <= MAX_GRAMMAR_BYTES:
        raise InvalidRequestError("grammar", f"{num_bytes} bytes", f"1 to {MAX_GRAMMAR_BYTES} bytes of text")
    for field, default in NOT_BESIDE_A_GRAMMAR.items():
        if getattr(sampling, field) != default:
            raise InvalidRequestError("grammar", grammar, f"none beside {field}")


def _validate_search(sampling: SamplingParams, limits: RequestLimits) -> None:
    _require_number("length_penalty", sampling.length_penalty, -10.0, 10.0)
    if not isinstance(sampling.early_stopping, bool) and sampling.early_stopping != "never":
        raise InvalidRequestError("early_stopping", sampling.early_stopping, 'True, False or "never"')
    if not sampling.beam_search:
        for field, unset in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(sampling, field) != unset:
                raise InvalidRequestError(field, getattr(sampling, field), f"{unset} unless beam_search is on")
        return
    if sampling.temperature != 0:
        raise InvalidRequestError("temperature", sampling.temperature, "0 where beam_search is on")
    if sampling.num_beams == 1:
        return
    for field, default in NOT_IN_A_SEARCH.items():
        if getattr(sampling, field) != default:
            raise InvalidRequestError(field, getattr(sampling, field), f"{default!r} where beam_search is on")
    num_ends = len(sampling.ending_tokens(frozenset(limits.eos_token_ids)))
    if sampling.num_beams + num_ends > limits.vocab_size:
        allowed = f"at most {max(1, limits.vocab_size - num_ends)} beams: each needs a token that does not end it"
        raise InvalidRequestError("best_of", sampling.num_beams, allowed)


def max_total_tokens(request: Request, limits: RequestLimits) -> int:
    """Return how long the request may grow, prompt and output together. Does not mutate.

    What the caller asked for where `max_tokens` was given (validation has refused what does not fit), else as much
    as the context and the memory allow.
    """
    fits = _longest(limits)
    asked = request.sampling.max_tokens
    return fits if asked is None else min(request.num_prompt_tokens + asked, fits)


def _longest(limits: RequestLimits) -> int:
    # The last token of a sequence is only sampled, never stored.
    return min(limits.max_model_len, limits.max_sequence_tokens + 1)


def _validate_scope(scope: CacheScope) -> None:
    if not isinstance(scope, CacheScope):
        raise InvalidRequestError("scope", scope, "a CacheScope")
    _require_text("tenant", scope.tenant, 0, MAX_NAME_LENGTH)
    _require_text("cache_salt", scope.salt, 0, MAX_SALT_LENGTH)
    if not isinstance(scope.extra_keys, tuple) or len(scope.extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidRequestError("extra_keys", scope.extra_keys, f"a tuple of at most {MAX_EXTRA_KEYS} strings")
    for key in scope.extra_keys:
        _require_text("extra_keys", key, 0, MAX_NAME_LENGTH)


def _validate_prompt(request: Request, limits: RequestLimits) -> None:
    tokens = request.tokens
    if not tokens:
        raise InvalidRequestError("prompt", [], "at least one token id")
    values = tokens.tolist()  # a list is walked faster
    if min(values) < 0 or max(values) >= limits.vocab_size:
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < limits.vocab_size)
        raise InvalidRequestError(f"prompt[{index}]", tokens[index], f"a token id from 0 to {limits.vocab_size - 1}")


def validate_length(request: Request, limits: RequestLimits) -> None:
    """Raise `RequestTooLargeError` unless the request fits into the context and the memory. Does not mutate."""
    prompt, asked = request.num_prompt_tokens, request.sampling.max_tokens
    total = prompt + (1 if asked is None else asked)
    if total > limits.max_model_len:
        raise RequestTooLargeError(
            "prompt and max_tokens together",
            total,
            f"at most {limits.max_model_len} tokens, because this model's maximum context length is "
            f"{limits.max_model_len} tokens; shorten the prompt or max_tokens",
        )
    if total - 1 > limits.max_sequence_tokens:
        raise RequestTooLargeError(
            "prompt and max_tokens together",
            total,
            f"at most {limits.max_sequence_tokens + 1} tokens, which is what the KV memory holds; "
            "shorten the prompt or max_tokens, or give the engine more KV memory",
        )


def _validate_stop_token_ids(sampling: SamplingParams, limits: RequestLimits) -> None:
    ids = sampling.stop_token_ids
    if not isinstance(ids, tuple) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", ids, f"a tuple of at most {MAX_STOP_TOKEN_IDS} token ids")
    for token in ids:
        _require_int("stop_token_ids", token, 0, limits.vocab_size - 1)


def _validate_stop_strings(sampling: SamplingParams) -> None:
    _require_bool("include_stop_str_in_output", sampling.include_stop_str_in_output)
    _require_bool("skip_special_tokens", sampling.skip_special_tokens)
    if not isinstance(sampling.stop, tuple) or len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", sampling.stop, f"at most {MAX_STOP_STRINGS} strings")
    for text in sampling.stop:
        _require_text("stop", text, 1, MAX_STOP_STRING_LENGTH)


def _validate_rules(sampling: SamplingParams, limits: RequestLimits) -> None:
    _require_number("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    _require_number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _require_number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _validate_biases(sampling, limits)
    _validate_bad_words(sampling, limits)
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        if not isinstance(allowed, tuple) or not 1 <= len(allowed) <= limits.vocab_size:
            fits = f"None, or a tuple of 1 to {limits.vocab_size} token ids"
            raise InvalidRequestError("allowed_token_ids", allowed, fits)
        for token in allowed:
            _require_int("allowed_token_ids", token, 0, limits.vocab_size - 1)
    _require_a_choice(sampling, limits)


def _validate_biases(sampling: SamplingParams, limits: RequestLimits) -> None:
    biases = sampling.biases
    if not isinstance(biases, tuple) or len(biases) > MAX_BIASES:
        raise InvalidRequestError("logit_bias", biases, f"a number for each of at most {MAX_BIASES} token ids")
    for pair in biases:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidRequestError("logit_bias", pair, "pairs of a token id and a number")
        _require_int("logit_bias", pair[0], 0, limits.vocab_size - 1)
        _require_number(f"logit_bias[{pair[0]}]", pair[1], -100.0, 100.0)
    if len({token for token, _ in biases}) < len(biases):
        raise InvalidRequestError("logit_bias", biases, "each token id once")


def _validate_bad_words(sampling: SamplingParams, limits: RequestLimits) -> None:
    words, sequences = sampling.bad_words, sampling.bad_words_ids
    if not isinstance(words, tuple) or len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError("bad_words", words, f"at most {MAX_BAD_WORDS} strings")
    for word in words:
        _require_text("bad_words", word, 1, MAX_BAD_WORD_LENGTH)
    if not isinstance(sequences, tuple) or len(sequences) > MAX_BAD_WORDS_IDS:
        raise InvalidRequestError("bad_words_ids", sequences, f"at most {MAX_BAD_WORDS_IDS} tuples of token ids")
    for sequence in sequences:
        if not isinstance(sequence, tuple) or not 1 <= len(sequence) <= MAX_BAD_WORD_TOKENS:
            allowed = f"tuples of 1 to {MAX_BAD_WORD_TOKENS} token ids"
            raise InvalidRequestError("bad_words_ids", sequence, allowed)
        for token in sequence:
            _require_int("bad_words_ids", token, 0, limits.vocab_size - 1)


def _require_a_choice(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Whatever the text is, a token must be left that nothing bans."""
    banned = {sequence[-1] for sequence in sampling.bad_words_ids}
    if sampling.min_tokens:
        banned |= sampling.ending_tokens(frozenset(limits.eos_token_ids))
    allowed = sampling.allowed_token_ids
    if allowed is not None and banned.issuperset(allowed):
        raise InvalidRequestError("allowed_token_ids", allowed, "one that no bad word and no min_tokens may ban")
    if sum(0 <= token < limits.vocab_size for token in banned) == limits.vocab_size:
        field = "bad_words_ids" if sampling.bad_words_ids else "min_tokens"
        raise InvalidRequestError(field, getattr(sampling, field), "what leaves a token that may be chosen")


def _require_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(field, value, f"an integer from {low} to {high}")


def _require_number(field: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise InvalidRequestError(field, value, "a finite number")
    if not low <= value <= high:
        raise InvalidRequestError(field, value, f"a number from {low:g} to {high:g}")


def _require_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(field, value, "True or False")


def _require_text(field: str, value: object, shortest: int, longest: int) -> None:
    if not isinstance(value, str) or not shortest <= len(value) <= longest:
        raise InvalidRequestError(field, value, f"a string of {shortest} to {longest} characters")
