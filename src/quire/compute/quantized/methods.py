"""The methods by their names in `quantization_config`; all others are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.awq import Awq
from quire.compute.quantized.compressed import Compressed
from quire.compute.quantized.fp8 import BlockFp8
from quire.compute.quantized.gptq import Gptq
from quire.compute.quantized.matrix import Method, refusal
from quire.compute.quantized.mxfp4 import Mxfp4

SETTINGS: Final = "quantization_config"
METHODS: Final[MappingProxyType[str, Callable[[ConfigFile], Method]]] = MappingProxyType(
    {
        "awq": Awq.read,
        "compressed-tensors": Compressed.read,
        "fp8": BlockFp8.read,
        "gptq": Gptq.read,
        "mxfp4": Mxfp4.read,
    }
)


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
    return METHODS[method](settings)
