"""Every answer that is an error, to the word: its status, its form, its headers, and what clients do with it."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import (
    ExecutionError,
    ExecutorLostError,
    InvalidConfigError,
    InvalidRequestError,
    InvariantError,
    OutOfMemoryError,
    RequestTooLargeError,
    TooManyJobsError,
)
from quire.serve import errors, management_errors
from quire.serve.errors import ApiError, api_error_of

LONG = "x" * 200
SHORT = "x" * 77 + "..."
NEVER = {"x-should-retry": "false"}


def after(seconds: int, milliseconds: int) -> dict[str, str]:
    return {"retry-after": str(seconds), "retry-after-ms": str(milliseconds)}


TOO_LARGE = RequestTooLargeError("prompt", 9, "at most 8 tokens")
ANSWERS: Mapping[str, tuple[ApiError, int, str, str | None, str | None, dict[str, str], str]] = {
    "context_length_exceeded": (
        errors.context_length_exceeded(TOO_LARGE),
        *(400, "invalid_request_error", "context_length_exceeded", "prompt", {}),
        "prompt is 9; allowed: at most 8 tokens (the maximum context length of this server)",
    ),
    "unsupported": (
        errors.unsupported("suffix", "no model fills in"),
        *(400, "invalid_request_error", "unsupported_parameter", "suffix", {}),
        "suffix is not supported: no model fills in",
    ),
    "unknown_host": (
        errors.unknown_host(LONG),
        *(421, "invalid_request_error", "unknown_host", None, {}),
        f"'{SHORT}' is not a host name of this server; if it should be, start the server with --allowed-host NAME",
    ),
    "foreign_origin": (
        errors.foreign_origin("https://evil.example"),
        *(403, "permission_error", "foreign_origin", None, {}),
        "web pages from 'https://evil.example' may not use this server; to allow them, start it with "
        "--cors-origin ORIGIN",
    ),
    "repeated_header": (
        errors.repeated_header("host"),
        *(400, "invalid_request_error", "repeated_header", None, {}),
        "the request has the header host more than once",
    ),
    "unauthorized": (
        errors.unauthorized(),
        *(401, "authentication_error", "invalid_api_key", None, {"www-authenticate": "Bearer", **NEVER}),
        "no valid API key; send the header Authorization: Bearer KEY",
    ),
    "operator_required": (
        errors.operator_required("/metrics"),
        *(403, "permission_error", "operator_required", None, {}),
        "/metrics covers all tenants and needs an operator's key (operator: true in the keys file)",
    ),
    "not_found": (
        errors.not_found("/" + LONG),
        *(404, "not_found_error", "not_found", None, {}),
        f"/{SHORT[1:]} is not a path on this server; GET /openapi.json lists them",
    ),
    "model_not_found": (
        errors.model_not_found("gpt\n4", ["gpt", "phi"]),
        *(404, "not_found_error", "model_not_found", "model", {}),
        "model 'gpt\\n4' not found; this server serves 'gpt', 'phi'; GET /v1/models lists all",
    ),
    "adapters_are_fixed": (
        management_errors.adapters_are_fixed(),
        *(403, "permission_error", "adapters_are_fixed", None, {}),
        "this server serves the adapters that it was started with; start it with --adapter-root to load others",
    ),
    "no_disk_cache": (
        management_errors.no_disk_cache(),
        *(404, "not_found_error", "no_disk_cache", None, {}),
        "this server keeps no blocks on disk; start it with --disk-cache FOLDER",
    ),
    "stores_elsewhere": (
        management_errors.stores_elsewhere(),
        *(400, "invalid_request_error", "stores_elsewhere", None, {}),
        "the engines keep blocks on other machines; use quire cache export and import there",
    ),
    "scope_not_kept": (
        management_errors.scope_not_kept(),
        *(403, "permission_error", "not_persistent", None, {}),
        "prompts of this API key are not written to the disk; set persist: true for it in the keys file",
    ),
    "bundle_under_way": (
        management_errors.bundle_under_way(),
        *(429, "rate_limit_error", "slow_down", None, after(2, 2000)),
        "another bundle is being exported or imported; try again when it is done",
    ),
    "prompt_not_kept": (
        management_errors.prompt_not_kept(32, 1024),
        *(503, "service_unavailable_error", "prompt_not_kept", None, after(2, 2000)),
        "only 32 of 1,024 tokens could be written to disk: the cache is too small, or other prompts need it; try again "
        "later, or raise --disk-cache-size",
    ),
    "disk_cache_fails": (
        management_errors.disk_cache_fails("No space left on device"),
        *(500, "server_error", "disk_cache_fails", None, NEVER),
        "the folder of the disk cache cannot be used: No space left on device; free space in it, or restart the server",
    ),
    "disk_cache_is_off": (
        management_errors.disk_cache_is_off(),
        *(500, "server_error", "disk_cache_is_off", None, NEVER),
        "the disk cache is off because the disk failed; see the server's log, and restart the server",
    ),
    "adapter_refused": (
        management_errors.adapter_refused("a tensor is torn"),
        *(400, "invalid_request_error", "invalid_value", "lora_path", {}),
        "a tensor is torn",
    ),
    "adapter_not_found": (
        management_errors.adapter_not_found("tun", ("tune", "other")),
        *(404, "not_found_error", "adapter_not_found", "lora_name", {}),
        "adapter 'tun' not found; loaded are 'tune', 'other'",
    ),
    "name_is_used": (
        management_errors.name_is_used("tune"),
        *(409, "invalid_request_error", "name_is_used", "lora_name", {"x-should-retry": "false"}),
        "the name 'tune' is used for something else; unload that first, or choose another name",
    ),
    "adapter_not_loaded": (
        management_errors.adapter_not_loaded("the adapter in tune could not be loaded: no memory"),
        *(500, "server_error", "adapter_not_loaded", None, {"x-should-retry": "false"}),
        "the adapter in tune could not be loaded: no memory",
    ),
    "model_not_loadable": (
        errors.model_not_loadable("gpt", "its weights are torn"),
        *(500, "server_error", "model_not_loadable", "model", {"x-should-retry": "false"}),
        "model 'gpt' cannot be loaded: its weights are torn",
    ),
    "model_not_loaded_in_time": (
        errors.model_not_loaded_in_time("gpt", 120.0, 5.0),
        *(503, "service_unavailable_error", "model_not_loaded", None, after(5, 5000)),
        "model 'gpt' was not loaded within 120 seconds (max_load_wait_s), because other models are busy or it is "
        "large; try again later",
    ),
    "method_not_allowed": (
        errors.method_not_allowed("PATCH", "GET, HEAD"),
        *(405, "invalid_request_error", "method_not_allowed", None, {"allow": "GET, HEAD"}),
        "PATCH is not allowed here; allowed: GET, HEAD",
    ),
    "request_timeout": (
        errors.request_timeout("body", 2.50),
        *(408, "invalid_request_error", "request_timeout", None, {}),
        "the body of the request did not arrive within 2.5 seconds",
    ),
    "body_too_large": (
        errors.body_too_large(4096, "send less"),
        *(413, "invalid_request_error", "body_too_large", None, {}),
        "the body of the request is over the limit of 4096 bytes: send less",
    ),
    "unsupported_media_type": (
        errors.unsupported_media_type("send JSON"),
        *(415, "invalid_request_error", "unsupported_media_type", None, {}),
        "send JSON",
    ),
    "head_too_large": (
        errors.head_too_large(256),
        *(431, "invalid_request_error", "head_too_large", None, {}),
        "the head of the request is over the limit of 256 bytes",
    ),
    "too_many_requests": (
        errors.too_many_requests(0.0),
        *(429, "rate_limit_error", "slow_down", None, after(1, 1)),
        "this API key has reached its limit of concurrent sequences; try again when one has ended",
    ),
    "too_many_texts": (
        errors.too_many_texts(),
        *(429, "rate_limit_error", "slow_down", None, after(2, 2000)),
        "this API key has reached its limit of queued long texts and descriptions of models; try again later",
    ),
    "too_many_bytes_of_key": (
        errors.too_many_bytes_of_key(512, 0.25),
        *(429, "rate_limit_error", "slow_down", None, after(1, 250)),
        "the bodies of this API key's requests already hold 512 bytes, its share; try again when a request has ended",
    ),
    "too_many_bytes": (
        errors.too_many_bytes(512, 1.2),
        *(503, "service_unavailable_error", "server_is_overloaded", None, after(2, 1200)),
        "the server is overloaded: request bodies already hold 512 bytes, the maximum; try again later",
    ),
    "overloaded": (
        errors.overloaded(120.0),
        *(503, "service_unavailable_error", "server_is_overloaded", None, after(120, 120_000)),
        "the server is overloaded: its queue is full; try again later",
    ),
    "too_many_adapters": (
        management_errors.too_many_adapters(60.0),
        *(503, "service_unavailable_error", "too_many_adapters", None, after(60, 60_000)),
        "many adapters wait to be read, one after another; if this does not end, their disk does not answer",
    ),
    "too_many_readers": (
        errors.too_many_readers(8),
        *(503, "service_unavailable_error", "too_many_readers", None, after(2, 2000)),
        "8 clients already read /live, the maximum (max_live_readers); try again later",
    ),
    "too_many_readers_of_key": (
        errors.too_many_readers_of_key(3),
        *(429, "rate_limit_error", "too_many_readers", None, after(2, 2000)),
        "this API key already has 3 readers of /live, its share of max_live_readers; close one first",
    ),
    "draining": (
        errors.draining(),
        *(503, "service_unavailable_error", "server_is_draining", None, after(5, 5000)),
        "the server is shutting down and accepts no new requests",
    ),
    "engine_unavailable": (
        errors.engine_unavailable(),
        *(503, "service_unavailable_error", "engine_unavailable", None, after(2, 2000)),
        "the engine is starting or restarting; try again later",
    ),
    "generation_failed": (
        errors.generation_failed("the tokenizer is broken"),
        *(500, "server_error", "generation_failed", None, NEVER),
        "the request failed in the engine: the tokenizer is broken",
    ),
    "grammar_exhausted": (
        errors.grammar_exhausted("its grammar is too expensive", "tools"),
        *(400, "invalid_request_error", "invalid_value", "tools", {}),
        "its grammar is too expensive; use a simpler one",
    ),
    "generation_aborted": (
        errors.generation_aborted(),
        *(500, "server_error", "aborted", None, NEVER),
        "the request was aborted",
    ),
    "deadline_exceeded": (
        errors.deadline_exceeded(30.0),
        *(504, "server_error", "deadline_exceeded", None, NEVER),
        "the request did not finish within 30 seconds, the limit of this server",
    ),
}


def test_each_answer_that_the_modules_make_is_held_to_its_words_here() -> None:
    made = {
        node.name
        for module in (errors, management_errors)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None)) == "ApiError"
    }
    assert made - {"api_error_of"} == ANSWERS.keys()


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_an_answer_is_what_clients_and_people_read(name: str) -> None:
    answer, status, kind, code, param, headers, message = ANSWERS[name]
    assert (answer.status, answer.headers) == (status, headers)
    assert json.loads(answer.body()) == {
        "error": {"message": message, "type": kind, "param": param, "code": code},
    }
    own_types = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
    own_message = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    body = {"type": "error", "error": {"type": own_types.get(status, kind), "message": own_message}}
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        assert json.loads(answer.body(path)) == body
    assert str(answer) == message
    assert message.isprintable()
    assert not message.endswith(".")


def retries(answer: ApiError) -> bool:
    """Whether openai-python tries again: its rules, as its documents state them."""
    if "x-should-retry" in answer.headers:
        return answer.headers["x-should-retry"] == "true"
    return answer.status in (408, 409, 429) or answer.status >= 500


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_clients_try_again_exactly_where_that_can_help(name: str) -> None:
    answer = ANSWERS[name][0]
    is_for_later = answer.status in (408, 429, 503)
    assert retries(answer) == is_for_later
    assert ("retry-after" in answer.headers) == (answer.status in (429, 503))


@given(st.floats(0.0, 1e6))
def test_a_client_waits_at_least_as_long_as_it_is_told(seconds: float) -> None:
    headers = errors.overloaded(seconds).headers
    whole, fine = int(headers["retry-after"]), int(headers["retry-after-ms"])
    assert seconds <= fine / 1000 < seconds + 0.0011 or fine == 1
    assert fine / 1000 <= whole < fine / 1000 + 1.0 or whole == 1


@pytest.mark.parametrize(
    ("raised", "status", "code", "param"),
    [
        (InvalidRequestError("top_p", 2, "at most 1"), 400, "invalid_value", "top_p"),
        (RequestTooLargeError("prompt", 9, "at most 8"), 400, "context_length_exceeded", "prompt"),
        (RequestTooLargeError("prompt[3]", 9, "at most 8"), 400, "context_length_exceeded", "prompt"),
        (RequestTooLargeError("max_tokens", 9, "at most 8"), 400, "context_length_exceeded", "max_tokens"),
        (TooManyJobsError("full"), 429, "slow_down", None),
        (ExecutionError("secret"), 503, "engine_unavailable", None),
        (OutOfMemoryError("secret"), 503, "engine_unavailable", None),
        (ExecutorLostError("secret"), 503, "engine_unavailable", None),
        (InvariantError("secret"), 500, "internal_error", None),
        (InvalidConfigError("api_key", "secret", "none"), 500, "internal_error", None),
        (KeyError("secret"), 500, "internal_error", None),
        (MemoryError("secret"), 500, "internal_error", None),
    ],
)
def test_what_is_raised_becomes_one_answer_and_what_is_ours_stays_with_us(
    raised: BaseException, status: int, code: str, param: str | None
) -> None:
    answer = api_error_of(raised)
    assert (answer.status, answer.detail.code, answer.detail.param) == (status, code, param)
    assert b"secret" not in answer.body()
    assert api_error_of(answer) is answer


def test_words_that_a_proxy_looks_for_stand_once() -> None:
    known = RequestTooLargeError("prompt", "100 tokens", "the maximum context length is 8 tokens")
    assert errors.context_length_exceeded(known).detail.message.count("maximum context length") == 1


@given(st.text(max_size=200), st.text(max_size=200))
def test_a_name_that_a_client_chose_is_cut_and_stays_json(field: str, value: str) -> None:
    answer = api_error_of(InvalidRequestError(field, value, "another"))
    told: Any = json.loads(answer.body())["error"]
    assert len(told["param"]) <= 80
    assert len(told["message"]) <= 80 + len(" is ") + 80 + len("; allowed: another")
