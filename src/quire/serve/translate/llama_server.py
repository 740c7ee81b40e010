"""Turns a request of llama-server's /completion or /infill into a `GenerationRequest`, like one of /v1/completions.

Only the names of the sampling parameters differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from msgspec.structs import replace as replace_fields

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import FORBIDDEN, MAX_BIASES, SamplingParams
from quire.engine.text.infill import OtherFile
from quire.serve.errors import unsupported
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.llama_server import (
    OPTION_NAMES,
    REFUSED_OPTIONS,
    LlamaCompletionRequest,
    LlamaInfillRequest,
    LlamaTextFields,
)
from quire.serve.schemas.sampling import TOKEN_ID
from quire.serve.services import Services
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.grammar import Held, held_to_grammar, held_to_schema
from quire.serve.translate.infill import ended_by, required_infill
from quire.serve.translate.sampling import with_penalty_window

NAMES: Final = {**OPTION_NAMES, "logprobs": "n_probs"}
"""The client's names for fields of the engine."""

NO_LIMIT: Final = (None, -1, -2)
RANDOM_SEED: Final = (-1, 0xFFFFFFFF)
BIAS_FORMS: Final = 'a list of [token id, bias], or an object {"token id": bias}'


def llama_completion_request(fields: LlamaCompletionRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a completion; raises if a field is not valid. Does not mutate."""
    prompts = prompts_of(fields.prompt)
    if len(prompts) != 1:
        raise InvalidRequestError("prompt", f"{len(prompts)} prompts", "one text, or one list of token ids")
    return _request(fields, services, prompts[0])


def llama_infill_request(fields: LlamaInfillRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a text to fill in; raises if a field is not valid. Does not mutate.

    Editors always send `n_indent` and `t_max_predict_ms`, which only end a middle early: here they are ignored.
    """
    fields = replace_fields(fields, n_indent=None, t_max_predict_ms=None)
    infill = required_infill(services, "input_suffix")
    others = [OtherFile(each.filename, each.text) for each in fields.input_extra or ()]
    prompt = infill.prompt(fields.input_prefix + fields.prompt, fields.input_suffix, others)
    request = _request(fields, services, prompt)
    return replace(request, sampling=ended_by(request.sampling, infill))


def _request(fields: LlamaTextFields, services: Services, prompt: str | list[int]) -> GenerationRequest:
    for name, refusal in REFUSED_OPTIONS.items():
        if getattr(fields, name) not in (None, *refusal.nothing):
            raise unsupported(name, refusal.why)
    held = _held(fields)
    return GenerationRequest(
        prompts=[prompt],
        sampling=_sampling(fields, services.model.get_default_sampling_params(), held),
        names={**NAMES, "grammar": held.field},
        sent_grammar=held.sent,
        prompts_only=fields.n_predict == 0,
    )


def _held(fields: LlamaTextFields) -> Held:
    if fields.grammar and fields.json_schema is not None:
        raise InvalidRequestError("grammar", fields.grammar, "none, because json_schema is set")
    if fields.json_schema is not None:
        return held_to_schema(fields.json_schema, "json_schema")
    return held_to_grammar(fields.grammar, "grammar") if fields.grammar else Held()


def _sampling(fields: LlamaTextFields, defaults: SamplingParams, held: Held) -> SamplingParams:
    given: dict[str, Any] = {
        ours: value for ours, theirs in OPTION_NAMES.items() if (value := getattr(fields, theirs)) is not None
    }
    if fields.seed in RANDOM_SEED:
        del given["seed"]
    # With 0 only the prompt is wanted; the engine generates at least one token, which is not shown.
    given["max_tokens"] = None if fields.n_predict in NO_LIMIT else fields.n_predict or 1
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    given |= {"logprobs": fields.n_probs or None, "grammar": held.grammar}
    return with_penalty_window(given, defaults, fields.repeat_last_n, "repeat_last_n")


def _biases(given: list[Any] | Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id; false forbids a token.

    >>> _biases([[7, 1.5], [8, False]]), _biases({"9": -2.0})
    ({7: 1.5, 8: -100.0}, {9: -2.0})
    """
    if len(given) > MAX_BIASES:
        raise InvalidRequestError("logit_bias", f"{len(given)} entries", f"at most {MAX_BIASES} entries")
    found: dict[int, float] = {}
    pairs: list[Any] = given if isinstance(given, list) else [_numbered(*pair) for pair in given.items()]
    for pair in pairs:
        match pair:
            case [int() as token, False] if type(token) is int:
                found[token] = FORBIDDEN
            case [int() as token, int() | float() as bias] if type(token) is int and _is_float(bias):
                found[token] = float(bias)
            case _:
                raise InvalidRequestError("logit_bias", pair, BIAS_FORMS)
    return found


def _is_float(bias: float) -> bool:
    """Return whether a number of JSON is one of a float; an integer can be too large, and true is an integer."""
    return type(bias) is not bool and abs(bias) <= sys.float_info.max


def _numbered(token: str, bias: float) -> list[Any]:
    return [int(token), bias] if TOKEN_ID.fullmatch(token) else [token, bias]
