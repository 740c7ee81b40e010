"""ServerConfig: all settings of the server, in one value.

Like `EngineConfig`, it consists of settings with their help texts, and it checks itself. Every bound has a default: an
untuned server stays within its memory under overload.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from quire.core.byte_sizes import parse_bytes
from quire.core.config import setting
from quire.core.errors import InvalidConfigError
from quire.core.setting_checks import require_int, require_number, require_one_of
from quire.core.validate import MAX_NAME_LENGTH
from quire.engine.process.heartbeat import MAX_SILENCE_S, MAX_STEP_S
from quire.engine.replicas.settings import CONTINUE_ON
from quire.serve.default_sampling import read_defaults
from quire.serve.host_names import allowed_name, allowed_origin
from quire.serve.loading.keep_alive import keep_alive_s
from quire.serve.reasoning import REASONING_FORMATS, create_reasoning_format
from quire.serve.tools import AUTO, TOOL_FORMATS, create_tool_format

MAX_REPLICAS = 256
REPLICAS: Final = re.compile(r"(ray:)?(?:([1-9][0-9]{0,2})-)?([1-9][0-9]{0,2})", re.ASCII)
METRICS_COMPAT = ("none", "vllm")
LOG_FORMATS = ("text", "json")
MAX_KEY_LENGTH = 512
URL: Final = re.compile(r"https?://[^/?#\s]+/[^?#\s]+")
MAX_SECONDS = 86_400.0
KEYS_TO_FILL = 4
"""By default, this many keys together can fill the memory for bodies."""

_FORMAT_NAMES = ", ".join(each.name for each in TOOL_FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, which clients it accepts, and its limits. Sizes are bytes, or texts such as "32MiB".

    >>> ServerConfig(max_body="1MiB").max_body
    1048576
    """

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = setting(8000, "port to listen on; 0: any free port")
    allowed_host: tuple[str, ...] = setting(
        (), "host name that clients may use, in addition to loopback names; *: any name", metavar="HOST"
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "origin whose web pages may send requests, such as https://chat.example or app://obsidian.md; *: every page",
        metavar="ORIGIN",
    )
    tls_cert: str | None = setting(None, "file with the certificate for HTTPS, in PEM form; none: HTTP", metavar="FILE")
    tls_key: str | None = setting(
        None, "file with the key of the certificate, in PEM form and without a password", metavar="FILE"
    )
    served_model_name: tuple[str, ...] = setting((), "model name that clients use; none: the model's own name")
    model_dir: str | None = setting(
        None, "folder of models to serve: model folders and GGUF files; none: no folder", metavar="FOLDER"
    )
    adapter_root: str | None = setting(
        None,
        "folder from which operators may load LoRA adapters while the server runs; none: not allowed",
        metavar="FOLDER",
    )
    keep_alive: float | str | None = setting(
        "5m",
        "with several models: how long a model stays loaded after its last request; 0: unload at once, none: forever",
        metavar="TIME",
    )
    models_at_once: int = setting(3, "with several models: number of models that share the memory")
    max_load_wait_s: float | None = setting(
        120.0, "with several models: seconds that a request waits for its model to be loaded; none: no limit"
    )
    replicas: str = setting(
        "1",
        "engines of the model, each in its own process with its share of threads and memory, or with its own GPU; "
        "ray:N: on the machines of a Ray cluster (without one, a cluster starts on this machine); needs quire[ray]; "
        "MIN-MAX in place of N: the number follows the load",
        metavar="N",
    )
    continue_on: str = setting(
        "same", "engines that may continue a text when its engine dies: same (equal model and settings), any or never"
    )
    api_key: tuple[str, ...] = setting((), "API key that clients must send; each key is a separate tenant", secret=True)
    api_keys_file: str | None = setting(None, "YAML file with tenants: keys, names and limits", metavar="FILE")
    tenant_secret: str | None = setting(
        None,
        "secret from which tenants' cache salts derive; none: random at each start, or kept in the disk cache",
        secret=True,
        metavar="TEXT",
    )
    open_metrics: bool = setting(
        False, "answer /metrics without a key; otherwise, if keys are set, it needs an operator's key"
    )
    max_queued_sequences: int | None = setting(
        None, "maximum queued sequences (prompts times n); none: 4 times max_num_seqs"
    )
    max_queued_tokens: int | None = setting(
        None, "maximum queued prompt tokens; none: 8 times what the KV memory holds"
    )
    max_wait_s: float | None = setting(
        30.0, "refuse a request whose first token would take longer than this; none: never"
    )
    max_sequences_per_key: int | None = setting(
        None, "maximum concurrent sequences per key (prompts times n); none: no limit"
    )
    max_choices: int = setting(128, "maximum outputs per request: n or best_of, over all its prompts")
    max_live_readers: int = setting(
        16, "maximum concurrent readers of /live, shared equally among tenants; 0: disable /live"
    )
    max_body: int | str = setting("8MiB", "maximum size of a request body; lower if the context length allows less")
    max_image_body: int | str = setting(
        "32MiB", "maximum size of a request body for a model that reads images, which are in the body as base64"
    )
    max_bodies: int | str = setting("256MiB", "maximum memory for all request bodies together")
    max_image_memory: int | str = setting(
        "1GiB", "maximum memory for the pixels of all requests' images together; with several keys, a quarter for each"
    )
    max_bodies_per_key: int | str | None = setting(
        None,
        "maximum memory for the request bodies of one key; none: a quarter of max_bodies, or all with a single key",
    )
    max_header_bytes: int | str = setting("32KiB", "maximum size of a request head (request line and headers)")
    max_connections: int = setting(4096, "maximum open connections")
    request_timeout_s: float | None = setting(600.0, "end a request after this many seconds; none: never")
    header_timeout_s: float = setting(10.0, "seconds a client has to send the request head")
    body_timeout_s: float = setting(60.0, "seconds a client has to send the request body")
    write_timeout_s: float = setting(30.0, "close the connection if a client reads nothing for this many seconds")
    keep_alive_timeout_s: float = setting(75.0, "seconds an idle connection stays open")
    max_step_s: float | None = setting(MAX_STEP_S, "restart the engine if a step takes longer than this; none: never")
    max_silence_s: float | None = setting(
        MAX_SILENCE_S,
        "restart an engine that is silent for longer than this (with several engines: 10 s at most); none: never",
    )
    drain_timeout_s: float = setting(30.0, "seconds that running requests have to finish when the server stops")
    default_sampling: str | None = setting(
        None,
        "sampling of requests that set none, such as temperature=0.7,top_p=0.95, instead of what the model's makers "
        "recommend; none: as they do, or else temperature 1",
        metavar="NAME=VALUE,...",
    )
    tool_format: str = setting(AUTO, f"format of tool calls: auto (from the chat template), none, {_FORMAT_NAMES}")
    reasoning_format: str = setting(
        AUTO, f"format of reasoning: auto (from the chat template), {', '.join(REASONING_FORMATS[1:])}"
    )
    metrics_compat: str = setting("none", "extra metric names in /metrics: none or vllm")
    dashboard: bool = setting(True, "serve the dashboard at /")
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL to send traces to, by OTLP over HTTP: http://localhost:4318/v1/traces; needs quire[otel]; none: off",
        metavar="URL",
    )
    log_format: str = setting("text", "log format: text or json")
    access_log: bool = setting(True, "log one line per request")

    def __post_init__(self) -> None:
        require_text("host", self.host)
        require_int("port", self.port, 0, 65_535)
        self._read_sizes()
        self._check_names_and_secrets()
        for name in ("max_queued_sequences", "max_queued_tokens", "max_sequences_per_key"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, 1 << 40)
        for name in ("model_dir", "adapter_root"):
            if getattr(self, name) is not None:
                require_text(name, getattr(self, name))
        try:
            seconds = math.inf if self.keep_alive is None else keep_alive_s(self.keep_alive)
        except ValueError as error:
            raise InvalidConfigError("keep_alive", self.keep_alive, str(error)) from None
        object.__setattr__(self, "keep_alive", seconds)
        require_int("models_at_once", self.models_at_once, 1, 1 << 10)
        match = REPLICAS.fullmatch(str(self.replicas))
        if match is None or not int(match[2] or match[3]) <= int(match[3]) <= MAX_REPLICAS:
            allowed = f"an integer from 1 to {MAX_REPLICAS} or a range such as 1-4, after ray: for a Ray cluster"
            raise InvalidConfigError("replicas", self.replicas, allowed)
        object.__setattr__(self, "replicas", match[0])
        require_one_of("continue_on", self.continue_on, CONTINUE_ON)
        require_int("max_choices", self.max_choices, 1, 1 << 20)
        require_int("max_live_readers", self.max_live_readers, 0, 1 << 20)
        require_int("max_connections", self.max_connections, 1, 1 << 20)
        for name in ("max_wait_s", "request_timeout_s", "max_load_wait_s"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 1e-3, MAX_SECONDS)
        for name in ("max_step_s", "max_silence_s"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 2.0, MAX_SECONDS)
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_timeout_s"):
            require_number(name, getattr(self, name), 1e-3, MAX_SECONDS)
        require_number("drain_timeout_s", self.drain_timeout_s, 0.0, MAX_SECONDS)
        require_one_of("metrics_compat", self.metrics_compat, METRICS_COMPAT)
        try:
            self.sampling_defaults()
        except ValueError as error:
            raise InvalidConfigError("default_sampling", self.default_sampling, str(error)) from None
        create_tool_format(self.tool_format, "")
        create_reasoning_format(self.reasoning_format, "")
        require_one_of("log_format", self.log_format, LOG_FORMATS)
        for name in ("open_metrics", "dashboard", "access_log"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfigError(name, getattr(self, name), "True or False")

    @property
    def num_replicas(self) -> int:
        """The number of engines of the model: the maximum, if the number follows the load."""
        return int(re.split("[:-]", self.replicas)[-1])

    @property
    def least_replicas(self) -> int:
        """The minimum number of engines of the model."""
        return int(self.replicas.rpartition(":")[2].partition("-")[0])

    @property
    def is_on_cluster(self) -> bool:
        """Whether the engines run on the machines of a cluster."""
        return self.replicas.startswith("ray:")

    @property
    def has_keys(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.api_key) or self.api_keys_file is not None

    @property
    def may_have_several_tenants(self) -> bool:
        """Whether there can be more than one tenant, judged without reading the keys file."""
        return len(self.api_key) > 1 or self.api_keys_file is not None

    @property
    def keep_alive_s(self) -> float:
        """Seconds that a model stays loaded after its last request; can be infinite."""
        return keep_alive_s(self.keep_alive)

    @property
    def max_body_bytes(self) -> int:
        """The maximum size of a request body, as a number."""
        return parse_bytes(self.max_body)

    @property
    def max_image_body_bytes(self) -> int:
        """The maximum size of a request body for a model that reads images: at least `max_body`."""
        return max(min(parse_bytes(self.max_image_body), self.max_bodies_bytes_per_key), self.max_body_bytes)

    @property
    def image_memory_bytes(self) -> int:
        """The maximum memory of the pixels of all requests' images, as a number."""
        return parse_bytes(self.max_image_memory)

    @property
    def image_memory_bytes_per_key(self) -> int:
        """The maximum memory of the pixels of one key's images."""
        return self.image_memory_bytes // (KEYS_TO_FILL if self.may_have_several_tenants else 1)

    @property
    def head_bytes(self) -> int:
        """The maximum size of a request head, as a number."""
        return parse_bytes(self.max_header_bytes)

    @property
    def max_bodies_bytes(self) -> int:
        """The maximum memory of all request bodies together, as a number."""
        return parse_bytes(self.max_bodies)

    @property
    def max_bodies_bytes_per_key(self) -> int:
        """The maximum memory of one key's request bodies: enough for one of maximum size, or more."""
        if self.max_bodies_per_key is not None:
            return parse_bytes(self.max_bodies_per_key)
        share = self.max_bodies_bytes // KEYS_TO_FILL if self.may_have_several_tenants else self.max_bodies_bytes
        return max(share, self.max_body_bytes)

    def sampling_defaults(self) -> dict[str, float]:
        """Return the sampling parameters of requests that set none, by name."""
        return {} if self.default_sampling is None else read_defaults(self.default_sampling)

    def _read_sizes(self) -> None:
        """Turn sizes into numbers, and check them. Mutates."""
        bounds = {"max_header_bytes": (256, 1 << 30)}
        for name in (
            "max_body",
            "max_image_body",
            "max_image_memory",
            "max_header_bytes",
            "max_bodies",
            "max_bodies_per_key",
        ):
            value = getattr(self, name)
            if name != "max_bodies_per_key" or value is not None:
                object.__setattr__(self, name, parse_bytes(value, name))
                require_int(name, getattr(self, name), *bounds.get(name, (1, 1 << 40)))
        for name in ("max_bodies", "max_bodies_per_key"):
            value = getattr(self, name)
            if value is not None and value < self.max_body_bytes:
                raise InvalidConfigError(name, value, f"max_body ({self.max_body}) or more, so that one body fits")

    def _check_names_and_secrets(self) -> None:
        """Check names and secrets. An error never shows a secret."""
        if not isinstance(self.served_model_name, tuple):
            raise InvalidConfigError("served_model_name", self.served_model_name, "a tuple of names")
        for name in self.served_model_name:
            require_text("served_model_name", name)
            if len(name) > MAX_NAME_LENGTH:
                raise InvalidConfigError("served_model_name", name, f"at most {MAX_NAME_LENGTH} characters")
        if not isinstance(self.allowed_host, tuple):
            raise InvalidConfigError("allowed_host", self.allowed_host, "a tuple of names")
        for name in self.allowed_host:
            require_text("allowed_host", name)
            allowed_name(name)
        if not isinstance(self.cors_origin, tuple):
            raise InvalidConfigError("cors_origin", self.cors_origin, "a tuple of origins")
        for origin in self.cors_origin:
            require_text("cors_origin", origin)
            allowed_origin(origin)
        self._check_tls()
        if self.otlp_traces_endpoint is not None:
            require_text("otlp_traces_endpoint", self.otlp_traces_endpoint)
            if not URL.fullmatch(self.otlp_traces_endpoint):
                allowed = "a URL with its path, such as http://localhost:4318/v1/traces"
                raise InvalidConfigError("otlp_traces_endpoint", self.otlp_traces_endpoint, allowed)
        if not isinstance(self.api_key, tuple):
            raise InvalidConfigError("api_key", f"a value of type {type(self.api_key).__name__}", "a tuple of keys")
        for index, key in enumerate(self.api_key):
            require_key(f"api_key[{index}]", key)
        if len(set(self.api_key)) < len(self.api_key):
            raise InvalidConfigError("api_key", "the same key twice", "each key once")
        if self.api_keys_file is not None:
            require_text("api_keys_file", self.api_keys_file)
        if self.tenant_secret is not None and not (isinstance(self.tenant_secret, str) and self.tenant_secret.strip()):
            raise InvalidConfigError("tenant_secret", "blank, or no text", "a text")

    def _check_tls(self) -> None:
        for name, value, other in (("tls_cert", self.tls_cert, "tls_key"), ("tls_key", self.tls_key, "tls_cert")):
            if value is not None:
                require_text(name, value)
                if getattr(self, other) is None:
                    raise InvalidConfigError(other, None, f"a file, because {name} is set")


def require_text(field: str, value: object) -> None:
    """Raise `InvalidConfigError` unless a setting is a non-empty text of printable characters."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InvalidConfigError(field, value, "a text of printable characters")


def require_key(field: str, value: object) -> str:
    """Return an API key; raises `InvalidConfigError`, which never shows the key, if a header cannot carry it."""
    if not isinstance(value, str):
        shown = f"a value of type {type(value).__name__}"
        raise InvalidConfigError(field, shown, "a text; a key of digits needs quotes in YAML")
    if not 1 <= len(value) <= MAX_KEY_LENGTH or not all("!" <= character <= "~" for character in value):
        shown = f"a key of {len(value)} characters" if value.strip() else "blank"
        raise InvalidConfigError(field, shown, f"1 to {MAX_KEY_LENGTH} characters of ASCII without spaces")
    return value
