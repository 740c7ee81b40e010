"""The settings of an engine and of its server as options of a command, resolved together."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from quire.cli.engine_options import add_engine_options, all_options
from quire.cli.options import DEFAULT, Setting, add_common_options, add_options, make_config, options_of, resolve
from quire.core.config import EngineConfig
from quire.serve.config import ServerConfig

FAIR = "fair_share"
ADAPTER_MEMORY: Final = "512MiB"
"""The default if operators can load adapters: room for 25 of rank 16 for a model of 0.6 billion weights."""
COMMON: Final = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "max_model_len",
    "kv_memory",
    "max_num_seqs",
    "weights",
    "kv_dtype",
    "num_threads",
)
"""The options that --help shows first: the ten that most people need."""

EXAMPLES: Final = """examples:
  quire serve smollm2
  quire serve ./model.gguf --port 9000 --max-model-len 8K
  quire serve Qwen/Qwen3-0.6B --weights int8 --kv-dtype int8 --kv-memory 2GiB
  quire serve smollm2 ./model.gguf --keep-alive 10m
  quire serve --model-dir ~/models --max-memory 12GiB
  quire serve guide --host 0.0.0.0 --allowed-host example.org --api-key KEY"""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The configs of an engine and its server, and the origin of each setting.

    `engine`: the config of the first model; `named`: the configs of all models that the user named.
    """

    engine: EngineConfig
    server: ServerConfig
    settings: Mapping[str, Setting]
    named: tuple[EngineConfig, ...]


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a server and its engine. Mutates the parser."""
    add_common_options(parser, all_options(), COMMON)
    group = parser.add_argument_group("server", "each option can also be set by an environment variable; the flag wins")
    add_options(group, [option for name, option in options_of(ServerConfig).items() if name not in COMMON])
    add_engine_options(parser, otherwise_said=("model", *COMMON), several_models=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES


def serve_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ServeSettings:
    """Return the settings that result from flags, environment, file and defaults. Does not mutate."""
    options, given = all_options(), vars(arguments)
    names: list[str] = given.get("model") or []
    own = {name: value for name, value in given.items() if name != "model"}
    first = argparse.Namespace(**own, **({"model": names[0]} if names else {}))
    settings = resolve(options, first, environ, options)
    server = make_config(ServerConfig, settings)
    policy = settings["policy"]
    if policy.origin == DEFAULT and server.may_have_several_tenants:
        settings["policy"] = replace(policy, value=FAIR, origin=f"{DEFAULT} with several keys")
    memory = settings["adapter_memory"]
    if server.adapter_root is not None and memory.origin == DEFAULT:
        settings["adapter_memory"] = replace(memory, value=ADAPTER_MEMORY, origin=f"{DEFAULT} with adapter_root")
    engine = make_config(EngineConfig, settings)
    named = [engine, *(replace(engine, model=name) for name in names[1:])]
    if server.model_dir is not None and settings["model"].origin == DEFAULT:
        named = []
    return ServeSettings(engine, server, settings, tuple(named))
