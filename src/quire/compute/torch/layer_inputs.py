"""LayerInputs: what layers read in addition to hidden states, if a model has inputs of its own for each layer.

    ids           ─► row of the embedding of all layers ─► × scale ─┐
    embedded rows ─► product ─► × scale ─► norm for each layer ─────┴─ + ─ × scale ─► once for all layers

    hidden state  ─► gate, activation, × input of the layer ─► output ─► added by the layer

The embedding is on the device like all weights: 4.7 GB in bfloat16 for Gemma 4 E2B, of which a token reads 18 kB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.compute.models.base import DecoderSpec
from quire.compute.models.sublayers import Activation, LayerInputsSpec
from quire.compute.torch.attention.base import GivenRows
from quire.compute.torch.operations import Operations
from quire.compute.torch.products import Product
from quire.compute.torch.weights import InputWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computes the inputs of layers, with implementations chosen once. Immutable."""

    spec: LayerInputsSpec
    weights: InputWeights
    operations: Operations
    product: Product
    activation: Activation

    @classmethod
    def of(
        cls, spec: DecoderSpec, weights: InputWeights | None, operations: Operations, product: Product
    ) -> LayerInputs | None:
        """Return the inputs of a model; None if it has none."""
        if spec.layer_inputs is None or weights is None:
            return None
        return cls(spec.layer_inputs, weights, operations, product, spec.mlp.activation)

    def all(self, embedded: torch.Tensor, ids: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        """Return the inputs of all layers for each token: `[num_tokens, num_layers, size]`."""
        spec, dtype = self.spec, embedded.dtype
        if given is not None:
            ids = ids.index_fill(0, given.tokens.long(), spec.given_token)
        projected = self.product(embedded, self.weights.projection) * spec.input_scale
        normed = self.operations.norm(projected.view(-1, spec.size), self.weights.norm).view(projected.shape)
        rows = self.weights.embedding.looked_up(ids).to(torch.float32) * spec.embedding_scale
        inputs = (normed.to(torch.float32) + rows) * spec.scale
        return inputs.to(dtype).unflatten(-1, (-1, spec.size))

    def update(self, hidden: torch.Tensor, own: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """Return what a layer makes of its own input, `[num_tokens, size]`, before the norm."""
        assert weights.input_gate is not None and weights.input_output is not None  # every layer has an input, or none
        gate_and_input = torch.cat((self.product(hidden, weights.input_gate), own), dim=-1)
        return self.product(self.operations.gated(gate_and_input, self.activation), weights.input_output)
