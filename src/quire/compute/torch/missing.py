"""The parts of models that the torch engine does not run yet."""

from __future__ import annotations

from quire.compute.models.base import DecoderSpec


def missing(spec: DecoderSpec) -> str:
    """Return what a model has that this engine does not run; empty if it runs the model."""
    inputs = spec.layer_inputs
    parts = {
        "latents (MLA)": spec.attention.latent is not None,
        "linear attention": spec.delta is not None,
        "gates on attention": spec.attention.gated,
        "state-space layers (Mamba)": spec.mamba is not None,
        "attention to later tokens": spec.attention.bidirectional,
        "short convolutions": spec.convolution is not None,
        "layers with one sublayer": not all(layer.attends and layer.transforms for layer in spec.layers),
        "several residual streams (AltUp)": spec.streams is not None,
        "LAuReL": spec.laurel_rank > 0,
        "thresholds of gates": any(layer.gate_threshold is not None for layer in spec.layers),
        "inputs of layers for some tokens only": inputs is not None and inputs.num_tokens is not None,
    }
    return next((name for name, is_there in parts.items() if is_there), "")
