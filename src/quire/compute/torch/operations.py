"""What a decoder does to rows of numbers between its products and its attention, in two forms.

`Operations` is what the layer walk asks for; which form answers is chosen once, when a decoder is made.
`PlainOperations` is torch alone, on any device, written to be read: what the fused Triton forms are compared with. All
work row by row: no sum runs over more than one row.

Every form computes in float32 and rounds once, to the dtype of the rows. One place has two roundings: `add_norm` rounds
the sum, and norms what was rounded, so that it is `norm` of the new residual stream to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn import functional

from quire.compute.models.base import Activation, RopeSpec
from quire.compute.torch.attention.base import AttentionBackend, KVPair

RUN: Final = 64
"""Numbers: a multiple of what any CPU takes at once."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm: by root mean square, or by mean and variance where it `centers`. An offset of the scale is added in."""

    weight: torch.Tensor  # float32 [size]
    bias: torch.Tensor | None  # float32 [size]
    epsilon: float
    centers: bool


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How the rows of a fused product are cut: num_heads queries, num_kv_heads keys, as many values; their norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Angles:
    """By how much the pairs (i, i + rotary_dim / 2) of each token's heads turn; the scale of the spec is in them."""

    cosines: torch.Tensor  # float32 [num_tokens, rotary_dim / 2]
    sines: torch.Tensor  # float32 [num_tokens, rotary_dim / 2]

    @classmethod
    def at(cls, positions: torch.Tensor, rope: RopeSpec, frequencies: torch.Tensor) -> Angles:
        """Return the angles of positions; `frequencies` are the rope's inverse ones, float32 on the device."""
        # Models are trained with angles rounded to float32; the functions of an angle are exact.
        exact = (positions.to(torch.float32)[:, None] * frequencies).to(torch.float64)
        return cls(exact.cos().to(torch.float32) * rope.scale, exact.sin().to(torch.float32) * rope.scale)


class Operations(Protocol):
    """The operations of a decoder on rows, `[num_tokens, size]`. Nothing passed in is mutated but the KV memory."""

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the rows normed."""
        ...

    def add_norm(self, rows: torch.Tensor, update: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows + update, and that normed."""
        ...

    def gated(self, gate_and_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) × up for rows that hold both, `[num_tokens, 2 × size]`, the gate first."""
        ...

    def activate(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of each number."""
        ...

    def rotate_and_write(
        self, projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
    ) -> torch.Tensor:
        """Norm and turn queries and keys, store keys and values; return the queries. Mutates the slots of the pair.

        `projected` is `[num_tokens, (num_heads + 2 × num_kv_heads) × head_dim]`, the result `[num_tokens, num_heads,
        head_dim]`. Without angles nothing turns; a token whose slot is -1 stores nothing.
        """
        ...


class PlainOperations:
    """Torch operations; implements `Operations`."""

    def __init__(self, attention: AttentionBackend[object]) -> None:
        self._attention = attention

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the rows normed over their last dimension."""
        numbers = rows.to(torch.float32)
        if norm.centers:
            numbers = numbers - numbers.mean(dim=-1, keepdim=True)
        length = torch.sqrt(numbers.square().mean(dim=-1, keepdim=True) + norm.epsilon)
        normed = norm.weight * (numbers / length)
        return (normed if norm.bias is None else normed + norm.bias).to(rows.dtype)

    def add_norm(self, rows: torch.Tensor, update: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows + update, and that normed."""
        total = rows + update
        return total, self.norm(total, norm)

    def gated(self, gate_and_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) × up."""
        gate, up = gate_and_up.to(torch.float32).chunk(2, dim=-1)
        return (activated(gate, activation) * up).to(gate_and_up.dtype)

    def activate(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of each number."""
        return activated(rows.to(torch.float32), activation).to(rows.dtype)

    def rotate_and_write(
        self, projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
    ) -> torch.Tensor:
        """Norm and turn queries and keys, store keys and values; return the queries. Mutates the slots of the pair."""
        heads = projected.to(torch.float32).unflatten(-1, (-1, form.head_dim))  # [num_tokens, all heads, head_dim]
        queries, keys, values = heads.split((form.num_heads, form.num_kv_heads, form.num_kv_heads), dim=1)
        if form.query_norm is not None and form.key_norm is not None:
            queries, keys = self.norm(queries, form.query_norm), self.norm(keys, form.key_norm)
        if angles is not None:
            queries, keys = rotated(queries, angles), rotated(keys, angles)
        self._attention.write_kv(pair, slots, keys, values)
        return queries.to(projected.dtype)


def activated(numbers: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of each number, float32."""
    # On the CPU torch rounds the last few numbers of a run of memory otherwise than the rest: let none of ours be last.
    run = functional.pad(numbers.flatten(), (0, -numbers.numel() % RUN))
    if activation is Activation.RELU:
        run = functional.relu(run)
    elif activation is Activation.SILU:
        run = functional.silu(run)
    else:
        run = functional.gelu(run, approximate="tanh" if activation is Activation.GELU_TANH else "none")
    return run[: numbers.numel()].view(numbers.shape)


def rotated(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Return heads, float32 `[num_tokens, num_heads, head_dim]`, with their pairs turned."""
    half = angles.cosines.shape[-1]
    cosines, sines = angles.cosines[:, None, :], angles.sines[:, None, :]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, dim=-1)
