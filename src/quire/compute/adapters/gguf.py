"""An adapter in a GGUF file, as llama.cpp converts it: its tensors by the names of PEFT.

    blk.3.attn_q.weight.lora_a          [rank, in]               general.type     adapter
    blk.3.attn_q.weight.lora_b          [out, rank]              adapter.type     lora
    blk.3.ffn_up_exps.weight.lora_a     [experts, rank, in]      adapter.lora.alpha

If a model's file has the rows of a matrix in another order (gguf/row_orders.py), an adapter has the rows of B in it,
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.compute.adapters.settings import AdapterSettings
from quire.compute.arrays import FloatArray
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.name_tables.table import EXPERTS
from quire.compute.gguf.row_orders import TAKES_TURNS
from quire.compute.gguf.settings import architecture_of
from quire.compute.gguf.tensors import GgufEntry, GgufTensors
from quire.compute.models.base import DecoderSpec
from quire.core.errors import CheckpointError

A, B = ".lora_a", ".lora_b"
OF_A: Final = "lora_a."
"""Prefixed to the names of A, so that none is mistaken for a matrix of the model."""

TRANSPOSED: Final = "gpt2"
"""An architecture with transposed matrices, whose adapters have another conversion."""


class GgufAdapter:
    """The tensors of an adapter, by the names that PEFT gives them."""

    def __init__(self, header: GgufHeader, spec: DecoderSpec) -> None:
        self.name = str(header.path)
        if architecture_of(header) == TRANSPOSED:
            raise CheckpointError(f"{self.name}: general.architecture", TRANSPOSED, "another, or the folder of PEFT")
        for name in header.tensors:
            if not name.endswith((A, B)):
                raise CheckpointError(f"{self.name}: tensor {name!r}", "not of LoRA", f"names that end in {A} and {B}")
        sides = {
            end: {name.removesuffix(end): each for name, each in header.tensors.items() if name.endswith(end)}
            for end in (A, B)
        }
        key = f"{architecture_of(header)}.attention.head_count"
        counts = {key: spec.attention.num_heads, f"{key}_kv": spec.attention.num_kv_heads}
        if spec.delta is not None and spec.delta.heads_per_key > 1 and architecture_of(header) in TAKES_TURNS:
            raise CheckpointError(f"{self.name}: general.architecture", architecture_of(header), "the folder of PEFT")
        self._b = GgufTensors(replace(header, settings={**header.settings, **counts}, tensors=sides[B]))
        # The tensors of experts need no reordering, and their names refer to one matrix of each expert.
        self._a = GgufTensors(
            replace(
                header, tensors={(stem if _is_of_experts(stem) else OF_A + stem): sides[A][stem] for stem in sides[A]}
            )
        )
        stems = {sides[B][stem].start: stem for stem in sides[B]}
        self._of_b, self._of_a = dict[str, str](), dict[str, str]()
        for ours, entry in self._b.entries.items():
            module, stem = ours.removesuffix(".weight"), stems[entry.tensor.start]
            self._of_b[f"{module}.lora_B.weight"] = ours
            of_a = ours if _is_of_experts(stem) else OF_A + stem
            if of_a in self._a.entries:
                self._of_a[f"{module}.lora_A.weight"] = of_a
        # Without B: refused later, by the name of its module.
        for name in sorted(self._a.entries.keys() - self._of_a.values()):
            self._of_a[f"{name.removeprefix(OF_A).removesuffix('.weight')}.lora_A.weight"] = name

    @property
    def entries(self) -> Mapping[str, GgufEntry]:
        """All tensors by name."""
        found = {name: self._b.entries[ours] for name, ours in self._of_b.items()}
        return found | {name: self._a.entries[ours] for name, ours in self._of_a.items()}

    def require_floats(self, name: str) -> None:
        """Do nothing: every type that passes the check of the header can be read."""

    def tensor(self, name: str) -> FloatArray:
        """Return a tensor as float32."""
        return self._b.tensor(self._of_b[name]) if name in self._of_b else self._a.tensor(self._of_a[name])


def gguf_settings(header: GgufHeader) -> AdapterSettings:
    """Return the settings of an adapter; its tensors give the rank. Raises `CheckpointError` for other files."""
    for key, allowed in (("general.type", "adapter"), ("adapter.type", "lora")):
        if header.settings.get(key) != allowed:
            raise CheckpointError(f"{header.path}: {key}", header.settings.get(key), allowed)
    alpha: Any = header.settings.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise CheckpointError(f"{header.path}: adapter.lora.alpha", alpha, "a number above 0")
    return AdapterSettings(str(header.path), None, float(alpha), False, {}, {})


def _is_of_experts(stem: str) -> bool:
    return stem.removesuffix(".weight").rpartition(".")[2] in EXPERTS
