"""The scaling of positions in a GGUF file, in the form of config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.gguf.named_settings import NEAR_BASE, Settings, as_written
from quire.compute.models.rope import FULL, SLIDING
from quire.core.errors import CheckpointError

YARN_LOG: Final = "rope.scaling.yarn_log_multiplier"
OLD_FACTOR: Final = "rope.scale_linear"
DIVISORS: Final = "rope_freqs.weight"
STILL: Final = np.float32(1e30)
"""A divisor of the frequency of dimensions that do not rotate."""

TEMPERATURE: Final = "attention.temperature_scale"
MISTRAL3: Final = (
    ("mscale_all_dim", YARN_LOG, "rope.scaling.mscale_all_dim"),
    ("llama_4_scaling_beta", TEMPERATURE, "rope.scaling_beta"),
)
"""Settings of Ministral 3 → their names in files, the second one in those of Ollama."""

ReadTensor = Callable[[str], FloatArray | None]
"""The name of a tensor in the file → its numbers, or None."""


def rope_settings(settings: Settings, read: ReadTensor) -> dict[str, object]:
    """Return the settings of positions in addition to `rope_theta`, by the kind of layers in Gemma 4."""
    if settings.architecture == "gemma4":
        return {"rope_parameters": _of_each_kind(settings, read)}
    scaling = rope_scaling(settings, read)
    return {"rope_scaling": scaling} if scaling else {}


def _of_each_kind(settings: Settings, read: ReadTensor) -> dict[str, object]:
    """Return the positions of Gemma 4, whose divisors are those of layers with full attention: 1, or else no rotation.

    A divisor of 1e30 leaves angles so small that numbers stay as they are; we have frequencies of 0 instead.
    """
    if settings.word("rope.scaling.type") not in (None, "none"):
        raise settings.file.error(settings.key("rope.scaling.type"), "none")
    size = settings.size("attention.key_length")
    divisors = read(DIVISORS)
    found = np.zeros(0) if divisors is None else divisors.reshape(-1)
    num_pairs = int(np.argmax(found != 1)) if (found != 1).any() else len(found)
    if len(found) != size // 2 or not num_pairs or not (found[num_pairs:] >= STILL).all():
        where, allowed = f"{settings.file.where}: tensor {DIVISORS!r}", f"{size // 2} numbers: some 1, then {STILL:g}"
        raise CheckpointError(where, "missing" if divisors is None else found[:8].tolist(), allowed)
    base = settings.number("rope.freq_base", 10_000.0)
    return {
        FULL: {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": 2 * num_pairs / size},
        SLIDING: {"rope_type": "default", "rope_theta": settings.number(NEAR_BASE, base)},
    }


def rope_scaling(settings: Settings, read: ReadTensor) -> dict[str, object]:
    """Return the scaling of positions, a linear one if the file has only a factor; empty if there is none."""
    long, short = read("rope_factors_long.weight"), read("rope_factors_short.weight")
    original = "rope.scaling.original_context_length"
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": settings.size(original, settings.size("context_length")),
        } | _given("attention_factor", settings, "rope.scaling.attn_factor")
    divisors = read(DIVISORS)
    if divisors is not None:
        return {"rope_type": "divided", "divisors": divisors.tolist()}
    kind = settings.word("rope.scaling.type") or "linear"  # files of Ollama may have an empty name
    named = settings.key("rope.scaling.factor" if settings.has("rope.scaling.factor") else OLD_FACTOR)
    factor = settings.file.optional_number(named, low=0)
    if kind == "none" or not factor:
        return {}
    if kind not in ("linear", "yarn"):
        raise settings.file.error(settings.key("rope.scaling.type"), "none, linear or yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": as_written(factor)}
    if kind == "yarn":
        if settings.has(original):
            scaling["original_max_position_embeddings"] = settings.size(original)
        for beta in ("beta_fast", "beta_slow"):
            scaling |= _given(beta, settings, f"rope.scaling.{beta}") | _given(
                beta, settings, f"rope.scaling.yarn_{beta}"
            )
        if settings.architecture == "gpt-oss":
            scaling["truncate"] = False
        if settings.architecture == "deepseek2" and settings.has(YARN_LOG):
            strength = float(f"{10 * settings.number(YARN_LOG):.7g}")
            scaling |= {"mscale": strength, "mscale_all_dim": strength}
        if settings.architecture == "mistral3":
            scaling |= _mistral3_yarn(settings)
    return scaling


def _mistral3_yarn(settings: Settings) -> dict[str, object]:
    """Return the strengths of yarn and the growth of queries, which files may have as 0."""
    found = {
        field: settings.file.optional_number(settings.key(name if settings.has(name) else old), low=0)
        for field, name, old in MISTRAL3
    }
    given: dict[str, object] = {field: as_written(number) for field, number in found.items() if number}
    return given | ({"mscale": 1.0} if "mscale_all_dim" in given else {})


def _given(field: str, settings: Settings, name: str) -> dict[str, object]:
    return {field: settings.number(name)} if settings.has(name) else {}
