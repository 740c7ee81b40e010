"""DecoderSpec: a model as data.

Every decoder here is the same loop: embed, then per layer attend and transform, each added to the
residual stream, then norm and head. Families differ in a few facts: which norms and where, how positions
are encoded, the window of a layer, the activation. A `DecoderSpec` states these facts, and the engines
(reference, native, torch) interpret them. So a family is written once, and no kernel depends on the family
that it serves.

A `Part` is one piece with weights: a matrix or a norm, each with an optional bias (parts.py). The spec lists
the parts of a model, their shapes, and their tensors in a checkpoint (`WeightSource`; also as rows of a fused
tensor, also transposed). So an entire checkpoint can be checked before it is used.

One layer; `norm_before`, `norm_after` and `norm_joined` determine its norms:

    x ─┬─ ATTENTION_NORM ─ attention ─ AFTER_ATTENTION_NORM ─ + ─ JOINED_ATTENTION_NORM ─┐
       └──────────────────────────────────────────────────────┘                           │
    ┌─────────────────────────────────────────────────────────────────────────────────────┘
    └┬─ MLP_NORM ─ MLP or experts ─ AFTER_MLP_NORM ─ + ─ JOINED_MLP_NORM ─► next layer
     └───────────────────────────────────────────────┘

A `parallel` layer computes both from the same x:

    x ─┬─ ATTENTION_NORM ─ attention ─ AFTER_ATTENTION_NORM ─ + ─ + ─► next layer
       ├──────────────────────────────────────────────────────┘   │
       └─ MLP_NORM, or ATTENTION_NORM ─ MLP ─ AFTER_MLP_NORM ─────┘

The spec declares only what the reference decoder interprets; a new family adds a field together with its
interpretation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from quire.compute.models.parts import NormScope, NormSpec, Part, PartShape, WeightSource
from quire.core.errors import CheckpointError
from quire.core.kv_spec import RECURRENT, KVCacheSpec

MAX_EXPERTS: Final = 1 << 16
"""For all layers together: three times the number in any model. The tensors of each are checked one by one."""


class Activation(Enum):
    """The non-linearity of the MLP."""

    SILU = "silu"
    GELU = "gelu"  # exact, by the error function
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    CLAMPED_SWIGLU = "clamped_swiglu"  # x × sigmoid(1.702 x) of x = min(gate, 7), times up clamped to ±7, plus 1


class Scoring(Enum):
    """The function from a router's scores to the weights of experts."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # of each expert alone
    SPARSE_MIXER = "sparse_mixer"  # over an expert and those with a score near to its own


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The first `rotary_dim` dimensions of a head rotate, in pairs (i, i + rotary_dim / 2).

    At position p pair i rotates by p × inverse_frequencies[i]; cosine and sine are multiplied by
    `scale`. Queries, not keys, are also multiplied by 1 + `query_growth` × log(1 + floor(p / growth_length)). These
    numbers include any context extension, and are float32 values.
    """

    rotary_dim: int
    inverse_frequencies: tuple[float, ...]
    scale: float = 1.0
    query_growth: float = 0.0
    growth_length: int = 1


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: a token has one latent for all heads instead of keys and values (MLA).

    The latent is `rank` numbers, normalised by `norm`, and `rope_dim` more that rotate. It is the only key-value head.
    A key of a head is `plain_dim` numbers, its rows of KEY_UP times the latent, and the rotating numbers; a value is
    `value_dim` numbers, its rows of VALUE_UP times the latent. `query_rank`: the size of a second latent, also
    normalised, from which queries are computed; None: they are computed from the hidden state.

    Engines compute no keys and no values: they multiply a query by KEY_UP, attend to latents, and multiply the result
    by VALUE_UP.
    """

    rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    norm: NormSpec
    query_rank: int | None = None

    @property
    def query_dim(self) -> int:
        """The numbers of a query head, before it is multiplied by KEY_UP."""
        return self.plain_dim + self.rope_dim

    def parts(self, num_heads: int, hidden_size: int, bias: bool) -> dict[Part, PartShape]:
        """Return a layer's parts for queries and latents, and for keys and values from latents."""
        queries_from = self.query_rank or hidden_size
        parts = {
            Part.QUERY: PartShape((num_heads * self.query_dim, queries_from)),
            Part.LATENT: PartShape((self.rank + self.rope_dim, hidden_size), bias),
            Part.LATENT_NORM: self.norm.shape(self.rank),
            Part.KEY_UP: PartShape((num_heads * self.plain_dim, self.rank)),
            Part.VALUE_UP: PartShape((num_heads * self.value_dim, self.rank)),
        }
        if self.query_rank is not None:
            parts[Part.QUERY_DOWN] = PartShape((self.query_rank, hidden_size), bias)
            parts[Part.QUERY_DOWN_NORM] = self.norm.shape(self.query_rank)
        return parts


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention by the gated delta rule: a recurrent layer, with a state instead of keys and values.

    Each of `num_heads` value heads has a matrix S, `[key_dim, value_dim]`, which a token changes and reads:

        S = decay × S;  S += k × rate × (v - S k);  output = S q        decay, rate: from 0 to 1, by token and head

    Value head h uses the query and key of head h // (num_heads / num_key_heads). Queries, keys and values first go
    through a SiLU of a causal filter over `filter_width` tokens; then queries and keys have length 1, and queries are
    divided by √key_dim. With a = row of DELTA_DECAY and b = row of DELTA_RATE, decay = exp(-exp(DELTA_LOG_DECAY) ×
    softplus(a + DELTA_DECAY_OFFSET)) and rate = sigmoid(b). The output is normalised by `norm` for each head, and
    multiplied by SiLU(DELTA_GATE). `outputs_in_turns`: the rows of DELTA_GATE and the columns of DELTA_OUTPUT have the
    first value head of each key, then the second of each key, as in GGUF files of Qwen3.5.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    filter_width: int
    norm: NormSpec
    outputs_in_turns: bool = False

    @property
    def heads_per_key(self) -> int:
        """How many value heads share a key."""
        return self.num_heads // self.num_key_heads

    @property
    def num_inputs(self) -> int:
        """The numbers of a token that go through the filter: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def record_matrices(self) -> int:
        """The floats of the matrices S that belong to one key head."""
        return self.heads_per_key * self.key_dim * self.value_dim

    @property
    def record_inputs(self) -> int:
        """The floats for a token's query, key and values of one key head."""
        return -(-(2 * self.key_dim + self.heads_per_key * self.value_dim) // 16) * 16

    @property
    def record_change(self) -> int:
        """The floats for what a token changes in the matrices of one key head."""
        return -(-(self.key_dim + self.heads_per_key * (self.value_dim + 1)) // 16) * 16

    @property
    def record_floats(self) -> int:
        """The floats of the state of one key head; see `quire.compute.reference.delta`."""
        return self.record_matrices + self.filter_width * self.record_inputs + self.record_change + 16

    @property
    def half_bytes(self) -> int:
        """The bytes of half a layer's state."""
        return self.num_key_heads // 2 * self.record_floats * 4

    @property
    def operations(self) -> int:
        """Additions and multiplications of a token in S: forgetting, adding, and reading by key and by query."""
        return 7 * self.num_heads * self.key_dim * self.value_dim

    def parts(self, hidden_size: int) -> dict[Part, PartShape]:
        """Return a layer's parts."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return {
            Part.DELTA_QUERY: PartShape((keys, hidden_size)),
            Part.DELTA_KEY: PartShape((keys, hidden_size)),
            Part.DELTA_VALUE: PartShape((values, hidden_size)),
            Part.DELTA_GATE: PartShape((values, hidden_size)),
            Part.DELTA_RATE: PartShape((self.num_heads, hidden_size)),
            Part.DELTA_DECAY: PartShape((self.num_heads, hidden_size)),
            Part.DELTA_FILTER: PartShape((self.num_inputs, 1, self.filter_width)),
            Part.DELTA_LOG_DECAY: PartShape((self.num_heads,)),
            Part.DELTA_DECAY_OFFSET: PartShape((self.num_heads,)),
            Part.DELTA_NORM: self.norm.shape(self.value_dim),
            Part.DELTA_OUTPUT: PartShape((hidden_size, values)),
        }


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The settings of all attention layers.

    Query head h reads key-value head h // (num_heads / num_kv_heads). `bias`: query, key and value have a bias.
    `qk_norm` normalises queries and keys before they rotate, or after that if `rotates_first`, by `qk_norm_scope`.
    `sinks`: each query head has a learned score that is not capped; it takes part in every softmax as a position
    without a value. `latent`: heads share one latent of `head_dim` numbers; `bias` then applies to the matrices that
    compute the latents. `gated`: the output of attention is multiplied by the sigmoid of ATTENTION_GATE.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_scope: NormScope = NormScope.HEAD
    rotates_first: bool = False
    score_soft_cap: float | None = None
    sinks: bool = False
    latent: LatentSpec | None = None
    gated: bool = False

    @property
    def output_dim(self) -> int:
        """The width of the output matrix's input: the numbers of all heads."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The settings that differ between layers.

    `window` None: full attention; `rope` None: no rotary positions; `sparse`: experts instead of an MLP; `recurrent`:
    linear attention (`DecoderSpec.delta`) instead of attention.
    """

    window: int | None
    rope: RopeSpec | None
    sparse: bool = False
    recurrent: bool = False


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) if not gated."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Experts of sparse layers: MLPs like the dense one except for their size and biases.

    The router's scores give the weights, by `scoring`. A token is routed to the `experts_per_token` experts with
    the highest weights; among equal ones, to the lowest ids. With `normalize_weights`, these weights are
    divided by their sum; with a softmax, this equals the softmax over these experts alone. Then they are multiplied by
    `scale`. Outputs are added in the order of expert ids. `bias`: the router and each matrix of an expert have a bias.

    - `margin`: a sparse mixer chooses the expert with the highest score m. Its weight is that of a softmax over the
      experts whose score s is near: m - s <= margin × max(m, |s|). The next one is chosen likewise among the others.
    - `offset`: the router has a number for each expert, which is added to its weight only for the choice of experts.
    - `num_groups`: experts are in groups of equal size; only experts of a token's best `groups_per_token` groups are
      chosen. Groups are ranked by the sum of their `group_best` highest weights, with offsets.
    - `shared_size`: the size of an additional MLP for every token; its output is added last. 0: none.
    - `shared_router`: that output is multiplied by the sigmoid of a score, which a matrix of one row computes.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    bias: bool = False
    scoring: Scoring = Scoring.SOFTMAX
    scale: float = 1.0
    margin: float = 0.0
    offset: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    group_best: int = 1
    shared_size: int = 0
    shared_router: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only model.

    - `norm_before`, `norm_after`, `norm_joined`: norms before each sublayer, on its output (before it
      is added to the residual stream), and on the residual stream after that; in any combination.
    - `parallel`: attention and MLP read the same residual stream; with `shared_norm` also through the same norm.
    - `residual_scale` multiplies the output of a sublayer; `logit_scale` multiplies logits.
    - `final_norm`: whether there is a norm before the head.
    - `embedding_size`: unless None, rows of this size are projected to the hidden size after the
      embedding (Part.EMBEDDING_IN) and back before the head (Part.EMBEDDING_OUT).
    - `embedding_scale` multiplies the rows of the embedding, before positions are added.
    - `learned_positions`: the offset of learned positions in their table; None: no learned positions.
    - `tied_head`: the embedding is also the head. `head_bias`: the head has a bias.
    - `experts`: of the `sparse` layers. `delta`: of the `recurrent` layers.
    - `sources`: the tensors of each part in a checkpoint. It may also have `ignored_tensors`, and those whose names
      begin with one of the `ignored_prefixes`, which are not used. Checkpoints of the bare decoder lack
      `optional_prefix` in their names.
    """

    vocab_size: int
    hidden_size: int
    context_length: int
    norm: NormSpec
    attention: AttentionSpec
    mlp: MLPSpec
    layers: tuple[LayerSpec, ...]
    sources: Mapping[Part, WeightSource]
    ignored_tensors: frozenset[str] = frozenset()
    ignored_prefixes: tuple[str, ...] = ()
    optional_prefix: str = ""
    experts: ExpertsSpec | None = None
    delta: DeltaSpec | None = None
    tied_head: bool = False
    head_bias: bool = False
    norm_before: bool = True
    norm_after: bool = False
    norm_joined: bool = False
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    final_norm: bool = True
    embedding_size: int | None = None
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        if heads % kv_heads:
            raise CheckpointError("num_attention_heads", heads, f"a multiple of the {kv_heads} kv heads")
        if self.attention.latent is not None:
            _check_latent(self.attention, self.attention.latent)
        if self.attention.rotates_first and self.attention.qk_norm_scope is NormScope.ALL_HEADS:
            raise CheckpointError("norms of all heads", "after positions", "before positions")
        if self.mlp.activation is Activation.CLAMPED_SWIGLU and not self.mlp.gated:
            raise CheckpointError("activation", self.mlp.activation.value, "another one for an MLP without a gate")
        if self.experts is not None:
            _check_experts(self.experts, sum(layer.sparse for layer in self.layers))
        if any(layer.recurrent for layer in self.layers):
            _check_delta(self)
        for layer in self.layers:
            if layer.rope is not None:
                latent = self.attention.latent
                _check_rope(layer.rope, self.attention.head_dim if latent is None else latent.rope_dim)
                if latent is not None and layer.rope.query_growth:
                    raise CheckpointError("query growth", layer.rope.query_growth, "0 in a model with latents")
            if layer.sparse and self.parallel:
                raise CheckpointError("layers", "sparse and parallel", "one of both")
            if layer.sparse and self.experts is None:
                raise CheckpointError("layers", "sparse without experts", "a spec of experts for sparse layers")

    def model_parts(self) -> dict[Part, PartShape]:
        """Return the parts of the model outside of layers."""
        row = self.embedding_size or self.hidden_size
        parts = {Part.EMBEDDING: PartShape((self.vocab_size, row))}
        if self.embedding_size is not None:
            parts[Part.EMBEDDING_IN] = PartShape((self.hidden_size, row))
            parts[Part.EMBEDDING_OUT] = PartShape((row, self.hidden_size))
        if self.learned_positions is not None:
            rows = self.context_length + self.learned_positions
            parts[Part.POSITIONS] = PartShape((rows, self.hidden_size))
        if self.final_norm:
            parts[Part.FINAL_NORM] = self.norm.shape(self.hidden_size)
        if not self.tied_head:
            parts[Part.HEAD] = PartShape((self.vocab_size, row), self.head_bias)
        return parts

    def layer_parts(self, layer: LayerSpec) -> dict[Part, PartShape]:
        """Return the parts of a layer, without those of its experts."""
        mlp = self._router_parts() if layer.sparse else self._mlp_parts()
        if layer.recurrent and self.delta is not None:
            return self.delta.parts(self.hidden_size) | mlp | self._norm_parts()
        latent = self.attention.latent
        if latent is None:
            return self._attention_parts() | mlp | self._norm_parts()
        parts = latent.parts(self.attention.num_heads, self.hidden_size, self.attention.bias)
        return parts | {Part.OUTPUT: self._output_part()} | mlp | self._norm_parts()

    def expert_parts(self) -> dict[Part, PartShape]:
        """Return the parts of one expert of a sparse layer."""
        if self.experts is None:
            return {}
        size, hidden, bias = self.experts.intermediate_size, self.hidden_size, self.experts.bias
        parts = {Part.EXPERT_UP: PartShape((size, hidden), bias), Part.EXPERT_DOWN: PartShape((hidden, size), bias)}
        if self.mlp.gated:
            parts[Part.EXPERT_GATE] = PartShape((size, hidden), bias)
        return parts

    def _attention_parts(self) -> dict[Part, PartShape]:
        attention, hidden = self.attention, self.hidden_size
        query = attention.num_heads * attention.head_dim
        key = attention.num_kv_heads * attention.head_dim
        parts = {
            Part.QUERY: PartShape((query, hidden), attention.bias),
            Part.KEY: PartShape((key, hidden), attention.bias),
            Part.VALUE: PartShape((key, hidden), attention.bias),
            Part.OUTPUT: self._output_part(),
        }
        if attention.gated:
            parts[Part.ATTENTION_GATE] = PartShape((query, hidden), attention.bias)
        if attention.sinks:
            parts[Part.SINKS] = PartShape((attention.num_heads,))
        if attention.qk_norm is not None:
            parts[Part.QUERY_NORM] = self._head_norm(attention.qk_norm, attention.num_heads)
            parts[Part.KEY_NORM] = self._head_norm(attention.qk_norm, attention.num_kv_heads)
        return parts

    def _output_part(self) -> PartShape:
        return PartShape((self.hidden_size, self.attention.output_dim), self.attention.output_bias)

    def _head_norm(self, norm: NormSpec, num_heads: int) -> PartShape:
        scope, head_dim = self.attention.qk_norm_scope, self.attention.head_dim
        if scope is NormScope.EACH_HEAD:
            return PartShape((num_heads, head_dim))
        return norm.shape(head_dim if scope is NormScope.HEAD else num_heads * head_dim)

    def _mlp_parts(self) -> dict[Part, PartShape]:
        mlp, hidden = self.mlp, self.hidden_size
        parts = {
            Part.UP: PartShape((mlp.intermediate_size, hidden), mlp.bias),
            Part.DOWN: PartShape((hidden, mlp.intermediate_size), mlp.bias),
        }
        if mlp.gated:
            parts[Part.GATE] = PartShape((mlp.intermediate_size, hidden), mlp.bias)
        return parts

    def _router_parts(self) -> dict[Part, PartShape]:
        if self.experts is None:
            return {}
        parts = {Part.ROUTER: PartShape((self.experts.num_experts, self.hidden_size), self.experts.bias)}
        if self.experts.offset:
            parts[Part.ROUTER_OFFSET] = PartShape((self.experts.num_experts,))
        if size := self.experts.shared_size:
            bias = self.mlp.bias
            parts[Part.SHARED_UP] = PartShape((size, self.hidden_size), bias)
            parts[Part.SHARED_DOWN] = PartShape((self.hidden_size, size), bias)
            if self.mlp.gated:
                parts[Part.SHARED_GATE] = PartShape((size, self.hidden_size), bias)
            if self.experts.shared_router:
                parts[Part.SHARED_ROUTER] = PartShape((1, self.hidden_size))
        return parts

    def _norm_parts(self) -> dict[Part, PartShape]:
        both = (Part.ATTENTION_NORM,) if self.shared_norm else (Part.ATTENTION_NORM, Part.MLP_NORM)
        before = both if self.norm_before else ()
        after = (Part.AFTER_ATTENTION_NORM, Part.AFTER_MLP_NORM) if self.norm_after else ()
        joined = (Part.JOINED_ATTENTION_NORM, Part.JOINED_MLP_NORM) if self.norm_joined else ()
        return dict.fromkeys(before + after + joined, self.norm.shape(self.hidden_size))

    def kv_cache_spec(self, block_size: int, dtype: str = "float32") -> KVCacheSpec:
        """Return the content of a block of KV memory for this model."""
        spec = KVCacheSpec.from_layers(
            [RECURRENT if layer.recurrent else layer.window for layer in self.layers],
            block_size=block_size,
            num_kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            dtype=dtype,
            latent_dim=0 if self.attention.latent is None else self.attention.latent.rank,
        )
        return spec if self.delta is None else spec.with_states(self.delta.half_bytes)


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise CheckpointError("rotary dimensions", rope.rotary_dim, f"an even number from 2 to {head_dim}")
    if len(rope.inverse_frequencies) != rope.rotary_dim // 2:
        raise CheckpointError("rotary frequencies", len(rope.inverse_frequencies), f"{rope.rotary_dim // 2} of them")


def _check_latent(attention: AttentionSpec, latent: LatentSpec) -> None:
    for name in ("rank", "rope_dim", "value_dim"):  # engines read 16 numbers at once, and heads are contiguous
        size = getattr(latent, name)
        if size < 1 or size % 16:
            raise CheckpointError(f"latent {name}", size, "a multiple of 16")
    has_other = attention.qk_norm is not None or attention.sinks or attention.num_kv_heads != 1
    if has_other or attention.head_dim != latent.rank + latent.rope_dim:
        raise CheckpointError("attention", "a latent with other heads", "one key-value head, which is the latent")


def _check_delta(spec: DecoderSpec) -> None:
    delta = spec.delta
    if delta is None:
        raise CheckpointError("layers", "recurrent without a rule", "a rule for recurrent layers")
    if spec.attention.latent is not None or spec.parallel:
        raise CheckpointError("layers", "recurrent next to latents or parallel", "recurrent, and full attention")
    if delta.num_key_heads % 2 or delta.num_heads % delta.num_key_heads:
        heads = f"{delta.num_heads} of values, {delta.num_key_heads} of keys"
        raise CheckpointError("recurrent heads", heads, "an even number of keys, with equally many values for each")
    for name, size in (("key", delta.key_dim), ("value", delta.value_dim)):
        if size % 16:  # engines read 16 numbers at once
            raise CheckpointError(f"numbers of a recurrent {name} head", size, "a multiple of 16")


def _check_experts(experts: ExpertsSpec, num_layers: int) -> None:
    if num_layers * experts.num_experts > MAX_EXPERTS:
        where = f"experts of {num_layers} layers"
        raise CheckpointError(where, num_layers * experts.num_experts, f"at most {MAX_EXPERTS}")
    if not 0 < experts.experts_per_token <= experts.num_experts:
        raise CheckpointError("experts per token", experts.experts_per_token, f"from 1 to {experts.num_experts}")
    if experts.num_groups < 1 or experts.num_experts % experts.num_groups:
        raise CheckpointError("groups of experts", experts.num_groups, f"a divisor of {experts.num_experts}")
    size = experts.num_experts // experts.num_groups
    if not 0 < experts.group_best <= size:
        raise CheckpointError("experts that rank a group", experts.group_best, f"from 1 to {size}")
    least = -(-experts.experts_per_token // size)
    if not least <= experts.groups_per_token <= experts.num_groups:
        raise CheckpointError("groups per token", experts.groups_per_token, f"from {least} to {experts.num_groups}")
    has_rules = experts.normalize_weights or experts.offset or experts.num_groups > 1
    if experts.scoring is Scoring.SPARSE_MIXER and has_rules:
        raise CheckpointError("experts of a sparse mixer", "sums, offsets or groups", "weights as they are")
