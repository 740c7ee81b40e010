"""The settings of an adapter, as PEFT writes them to adapter_config.json.

The tensors show which matrices an adapter changes; the settings scale the changes. A setting that would change the
result and is not implemented is refused by its name, and so is an unknown setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quire.compute.models.config_file import ConfigFile

SETTINGS_FILE: Final = "adapter_config.json"
MAX_RANK: Final = 1 << 16
USED: Final = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
"""Settings of the training, or settings that the tensors show too."""

PLAIN_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base unchanged."""

PATTERN: Final = re.compile(r"\^?\w+(\\?\.\w+)*\$?", re.ASCII)
"""Only names of modules are allowed: matching an arbitrary expression could take hours."""

Patterns = Mapping[str, tuple[int, float]]
"""The number of a pattern, after its place among the patterns: the first one that matches counts."""

ANYWHERE: Final = ".*\\."
"""PEFT's prefix for names of experts; it has no effect, since any name may have a prefix."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Rank and scale of the modules of an adapter. `rank` None: the rank of the tensors."""

    where: str
    rank: int | None
    alpha: float
    has_root_scale: bool
    ranks: Patterns
    alphas: Patterns

    @classmethod
    def of(cls, file: ConfigFile) -> AdapterSettings:
        """Check the settings and return them; raises `CheckpointError` for an adapter that cannot be used."""
        file.require("peft_type", "LORA")
        file.require("bias", "none", None)
        start = file.fields.get("init_lora_weights")
        if not any(start is plain or start == plain for plain in PLAIN_STARTS):
            allowed = "true, false, gaussian, eva or orthogonal: others change the base"
            raise file.error("init_lora_weights", allowed)
        for name, value in file.fields.items():
            is_known = name in USED or name in WITHOUT_EFFECT or name in ("bias", "init_lora_weights")
            if not is_known and value not in (None, False, "", [], {}):
                raise file.error(name, "null, false or empty: quire does not support this")
        return cls(
            where=file.where,
            rank=file.size("r", high=MAX_RANK),
            alpha=file.number("lora_alpha"),
            has_root_scale=file.flag("use_rslora", False),
            ranks=_patterns(file, "rank_pattern"),
            alphas=_patterns(file, "alpha_pattern"),
        )

    def rank_of(self, module: str, found: int) -> int:
        """Return the required rank of a module; `found` is the rank of its tensors."""
        return int(_found(self.ranks, module, found if self.rank is None else self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of B A for a module with this rank.

        >>> AdapterSettings("", 16, 8.0, False, {"q_proj": (0, 4)}, {}).scale_of("layers.0.q_proj", 4)
        2.0
        """
        return _found(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.has_root_scale else rank)


def _patterns(file: ConfigFile, field: str) -> Patterns:
    """Return the patterns of a setting without `$`, which they all end with, and without the escapes of dots."""
    section = file.section(field)
    found: dict[str, tuple[int, float]] = {}
    for place, name in enumerate(section.fields):
        pattern = name.removeprefix(ANYWHERE)
        if PATTERN.fullmatch(pattern) is None:
            raise section.error(name, "a module name, not another expression")
        number = section.size(name, high=MAX_RANK) if field == "rank_pattern" else section.number(name)
        found.setdefault(pattern.removesuffix("$").replace("\\.", "."), (place, number))
    return found


def _found(patterns: Patterns, module: str, default: float) -> float:
    """Return the number of the first pattern that matches the end of a module's name, as in PEFT.

    >>> _found({"proj": (0, 2), "^layers.0.proj": (1, 4), "0.proj": (2, 8)}, "layers.0.proj", 1)
    2
    """
    parts = module.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))
    matching = [patterns[end] for end in (f"^{module}", *ends) if end in patterns]
    return min(matching)[1] if matching else default
