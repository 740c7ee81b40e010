"""Requires that errors about the weights of a GGUF file name its own tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from quire.compute.gguf.header import GgufHeader, GgufTensor
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models.base import DecoderSpec
from quire.compute.weights.decoder_weights import WeightReader
from quire.core.errors import CheckpointError


def require_named(
    header: GgufHeader, spec: DecoderSpec, names: Iterable[str], wrong_size: Callable[[GgufTensor], int]
) -> None:
    """Leave each tensor of layers 0, 2, … out, give those of the others a wrong size, and do both to all other tensors.

    `header` is that of m.gguf.
    """
    for name in names:
        layer = re.match(r"blk\.(\d+)\.", name)
        is_odd = layer is not None and int(layer[1]) % 2 == 1
        if not is_odd:
            rest = {other: tensor for other, tensor in header.tensors.items() if other != name}
            with pytest.raises(CheckpointError, match=rf"m\.gguf: tensors \(missing: {re.escape(name)}\) is "):
                WeightReader(spec, GgufTensors(replace(header, tensors=rest)), "float32")
        if is_odd or layer is None:
            tensor = header.tensors[name]
            short = replace(tensor, shape=(*tensor.shape[:-1], wrong_size(tensor)))
            with pytest.raises(CheckpointError, match=rf"wrong shape: {re.escape(name)} \[.*\] for \[.*\]\) is "):
                WeightReader(spec, GgufTensors(replace(header, tensors={**header.tensors, name: short})), "float32")
