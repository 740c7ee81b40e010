"""Ollama's API, /api/chat and the other paths: its requests and answers. Streams are lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.core.sampling_params import MAX_LOGPROBS
from quire.serve.schemas.common import ContentLogprob, FinishReason, ModelFields, StreamFields
from quire.serve.schemas.fields import Refusal

VERSION: Final = "0.13.4"
"""The version of Ollama with this API. Clients compare it with the version that they need: Codex needs 0.13.4. That of
quire is at /version."""

OPTION_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "seed": "seed",
        "stop": "stop",
        "repetition_penalty": "repeat_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "max_tokens": "num_predict",
    }
)
"""Sampling parameter → the equivalent option."""

DoneReason = FinishReason | Literal["load", "unload"]

if TYPE_CHECKING:
    Whole = int
    WholeFrom1 = int
else:  # also as 8192.0: Home Assistant writes its options so
    Whole = int | float
    WholeFrom1 = Annotated[int, Meta(ge=1)] | Annotated[float, Meta(ge=1)]


class OllamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for sampling and for loading a model. Options that cannot change the text are accepted and ignored."""

    num_predict: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Whole | None = None
    num_ctx: WholeFrom1 | None = None
    # refused unless neutral
    embedding_only: bool | None = None
    mirostat: Whole | None = None
    penalize_newline: bool | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    vocab_only: bool | None = None
    # ignored: the engine is already loaded
    f16_kv: bool | None = None
    logits_all: bool | None = None
    low_vram: bool | None = None
    main_gpu: Whole | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    num_keep: Whole | None = None
    num_thread: Whole | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None

    def __post_init__(self) -> None:
        for name in WHOLE_OPTIONS:
            value = getattr(self, name)
            if isinstance(value, float):
                if not value.is_integer():
                    raise ValueError(f"{name} is {value}; allowed: a whole number")
                msgspec.structs.force_setattr(self, name, int(value))


WHOLE_OPTIONS: Final = tuple(name for name, kind in OllamaOptions.__annotations__.items() if "Whole" in kind)
"""The options that are whole numbers."""

REFUSED_OPTIONS: Final[Mapping[str, Refusal]] = MappingProxyType(
    {
        "embedding_only": Refusal("call POST /api/embed", (False,)),
        "mirostat": Refusal("use temperature, top_p or min_p", (0,)),
        "penalize_newline": Refusal("penalties treat all tokens alike", (True,)),
        "tfs_z": Refusal("use top_p or min_p", (1.0,)),
        "typical_p": Refusal("use top_p or min_p", (1.0,)),
        "vocab_only": Refusal("this server always loads the whole model", (False,)),
    }
)
"""Unsupported options that would change a text, with the reasons and their neutral values."""


class KeptFields(Protocol):
    """Requests with `keep_alive`: how long their model stays loaded."""

    keep_alive: float | str | None


class OllamaModelFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """The base of all requests of Ollama's API."""

    any_media_type: ClassVar[bool] = True  # curl -d sends the Content-Type of a form


class OllamaFields(StreamFields, OllamaModelFields, kw_only=True, forbid_unknown_fields=True):
    """The options of requests for text. Without `stream`, the answer is a stream."""

    stream_type: ClassVar[str] = "application/x-ndjson"
    paths: ClassVar[tuple[str, ...]] = tuple(f"options.{name}" for name in OllamaOptions.__struct_fields__)

    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # options that some clients write here; `options` takes precedence
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        self.stream = self.stream is not False


class OllamaChatRequest(OllamaFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer. Without messages: load the model."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True, forbid_unknown_fields=True):
    """A text to answer, to continue if `raw`, or to fill in before a suffix. Without a text: load the model."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The called function; `index` counts the calls of an answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True):
    """A call of a function."""

    id: str
    function: CalledFunction


class OllamaMessage(msgspec.Struct, frozen=True):
    """An answer, or in a stream its new part."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all answers. The last line of a stream has the finish reason, token counts and nanoseconds."""

    model: str
    created_at: datetime
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    """The answer to a conversation; in a stream, every line has this form."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    """The answer to a text; in a stream, every line has this form."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaShowRequest(OllamaModelFields, kw_only=True, forbid_unknown_fields=True):
    """The model to describe; `name` is the old name of `model`. The other fields are for Ollama's own files."""

    has_text: ClassVar[bool] = False

    name: str | None = None
    verbose: bool | None = None
    system: Literal[""] | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.model and self.name is not None:
            self.model = self.name


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of a model."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that requests can use."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model, with its memory, its share of that on a GPU, and the time when it will be unloaded."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: datetime
    size_vram: int
    context_length: int


class ListedModels(msgspec.Struct, frozen=True):
    """The models that requests can use."""

    models: list[ListedModel]


class LoadedModels(msgspec.Struct, frozen=True):
    """The loaded models."""

    models: list[LoadedModel]


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """The details of a model; `parameters` are its defaults, in the form of a Modelfile."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(msgspec.Struct, frozen=True):
    """The version of the API."""

    version: str = VERSION
