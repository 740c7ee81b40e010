"""What would fit where a model does not: the settings to add, the one that changes the model least first."""

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
"""Narrower types, that which holds most of the model first."""

Config = TypeVar("Config", bound=EngineConfig)


def flags_that_fit(config: Config, require: Callable[[Config], object]) -> str:
    """Return the flags of the first narrower settings that `require` takes; empty where it refuses all of them.

    >>> def require(config: EngineConfig) -> None:
    ...     if config.weights != "int4":
    ...         raise InvalidConfigError("memory", "4 GiB", "5 GiB")
    >>> flags_that_fit(EngineConfig(), require)
    '--weights int4'
    """
    for changes in NARROWER:
        try:
            require(replace(config, **changes))
        except InvalidConfigError:  # it does not fit, or the model cannot be run so
            continue
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
    return ""
