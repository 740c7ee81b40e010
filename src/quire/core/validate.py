"""The one check of values from outside.

`validate(request, limits)` is pure: it reads, and raises a typed error that names the field, the value and what is
allowed. Every door calls it before it enqueues anything, and the scheduler calls it again, so that no door can be
weaker than another. The range of each sampling parameter is the declared one; this module checks how they combine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.grammar import GRAMMAR_KINDS, Grammar
from quire.core.images import MIN_IMAGE_TOKENS, Image
from quire.core.parameters import (
    Biases,
    Choice,
    HeldText,
    Integer,
    Kind,
    Number,
    Switch,
    Texts,
    TokenIds,
    TokenSequences,
)
from quire.core.pooling import FIRST, LABELS, POOLINGS, Pooling
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import MAX_INT32, MAX_LOGPROBS, PARAMETERS, SamplingParams

MAX_NAME_LENGTH = 256
MAX_SALT_LENGTH = 1024
MAX_EXTRA_KEYS = 16
MAX_GRAMMAR_BYTES = 256 << 10
MAX_PRIORITY = 1_000_000
MAX_PROMPT_LOGPROBS: Final = 16 << 20
"""The most log-probabilities of one prompt: for each token those of the likeliest, its own, and one for its rank.

They reach the client in one message of the engine, in which each takes up to 12 bytes.
"""
LARGEST = sys.float_info.max
NO_LABELS: Final = "this model has no labels, so it cannot classify texts"
# A beam search ranks texts by the model's own probabilities, and decides itself when they end.
NOT_IN_A_SEARCH: Final = (
    "stop",
    "logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "bad_words_ids",
    "allowed_token_ids",
)
# Parameters that could ban every token that the grammar allows, or continue the text past its end.
NOT_BESIDE_A_GRAMMAR: Final = ("allowed_token_ids", "bad_words", "bad_words_ids", "min_tokens", "ignore_eos")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of an engine.

    `max_model_len` counts prompt and output together. `max_sequence_tokens` is the number of tokens of one sequence
    that the KV memory can hold when it holds nothing else. `eos_token_ids` end a text. `vector_size` is the number of
    dimensions of a vector; 0: the engine makes no vectors. `num_labels`: labels of a model that classifies.
    `generates`: whether the model can continue a text. `one_step`: a text is computed in one step, and uses no cache,
    because its tokens attend to later ones. `max_images`: of one prompt; 0: the model reads no images.
    """

    vocab_size: int
    max_model_len: int
    max_sequence_tokens: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...] = ()
    vector_size: int = 0
    num_labels: int = 0
    generates: bool = True
    one_step: bool = False
    max_images: int = 0


ANY_ENGINE: Final = RequestLimits(MAX_INT32, MAX_INT32, MAX_INT32, 1 << 20)
"""Limits that refuse only what every engine refuses."""


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
    _require_number("arrival_s", request.arrival_s, Number(-LARGEST, LARGEST))
    validate_sampling(request.sampling, limits)
    if request.pooling is not None:
        _validate_pooling(request.pooling, request.sampling, limits)
    elif not limits.generates:
        allowed = "a text to classify or to score (/classify, /score, /rerank)"
        if not limits.num_labels:
            allowed = "a text to embed (/v1/embeddings) or to score (/score, /rerank)"
        raise InvalidRequestError("prompt", "a text to continue", f"{allowed}: this model cannot generate text")
    _validate_prompt_logprobs(request)
    validate_length(request, limits)  # before the tokens, because checking each token of a long prompt takes long
    _validate_tokens(request, limits)
    if request.images:
        _validate_images(request, limits)
    if request.num_output_tokens:
        _validate_beginning(request, limits)


def validate_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Raise `InvalidRequestError` unless every sampling field is allowed. Does not mutate."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError("sampling", sampling, "SamplingParams")
    narrowed = _narrowed(sampling, limits)
    for name, declared in PARAMETERS.items():
        value = getattr(sampling, name)
        if value is not declared.default:
            _require(name, value, narrowed.get(name, declared.kind), limits)
    _require_a_choice(sampling, limits)
    if sampling.grammar is not None:
        _require_alone(sampling.grammar, sampling)
    _validate_search(sampling, limits)


def _validate_pooling(pooling: Pooling, sampling: SamplingParams, limits: RequestLimits) -> None:
    """Check a request for a vector, which samples nothing."""
    if not isinstance(pooling, Pooling) or pooling.kind not in (*POOLINGS, LABELS):
        kind = pooling.kind if isinstance(pooling, Pooling) else pooling
        raise InvalidRequestError("pooling", kind, f"one of {', '.join(POOLINGS)}")
    if not limits.vector_size:
        raise InvalidRequestError("pooling", pooling.kind, "none: this backend makes no vectors; backend native does")
    if pooling.kind == LABELS and not limits.num_labels:
        raise InvalidRequestError("pooling", LABELS, "last or mean").saying(NO_LABELS)
    if pooling.kind == FIRST and not limits.one_step:
        raise InvalidRequestError("pooling", FIRST, "last or mean: the first token of this model reads only itself")
    if pooling.dimensions != 0:
        _require_int("dimensions", pooling.dimensions, 1, limits.vector_size)
    if sampling.num_sequences > 1 or sampling.max_tokens != 1 or sampling.prompt_logprobs is not None:
        raise InvalidRequestError("sampling", sampling, "SamplingParams(max_tokens=1) for a vector")


def _validate_prompt_logprobs(request: Request) -> None:
    asked, num_tokens = request.sampling.prompt_logprobs, request.num_prompt_tokens
    if asked is not None and num_tokens * (asked + 2) > MAX_PROMPT_LOGPROBS:
        most = MAX_PROMPT_LOGPROBS // num_tokens - 2
        allowed = f"at most {most}" if most >= 0 else "None"
        raise InvalidRequestError("prompt_logprobs", asked, f"{allowed} for a prompt of {num_tokens} tokens")


def _narrowed(sampling: SamplingParams, limits: RequestLimits) -> dict[str, Kind]:
    """Return the ranges that depend on the engine, or on a field that is checked earlier."""
    longest = limits.max_model_len if sampling.max_tokens is None else sampling.max_tokens
    logprobs = Integer(0, min(MAX_LOGPROBS, limits.vocab_size))
    return {
        "n": Integer(1, limits.max_num_seqs),
        "best_of": Integer(sampling.n, limits.max_num_seqs),
        "min_tokens": Integer(0, longest),
        "logprobs": logprobs,
        "prompt_logprobs": logprobs,
    }


def _require(name: str, value: Any, kind: Kind, limits: RequestLimits) -> None:
    match kind:
        case Integer():
            _require_int(name, value, kind.low, kind.high)
        case Number():
            _require_number(name, value, kind)
        case Switch():
            if not isinstance(value, bool):
                raise InvalidRequestError(name, value, kind.allowed)
        case Choice():
            if not isinstance(value, bool) and value not in kind.words:
                raise InvalidRequestError(name, value, kind.allowed)
        case Texts():
            _require_entries(name, value, kind.most, kind.allowed)
            for text in value:
                _require_text(name, text, 1, kind.longest)
        case TokenIds():
            _require_token_ids(name, value, kind, limits)
        case TokenSequences():
            _require_sequences(name, value, kind, limits)
        case Biases():
            _require_biases(name, value, kind, limits)
        case HeldText():
            _require_grammar(name, value, kind)


def _require_token_ids(name: str, value: Any, kind: TokenIds, limits: RequestLimits) -> None:
    if kind.most is None:
        if not isinstance(value, tuple) or not 1 <= len(value) <= limits.vocab_size:
            raise InvalidRequestError(name, value, f"None, or a tuple of 1 to {limits.vocab_size} token ids")
    else:
        _require_entries(name, value, kind.most, kind.allowed)
    # Of up to a whole vocabulary of integers, the extremes are enough: a call for each would take long.
    for token in (min(value), max(value)) if {*map(type, value)} == {int} else value:
        _require_token(name, token, limits)


def _require_sequences(name: str, value: Any, kind: TokenSequences, limits: RequestLimits) -> None:
    _require_entries(name, value, kind.most, kind.allowed)
    for sequence in value:
        if not isinstance(sequence, tuple) or not 1 <= len(sequence) <= kind.longest:
            raise InvalidRequestError(name, sequence, f"tuples of 1 to {kind.longest} token ids")
        for token in sequence:
            _require_token(name, token, limits)


def _require_token(name: str, token: object, limits: RequestLimits) -> None:
    try:
        _require_int(f"a token id in {name}", token, 0, limits.vocab_size - 1)
    except InvalidRequestError as error:
        raise InvalidRequestError(name, error.value, error.allowed).saying(str(error)) from None


def _require_biases(name: str, value: Any, kind: Biases, limits: RequestLimits) -> None:
    _require_entries(name, value, kind.most, kind.allowed)
    for pair in value:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidRequestError(name, pair, "pairs of a token id and a number")
        _require_token(name, pair[0], limits)
        _require_number(f"{name}[{pair[0]}]", pair[1], kind.number)
    if len({token for token, _ in value}) < len(value):
        raise InvalidRequestError(name, value, "each token id once")


def _require_grammar(name: str, grammar: Any, kind: HeldText) -> None:
    if not isinstance(grammar, Grammar):
        raise InvalidRequestError(name, grammar, kind.allowed)
    if grammar.kind not in GRAMMAR_KINDS:
        raise InvalidRequestError(name, grammar.kind, f"one of the kinds {', '.join(GRAMMAR_KINDS)}")
    if not isinstance(grammar.text, str):
        raise InvalidRequestError(name, grammar.text, "a text")
    try:
        num_bytes = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(name, f"a lone surrogate at {error.start}", "Unicode text") from error
    if not 1 <= num_bytes <= MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(name, f"{num_bytes} bytes", f"1 to {MAX_GRAMMAR_BYTES} bytes of text")


def _require_alone(grammar: Grammar, sampling: SamplingParams) -> None:
    if sampling.beam_search:
        raise InvalidRequestError("grammar", grammar, "no grammar in a beam search")
    for field in NOT_BESIDE_A_GRAMMAR:
        if getattr(sampling, field) != PARAMETERS[field].default:
            raise InvalidRequestError("grammar", grammar, f"no grammar together with {field}")


def _validate_search(sampling: SamplingParams, limits: RequestLimits) -> None:
    if not sampling.beam_search:
        for field in ("length_penalty", "early_stopping"):
            value, unset = getattr(sampling, field), PARAMETERS[field].default
            if value != unset:
                raise InvalidRequestError(field, value, f"{unset} outside a beam search")
        return
    if sampling.temperature != 0:
        raise InvalidRequestError("temperature", sampling.temperature, "0 in a beam search")
    if sampling.num_beams == 1:
        return
    for field in NOT_IN_A_SEARCH:
        value, unset = getattr(sampling, field), PARAMETERS[field].default
        if value != unset:
            raise InvalidRequestError(field, value, f"{unset!r} in a beam search")
    num_ends = len(sampling.ending_tokens(frozenset(limits.eos_token_ids)))
    if sampling.num_beams + num_ends > limits.vocab_size:
        allowed = f"at most {max(1, limits.vocab_size - num_ends)} beams: each needs a token that does not end it"
        raise InvalidRequestError("best_of", sampling.num_beams, allowed)


def max_total_tokens(request: Request, limits: RequestLimits) -> int:
    """Return the maximum length of the request, prompt and output together. Does not mutate.

    With `max_tokens`, that many output tokens (validation has refused requests that do not fit); otherwise as many as
    the context and the memory allow. The maximum of a text that becomes a vector is never reached.
    """
    if request.pooling is not None:
        return request.num_prompt_tokens + 1
    fits = longest(limits)
    asked = request.sampling.max_tokens
    return fits if asked is None else min(request.num_prompt_tokens + asked, fits)


def longest(limits: RequestLimits) -> int:
    """Return the maximum length of any sequence, prompt and output together. Pure."""
    # The last token of a sequence is only sampled, never stored.
    return min(limits.max_model_len, limits.max_sequence_tokens + 1)


def longest_text(limits: RequestLimits) -> int:
    """Return the maximum length of a text that becomes a vector, after which no token is sampled. Pure."""
    return min(limits.max_model_len, limits.max_sequence_tokens)


def _validate_scope(scope: CacheScope) -> None:
    if not isinstance(scope, CacheScope):
        raise InvalidRequestError("scope", scope, "a CacheScope")
    _require_text("tenant", scope.tenant, 0, MAX_NAME_LENGTH)
    _require_text("cache_salt", scope.salt, 0, MAX_SALT_LENGTH)
    if not isinstance(scope.extra_keys, tuple) or len(scope.extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidRequestError("extra_keys", scope.extra_keys, f"a tuple of at most {MAX_EXTRA_KEYS} strings")
    for key in scope.extra_keys:
        _require_text("extra_keys", key, 0, MAX_NAME_LENGTH)
    if not isinstance(scope.persist, bool):
        raise InvalidRequestError("persist", scope.persist, "True or False")
    _require_text("adapter", scope.adapter, 0, MAX_NAME_LENGTH)


def _validate_tokens(request: Request, limits: RequestLimits) -> None:
    tokens, num_prompt_tokens = request.tokens, request.num_prompt_tokens
    if not num_prompt_tokens:
        raise InvalidRequestError("prompt", [], "at least one token id")
    values = tokens.tolist()  # iterating over a list is faster
    if min(values) < 0 or max(values) >= limits.vocab_size:
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < limits.vocab_size)
        place = f"prompt[{index}]"
        if index >= num_prompt_tokens:
            place = f"output_token_ids[{index - num_prompt_tokens}]"
        raise InvalidRequestError(place, tokens[index], f"a token id from 0 to {limits.vocab_size - 1}")


def _validate_images(request: Request, limits: RequestLimits) -> None:
    """Check the places of images: each behind the one before it, and within the prompt."""
    images = request.images
    if not isinstance(images, tuple) or not all(isinstance(image, Image) for image in images):
        raise InvalidRequestError("images", images, "a tuple of images")
    if len(images) > limits.max_images:
        allowed = f"at most {limits.max_images}" if limits.max_images else "none: this model reads no images"
        raise InvalidRequestError("images", len(images), allowed)
    if request.pooling is not None:
        raise InvalidRequestError("images", len(images), "none in a text that becomes a vector")
    if request.sampling.prompt_logprobs is not None and any(image.is_whole for image in images):
        raise InvalidRequestError(
            "prompt_logprobs", request.sampling.prompt_logprobs, "None with images, for this model"
        )
    end = 0
    for index, image in enumerate(images):
        if image.start < end or image.num_tokens < MIN_IMAGE_TOKENS or image.end > request.num_prompt_tokens:
            found = f"tokens {image.start} to {image.end - 1}"
            allowed = f"at least {MIN_IMAGE_TOKENS} tokens of the prompt, behind the image before it"
            raise InvalidRequestError(f"images[{index}]", found, allowed)
        end = image.end


def _validate_beginning(request: Request, limits: RequestLimits) -> None:
    """Check the output that another engine generated and this request continues: it must not have ended the text."""
    sampling, output = request.sampling, request.tokens[request.num_prompt_tokens :]
    if request.pooling is not None or sampling.num_sequences > 1:
        allowed = "none for a vector, or for n, best_of and beams above 1; continue each sequence as its own request"
        raise InvalidRequestError("output_token_ids", f"{len(output)} tokens", allowed)
    if sampling.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs", sampling.prompt_logprobs, "None with output_token_ids")
    if sampling.max_tokens is not None and len(output) >= sampling.max_tokens:
        allowed = f"fewer than max_tokens, which is {sampling.max_tokens}"
        raise InvalidRequestError("output_token_ids", f"{len(output)} tokens", allowed)
    ends = sampling.ending_tokens(frozenset(limits.eos_token_ids))
    first = max(sampling.min_tokens, 1) - 1
    if not ends.isdisjoint(output[first:]):
        index = next(index for index, token in enumerate(output) if index >= first and token in ends)
        allowed = "a token that does not end the text"
        raise InvalidRequestError(f"output_token_ids[{index}]", output[index], allowed)


def validate_length(request: Request, limits: RequestLimits) -> None:
    """Raise `RequestTooLargeError` unless the request fits into the context and the memory. Does not mutate."""
    prompt, asked = request.num_prompt_tokens, request.sampling.max_tokens
    begun = prompt + request.num_output_tokens
    total, most = begun + 1 if asked is None else prompt + asked, longest(limits)
    if request.pooling is not None:
        total, most = prompt, longest_text(limits)
    if total > most:
        raise _too_long(request, limits, total, most)


def _too_long(request: Request, limits: RequestLimits, total: int, most: int) -> RequestTooLargeError:
    """Return the error for a request of `total` tokens, more than `most`. Pure."""
    prompt, asked = request.num_prompt_tokens, None if request.pooling is not None else request.sampling.max_tokens
    begun = prompt + request.num_output_tokens
    limit, remedy = f"this model's maximum context length is {most} tokens", ""
    if most < limits.max_model_len:
        limit = f"the KV memory of this engine limits the maximum context length to {most} tokens"
        remedy = ", or give the engine more KV memory"
    error = RequestTooLargeError("prompt", f"{total} tokens", f"at most {most} tokens")
    if asked is None or begun >= most:
        count = f"the prompt has {prompt} tokens"
        if request.images:
            count += f", {sum(image.num_tokens for image in request.images)} of them for images"
        if request.num_output_tokens:
            count = f"the prompt and its beginning of an answer have {begun} tokens"
        room = ", of which 1 must stay free for the output" if begun == most else ""
        reason = f"{limit}{room}. Shorten the prompt{remedy}."
        error.numbers_first = f"{begun} tokens > {most - (request.pooling is None)} maximum; {reason}"
        return error.saying(f"{count}; {reason}")
    prompt_tokens = f"{prompt} token{'s' if prompt > 1 else ''}"
    count = f"the prompt ({prompt_tokens}) and max_tokens ({asked}) together are {total} tokens"
    return error.saying(f"{count}; {limit}. Shorten the prompt or lower max_tokens{remedy}.")


def _require_a_choice(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Check that for any text at least one token is not banned."""
    banned = {sequence[-1] for sequence in sampling.bad_words_ids}
    if sampling.min_tokens:
        banned |= sampling.ending_tokens(frozenset(limits.eos_token_ids))
    allowed = sampling.allowed_token_ids
    if allowed is not None and banned.issuperset(allowed):
        raise InvalidRequestError("allowed_token_ids", allowed, "at least one that bad_words and min_tokens allow")
    if sum(0 <= token < limits.vocab_size for token in banned) == limits.vocab_size:
        field = "bad_words_ids" if sampling.bad_words_ids else "min_tokens"
        raise InvalidRequestError(field, getattr(sampling, field), "a value that leaves at least one token to choose")


def _require_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(field, value, Integer(low, high).allowed)


def _require_number(field: str, value: object, kind: Number) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise InvalidRequestError(field, value, "a finite number")
    if not kind.low <= value <= kind.high or (kind.is_above and value == kind.low):
        raise InvalidRequestError(field, value, kind.allowed)


def _require_entries(field: str, value: object, most: int, allowed: str) -> None:
    if not isinstance(value, tuple) or len(value) > most:
        raise InvalidRequestError(field, value, allowed)


def _require_text(field: str, value: object, shortest: int, longest: int) -> None:
    if not isinstance(value, str) or not shortest <= len(value) <= longest:
        raise InvalidRequestError(field, value, f"a string of {shortest} to {longest} characters")
