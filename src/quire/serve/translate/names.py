"""Gives the engine's refusals the client's name for the field at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.serve.errors import ApiError, api_error_of, context_length_exceeded, model_not_found
from quire.serve.run.request import GenerationRequest, RefusedPrompt

_HEAD: Final = re.compile(r"[^.\[]*")


def named(refused: RefusedPrompt, request: GenerationRequest) -> ApiError:
    """Return the answer for a refusal of the engine, with the names of the client's request. Does not mutate."""
    if refused.error.field == "adapter":  # unloaded since it was found: for the client, an adapter is a model
        return model_not_found(str(refused.error.value))
    error = refused.error if request.form is None else request.form.blame(refused.error)
    if error.field == "grammar" and request.sent_grammar and (request.form is None or request.form.tools is None):
        error = InvalidRequestError(error.field, request.sent_grammar, error.allowed)
    return renamed(error, request.names, refused.prompt_index)


def renamed(error: InvalidRequestError, names: Mapping[str, str], prompt_index: int | None = None) -> ApiError:
    """Return the answer for a refusal; `names` are the client's names for fields of the engine. Does not mutate.

    >>> renamed(InvalidRequestError("prompt[4]", -1, "a token id"), {}, 2).detail.param
    'prompt[2][4]'
    """
    index = "" if prompt_index is None else f"[{prompt_index}]"
    place = names.get(f"prompt{index}", names.get("prompt", "prompt") + index)
    if isinstance(error, RequestTooLargeError):
        theirs = names.get("max_tokens", "max_tokens")
        return context_length_exceeded(error.saying(error.sentence.replace("max_tokens", theirs)), place)
    match = _HEAD.match(error.field)
    head = match[0] if match else error.field
    name = place if head == "prompt" else names.get(head, head)
    refusal = InvalidRequestError(name + error.field[len(head) :], error.value, error.allowed)
    return api_error_of(refusal.saying(error.sentence))
