"""Rotary positions: turns the settings of a config into frequencies.

transformers 4 has the settings at the top level (`rope_theta`, `rope_scaling`). transformers 5 has them in
`rope_parameters`, perhaps separately for each type of layer. Every scaling becomes one list of frequencies
and one factor for cosine and sine, so engines need not know the scalings:

    default        base ** (-2i / rotary_dim)
    linear         … / factor
    divided        … / a number for each, which GGUF files have instead of llama3's settings
    proportional   … over head_dim, with the last frequencies 0
    alpha          a larger base; Hunyuan's files name it dynamic, other families' files are refused
    dynamic        a larger base, for the maximum length      ┐ transformers uses the current length
    longrope       … / short or long factors, and a scale     ┘ of the text
    yarn           the slow ones / factor, the fast ones unchanged, and a scale
    llama3         the slow ones / factor, a ramp by wavelength to the fast ones

Two scalings depend on the current length. If the frequencies changed as a text grows, its keys would not fit
together, and a cached prefix would depend on the text after it. So both are frozen at load for the maximum
length, and `rope_notices` reports it.

The arithmetic is float32 in the order of transformers, because models were trained with these roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.sublayers import RopeSpec
from quire.core.errors import CheckpointError

FULL_BASE: Final = 1_000_000.0
"""The base of positions in layers of Gemma 3 with full attention, if no setting has it."""

LOCAL_BASE: Final = 10_000.0
"""The same in layers with a window."""

FULL: Final = "full_attention"  # the names in `layer_types`
SLIDING: Final = "sliding_attention"
DEFAULT_BASE: Final = 10_000.0
MAX_GROWTH: Final = 1000.0  # of queries; 0.1 in published models
SECTIONS: Final = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5


def rope_spec(
    config: ConfigFile,
    head_dim: int,
    max_length: int | None = None,
    *,
    layer_type: str | None = None,
    default_base: float = DEFAULT_BASE,
    partial: bool = False,
) -> RopeSpec:
    """Return the rotary positions of a model, or of its layers of one type.

    `max_length` is the longest text to run, if it differs from the config. Only a family with `partial` may rotate a
    part of each head. For other families, transformers ignores `partial_rotary_factor` while other engines apply it, so
    a model with this setting is ambiguous, and is refused.
    """
    section = _section(config, layer_type)
    kind = _kind(section)
    if kind == "alpha" and kind not in (section.fields.get("rope_type"), section.fields.get("type")):
        raise section.error("alpha", "null, because engines disagree on its meaning in this family")
    fraction = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if fraction > 1:
        raise section.error("partial_rotary_factor", "a number above 0, at most 1")
    if fraction != 1 and not (partial or kind == "proportional"):
        named = section if section.is_set("partial_rotary_factor") else config
        raise named.error("partial_rotary_factor", "1, because models of this family rotate entire heads")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        where = f"{config.where}: rotary dimensions"
        raise CheckpointError(where, rotary_dim, f"an even number from 2 to {head_dim}")
    rope = _Rope(
        section=section,
        base=section.number("rope_theta", config.number("rope_theta", default_base)),
        rotary_dim=rotary_dim,
        head_dim=head_dim,
        original_length=_original_length(config, section),
        trained_length=config.size("max_position_embeddings", high=MAX_LENGTH),
        max_length=_frozen_length(config, max_length),
    )
    # An extreme base or factor gives numbers that are not finite.
    with np.errstate(all="ignore"):
        frequencies, scale = SCALINGS[kind](rope)
    if not (np.isfinite(frequencies).all() and 0 < scale < math.inf):
        raise config.error("rope_theta", "a value that gives finite frequencies with its scaling")
    return RopeSpec(2 * len(frequencies), tuple(map(float, frequencies)), float(np.float32(scale)))


def full_and_sliding_ropes(
    config: ConfigFile, head_dim: int, max_length: int | None, *, base: float, sliding_base: float
) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary positions of layers with full attention, and of layers with a window.

    transformers 5 has settings for each. transformers 4 has settings for full attention only; layers with a window use
    `sliding_base` without scaling. `base` is the default for full attention.
    """
    nested = config.section("rope_parameters").fields
    plain = ConfigFile(config.where, {**config.fields, "rope_theta": sliding_base, "rope_scaling": None})
    if nested and (nested.keys() != {FULL, SLIDING} or config.is_set("rope_scaling")):
        raise config.error("rope_parameters", f"settings for {FULL} and for {SLIDING}, and no rope_scaling")
    full = rope_spec(config, head_dim, max_length, layer_type=FULL, default_base=base)
    return full, rope_spec(plain, head_dim, max_length, layer_type=SLIDING, default_base=sliding_base)


def context_length(config: ConfigFile, max_length: int | None = None) -> int:
    """Return the number of positions that the model supports.

    This is `max_position_embeddings`, or the length that yarn extends to if that is longer. Dynamic scaling
    extends up to a given `max_length`, at most by its factor.
    """
    trained = config.size("max_position_embeddings", high=MAX_LENGTH)
    section = _section(config, FULL)
    kind = _kind(section)
    if kind == "dynamic" and max_length is not None:
        return max(trained, min(max_length, int(trained * section.number("factor"))))
    if kind == "yarn" and section.is_set("original_max_position_embeddings"):
        stretched = section.size("original_max_position_embeddings", high=MAX_LENGTH) * section.number("factor")
        return max(trained, min(int(stretched), MAX_LENGTH))
    return trained


def rope_notices(config: ConfigFile, max_length: int | None = None) -> tuple[str, ...]:
    """Return notices for the user about a scaling that is frozen at load."""
    section = _section(config, FULL)
    kind = _kind(section)
    if kind not in ("dynamic", "longrope"):
        return ()
    length = _frozen_length(config, max_length)
    if kind == "dynamic":
        chosen = (
            "stretched for" if length > config.size("max_position_embeddings", high=MAX_LENGTH) else "not needed at"
        )
    else:
        chosen = f"by its {'long' if has_long_factors(config, max_length) else 'short'} factors for"
    return (f"rope scaling {kind!r} depends on the current length: frozen at load, {chosen} {length} tokens",)


def has_long_factors(config: ConfigFile, max_length: int | None) -> bool:
    """Return whether longrope has its long factors, for the longest text to run."""
    return _frozen_length(config, max_length) > _original_length(config, _section(config, FULL))


@dataclass(frozen=True, slots=True)
class _Rope:
    """The inputs of the frequencies."""

    section: ConfigFile
    base: float
    rotary_dim: int
    head_dim: int
    original_length: int
    trained_length: int
    max_length: int

    def powers(self, base: float | None = None, dim: int | None = None) -> FloatArray:
        """Return base ** (2i / dim) for each pair i that rotates."""
        return _powers(self.base if base is None else base, self.rotary_dim, dim or self.rotary_dim)

    def frequencies(self) -> FloatArray:
        """Return the frequencies without any scaling."""
        return np.float32(1) / self.powers()

    def factor(self) -> float:
        """Return the factor of the scaling."""
        return self.section.number("factor")

    def stretch(self, default: float | None = None) -> float:
        """Return the factor, or the ratio of the lengths if they give it, or else the default."""
        ratio = self.trained_length / self.original_length
        return self.section.number("factor", default if ratio == 1 else ratio)


def plain_frequencies(base: float, rotary_dim: int) -> tuple[float, ...]:
    """Return the frequency of each pair that rotates, without any scaling."""
    with np.errstate(all="ignore"):  # an extreme base gives numbers that are not finite
        return tuple(map(float, np.float32(1) / _powers(base, rotary_dim, rotary_dim)))


def _powers(base: float, rotary_dim: int, dim: int) -> FloatArray:
    """Return base ** (2i / dim) for each pair i that rotates."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(dim)
    # Rounds the power once: numpy's own float32 power is sometimes off by one bit.
    exact = np.float64(np.float32(base)) ** exponents.astype(np.float64)
    return exact.astype(np.float32)


def _default(rope: _Rope) -> tuple[FloatArray, float]:
    return rope.frequencies(), 1.0


def _divided(rope: _Rope) -> tuple[FloatArray, float]:
    divisors = np.array(rope.section.numbers("divisors"), np.float32)
    if len(divisors) != rope.rotary_dim // 2:
        raise rope.section.error("divisors", f"{rope.rotary_dim // 2} numbers")
    return rope.frequencies() / divisors, 1.0


def _linear(rope: _Rope) -> tuple[FloatArray, float]:
    return rope.frequencies() / np.float32(rope.factor()), 1.0


def _proportional(rope: _Rope) -> tuple[FloatArray, float]:
    turned = np.float32(1) / rope.powers(dim=rope.head_dim)
    frequencies = np.zeros(rope.head_dim // 2, np.float32)
    frequencies[: len(turned)] = turned
    return frequencies / np.float32(rope.section.number("factor", 1.0)), 1.0


def _dynamic(rope: _Rope) -> tuple[FloatArray, float]:
    if rope.rotary_dim == 2:
        raise rope.section.error("rope_type", "another type for 2 rotary dimensions")
    factor, length = rope.factor(), max(rope.max_length, rope.trained_length)
    stretch = factor * length / rope.trained_length - (factor - 1)
    base = rope.base * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return np.float32(1) / rope.powers(base), 1.0


def _alpha(rope: _Rope) -> tuple[FloatArray, float]:
    if rope.rotary_dim == 2:
        raise rope.section.error("rope_type", "another type for 2 rotary dimensions")
    base = rope.base * rope.section.number("alpha") ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return np.float32(1) / rope.powers(base), 1.0


def _longrope(rope: _Rope) -> tuple[FloatArray, float]:
    factor = rope.stretch(1.0)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(2, rope.original_length)))
    chosen = "long_factor" if rope.max_length > rope.original_length else "short_factor"
    factors = np.array(rope.section.numbers(chosen), np.float32)
    if len(factors) != rope.rotary_dim // 2:
        raise rope.section.error(chosen, f"{rope.rotary_dim // 2} numbers")
    return np.float32(1) / (factors * rope.powers()), rope.section.number("attention_factor", scale)


def _yarn(rope: _Rope) -> tuple[FloatArray, float]:
    factor = rope.stretch()
    low, high = _yarn_range(rope)
    count = rope.rotary_dim // 2
    ramp = (np.arange(count, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    slow, fast = np.float32(1) / (np.float32(factor) * rope.powers()), rope.frequencies()
    return slow * (np.float32(1) - kept) + fast * kept, _yarn_scale(rope.section, factor)


def _yarn_range(rope: _Rope) -> tuple[float, float]:
    """Return the range of pairs in which frequencies change from fast (kept) to slow (divided)."""
    if rope.base <= 1:
        raise rope.section.error("rope_theta", "a number above 1")

    def pair(num_rotations: float) -> float:
        turns = rope.original_length / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.base))

    low, high = pair(rope.section.number("beta_fast", 32)), pair(rope.section.number("beta_slow", 1))
    if rope.section.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_scale(section: ConfigFile, factor: float) -> float:
    if section.is_set("mscale") and section.is_set("mscale_all_dim"):
        natural = _growth(factor, section.number("mscale")) / _growth(factor, section.number("mscale_all_dim"))
    else:
        natural = _growth(factor, 1.0)
    return section.number("attention_factor", natural)


def _growth(factor: float, strength: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def score_factor(config: ConfigFile) -> float:
    """Return the factor of the scores in DeepSeek's models with scaled positions."""
    section = _section(config, None)
    strength = section.optional_number("mscale_all_dim", low=0)
    if _kind(section) == "default" or not strength:
        return 1.0
    return _growth(section.number("factor"), strength) ** 2


def growing(config: ConfigFile, rope: RopeSpec) -> RopeSpec:
    """Return the rope of a model whose queries grow with their position, if its settings say so."""
    section = _section(config, None)
    growth = section.optional_number("llama_4_scaling_beta", low=0, high=MAX_GROWTH)
    if not growth:
        return rope
    length = section.size("original_max_position_embeddings", high=MAX_LENGTH)
    return replace(rope, query_growth=float(np.float32(growth)), growth_length=length)


def _llama3(rope: _Rope) -> tuple[FloatArray, float]:
    factor = np.float32(rope.factor())
    low, high = rope.section.number("low_freq_factor"), rope.section.number("high_freq_factor")
    if low >= high:
        raise rope.section.error("high_freq_factor", f"a number above low_freq_factor, {low:g}")
    fast = rope.frequencies()
    lengths = np.float32(2 * math.pi) / fast
    ramp = (np.float32(rope.original_length) / lengths - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - ramp) * fast / factor + ramp * fast
    slower = np.where(lengths > rope.original_length / low, fast / factor, between)
    return np.where(lengths < rope.original_length / high, fast, slower), 1.0


SCALINGS: Final[Mapping[str, Callable[[_Rope], tuple[FloatArray, float]]]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "divided": _divided,
        "proportional": _proportional,
        "alpha": _alpha,
        "dynamic": _dynamic,
        "longrope": _longrope,
        "su": _longrope,  # its name in the first Phi-3
        "yarn": _yarn,
        "llama3": _llama3,
    }
)


def _section(config: ConfigFile, layer_type: str | None) -> ConfigFile:
    """Return the settings of the scaling, for one type of layer if types differ."""
    for field in SECTIONS:
        section = config.section(field)
        if layer_type is not None and isinstance(section.fields.get(layer_type), dict):
            return section.section(layer_type)
        if any(isinstance(value, dict) for value in section.fields.values()):
            raise config.error(field, f"one set of settings for {layer_type or 'all'} layers")
        if section.fields:
            return section
    return config.section(SECTIONS[-1])


def _kind(section: ConfigFile) -> str:
    field = "rope_type" if section.is_set("rope_type") else "type"
    kind = section.fields.get(field)
    if kind is None:
        return "default"
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise section.error(field, f"one of {', '.join(SCALINGS)}")
    if kind == "dynamic" and section.is_set("alpha"):
        return "alpha"
    return "longrope" if kind == "su" else kind


def _original_length(config: ConfigFile, section: ConfigFile) -> int:
    """Return the original length, before scaling; Phi-3 has it outside the section."""
    field = "original_max_position_embeddings"
    trained = config.size("max_position_embeddings", high=MAX_LENGTH)
    return (config if config.is_set(field) else section).size(field, trained, high=MAX_LENGTH)


def _frozen_length(config: ConfigFile, max_length: int | None) -> int:
    context = context_length(config, max_length)
    return context if max_length is None else min(context, max_length)
