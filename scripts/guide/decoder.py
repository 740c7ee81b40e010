"""The guide as a torch module: a small Qwen3 decoder, with the parameter names of a Hugging Face checkpoint.

Several conversations are packed into one row of a batch. Each has its own positions and attends only to itself, so the
model learns the same from a packed row as from separate conversations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a guide, with the names of Hugging Face's config."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6

    def fields(self) -> dict[str, int | float]:
        """Return the sizes by name."""
        return asdict(self)


ROPE_THETA = 10_000.0


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """Return the outputs of the heads, projected to the hidden size."""
        rows, length, _ = hidden.shape
        heads = (rows, length, -1, self.head_dim)
        queries = _rotate(self.q_norm(self.q_proj(hidden).view(heads)).transpose(1, 2), angles)
        keys = _rotate(self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2), angles)
        values = self.v_proj(hidden).view(heads).transpose(1, 2)
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
        return self.o_proj(seen.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return silu(gate) times up, projected down."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """Attention and MLP, each after a norm; in training, with dropout on their outputs."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """Return the hidden states after this layer."""
        hidden = hidden + self.dropout(self.self_attn(self.input_layernorm(hidden), angles, visible))
        return hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))


class Decoder(nn.Module):
    """The layers between embedding and final norm."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)


class Guide(nn.Module):
    """Maps token ids to logits; the head is the embedding."""

    def __init__(self, shape: Shape, *, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        small = (2 * shape.num_hidden_layers) ** -0.5  # each layer's part of the residual sum begins small
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = small if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=scale * shape.hidden_size**-0.5)

    def forward(self, token_ids: Tensor, positions: Tensor, owners: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits of the `wanted` places; `owners` numbers the texts of a row.

        All arguments are [num_rows, length].
        """
        length = token_ids.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool).tril()
        visible = ((owners[:, :, None] == owners[:, None, :]) & earlier)[:, None]
        angles = _angles(positions, self.shape.head_dim)
        hidden = self.model.dropout(self.model.embed_tokens(token_ids))
        for layer in self.model.layers:
            hidden = layer(hidden, angles, visible)
        return functional.linear(self.model.norm(hidden[wanted]), self.model.embed_tokens.weight)


def _angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    half = positions[:, None, :, None].float() * frequencies  # [num_rows, 1, length, head_dim / 2]
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


def _rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]
