"""FBGEMM: fp8 as in compressed-tensors, with a scale for each output."""

from __future__ import annotations

from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.compressed import FLOAT, Compressed, Scheme
from quire.compute.quantized.matrix import optional_texts


def read(config: ConfigFile) -> Compressed:
    """Read the settings of a folder."""
    scheme = Scheme(FLOAT, 8, True, "channel", (1, 0))
    return Compressed("FBGEMM, fp8", scheme, optional_texts(config, "modules_to_not_convert"))
