"""Settings to suggest if a model does not fit into memory, those that change the model least first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError

NARROWER: Final[tuple[Mapping[str, Any], ...]] = (
    {"kv_dtype": "int8"},
    {"weights": "int8"},
    {"weights": "int8", "kv_dtype": "int8"},
    {"weights": "int4"},
    {"weights": "int4", "kv_dtype": "int4"},
)
"""Narrower types, those that change the model least first."""

Config = TypeVar("Config", bound=EngineConfig)


def flags_that_fit(config: Config, require: Callable[[Config], object]) -> str:
    """Return the flags of the first narrower settings that `require` accepts; empty if it refuses all of them.

    >>> def require(config: EngineConfig) -> None:
    ...     if config.weights != "int4":
    ...         raise InvalidConfigError("memory", "4 GiB", "5 GiB")
    >>> flags_that_fit(EngineConfig(), require)
    '--weights int4'
    """
    for changes in NARROWER:
        try:
            require(replace(config, **changes))
        except InvalidConfigError:  # the model does not fit, or does not support these types
            continue
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
    return ""
