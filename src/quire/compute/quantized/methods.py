"""The methods by their names in `quantization_config`; all others are refused. Each is imported when a model has it."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import Method, refusal
from quire.core.model_files import ModelFiles

SETTINGS: Final = "quantization_config"
MODELOPT_FILE: Final = "hf_quant_config.json"
"""Where older versions of ModelOpt write their settings, in the section "quantization"."""
METHODS: Final = MappingProxyType(
    {
        "auto-round": "auto_round",
        "awq": "awq",
        "bitsandbytes": "bitsandbytes",
        "compressed-tensors": "compressed",
        "fbgemm_fp8": "fbgemm",
        "fp8": "fp8",
        "gptq": "gptq",
        "intel/auto-round": "auto_round",
        "modelopt": "modelopt",
        "mxfp4": "mxfp4",
    }
)
"""The module of each; its `read` interprets the settings."""


def quantization_of(config: ConfigFile, files: ModelFiles) -> Method | None:
    """Return the quantisation method in the settings among a model's files; None if the weights are not quantised."""
    if not config.is_set(SETTINGS):
        return _of_modelopt(files) if files.has(MODELOPT_FILE) else None
    settings = config.section(SETTINGS)
    name = settings.fields.get("quant_method")
    if not isinstance(name, str):
        raise settings.error("quant_method", f"one of {', '.join(METHODS)}")
    if name not in METHODS:
        raise refusal(settings, repr(name))
    return _read(name, settings)


def _of_modelopt(files: ModelFiles) -> Method | None:
    settings = ConfigFile.read(files, MODELOPT_FILE).section("quantization")
    return _read("modelopt", settings) if settings.is_set("quant_algo") else None


def _read(name: str, settings: ConfigFile) -> Method:
    method: Method = import_module(f"{__package__}.{METHODS[name]}").read(settings)
    return method
