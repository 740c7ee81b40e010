"""The sublayers of a decoder as data: positions, attention, the MLP and experts; recurrent.py has the others.

A `DecoderSpec` (base.py) consists of these specs. Each states the settings of one sublayer; engines interpret them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from quire.compute.models.parts import NormScope, NormSpec, Part, PartShape
from quire.core.errors import CheckpointError

MAX_EXPERTS: Final = 1 << 16
"""For all layers together: three times the number in any model. The tensors of each are checked one by one."""


MAX_AXES: Final = 3
"""Time, height and width."""

NUM_STREAMS: Final = 4
SHORTEST: Final = 1e-5
"""The least mean square by which a stream is divided; see `StreamsSpec`."""


class Activation(Enum):
    """The non-linearity of the MLP."""

    SILU = "silu"
    GELU = "gelu"  # exact, by the error function
    GELU_TANH = "gelu_tanh"
    QUICK_GELU = "quick_gelu"  # x × sigmoid(1.702 x)
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    XIELU = "xielu"  # a square above 0, an exponential below, with four numbers of each layer (Part.XIELU)
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
    `scale`. With `axes`, p is the coordinate of the token on axis axes[i]: patches and images have several coordinates.
    Queries, not keys, are also multiplied by 1 + `query_growth` × log(1 + floor((p + growth_offset) / growth_length)).
    In a layer without rotary positions, `rotary_dim` is 0. These numbers include any context extension, and are float32
    values.
    """

    rotary_dim: int
    inverse_frequencies: tuple[float, ...]
    scale: float = 1.0
    query_growth: float = 0.0
    growth_length: int = 1
    growth_offset: int = 0
    axes: tuple[int, ...] = ()


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
class AttentionSpec:
    """The settings of all attention layers.

    Query head h reads key-value head h // (num_heads / num_kv_heads). `bias`: query, key and value have a bias.
    `qk_norm` normalises queries and keys before they rotate, or after that if `rotates_first`, by `qk_norm_scope`.
    `sinks`: each query head has a learned score that is not capped; it takes part in every softmax as a position
    without a value. `latent`: heads share one latent of `head_dim` numbers; `bias` then applies to the matrices that
    compute the latents. `gated`: the output of attention is multiplied by the sigmoid of ATTENTION_GATE.
    `value_norm`: each value head is normalised like keys, without weights. `bidirectional`: a token attends to later
    tokens as well, so a text is computed in one step; windows extend to both sides. `ahead_in_windows`: tokens of an
    image that see later ones (`StepInputs.ends_seen`) do so only in layers with a window. `distance_bias`: each score
    has a bias, before it is capped, by the distance of two tokens (distances.py). `chunked`: the text is cut into
    chunks of as many tokens as a window has, and in layers with a window a token attends to those of its own chunk.
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
    value_norm: bool = False
    bidirectional: bool = False
    ahead_in_windows: bool = False
    distance_bias: bool = False
    chunked: bool = False

    @property
    def output_dim(self) -> int:
        """The width of the output matrix's input: the numbers of all heads."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """Inputs of each layer for each token (Gemma's per-layer embeddings), `size` numbers per layer.

    They are computed once, from the token and from its scaled embedding x:

        (row of LAYER_EMBEDDING × embedding_scale + norm(LAYER_INPUTS x × input_scale)) × scale

    A row has the numbers of all layers; the norm, LAYER_INPUTS_NORM, is over those of a layer. A row that is given in
    place of a token's embedding takes the place of x, and the row of `given_token` that of the token.
    `num_tokens`: the rows of the table; later tokens have the row of token 0. None: as many as there are tokens.
    """

    size: int
    embedding_scale: float
    input_scale: float
    scale: float
    given_token: int = 0
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Four residual streams instead of one (AltUp): h0, which the layers change, and three that follow it.

        before the first layer   hi = STREAM_IN_i h0, as long as h0                            i = 1, 2, 3
        before a layer           pj = hj + the sum of all A[j, i] hi                           A = STREAM_PREDICT w(h0)
        the layer                computes y from p0
        after it                 hj = pj + (1 + c[j]) × (y - p0)                               c = STREAM_CORRECT w(y)
                                 hi = hi + what the layer makes of its input and STREAM_SCALE × h0
        after the last layer     the mean of h0 and the three STREAM_OUT_i hi, each as long as h0

    w(x) = tanh(STREAM_ROUTER norm(x) / hidden_size) with the norm STREAM_NORM; A is a matrix of 4 × 4, and c has 4
    numbers. "As long" means: with the same mean square. `scales`: whether there is a STREAM_SCALE.
    """

    scales: bool = True


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) if not gated.

    The numbers of XIELU are p, n, s and the limit l, a small negative number. For x > 0, it is
    s × x + softplus(p) × x², else s × x + (s + softplus(n)) × (e^min(x, l) - 1 - x).
    """

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
    - `own_norms`: the router and the experts each read the residual stream through a norm of their own, ROUTER_NORM and
      EXPERTS_NORM; the outputs of the experts and of the MLP are normalised before they are added.
    - `score_scale` multiplies the router's scores. `factors`: the weight of each expert is multiplied by a number.
    - `weighs_inputs`: an expert's input is multiplied by its weight, instead of its output.
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
    own_norms: bool = False
    score_scale: float = 1.0
    factors: bool = False
    weighs_inputs: bool = False


def check_rope(rope: RopeSpec, head_dim: int) -> None:
    """Raise unless positions fit into a head and have a frequency for each pair."""
    if rope.rotary_dim % 2 or not (0 if rope.query_growth else 2) <= rope.rotary_dim <= head_dim:
        raise CheckpointError("rotary dimensions", rope.rotary_dim, f"an even number from 2 to {head_dim}")
    if len(rope.inverse_frequencies) != rope.rotary_dim // 2:
        raise CheckpointError("rotary frequencies", len(rope.inverse_frequencies), f"{rope.rotary_dim // 2} of them")
    if rope.axes and (len(rope.axes) != len(rope.inverse_frequencies) or not set(rope.axes) <= set(range(MAX_AXES))):
        raise CheckpointError("rotary axes", rope.axes, f"one for each frequency, from 0 to {MAX_AXES - 1}")


def check_latent(attention: AttentionSpec, latent: LatentSpec) -> None:
    """Raise unless the latent is the only key-value head, and engines can read its parts."""
    for name in ("rank", "rope_dim", "value_dim"):  # engines read 16 numbers at once, and heads are contiguous
        size = getattr(latent, name)
        if size < 1 or size % 16:
            raise CheckpointError(f"latent {name}", size, "a multiple of 16")
    has_other = attention.qk_norm is not None or attention.sinks or attention.num_kv_heads != 1
    if has_other or attention.head_dim != latent.rank + latent.rope_dim:
        raise CheckpointError("attention", "a latent with other heads", "one key-value head, which is the latent")


def check_experts(experts: ExpertsSpec, num_layers: int) -> None:
    """Raise unless a token can choose its experts; `num_layers` have some."""
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
    if experts.own_norms and experts.shared_router:
        raise CheckpointError("MLP next to experts", "a weight and a norm", "one of both")
    has_rules = experts.normalize_weights or experts.offset or experts.num_groups > 1
    if experts.scoring is Scoring.SPARSE_MIXER and has_rules:
        raise CheckpointError("experts of a sparse mixer", "sums, offsets or groups", "weights as they are")
