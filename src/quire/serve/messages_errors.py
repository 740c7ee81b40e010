"""Errors in the form of Anthropic's interface: the paths that have it, and the types of errors there; keys for it."""

from __future__ import annotations

from typing import Final

import msgspec

MESSAGES_PATH: Final = "/v1/messages"
MODELS_PATH: Final = "/v1/models"
BY_STATUS: Final = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
SAME: Final = frozenset(
    {"authentication_error", "invalid_request_error", "not_found_error", "permission_error", "rate_limit_error"}
)
"""The types with the same name in OpenAI's form."""


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an error answer, and the data of the event that ends a failed stream."""

    error: MessagesErrorDetail


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's interface.

    >>> is_messages_path("/v1/messages"), is_messages_path("/v1/messages/batches"), is_messages_path("/v1/messages2")
    (True, True, False)
    """
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def takes_x_api_key(path: str) -> bool:
    """Return whether a key may be in Anthropic's header: on the paths that its clients call, models included.

    >>> takes_x_api_key("/v1/messages"), takes_x_api_key("/v1/models/org/name"), takes_x_api_key("/v1/embeddings")
    (True, True, False)
    """
    return is_messages_path(path) or path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")


def messages_error(status: int, type: str, message: str) -> MessagesErrorBody:
    """Return the body of an error with this status and type in OpenAI's form. Does not mutate.

    >>> messages_error(500, "server_error", "oh").error.type
    'api_error'
    """
    own_type = BY_STATUS.get(status, type if type in SAME else "api_error")
    return MessagesErrorBody(MessagesErrorDetail(own_type, message))
