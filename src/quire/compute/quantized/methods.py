"""The methods by their names in `quantization_config`; all others are refused. Each is imported when a model has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import Method, refusal

SETTINGS: Final = "quantization_config"
METHODS: Final = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")


def quantization_of(config: ConfigFile) -> Method | None:
    """Return the quantisation method in a model's settings; None if the weights are not quantised."""
    if not config.is_set(SETTINGS):
        return None
    settings = config.section(SETTINGS)
    method = settings.fields.get("quant_method")
    if not isinstance(method, str):
        raise settings.error("quant_method", f"one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise refusal(settings, repr(method))
    return _reader(method)(settings)


def _reader(method: str) -> Callable[[ConfigFile], Method]:
    """Return the function that reads the settings of a method."""
    match method:
        case "awq":
            from quire.compute.quantized.awq import Awq

            return Awq.read
        case "compressed-tensors":
            from quire.compute.quantized.compressed import Compressed

            return Compressed.read
        case "fp8":
            from quire.compute.quantized.fp8 import BlockFp8

            return BlockFp8.read
        case "gptq":
            from quire.compute.quantized.gptq import Gptq

            return Gptq.read
    from quire.compute.quantized.mxfp4 import Mxfp4

    return Mxfp4.read
