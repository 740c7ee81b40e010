"""Turns the fields that all requests for text share into `SamplingParams` and a `Truncation`.

`quire.core.validate` checks the values of sampling parameters, as for the Python API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.core.parameters import Place
from quire.core.sampling_params import MAX_BIASES, MAX_INT32, USUAL_PENALTY_WINDOW, WHOLE_TEXT, SamplingParams
from quire.serve.errors import ApiError
from quire.serve.run.request import Truncation
from quire.serve.schemas.sampling import TOKEN_ID, ChoiceFields, SamplingFields, names_in
from quire.serve.services import Services

AS_MANY_AS_FIT: Final = -1
NO_PENALTIES: Final[Mapping[str, Any]] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

PASSED: Final = tuple(
    name for name in ("stop", *names_in(Place.DRAW, Place.TEXT, Place.CHOICES)) if name != "logit_bias"
)
"""Fields with the same names and values as in `SamplingParams`."""


def sampling_of(fields: SamplingFields, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """Return the sampling parameters of a request: `changes`, else its fields, else the defaults. Does not mutate.

    >>> import msgspec
    >>> fields = msgspec.convert({"n": 2, "logit_bias": {"7": 1.0}}, ChoiceFields)
    >>> sampling_of(fields, SamplingParams(temperature=0.6), max_tokens=16)
    SamplingParams(n=2, ..., temperature=0.6, ..., max_tokens=16, ..., logit_bias=((7, 1.0),), ...)
    """
    given: dict[str, Any] = {name: value for name in PASSED if (value := getattr(fields, name, None)) is not None}
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    if getattr(fields, "use_beam_search", None):
        # A search ranks by the model's own probabilities. Of the makers' defaults only `stop` counts, for one beam.
        search = SamplingParams(temperature=0.0, beam_search=True)
        defaults = replace(search, stop=defaults.stop if replace(search, **given).num_beams == 1 else ())
    return replace(defaults, **(given | changes))


def with_penalty_window(
    given: Mapping[str, Any], defaults: SamplingParams, repeat_last_n: int | None, field: str
) -> SamplingParams:
    """Return the defaults with the `given` parameters, and with llama.cpp's `repeat_last_n`, named `field`.

    >>> default, given = SamplingParams(), {"repetition_penalty": 1.1}
    >>> [with_penalty_window(given, default, n, "repeat_last_n").penalty_window for n in (None, 20, -1)]
    [64, 20, 0]
    >>> with_penalty_window(given, default, 0, "repeat_last_n").has_penalties
    False
    """
    sampling = replace(defaults, **given)
    if repeat_last_n is None:
        is_usual = sampling.has_penalties and not defaults.penalty_window and not given.keys().isdisjoint(NO_PENALTIES)
        return replace(sampling, penalty_window=USUAL_PENALTY_WINDOW) if is_usual else sampling
    if not WHOLE_TEXT <= repeat_last_n <= MAX_INT32:
        raise InvalidRequestError(field, repeat_last_n, f"a number of tokens, or {WHOLE_TEXT} for the whole text")
    if repeat_last_n == 0:
        return replace(sampling, **NO_PENALTIES)
    return replace(sampling, penalty_window=max(0, repeat_last_n))


def max_tokens_of(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """Return the requested number of tokens, from the old field or the new one; raises if the two differ.

    >>> max_tokens_of(5, None), max_tokens_of(None, 6), max_tokens_of(7, 7), max_tokens_of(None, None)
    (5, 6, 7, None)
    """
    if max_completion_tokens is None or max_tokens == max_completion_tokens:
        return max_tokens
    if max_tokens is None:
        return max_completion_tokens
    raise InvalidRequestError("max_tokens", max_tokens, "the same as max_completion_tokens, or not set")


def require_few_choices(num_prompts: int, sampling: SamplingParams, services: Services) -> None:
    """Raise if a request needs more texts than it may, or one of its prompts more than the engine runs at once."""
    limit, most_at_once = services.config.max_choices, services.model.limits.max_num_seqs
    if num_prompts > limit:
        raise InvalidRequestError("prompt", f"{num_prompts} prompts", f"at most {limit} prompts")
    most = min(limit // num_prompts, most_at_once)
    if sampling.num_sequences > most:
        name = "n" if sampling.best_of is None else "best_of"
        allowed = f"at most {most}: a request can have {limit} texts over all its prompts"
        if most == most_at_once:
            allowed = f"at most {most}, the sequences that run at once (--max-num-seqs)"
        raise InvalidRequestError(name, sampling.num_sequences, allowed)


def truncation_of(fields: SamplingFields) -> Truncation | None:
    """Return how to cut prompts, or None; raises if the length is not valid. Does not mutate.

    >>> import msgspec
    >>> truncation_of(msgspec.convert({"truncate_prompt_tokens": -1}, SamplingFields))
    Truncation(length=None, keeps_start=False, refuses=False)
    """
    return truncation_to(fields.truncate_prompt_tokens, keeps_start=fields.truncation_side == "right")


def truncation_to(length: int | None, *, keeps_start: bool = True) -> Truncation | None:
    """Return how to cut prompts to a requested length; None: do not cut."""
    if length is None:
        return None
    if length < 1 and length != AS_MANY_AS_FIT:
        allowed = "a number of tokens from 1, or -1 for as many as fit"
        raise InvalidRequestError("truncate_prompt_tokens", length, allowed)
    return Truncation(None if length == AS_MANY_AS_FIT else length, keeps_start)


def include_usage(fields: ChoiceFields) -> tuple[bool, bool]:
    """Return whether a stream reports usage at its end, and whether in every chunk."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        message = "stream_options needs stream: true"
        raise ApiError(400, message, code="invalid_value", param="stream_options")
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id; ids must be in normal form, so that no id can occur twice."""
    if len(biases) > MAX_BIASES:
        raise InvalidRequestError("logit_bias", f"{len(biases)} entries", f"at most {MAX_BIASES} entries")
    for key in biases:
        if not TOKEN_ID.fullmatch(key):
            raise InvalidRequestError("logit_bias", key, "token ids as keys, in decimal digits")
    return {int(key): bias for key, bias in biases.items()}
