"""MeasuredServer: the server under load, either a running one or one that the benchmark starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from quire.core.config import EngineConfig, ResolvedConfig
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.engine.factory import plan_engine
from quire.instruments.bench.load_run import Target
from quire.instruments.bench.shapes import measured_config, write_byte_tokenizer
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess
from quire.reporting.results import Tell

SCHEMES = ("http://", "https://")
ASSUMED_VOCAB_SIZE = 32_000
"""The vocabulary size assumed for a model on another server: nearly all models have at least this many tokens."""


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """The server under load. `process` and `config` are None for a server that was already running."""

    target: Target
    vocab_size: int
    process: ServerProcess | None = None
    config: ResolvedConfig | None = None


@contextmanager
def measured_server(options: argparse.Namespace, tell: Tell) -> Iterator[MeasuredServer]:
    """Yield the server that the options name by URL, or a new one for their model, which is stopped at the end."""
    url = getattr(options, "model", "")
    if url.startswith(SCHEMES):
        _refuse_engine_options(options)
        yield MeasuredServer(_target(options, url), options.vocab_size or ASSUMED_VOCAB_SIZE)
        return
    with measured_config(options) as config:
        blueprint = plan_engine(replace(config, skip_tokenizer_init=True))
        vocab_size = blueprint.vocab_size
        if options.shape is not None:
            write_byte_tokenizer(Path(config.model), vocab_size)
        tell(f"starting a server for {config.model}")
        with ServerProcess(config) as process:
            tell(f"{process.url} is ready after {process.ready_s:.2f} s")
            yield MeasuredServer(
                _target(options, process.url), options.vocab_size or vocab_size, process, blueprint.config
            )


def _target(options: argparse.Namespace, url: str) -> Target:
    base, api_key = url.rstrip("/").removesuffix("/v1"), _api_key(options.api_key_env)
    return Target(base, options.name or first_model(base, api_key), options.endpoint, api_key)


def _api_key(name: str) -> str:
    """Return the API key from the environment: on the command line, other users and the report would show it."""
    if name and not os.environ.get(name):
        raise InvalidConfigError("api-key-env", name, "the name of an environment variable that holds the key")
    return os.environ[name] if name else ""


def first_model(url: str, api_key: str = "") -> str:
    """Return the first model name of a server."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    answer = ask(f"{url}/v1/models", headers=headers)
    if answer.status != 200:
        raise ExecutionError(f"{url}/v1/models answered {answer.status}: {answer.body[:200].decode(errors='replace')}")
    try:
        return str(answer.json()["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ExecutionError(f"{url}/v1/models names no model; see --name") from None


def _refuse_engine_options(options: argparse.Namespace) -> None:
    given = [field.name for field in fields(EngineConfig) if field.name != "model" and field.name in vars(options)]
    if options.shape is not None:
        given.append("shape")
    if "load" not in options.only:
        raise InvalidConfigError(
            "only",
            " ".join(options.only),
            "load: the costs of HTTP and of the dashboard need a server that the benchmark starts",
        )
    if given:
        raise InvalidConfigError(given[0], getattr(options, given[0]), "none with the URL of a running server")
