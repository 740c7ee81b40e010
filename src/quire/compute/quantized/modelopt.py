"""ModelOpt, NVIDIA's quantiser: NVFP4, fp8 with one scale for each matrix, or some matrices in each.

quire does not round activations: their settings and scales are not used.
"""

from __future__ import annotations

from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.compressed import FLOAT, Compressed, Scheme
from quire.compute.quantized.matrix import Method, optional_texts, refusal
from quire.compute.quantized.nvfp4 import SIZE, Nvfp4
from quire.compute.quantized.several import one_of

MIXED: Final = "MIXED_PRECISION"
OF_NVFP4: Final = ("NVFP4", "W4A16_NVFP4")


def read(config: ConfigFile) -> Method:
    """Read the settings of a folder."""
    if config.fields.get("quant_algo") != MIXED:
        return _method(config, config)
    modules = config.section("quantized_layers")
    if not modules.fields:
        raise config.error("quantized_layers", "the settings of at least one module")
    of_modules = [modules.section(name) for name in modules.fields]  # thousands, with a few algorithms
    different = {repr(settings.fields.get("quant_algo")): settings for settings in of_modules}
    for settings in of_modules:
        _require_size(settings)
    return one_of(_method(config, settings) for settings in different.values())


def _require_size(settings: ConfigFile) -> None:
    """Raise unless the matrices have the groups of their algorithm."""
    if settings.fields.get("quant_algo") in OF_NVFP4 and settings.size("group_size", SIZE) != SIZE:
        raise settings.error("group_size", f"{SIZE}")


def _method(config: ConfigFile, settings: ConfigFile) -> Method:
    """Return the method of the matrices with these settings."""
    unconverted = optional_texts(config, "ignore") or optional_texts(config, "exclude_modules")
    _require_size(settings)
    match algorithm := settings.fields.get("quant_algo"):
        case str() if algorithm in OF_NVFP4:
            return Nvfp4("ModelOpt, NVFP4", "weight", "weight_scale_2", False, unconverted)
        case "FP8":
            return Compressed("ModelOpt, fp8", Scheme(FLOAT, 8, True, "tensor", (0, 0)), unconverted)
    raise refusal(config, f"ModelOpt with the algorithm {algorithm!r}")
