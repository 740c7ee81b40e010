"""The parts of models that the torch engine does not run yet."""

from __future__ import annotations

from quire.compute.models.base import DecoderSpec


def missing(spec: DecoderSpec) -> str:
    """Return what a model has that this engine does not run; empty if it runs the model."""
    if spec.joins_states:
        return "the layer of a model that guesses (speculation mtp)"
    if spec.attention.latent is not None:
        return "latents (MLA)"
    if spec.delta is not None:
        return "linear attention"
    if spec.attention.gated:
        return "gates on attention"
    if spec.mamba is not None:
        return "state-space layers (Mamba)"
    if spec.attention.bidirectional:
        return "attention to later tokens"
    if spec.convolution is not None:
        return "short convolutions"
    if not all(layer.attends and layer.transforms for layer in spec.layers):
        return "layers with one sublayer"
    return ""
