"""ApiError: an error answer, in OpenAI's form.

    {"error": {"message": "n is 0; allowed: an integer from 1 to 64", "type": "invalid_request_error", "param": "n",
               "code": "invalid_value"}}
    {"error": "n is 0; allowed: an integer from 1 to 64"}             on the paths of Ollama's interface
    {"type": "error", "error": {"type": …, "message": …}}             on the paths of Anthropic's interface

Every answer that is not 2xx has such a body, whether the frame, the gate, an endpoint or the engine refuses. Clients
decide by status and headers whether to retry: openai-python retries on 408, 409, 429 and from 500 on, after
`Retry-After`, unless `x-should-retry` is "false". This server sends that where a retry can only fail again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from quire.core.errors import (
    ExecutionError,
    InvalidRequestError,
    RequestTooLargeError,
    TooManyJobsError,
    shortened,
)
from quire.serve.messages_errors import MessagesErrorBody, is_messages_path, messages_error, takes_x_api_key

INVALID_REQUEST = "invalid_request_error"
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "server_error",
}
"""The type of an error by its status; all others are errors of the request."""

OLLAMA_PATHS = "/api/"
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
RESTART_S = 2.0
"""Seconds after which a client should retry while a lost engine restarts."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `param` is the field of the request at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error answer."""

    error: ErrorDetail


class OllamaErrorBody(msgspec.Struct, frozen=True):
    """The body on the paths of Ollama's interface, whose clients expect a text only."""

    error: str


class ApiError(Exception):
    """An error answer.

    >>> ApiError(400, "n is 0", param="n", code="invalid_value").body()
    b'{"error":{"message":"n is 0","type":"invalid_request_error","param":"n","code":"invalid_value"}}'
    >>> ApiError(400, "n is 0", param="n").body("/api/chat")
    b'{"error":"n is 0"}'
    >>> ApiError(400, "n is 0", param="n").body("/v1/messages")
    b'{"type":"error","error":{"type":"invalid_request_error","message":"n is 0"}}'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.anthropic_message = message
        self.detail = ErrorDetail(message, TYPES.get(status, INVALID_REQUEST), param and shortened(param), code)

    def body(self, path: str = "") -> bytes:
        """Return the body of the answer to a request for this path. Does not mutate."""
        if is_messages_path(path):
            return msgspec.json.encode(self.messages_body())
        is_ollama = path.startswith(OLLAMA_PATHS)
        return msgspec.json.encode(OllamaErrorBody(self.detail.message) if is_ollama else ErrorBody(self.detail))

    def messages_body(self) -> MessagesErrorBody:
        """Return the error in Anthropic's form. Does not mutate."""
        return messages_error(self.status, self.detail.type, self.anthropic_message)


def api_error_of(error: BaseException) -> ApiError:
    """Return the answer for an exception. The details of an unexpected one never reach the client, only the log.

    >>> from quire.core.errors import InvalidRequestError
    >>> api_error_of(InvalidRequestError("top_p", 2, "at most 1")).detail.param
    'top_p'
    >>> api_error_of(ZeroDivisionError("secret")).detail.message
    'internal error: this is a bug in the server; its log has the details'
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLargeError):
        return context_length_exceeded(error, error.field if error.field.isidentifier() else "prompt")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), code="invalid_value", param=error.field)
    if isinstance(error, TooManyJobsError):
        return too_many_texts()
    if isinstance(error, ExecutionError):
        return engine_unavailable()
    return ApiError(500, "internal error: this is a bug in the server; its log has the details", code="internal_error")


# ---- errors of the request ------------------------------------------------------------------------------------------


def context_length_exceeded(error: RequestTooLargeError, param: str = "prompt") -> ApiError:
    """Return the answer to a prompt, named `param`, that can never fit; proxies look for "maximum context length".

    Programs for Anthropic's interface look for other words, and shorten the conversation by the excess if that follows.

    >>> error = RequestTooLargeError("prompt", "9 tokens", "at most 8 tokens")
    >>> error.numbers_first = "9 tokens > 8 maximum; shorten the prompt"
    >>> context_length_exceeded(error).messages_body().error.message
    'prompt is too long: 9 tokens > 8 maximum; shorten the prompt'
    """
    message, words = str(error), "maximum context length"
    if words not in message:
        message = f"{message} (the {words} of this server)"
    answer = ApiError(400, message, code="context_length_exceeded", param=param)
    answer.anthropic_message = f"prompt is too long: {error.numbers_first or message}"
    return answer


def unsupported(param: str, why: str) -> ApiError:
    """Return the answer to an unsupported field that would change the output."""
    return ApiError(400, f"{param} is not supported: {why}", code="unsupported_parameter", param=param)


def unknown_host(name: str) -> ApiError:
    """Return the answer to a request for a foreign host name."""
    message = (
        f"{shortened(name)!r} is not a host name of this server; if it should be, start the server with "
        f"--allowed-host NAME"
    )
    return ApiError(421, message, code="unknown_host")


def foreign_origin(origin: str) -> ApiError:
    """Return the answer to a web page of another site."""
    message = (
        f"web pages from {shortened(origin)!r} may not use this server; to allow them, start it with "
        f"--cors-origin ORIGIN"
    )
    return ApiError(403, message, code="foreign_origin")


def repeated_header(name: str) -> ApiError:
    """Return the answer to a request that repeats a header which may occur only once."""
    return ApiError(400, f"the request has the header {name} more than once", code="repeated_header")


def unauthorized(path: str = "") -> ApiError:
    """Return the answer to a missing or a wrong key: the same for both."""
    other = " or x-api-key: KEY" if takes_x_api_key(path) else ""
    message = f"no valid API key; send the header Authorization: Bearer KEY{other}"
    headers = {"www-authenticate": "Bearer", **NO_RETRY}  # Claude Code would try a wrong key again for minutes
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def operator_required(path: str) -> ApiError:
    """Return the answer to a tenant's key where the data covers all tenants."""
    message = f"{path} covers all tenants and needs an operator's key (operator: true in the keys file)"
    return ApiError(403, message, code="operator_required")


def not_found(path: str) -> ApiError:
    """Return the answer to an unknown path."""
    message = f"{shortened(path)} is not a path on this server; GET /openapi.json lists them"
    return ApiError(404, message, code="not_found")


def model_not_found(name: str, near: Sequence[str] = ()) -> ApiError:
    """Return the answer to the name of a model that is not served; `near`: served names to suggest."""
    served = f"; this server serves {', '.join(map(repr, near))}" if near else ""
    message = f"model {shortened(name)!r} not found{served}; GET /v1/models lists all"
    return ApiError(404, message, code="model_not_found", param="model")


def method_not_allowed(method: str, allowed: str) -> ApiError:
    """Return the answer to a method that the path does not support; `allowed` lists the supported ones."""
    message = f"{shortened(method)} is not allowed here; allowed: {allowed}"
    return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})


def request_timeout(what: str, limit_s: float) -> ApiError:
    """Return the answer to a client that takes too long to send `what` (its head, its body)."""
    message = f"the {what} of the request did not arrive within {limit_s:g} seconds"
    return ApiError(408, message, code="request_timeout")


def body_too_large(limit: int, why: str) -> ApiError:
    """Return the answer to a body over the limit; `why` names the limit's source and what to do."""
    return ApiError(413, f"the body of the request is over the limit of {limit} bytes: {why}", code="body_too_large")


def unsupported_media_type(message: str) -> ApiError:
    """Return the answer to a body that is not plain JSON, by type or by encoding."""
    return ApiError(415, message, code="unsupported_media_type")


def head_too_large(limit: int) -> ApiError:
    """Return the answer to a head over the limit."""
    message = f"the head of the request is over the limit of {limit} bytes"
    return ApiError(431, message, code="head_too_large")


def model_not_loadable(name: str, reason: str) -> ApiError:
    """Return the answer to a request for a model that cannot be loaded until its files or memory change."""
    message = f"model {shortened(name)!r} cannot be loaded: {reason}"
    return ApiError(500, message, code="model_not_loadable", param="model", headers=NO_RETRY)


# ---- errors of the server -------------------------------------------------------------------------------------------


def too_many_requests(retry_after_s: float) -> ApiError:
    """Return the answer to a key at its limit of concurrent sequences."""
    message = "this API key has reached its limit of concurrent sequences; try again when one has ended"
    return ApiError(429, message, code="slow_down", headers=retry_after(retry_after_s))


def too_many_texts() -> ApiError:
    """Return the answer to a key that has too many long texts or descriptions of models waiting to be read."""
    message = "this API key has reached its limit of queued long texts and descriptions of models; try again later"
    return ApiError(429, message, code="slow_down", headers=retry_after(RESTART_S))


def too_many_bytes_of_key(limit: int, retry_after_s: float, kind: str = "bodies") -> ApiError:
    """Return the answer to a body, or to images, of a key whose requests hold their maximum of bytes."""
    message = (
        f"the {kind} of this API key's requests already hold {limit} bytes, its share; "
        "try again when a request has ended"
    )
    return ApiError(429, message, code="slow_down", headers=retry_after(retry_after_s))


def too_many_bytes(limit: int, retry_after_s: float, kind: str = "bodies") -> ApiError:
    """Return the answer to a body, or to images, if all requests together hold their maximum of bytes."""
    message = f"the server is overloaded: request {kind} already hold {limit} bytes, the maximum; try again later"
    return ApiError(503, message, code="server_is_overloaded", headers=retry_after(retry_after_s))


def overloaded(retry_after_s: float, why: str = "its queue is full") -> ApiError:
    """Return the answer of a server whose queue is full, or would be too slow."""
    message = f"the server is overloaded: {why}; try again later"
    return ApiError(503, message, code="server_is_overloaded", headers=retry_after(retry_after_s))


def too_many_readers(limit: int) -> ApiError:
    """Return the answer to one more reader of /live."""
    message = f"{limit} clients already read /live, the maximum (max_live_readers); try again later"
    return ApiError(503, message, code="too_many_readers", headers=retry_after(RESTART_S))


def too_many_readers_of_key(limit: int) -> ApiError:
    """Return the answer to a tenant that has its maximum of readers of /live."""
    message = f"this API key already has {limit} readers of /live, its share of max_live_readers; close one first"
    return ApiError(429, message, code="too_many_readers", headers=retry_after(RESTART_S))


def draining() -> ApiError:
    """Return the answer of a server that is about to stop."""
    message = "the server is shutting down and accepts no new requests"
    return ApiError(503, message, code="server_is_draining", headers=retry_after(5.0))


def engine_unavailable() -> ApiError:
    """Return the answer while the engine starts or restarts."""
    message = "the engine is starting or restarting; try again later"
    return ApiError(503, message, code="engine_unavailable", headers=retry_after(RESTART_S))


def model_not_loaded_in_time(name: str, limit_s: float, retry_after_s: float) -> ApiError:
    """Return the answer to a request whose model did not load in time: the memory is in use, or loading is slow."""
    message = (
        f"model {shortened(name)!r} was not loaded within {limit_s:g} seconds (max_load_wait_s), because other models "
        "are busy or it is large; try again later"
    )
    return ApiError(503, message, code="model_not_loaded", headers=retry_after(retry_after_s))


def generation_failed(message: str) -> ApiError:
    """Return the answer to a request that failed through its own fault: the same request would fail again."""
    text = f"the request failed in the engine: {message}"
    return ApiError(500, text, code="generation_failed", headers=NO_RETRY)


def grammar_exhausted(message: str, param: str) -> ApiError:
    """Return the answer to a request whose grammar, named `param`, exceeded a limit during generation."""
    return ApiError(400, f"{message}; use a simpler one", code="invalid_value", param=param)


def generation_aborted() -> ApiError:
    """Return the answer to a request that was aborted, but not by its client."""
    return ApiError(500, "the request was aborted", code="aborted", headers=NO_RETRY)


def deadline_exceeded(limit_s: float) -> ApiError:
    """Return the answer to a request that did not finish in time."""
    message = f"the request did not finish within {limit_s:g} seconds, the limit of this server"
    return ApiError(504, message, code="deadline_exceeded", headers=NO_RETRY)


def retry_after(seconds: float) -> dict[str, str]:
    """Return the retry headers: whole seconds for all clients, milliseconds for those that read them."""
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}
