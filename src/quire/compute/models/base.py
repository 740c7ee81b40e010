"""DecoderSpec: a model as data.

Every decoder here is the same loop: embed, then per layer attend and transform, each added to the
residual stream, then norm and head. Families differ in a few facts: which norms, where they stand,
how positions enter, how far a layer sees, which activation. A `DecoderSpec` states these facts, and
the engines (reference, native, torch) interpret them, so that a family is written once and a kernel
never asks which family it serves.

A `Part` is one weight-bearing piece: a matrix or a norm, each with an optional bias. The spec knows
which parts a model has, their shapes, and what a checkpoint calls them; hence a checkpoint can be
checked whole before it is used. Names are templates with a `{layer}` in them; `.weight` and `.bias`
are appended.

Only what the reference decoder interprets is declared; a new family adds the field and its
interpretation together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from quire.core.errors import CheckpointError
from quire.core.kv_spec import KVCacheSpec


class NormKind(Enum):
    """By root mean square, or by mean and variance; the latter has a bias."""

    RMS = "rms"
    LAYER = "layer"


class Activation(Enum):
    """The non-linearity of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


class Part(Enum):
    """A piece of the model that has weights."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    ATTENTION_NORM = "attention_norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_NORM = "query_norm"
    KEY_NORM = "key_norm"
    OUTPUT = "output"
    AFTER_ATTENTION_NORM = "after_attention_norm"
    MLP_NORM = "mlp_norm"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    AFTER_MLP_NORM = "after_mlp_norm"
    FINAL_NORM = "final_norm"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class PartShape:
    """The shape of a part's weight, and whether it has a bias (of the weight's first dimension)."""

    weight: tuple[int, ...]
    bias: bool = False

    def tensors(self, stem: str) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor of the part.

        >>> PartShape((3, 2), bias=True).tensors("up")
        {'up.weight': (3, 2), 'up.bias': (3,)}
        """
        found = {f"{stem}.weight": self.weight}
        if self.bias:
            found[f"{stem}.bias"] = self.weight[:1]
        return found


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm. With `unit_offset` the scale is 1 + weight (Gemma)."""

    kind: NormKind
    epsilon: float
    unit_offset: bool = False

    def shape(self, size: int) -> PartShape:
        """Return the shape of its weights for vectors of `size`."""
        return PartShape((size,), bias=self.kind is NormKind.LAYER)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The first `rotary_dim` dimensions of a head turn, in pairs (i, i + half)."""

    base: float
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What all attention layers share.

    Query head h reads key-value head h // (num_heads / num_kv_heads).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    score_soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer. `window` None: full attention; `rope` None: none."""

    window: int | None
    rope: RopeSpec | None


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where not gated."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only model.

    Norms stand before each sublayer (`norm_before`), after it (`norm_after`, before it joins the
    residual stream), or both. `learned_positions` is the offset of learned position embeddings in
    their table, None where there are none. `names` says what a checkpoint calls each part;
    `ignored_tensors` may be in a checkpoint without being used.
    """

    vocab_size: int
    hidden_size: int
    context_length: int
    norm: NormSpec
    attention: AttentionSpec
    mlp: MLPSpec
    layers: tuple[LayerSpec, ...]
    names: Mapping[Part, str]
    ignored_tensors: frozenset[str] = frozenset()
    tied_head: bool = False
    norm_before: bool = True
    norm_after: bool = False
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        if heads % kv_heads:
            raise CheckpointError("num_attention_heads", heads, f"a multiple of the {kv_heads} kv heads")
        for layer in self.layers:
            if layer.rope is not None:
                _check_rope(layer.rope, self.attention.head_dim)

    def model_parts(self) -> dict[Part, PartShape]:
        """Return the parts that stand once in the model."""
        parts = {
            Part.EMBEDDING: PartShape((self.vocab_size, self.hidden_size)),
            Part.FINAL_NORM: self.norm.shape(self.hidden_size),
        }
        if self.learned_positions is not None:
            rows = self.context_length + self.learned_positions
            parts[Part.POSITIONS] = PartShape((rows, self.hidden_size))
        if not self.tied_head:
            parts[Part.HEAD] = PartShape((self.vocab_size, self.hidden_size))
        return parts

    def layer_parts(self) -> dict[Part, PartShape]:
        """Return the parts that stand in every layer."""
        return self._attention_parts() | self._mlp_parts() | self._norm_parts()

    def _attention_parts(self) -> dict[Part, PartShape]:
        attention, hidden = self.attention, self.hidden_size
        query = attention.num_heads * attention.head_dim
        key = attention.num_kv_heads * attention.head_dim
        parts = {
            Part.QUERY: PartShape((query, hidden), attention.bias),
            Part.KEY: PartShape((key, hidden), attention.bias),
            Part.VALUE: PartShape((key, hidden), attention.bias),
            Part.OUTPUT: PartShape((hidden, query), attention.output_bias),
        }
        if attention.qk_norm is not None:
            parts[Part.QUERY_NORM] = attention.qk_norm.shape(attention.head_dim)
            parts[Part.KEY_NORM] = attention.qk_norm.shape(attention.head_dim)
        return parts

    def _mlp_parts(self) -> dict[Part, PartShape]:
        mlp, hidden = self.mlp, self.hidden_size
        parts = {
            Part.UP: PartShape((mlp.intermediate_size, hidden), mlp.bias),
            Part.DOWN: PartShape((hidden, mlp.intermediate_size), mlp.bias),
        }
        if mlp.gated:
            parts[Part.GATE] = PartShape((mlp.intermediate_size, hidden), mlp.bias)
        return parts

    def _norm_parts(self) -> dict[Part, PartShape]:
        before = (Part.ATTENTION_NORM, Part.MLP_NORM) if self.norm_before else ()
        after = (Part.AFTER_ATTENTION_NORM, Part.AFTER_MLP_NORM) if self.norm_after else ()
        return dict.fromkeys(before + after, self.norm.shape(self.hidden_size))

    def kv_cache_spec(self, block_size: int, dtype: str = "float32") -> KVCacheSpec:
        """Return what a block of KV memory holds for this model."""
        return KVCacheSpec.from_layers(
            [layer.window for layer in self.layers],
            block_size=block_size,
            num_kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            dtype=dtype,
        )


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise CheckpointError("rotary dimensions", rope.rotary_dim, f"an even number from 2 to {head_dim}")
