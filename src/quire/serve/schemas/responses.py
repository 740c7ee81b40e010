"""POST /v1/responses: what comes in, what goes out, and the events of its streams. Text only, and nothing is kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quire.core.errors import InvalidRequestError
from quire.serve.errors import ApiError, unsupported
from quire.serve.schemas.common import ContentLogprob
from quire.serve.schemas.formats import OutputFormat, TextFormat
from quire.serve.schemas.sampling import LogprobCount, SamplingFields, TokenCount

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # asked for by clients that keep nothing; there is none
TEXT_PARTS = ("input_text", "output_text", "text")
ITEM_KEYS = frozenset({"content", "id", "phase", "role", "status", "type"})

Status = Literal["completed", "incomplete", "in_progress"]


class TextWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of an answer is held to. A verbosity is accepted, and changes nothing."""

    format: OutputFormat | None = None
    verbosity: str | None = None


class ResponseRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A text or a conversation, to be answered."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: LogprobCount | None = None
    include: list[str] | None = None
    text: TextWanted | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_format(self) -> OutputFormat:
        """What the text of the answer is held to."""
        return TextFormat() if self.text is None or self.text.format is None else self.text.format


class OutputText(msgspec.Struct, frozen=True):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ContentLogprob]


class OutputMessage(msgspec.Struct, frozen=True):
    """The message that answers."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Of the tokens of the input: those whose keys and values were in the cache. Writing there costs nothing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Of the tokens of the output: those of a reasoning that is kept apart. There are none."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """What the call has taken."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class TextSettings(msgspec.Struct, frozen=True):
    """What the text is held to."""

    format: OutputFormat = TextFormat()


class ResponseAnswer(msgspec.Struct, frozen=True):
    """The answer, whole or on its way."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    error: None = None
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    text: TextSettings = TextSettings()
    tool_choice: str = "none"
    tools: list[str] = []
    truncation: str = "disabled"


class TextDelta(msgspec.Struct, frozen=True):
    """What is new of the text: the one event that comes with every token."""

    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ContentLogprob]


def messages_of(fields: ResponseRequest) -> list[dict[str, Any]]:
    """Return the conversation of a call: the instructions first, as a system message. Does not mutate.

    >>> messages_of(ResponseRequest(input="Hi", instructions="Be brief."))
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    if not fields.input:
        raise InvalidRequestError("input", fields.input, "a text, or at least one message")
    return messages + [_message(item, f"input[{index}]") for index, item in enumerate(fields.input)]


def require_supported(fields: ResponseRequest) -> None:
    """Raise for settings that would change the answer, and that are not supported. Does not mutate."""
    if fields.truncation not in (None, "disabled"):
        raise unsupported("truncation", "a conversation is never shortened behind the client's back")
    for name in fields.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise unsupported("include", f"nothing of this server is called {name[:80]!r}")
    for name in fields.stream_options or {}:
        if name != "include_obfuscation":
            raise ApiError(400, "allowed: include_obfuscation", code="invalid_value", param=f"stream_options.{name}")
    if fields.stream_options and not fields.stream:
        message = "stream_options are allowed only where stream is true"
        raise ApiError(400, message, code="invalid_value", param="stream_options")


def effort_of(fields: ResponseRequest) -> str | None:
    """Return how much reasoning is wanted; None where nothing is said. Does not mutate."""
    reasoning = fields.reasoning or {}
    for name, value in reasoning.items():
        if name not in ("effort", "summary", "generate_summary"):
            raise InvalidRequestError(f"reasoning.{name}", value, "effort or summary")
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequestError("reasoning.effort", effort, "a text")
    return effort


def num_logprobs(fields: ResponseRequest) -> int | None:
    """Return how many of the likeliest tokens are told beside each token; None: nothing is told. Does not mutate."""
    return fields.top_logprobs or 0 if LOGPROBS in (fields.include or ()) or fields.top_logprobs else None


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message from an item of the input."""
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported(f"{where}.type", "messages are the only items that this server reads")
    for key in item.keys() - ITEM_KEYS:
        if item[key] is not None:
            raise InvalidRequestError(f"{where}.{key[:80]}", item[key], f"one of {', '.join(sorted(ITEM_KEYS))}")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequestError(f"{where}.role", role, "user, assistant, system or developer")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content", content, "a text, or a list of text parts")
    return {"role": role, "content": content}


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        raise unsupported(f"{where}.type", "texts are the only parts that this server reads")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where}.text", part.get("text"), "a text")
    return str(part["text"])
