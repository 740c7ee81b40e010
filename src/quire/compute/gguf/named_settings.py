"""Settings: the settings of one architecture in a GGUF file, by their names after the dot."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from quire.compute.gguf.header import same_number
from quire.compute.models.common import MAX_LAYERS
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.rope import FULL, SLIDING

KV_HEADS: Final = "attention.head_count_kv"
NEAR_BASE: Final = "rope.freq_base_swa"
TURNED: Final = "rope.dimension_count"
WIDTH: Final = "feed_forward_length"
PATTERN: Final = "attention.sliding_window_pattern"
SIGMOID: Final = 2  # of expert_gating_func


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one architecture, each by its name after the dot, and the names of its tensors."""

    file: ConfigFile
    architecture: str
    tensors: Set[str]

    def key(self, name: str) -> str:
        """Return the name of a setting in the file."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Return whether the file has a setting."""
        return self.file.is_set(self.key(name))

    def size(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_LENGTH) -> int:
        """Return a size; a list with the same size for each layer counts as one."""
        key = self.key(name)
        found = self.file.fields.get(key)
        file = ConfigFile(self.file.where, {key: same_number(found)}) if isinstance(found, list) else self.file
        return file.size(key, default, low=low, high=high)

    def sizes(self, name: str, count: int, default: int | None = None) -> list[int]:
        """Return a size for each of `count` layers, from a list or one size for all."""
        key = self.key(name)
        found = self.file.fields.get(key)
        if not isinstance(found, list) or len(found) != count:
            return [self.size(name, default)] * count
        return [ConfigFile(self.file.where, {key: each}).size(key, high=MAX_LENGTH) for each in found]

    def of_first_layer(self, *names: str) -> Settings:
        """Return these settings with the first number of each list in `names`, which has one for each layer."""
        keys = {key: self.file.fields.get(key) for key in map(self.key, names)}
        first = {key: found[0] for key, found in keys.items() if isinstance(found, list) and found}
        return replace(self, file=ConfigFile(self.file.where, {**self.file.fields, **first}))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number as it was written before it became float32: 1e-06, not 9.99999997e-07."""
        return as_written(self.file.number(self.key(name), default))

    @property
    def head_size(self) -> int:
        """The size of a head of attention."""
        heads, hidden = self.size("attention.head_count"), self.size("embedding_length")
        return self.size("attention.key_length", max(hidden // heads, 1))

    def word(self, name: str) -> str | None:
        """Return a text, or None."""
        found = self.file.fields.get(self.key(name))
        if found is not None and not isinstance(found, str):
            raise self.file.error(self.key(name), "a text")
        return found


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The settings of state-space layers."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    filter_width: int
    has_bias: bool

    @classmethod
    def of(cls, settings: Settings) -> StateSpace:
        """Return what a file says."""
        heads, inner = settings.size("ssm.time_step_rank"), settings.size("ssm.inner_size")
        if inner % heads:
            raise settings.file.error(settings.key("ssm.inner_size"), f"a multiple of ssm.time_step_rank, {heads}")
        return cls(
            num_heads=heads,
            head_size=inner // heads,
            num_groups=settings.size("ssm.group_count"),
            state_size=settings.size("ssm.state_size"),
            filter_width=settings.size("ssm.conv_kernel"),
            has_bias=any(name.endswith(".ssm_conv1d.bias") for name in settings.tensors),
        )


def local_experts(settings: Settings) -> dict[str, object]:
    """Return the number of experts, and of those for a token, as most families name them."""
    return {
        "num_local_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
    }


def turned(settings: Settings) -> dict[str, object]:
    """Return the fraction of each head that rotates."""
    size = settings.head_size
    return {"partial_rotary_factor": settings.size(TURNED, size) / size}


def listed_windows(settings: Settings) -> dict[str, object]:
    """Return the window and the list of layers that have one; empty without a window."""
    if not settings.has("attention.sliding_window"):
        return {}
    return {"sliding_window": settings.size("attention.sliding_window"), **near_layers(settings)}


def near_layers(settings: Settings) -> dict[str, object]:
    """Return which layers have a window, by a list, or by a number of layers of which the last has none; or nothing."""
    pattern = settings.file.fields.get(key := settings.key(PATTERN))
    if pattern is None:
        return {}
    if type(pattern) is int:
        period, count = settings.size(PATTERN), settings.size("block_count", high=MAX_LAYERS)
        pattern = [layer % period < period - 1 for layer in range(count)]
    if not isinstance(pattern, list) or not set(map(type, pattern)) <= {bool}:
        raise settings.file.error(key, "a list of booleans, one for each layer, or a number of layers")
    return {"layer_types": [SLIDING if has_window else FULL for has_window in pattern]}


def kinds_of_layers(settings: Settings, count: int, full: str, recurrent: str) -> list[str] | None:
    """Return the kind of each layer, from a list of key-value heads; None if one number is for all layers."""
    heads = settings.file.fields.get(key := settings.key(KV_HEADS))
    if not isinstance(heads, list):
        return None
    if len(heads) != count:
        raise settings.file.error(key, f"a number for each of the {count} layers, 0 for {recurrent}")
    return [full if each else recurrent for each in heads]


def as_written(number: float) -> float:
    """Return a number as it was written before it became float32.

    >>> as_written(0.4000000059604645)
    0.4
    """
    return float(str(np.float32(number)))
