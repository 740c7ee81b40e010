"""ServerConfig: everything that can be said about the server, in one value.

Like `EngineConfig` it is made of settings that have their help beside them, and it checks itself. Every bound has a
default: a server that nobody has tuned holds its memory when too much is asked of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.byte_sizes import parse_bytes
from quire.core.config import require_int, require_number, require_one_of, setting
from quire.core.errors import InvalidConfigError
from quire.engine.process.heartbeat import MAX_SILENCE_S, MAX_STEP_S
from quire.serve.host_names import allowed_name
from quire.serve.reasoning import is_thinking_format
from quire.serve.tools import AUTO, TOOL_FORMATS, create_tool_format

METRICS_COMPAT = ("none", "vllm")
LOG_FORMATS = ("text", "json")
MAX_KEY_LENGTH = 512
MAX_SECONDS = 86_400.0
KEYS_TO_FILL = 4
"""Keys that it takes to hold all the bytes that bodies may hold."""

_FORMAT_NAMES = ", ".join(each.name for each in TOOL_FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, whom it lets in, and how much it takes on. Sizes are bytes, or texts such as "32MiB".

    >>> ServerConfig(max_body="1MiB").max_body
    1048576
    """

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: every address of the machine")
    port: int = setting(8000, "port to listen on; 0: a free one")
    allowed_host: tuple[str, ...] = setting(
        (), "name that clients may call the server by, besides loopback names; *: any name"
    )
    served_model_name: tuple[str, ...] = setting((), "name that clients call the model by; none: its own")
    api_key: tuple[str, ...] = setting((), "key that clients must send; each is a tenant of its own", secret=True)
    api_keys_file: str | None = setting(None, "YAML file with the keys of tenants, their names and limits")
    tenant_secret: str | None = setting(
        None, "where the salts of tenants come from; none: drawn at the start", secret=True
    )
    open_metrics: bool = setting(False, "answer /metrics without a key; else it needs an operator's where keys are set")
    max_queued_sequences: int | None = setting(
        None, "sequences that may wait: prompts times n; none: 4 for each sequence of a step"
    )
    max_queued_tokens: int | None = setting(None, "tokens of prompts that may wait; none: 8 times the KV memory")
    max_wait_s: float | None = setting(
        30.0, "seconds until its first token above which a call is turned away; none: the queue may be as slow as it is"
    )
    max_sequences_per_key: int | None = setting(
        None, "sequences of one key at once: prompts times n; none: no limit for one key"
    )
    max_choices: int = setting(128, "texts of one call: n or best_of, for each of its prompts")
    max_live_readers: int = setting(16, "readers of /live at once, tenants with equal shares; 0: nobody may watch")
    max_body: int | str = setting("8MiB", "the largest body of a call; less where the context holds less")
    max_bodies: int | str = setting("256MiB", "bytes that the bodies of all calls under way may hold together")
    max_bodies_per_key: int | str | None = setting(
        None, "bytes that the bodies of one key's calls may hold; none: a quarter of max_bodies, all with a single key"
    )
    max_header_bytes: int | str = setting("32KiB", "the largest head of a call: its path and headers")
    max_connections: int = setting(4096, "connections that are open at once")
    request_timeout_s: float | None = setting(600.0, "seconds after which a call is ended; none: never")
    header_timeout_s: float = setting(10.0, "seconds that the head of a call may take to arrive")
    body_timeout_s: float = setting(60.0, "seconds that the body of a call may take to arrive")
    write_timeout_s: float = setting(30.0, "seconds that a client may read nothing of what waits for it")
    keep_alive_timeout_s: float = setting(75.0, "seconds that a connection may stay open between two calls")
    max_step_s: float | None = setting(
        MAX_STEP_S, "seconds that a step may take before the engine is started again; none: for ever"
    )
    max_silence_s: float | None = setting(
        MAX_SILENCE_S, "seconds without a sign of life before the engine is started again; none: for ever"
    )
    drain_timeout_s: float = setting(30.0, "seconds that calls under way have to end in when the server is stopped")
    tool_format: str = setting(AUTO, f"how the model writes calls: auto (by its chat template), none, {_FORMAT_NAMES}")
    reasoning_format: str = setting("auto", "marks of the model's reasoning: auto (by its chat template), none, think")
    metrics_compat: str = setting("none", "names in /metrics beside quire's own: none or vllm")
    dashboard: bool = setting(True, "serve the page that shows the memory at work, at /")
    log_format: str = setting("text", "how logs are written: text or json")
    access_log: bool = setting(True, "write a line for every call")

    def __post_init__(self) -> None:
        require_text("host", self.host)
        require_int("port", self.port, 0, 65_535)
        self._read_sizes()
        self._check_names_and_secrets()
        for name in ("max_queued_sequences", "max_queued_tokens", "max_sequences_per_key"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, 1 << 40)
        require_int("max_choices", self.max_choices, 1, 1 << 20)
        require_int("max_live_readers", self.max_live_readers, 0, 1 << 20)
        require_int("max_connections", self.max_connections, 1, 1 << 20)
        for name in ("max_wait_s", "request_timeout_s"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 1e-3, MAX_SECONDS)
        for name in ("max_step_s", "max_silence_s"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 2.0, MAX_SECONDS)
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_timeout_s"):
            require_number(name, getattr(self, name), 1e-3, MAX_SECONDS)
        require_number("drain_timeout_s", self.drain_timeout_s, 0.0, MAX_SECONDS)
        require_one_of("metrics_compat", self.metrics_compat, METRICS_COMPAT)
        create_tool_format(self.tool_format, "")
        is_thinking_format(self.reasoning_format, "")
        require_one_of("log_format", self.log_format, LOG_FORMATS)
        for name in ("open_metrics", "dashboard", "access_log"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfigError(name, getattr(self, name), "True or False")

    @property
    def has_keys(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.api_key) or self.api_keys_file is not None

    @property
    def may_have_several_tenants(self) -> bool:
        """Whether keys of more than one tenant can be there, as far as that can be said before a file is read."""
        return len(self.api_key) > 1 or self.api_keys_file is not None

    @property
    def max_body_bytes(self) -> int:
        """The largest body, as a number."""
        return parse_bytes(self.max_body)

    @property
    def head_bytes(self) -> int:
        """The largest head, as a number."""
        return parse_bytes(self.max_header_bytes)

    @property
    def max_bodies_bytes(self) -> int:
        """What the bodies of all calls may hold, as a number."""
        return parse_bytes(self.max_bodies)

    @property
    def max_bodies_bytes_per_key(self) -> int:
        """What the bodies of one key's calls may hold: at least one of the largest."""
        if self.max_bodies_per_key is not None:
            return parse_bytes(self.max_bodies_per_key)
        share = self.max_bodies_bytes // KEYS_TO_FILL if self.may_have_several_tenants else self.max_bodies_bytes
        return max(share, self.max_body_bytes)

    def _read_sizes(self) -> None:
        """Turn sizes into numbers, and check them. Mutates."""
        bounds = {"max_header_bytes": (256, 1 << 30)}
        for name in ("max_body", "max_header_bytes", "max_bodies", "max_bodies_per_key"):
            value = getattr(self, name)
            if name != "max_bodies_per_key" or value is not None:
                object.__setattr__(self, name, parse_bytes(value, name))
                require_int(name, getattr(self, name), *bounds.get(name, (1, 1 << 40)))
        for name in ("max_bodies", "max_bodies_per_key"):
            value = getattr(self, name)
            if value is not None and value < self.max_body_bytes:
                raise InvalidConfigError(name, value, f"max_body ({self.max_body}) or more, so that one body fits")

    def _check_names_and_secrets(self) -> None:
        """A secret that is refused is not shown."""
        if not isinstance(self.served_model_name, tuple):
            raise InvalidConfigError("served_model_name", self.served_model_name, "a tuple of names")
        for name in self.served_model_name:
            require_text("served_model_name", name)
        if not isinstance(self.allowed_host, tuple):
            raise InvalidConfigError("allowed_host", self.allowed_host, "a tuple of names")
        for name in self.allowed_host:
            require_text("allowed_host", name)
            allowed_name(name)
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


def require_text(field: str, value: object) -> None:
    """Raise `InvalidConfigError` unless a setting is a text that names something."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InvalidConfigError(field, value, "a text of printable characters")


def require_key(field: str, value: object) -> str:
    """Return an API key; raises `InvalidConfigError`, which does not show it, for what a header cannot carry."""
    if not isinstance(value, str):
        shown = f"a value of type {type(value).__name__}"
        raise InvalidConfigError(field, shown, "a text; a key of digits needs quotes in YAML")
    if not 1 <= len(value) <= MAX_KEY_LENGTH or not all("!" <= character <= "~" for character in value):
        shown = f"a key of {len(value)} characters" if value.strip() else "blank"
        raise InvalidConfigError(field, shown, f"1 to {MAX_KEY_LENGTH} characters of ASCII without spaces")
    return value
