"""The parts of models that the torch engine does not run yet."""

from __future__ import annotations

from quire.compute.models.base import DecoderSpec


def missing(spec: DecoderSpec) -> str:
    """Return what a model has that this engine does not run; empty if it runs the model."""
    attention, layers = spec.attention, spec.layers
    if attention.latent is not None:
        return "latents (MLA)"
    if spec.delta is not None or attention.gated:
        return "linear attention"
    if spec.convolution is not None:
        return "short convolutions"
    if any(layer.keys_of is not None or layer.keys_are_values for layer in layers):
        return "layers that share keys and values"
    if attention.value_norm or spec.layer_inputs is not None or spec.layer_scale:
        return "Gemma 4's layers"
    if spec.experts is not None and (spec.experts.own_norms or spec.experts.factors or spec.experts.score_scale != 1.0):
        return "experts with norms or factors of their own"
    if any(layer.heads is not None or layer.intermediate_size is not None for layer in layers):
        return "layers of different sizes"
    return ""
