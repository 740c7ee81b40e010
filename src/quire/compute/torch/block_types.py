"""Decides which matrices keep their file's blocks on a GPU, without importing torch, so that any machine can plan.

A GPU reads codes of 4 and of 8 bits (`quire.compute.torch.blocks`); blocks of other types are widened. Parts that are
fused into one matrix keep their blocks only if all have the same type; the same holds for the experts of a layer. On a
CPU no matrix keeps its blocks, because torch would widen them at each use; with several ranks none does either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.torch.settings import TorchSettings

Joined = tuple[tuple[Part, ...], ...]
CODINGS: Final = MappingProxyType(
    {
        "Q4_0": "Q4_0",
        "Q4_1": "Q4_1",
        "Q4_K": "Q4_K",
        "Q5_0": "Q8_0",
        "Q6_K": "Q6_K_wide",
        "Q8_0": "Q8_0",
        "MXFP4": "Q8_0",
        "E4M3": "E4M3",
    }
)
"""The types of blocks that a GPU keeps, and the coding whose size each has there."""
FUSED: Final[Joined] = ((Part.QUERY, Part.KEY, Part.VALUE), (Part.GATE, Part.UP), (Part.SHARED_GATE, Part.SHARED_UP))
OF_EXPERTS: Final[Joined] = ((Part.EXPERT_GATE, Part.EXPERT_UP), (Part.EXPERT_DOWN,))


def kept_blocks(spec: DecoderSpec, block_types: Mapping[str, str], settings: TorchSettings) -> dict[str, str]:
    """Return the block types of a checkpoint's matrices that keep their blocks, by name. Does not mutate."""
    if settings.weights != "auto" or settings.device != "cuda" or settings.tensor_parallel > 1:
        return {}
    kept = {name: kind for name, kind in block_types.items() if kind in CODINGS}
    for names in _joined(spec) if kept else ():
        if len({kept.get(name) for name in names}) > 1:
            kept = {name: kind for name, kind in kept.items() if name not in names}
    return kept


def codings(kept: Mapping[str, str]) -> dict[str, str]:
    """Return the codings of matrices that keep their blocks, by name, to compute their size."""
    return {name: CODINGS[kind] for name, kind in kept.items()}


def _joined(spec: DecoderSpec) -> Iterator[set[str]]:
    """Yield the names of the tensors that become one matrix, or the matrices of one layer's experts."""
    num_experts = 0 if spec.experts is None else spec.experts.num_experts
    for layer in range(len(spec.layers)):
        held = spec.layer_parts(spec.layers[layer])
        for parts in FUSED:
            yield {_name(spec, part, layer) for part in parts if part in held}
        for parts in OF_EXPERTS if spec.layers[layer].sparse else ():
            of_experts = [part for part in parts if part in spec.sources]
            yield {_name(spec, part, layer, expert) for part in of_experts for expert in range(num_experts)}


def _name(spec: DecoderSpec, part: Part, layer: int, expert: int = 0) -> str:
    return f"{spec.sources[part].stem_of(layer, expert)}.weight"
