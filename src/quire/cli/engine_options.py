"""The settings of `EngineConfig` as options of a command: the model is a positional argument, the others are flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from quire.cli.options import DEFAULT, Option, Setting, add_file_option, add_options, make_config, options_of, resolve
from quire.core.config import EngineConfig

OTHERWISE_SAID = frozenset({"model", "seed", "skip_tokenizer_init"})
"""The model is positional, --seed is the request's, and a command always needs the tokenizer."""
NOT_STARTED = OTHERWISE_SAID | {"step_log"}
"""The same for commands that start no engine and so have no steps to log."""
NO_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({})


def add_engine_options(
    parser: argparse.ArgumentParser,
    otherwise_said: Collection[str] = OTHERWISE_SAID,
    *,
    several_models: bool = False,
) -> None:
    """Add a model and the engine's options, except those that the command sets otherwise. Mutates the parser.

    `several_models`: the command takes any number of models.
    """
    options = options_of(EngineConfig)
    model = options["model"]
    parser.add_argument(
        "model",
        nargs="*" if several_models else "?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"{model.help} (default: {model.default}; {model.variable})",
    )
    group = parser.add_argument_group("engine", "each option can also be set by an environment variable; the flag wins")
    add_options(group, [option for name, option in options.items() if name not in otherwise_said])
    add_file_option(group)


def engine_config(
    arguments: argparse.Namespace, environ: Mapping[str, str], defaults: Mapping[str, Any] = NO_DEFAULTS
) -> EngineConfig:
    """Return the config that results from flags, environment, file and defaults. Does not mutate.

    `defaults` are the command's own, and replace the engine's.
    """
    settings = engine_settings(arguments, environ)
    for name, value in defaults.items():
        if settings[name].origin == DEFAULT:
            settings[name] = replace(settings[name], value=value)
    return make_config(EngineConfig, settings)


def engine_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return each of these settings with its origin. Does not mutate."""
    given = vars(arguments).items()
    own = {name: value for name, value in given if name == "model" or name not in OTHERWISE_SAID}
    return resolve(options_of(EngineConfig), argparse.Namespace(**own), environ, all_options())


def all_options() -> dict[str, Option]:
    """Return the options of the engine and the server by name: those that a settings file may contain."""
    from quire.serve.config import ServerConfig  # late: only a settings file needs it

    return options_of(EngineConfig) | options_of(ServerConfig)
