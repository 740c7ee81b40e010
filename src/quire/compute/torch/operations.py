"""The operations of a decoder on rows, between its products and its attention, in two implementations.

The layer walk uses `Operations`; its implementation is chosen once, when a decoder is made. `PlainOperations` is
readable torch for any device, and the fused Triton kernels are compared with it. All work row by row: no sum runs over
more than one row.

Every operation computes in float32 and rounds once, to the dtype of the rows. Only `add_norm` rounds twice: it rounds
the sum before the norm, so that its result is `norm` of the new residual stream, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional

from quire.compute.models.parts import NormScope
from quire.compute.models.sublayers import Activation, RopeSpec
from quire.compute.torch.attention.base import AttentionBackend, KVPair

RUN: Final = 64
"""A multiple of the vector width of any CPU, in numbers."""
SWIGLU_FACTOR: Final = 1.702
SWIGLU_LIMIT: Final = 7.0


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm: by root mean square, or by mean and variance with `centers`. `weight` includes any unit offset."""

    weight: torch.Tensor  # float32 [size]
    bias: torch.Tensor | None  # float32 [size]
    epsilon: float
    centers: bool


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How to cut the rows of a fused product: num_heads queries, num_kv_heads keys, as many values; and their norms.

    `num_kv_heads` 0: the layer attends to the keys and values of another. `keys_are_values`: the product has no values,
    which are the keys before norms and positions.
    `scope`: the numbers that a norm covers; the weights of a norm of each head are `[num_heads, head_dim]`.
    `rotates_first`: norms follow the rotation, instead of preceding it.
    `key_centre`, float32 `[num_kv_heads, head_dim]`, is subtracted from the keys before they are stored.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    key_centre: torch.Tensor | None = None
    scope: NormScope = NormScope.HEAD
    rotates_first: bool = False
    keys_are_values: bool = False

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values of rows, `[num_tokens, all heads, head_dim]`, as views."""
        num_values = 0 if self.keys_are_values else self.num_kv_heads
        queries, keys, values = heads.split((self.num_heads, self.num_kv_heads, num_values), dim=1)
        return queries, keys, keys if self.keys_are_values else values


class Frequencies(NamedTuple):
    """The frequencies of rotary positions, on the device, and the axis of each; None: there are no axes."""

    inverse: torch.Tensor  # float32 [rotary_dim / 2]
    axes: torch.Tensor | None  # [rotary_dim / 2]

    @classmethod
    def of(cls, rope: RopeSpec, device: torch.device) -> Frequencies:
        """Return those of a spec."""
        axes = torch.tensor(rope.axes, device=device) if rope.axes else None
        return cls(torch.tensor(rope.inverse_frequencies, device=device), axes)


@dataclass(frozen=True, slots=True)
class Angles:
    """The angles of the pairs (i, i + rotary_dim / 2) of each token's heads, multiplied by the spec's scale.

    `query_factors`: numbers by which the token's queries are multiplied, if the spec has a growth.
    """

    cosines: torch.Tensor  # float32 [num_tokens, rotary_dim / 2]
    sines: torch.Tensor  # float32 [num_tokens, rotary_dim / 2]
    query_factors: torch.Tensor | None = None  # float32 [num_tokens]

    @classmethod
    def at(
        cls,
        positions: torch.Tensor,
        rope: RopeSpec,
        table: Frequencies,
        coordinates: Sequence[torch.Tensor] | None = None,
    ) -> Angles:
        """Return the angles of tokens; `coordinates` on each axis, None: each is the position."""
        turning = positions[:, None]
        if coordinates is not None and table.axes is not None:
            turning = torch.stack(tuple(coordinates), dim=1)[:, table.axes]
        # Models are trained with angles rounded to float32, so only the cosines and sines are exact.
        exact = (turning.to(torch.float32) * table.inverse).to(torch.float64)
        factors = None
        if rope.query_growth:
            times = 1 + (positions + rope.growth_offset).div(rope.growth_length, rounding_mode="floor")
            factors = (1 + rope.query_growth * times.to(torch.float64).log()).to(torch.float32)
        return cls(exact.cos().to(torch.float32) * rope.scale, exact.sin().to(torch.float32) * rope.scale, factors)


class Operations(Protocol):
    """The operations of a decoder on rows, `[num_tokens, size]`. Of their arguments they mutate only the KV memory."""

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm of each row."""
        ...

    def add_norm(self, rows: torch.Tensor, update: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows + update, and the norm of that sum."""
        ...

    def gated(self, gate_and_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) × up for rows with both, `[num_tokens, 2 × size]`, the gate first.

        A clamped gate also clamps `up`, and adds 1 to it.
        """
        ...

    def activate(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of each number."""
        ...

    def rotate_and_write(
        self, projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values; return the queries. Mutates the pair's slots.

        `projected` is `[num_tokens, (num_heads + 2 × num_kv_heads) × head_dim]`, without values if keys are the values;
        the result `[num_tokens, num_heads, head_dim]`. Without angles nothing rotates; a token with slot -1 stores
        nothing.
        """
        ...


class PlainOperations:
    """Torch operations; implements `Operations`."""

    def __init__(self, attention: AttentionBackend[object]) -> None:
        self._attention = attention

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm of each row, over the last dimension."""
        numbers = rows.to(torch.float32)
        if norm.centers:
            numbers = numbers - numbers.mean(dim=-1, keepdim=True)
        length = torch.sqrt(numbers.square().mean(dim=-1, keepdim=True) + norm.epsilon)
        normed = norm.weight * (numbers / length)
        return (normed if norm.bias is None else normed + norm.bias).to(rows.dtype)

    def add_norm(self, rows: torch.Tensor, update: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows + update, and the norm of that sum."""
        total = rows + update
        return total, self.norm(total, norm)

    def gated(self, gate_and_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) × up."""
        gate, up = gate_and_up.to(torch.float32).chunk(2, dim=-1)
        if activation is Activation.CLAMPED_SWIGLU:
            up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        return (activated(gate, activation) * up).to(gate_and_up.dtype)

    def activate(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of each number."""
        return activated(rows.to(torch.float32), activation).to(rows.dtype)

    def rotate_and_write(
        self, projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values; return the queries. Mutates the pair."""
        queries, keys, values = self.prepared(projected, form, angles)
        if form.num_kv_heads:
            keys = keys if form.key_centre is None else keys - form.key_centre
            self._attention.write_kv(pair, slots, keys, values)
        return queries.to(projected.dtype)

    def prepared(
        self, projected: torch.Tensor, form: HeadForm, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, normalised and rotated: float32 `[num_tokens, heads, head_dim]`."""
        heads = projected.to(torch.float32).unflatten(-1, (-1, form.head_dim))  # [num_tokens, all heads, head_dim]
        queries, keys, values = form.split(heads)
        queries = self._prepared(queries, form.query_norm, form, angles)
        if angles is not None and angles.query_factors is not None:
            queries = queries * angles.query_factors[:, None, None]
        if form.num_kv_heads:
            keys = self._prepared(keys, form.key_norm, form, angles)
            if form.value_norm is not None:
                values = self.norm(values, form.value_norm)
        return queries, keys, values

    def _prepared(self, heads: torch.Tensor, norm: Norm | None, form: HeadForm, angles: Angles | None) -> torch.Tensor:
        """Return queries or keys, normalised and rotated."""
        if angles is not None and form.rotates_first:
            heads = rotated(heads, angles)
        if norm is not None:
            rows = heads.flatten(1) if form.scope is NormScope.ALL_HEADS else heads
            heads = self.norm(rows, norm).view(heads.shape)
        return heads if angles is None or form.rotates_first else rotated(heads, angles)


def are_finite(rows: torch.Tensor) -> torch.Tensor:
    """Return for each row whether all its numbers are finite. Reads them once: a NaN is both minimum and maximum."""
    least, most = rows.aminmax(dim=-1)
    return least * 0 == most * 0  # if one is not finite, its product is NaN, which equals nothing; few small kernels


def activated(numbers: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of each number, float32."""
    run = _padded(numbers)
    if activation is Activation.RELU:
        run = functional.relu(run)
    elif activation is Activation.RELU_SQUARED:
        run = functional.relu(run).square()
    elif activation is Activation.SILU:
        run = functional.silu(run)
    elif activation is Activation.QUICK_GELU:
        run = run * torch.sigmoid(run * SWIGLU_FACTOR)
    elif activation is Activation.CLAMPED_SWIGLU:
        run = run.clamp(max=SWIGLU_LIMIT)
        run = run * torch.sigmoid(run * SWIGLU_FACTOR)
    else:
        run = functional.gelu(run, approximate="tanh" if activation is Activation.GELU_TANH else "none")
    return run[: numbers.numel()].view(numbers.shape)


def xielu(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the activation of each number by the four numbers of a layer; see `MLPSpec`."""
    positive, negative, slope, limit = numbers.unbind()
    x = _padded(rows.to(torch.float32))
    above = functional.softplus(positive) * x * x
    below = (slope + functional.softplus(negative)) * (torch.expm1(torch.minimum(x, limit)) - x)
    active = slope * x + torch.where(x > 0, above, below)
    return active[: rows.numel()].view(rows.shape).to(rows.dtype)


def _padded(numbers: torch.Tensor) -> torch.Tensor:
    """Return all numbers as a vector of a multiple of `RUN`: on a CPU, torch rounds the last ones differently."""
    return functional.pad(numbers.flatten(), (0, -numbers.numel() % RUN))


def rotated(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Return heads, float32 `[num_tokens, num_heads, head_dim]`, with their pairs rotated."""
    half = angles.cosines.shape[-1]
    cosines, sines = angles.cosines[:, None, :], angles.sines[:, None, :]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, dim=-1)
