"""FusedOperations: `Operations` in Triton kernels: one launch instead of torch's four to twenty.

A layer of a small model reads its weights in a few microseconds, so every launch between its products counts. One
kernel computes a sum and its norm, another gate and up, and a third everything between the fused product and attention:
norms of heads, rotation, quantisation and the write to the KV memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.compute.models.parts import NormScope
from quire.compute.models.sublayers import Activation
from quire.compute.torch.attention.base import AttentionBackend, KVPair
from quire.compute.torch.kernels import activations, norms, rope_cache
from quire.compute.torch.operations import Angles, HeadForm, Norm, PlainOperations


class FusedOperations:
    """Triton kernels; implements `Operations`."""

    def __init__(self, attention: AttentionBackend[object]) -> None:
        self._plain = PlainOperations(attention)

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the normalised rows."""
        return norms.norm(rows, norm.weight, norm.bias, epsilon=norm.epsilon, centers=norm.centers)

    def add_norm(self, rows: torch.Tensor, update: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows + update, and the norm of that sum."""
        return norms.add_norm(rows, update, norm.weight, norm.bias, epsilon=norm.epsilon, centers=norm.centers)

    def gated(self, gate_and_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) × up."""
        return activations.activate(gate_and_up, activation=activation.value, gated=True)

    def activate(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of each number."""
        return activations.activate(rows, activation=activation.value, gated=False)

    def rotate_and_write(
        self, projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values; return the queries. Mutates the pair.

        A norm of all heads together is one more launch for queries and one for keys, rounded to the dtype of the rows.
        """
        query_norm, key_norm = form.query_norm, form.key_norm
        is_rare = form.scope is NormScope.EACH_HEAD
        if query_norm is not None and form.scope is NormScope.ALL_HEADS:
            is_rare = key_norm is None or form.value_norm is not None or form.keys_are_values
            if key_norm is not None and not is_rare:
                widths = [count * form.head_dim for count in (form.num_heads, form.num_kv_heads, form.num_kv_heads)]
                queries, keys, values = projected.split(widths, dim=-1)
                projected = torch.cat((self.norm(queries, query_norm), self.norm(keys, key_norm), values), dim=-1)
                form = replace(form, query_norm=None, key_norm=None)
        # Few families have a norm of heads by mean and variance, or weights for each head: the kernel supports neither.
        if is_rare or any(norm is not None and norm.centers for norm in (form.query_norm, form.key_norm)):
            heads = torch.cat(self._plain.prepared(projected, form, angles), dim=1).flatten(1)
            form = HeadForm(form.num_heads, form.num_kv_heads, form.head_dim, key_centre=form.key_centre)
            return rope_cache.rotate_and_write(heads, form, None, pair, slots).to(projected.dtype)
        return rope_cache.rotate_and_write(projected, form, angles, pair, slots)
