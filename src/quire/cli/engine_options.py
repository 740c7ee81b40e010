"""The settings of `EngineConfig` as options of a command: a flag and an environment name for each.

    flag  >  environment  >  default            --block-size 32     QUIRE_BLOCK_SIZE=32

Names, defaults and help are read from the fields, so a setting that is added there is an option here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, get_type_hints

from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError

PREFIX = "QUIRE_"
OTHERWISE_SAID = frozenset({"model", "seed", "skip_tokenizer_init"})
"""The model stands without a flag, --seed is that of the request, and a command line is about text."""

TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Give a command a model and the settings of an engine. Mutates the parser."""
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"{_help(_settings()['model'])} (default: guide; {PREFIX}MODEL)",
    )
    group = parser.add_argument_group("engine", "each has a name in the environment too, which the flag goes before")
    for name, field in _settings().items():
        if name in OTHERWISE_SAID:
            continue
        flag = f"--{name.replace('_', '-')}"
        shown = "none" if field.default is None else field.default
        text = f"{_help(field)} (default: {shown}; {environment_name(name)})"
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(flag, type=_reader(name), default=argparse.SUPPRESS, metavar=_metavar(name), help=text)


def engine_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """Return the settings that flags, environment and defaults make together. Does not mutate."""
    values: dict[str, Any] = {}
    for name in _settings():
        variable = environment_name(name)
        if name in vars(arguments) and (name == "model" or name not in OTHERWISE_SAID):
            values[name] = getattr(arguments, name)
        elif variable in environ:
            try:
                values[name] = _reader(name)(environ[variable])
            except ValueError as error:
                raise InvalidConfigError(variable, environ[variable], str(error)) from None
    return EngineConfig(**values)


def environment_name(setting: str) -> str:
    """Return the environment name of a setting.

    >>> environment_name("kv_memory")
    'QUIRE_KV_MEMORY'
    """
    return PREFIX + setting.upper()


def _settings() -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(EngineConfig)}


def _help(field: Field[Any]) -> str:
    return str(field.metadata["help"])


def _reader(name: str) -> Callable[[str], Any]:
    """Return what makes a value of a text; it raises ValueError for a text that is none."""
    hint, default = get_type_hints(EngineConfig)[name], _settings()[name].default
    optional = default is None
    allowed = "yes or no" if hint is bool else "an integer"

    def integer(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        if hint is bool and text.lower() in TRUTHS:
            return TRUTHS[text.lower()]
        if hint is bool or not text.strip().lstrip("-").isdecimal():
            raise ValueError(allowed)
        return int(text)

    def words(text: str) -> Any:
        return None if optional and text.lower() == "none" else text

    return words if hint in (str, str | None, int | str, int | str | None) else integer


def _metavar(name: str) -> str:
    hint = get_type_hints(EngineConfig)[name]
    if hint in (int, int | None):
        return "N"
    return "SIZE" if hint in (int | str, int | str | None) else "PATH" if name == "tokenizer" else "NAME"
