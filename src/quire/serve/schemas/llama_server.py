"""llama-server's own API, /completion, /infill and /props: its requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.core.sampling_params import MAX_LOGPROBS
from quire.serve.schemas.common import StreamFields
from quire.serve.schemas.fields import Refusal

OPTION_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "top_n_sigma": "top_n_sigma",
        "seed": "seed",
        "stop": "stop",
        "repetition_penalty": "repeat_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "max_tokens": "n_predict",
        "ignore_eos": "ignore_eos",
    }
)
"""Sampling parameter → the equivalent field."""

StopType = Literal["none", "eos", "limit", "word"]


class LlamaTextFields(StreamFields, kw_only=True, forbid_unknown_fields=True):
    """How a text is generated. Fields that cannot change the text are accepted and ignored."""

    any_media_type: ClassVar[bool] = True  # curl -d sends the Content-Type of a form

    n_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    ignore_eos: bool | None = None
    logit_bias: list[Any] | dict[str, float] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens: bool | None = None
    # refused unless neutral
    dry_multiplier: float | None = None
    dynatemp_range: float | None = None
    image_data: list[Any] | None = None
    lora: list[Any] | None = None
    mirostat: int | None = None
    n_cmpl: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    # ignored: the place of computation, and the form of streams
    cache_prompt: bool | None = None
    dry_allowed_length: int | None = None
    dry_base: float | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    dynatemp_exponent: float | None = None
    id_slot: int | None = None
    min_keep: int | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    n_cache_reuse: int | None = None
    n_discard: int | None = None
    n_keep: int | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None
    return_progress: bool | None = None
    samplers: str | list[str] | None = None
    sse_ping_interval: float | None = None
    timings_per_token: bool | None = None
    xtc_threshold: float | None = None


class LlamaCompletionRequest(LlamaTextFields, kw_only=True, forbid_unknown_fields=True):
    """A text to continue."""

    prompt: str | list[Any]


class LlamaFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, or a part of one. `time`, when an editor took it, changes nothing."""

    text: str
    filename: str = ""
    time: Any = None


class LlamaInfillRequest(LlamaTextFields, kw_only=True, forbid_unknown_fields=True):
    """A text to fill in. `prompt` is the end of the prefix, such as the line of the cursor."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[LlamaFile] | None = None
    prompt: str = ""
    # ignored: limits of a computation without a prefix cache
    t_max_prompt_ms: int | None = None


REFUSED_OPTIONS: Final[Mapping[str, Refusal]] = MappingProxyType(
    {
        "dry_multiplier": Refusal("use repeat_penalty or frequency_penalty", (0.0,)),
        "dynatemp_range": Refusal("use temperature", (0.0,)),
        "image_data": Refusal("send images to /v1/chat/completions, for a model that reads them", ([],)),
        "lora": Refusal("this server has no adapters", ([],)),
        "mirostat": Refusal("use temperature, top_p or min_p", (0,)),
        "n_cmpl": Refusal("call /v1/completions with n", (1,)),
        "n_indent": Refusal("use a grammar", (0,)),
        "t_max_predict_ms": Refusal("use n_predict", (0, -1)),
        "typical_p": Refusal("use top_p or min_p", (1.0,)),
        "xtc_probability": Refusal("use temperature, top_p or min_p", (0.0,)),
    }
)
"""Unsupported options that would change a text, with the reasons and their neutral values."""


class LlamaTimings(msgspec.Struct, frozen=True):
    """The times of the prompt and of the text."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class LlamaLikely(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaProbability(msgspec.Struct, frozen=True):
    """The log-probability of a token of the text, and the likeliest tokens at its place."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[LlamaLikely]


class LlamaCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or in a stream its new part; the last part has the finish reason, counts and times."""

    index: int = 0
    content: str
    tokens: list[int] = []
    stop: bool
    id_slot: int = 0
    model: str | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    truncated: bool | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET
    completion_probabilities: list[LlamaProbability] | UnsetType = UNSET


class LlamaDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The default sampling parameters."""

    n_ctx: int
    params: dict[str, float | int]


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of the server."""

    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool = False
