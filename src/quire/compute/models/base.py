"""DecoderSpec: a model as data.

Every model here is the same loop: embed, then per layer attend and transform, each added to the
residual stream, then norm and head. Families differ in a few facts: which norms and where, how positions
are encoded, the window of a layer, the activation. A `DecoderSpec` states these facts, and the engines
(reference, native, torch) interpret them. So a family is written once, and no kernel depends on the family
that it serves.

The settings of a sublayer are specs of their own (sublayers.py). A `Part` is one piece with weights: a matrix or a
norm, each with an optional bias (parts.py). The spec lists the parts of a model, their shapes, and their tensors in
a checkpoint (`WeightSource`; also as rows of a fused tensor, also transposed). So an entire checkpoint can be
checked before it is used.

One layer; `norm_before`, `norm_after` and `norm_joined` determine its norms:

    x ─┬─ ATTENTION_NORM ─ attention ─ AFTER_ATTENTION_NORM ─ + ─ JOINED_ATTENTION_NORM ─┐
       └──────────────────────────────────────────────────────┘                           │
    ┌─────────────────────────────────────────────────────────────────────────────────────┘
    └┬─ MLP_NORM ─ MLP or experts ─ AFTER_MLP_NORM ─ + ─ JOINED_MLP_NORM ─► next layer
     └───────────────────────────────────────────────┘

A `parallel` layer computes both from the same x:

    x ─┬─ ATTENTION_NORM ─ attention ─ AFTER_ATTENTION_NORM ─ + ──────── + ─► next layer
       ├──────────────────────────────────────────────────────┘          │
       └─ MLP_NORM, or ATTENTION_NORM ─ MLP or experts ─ AFTER_MLP_NORM ─┘

With `layer_inputs`, a layer then adds what it makes of its own input for each token:

    ─┬─ INPUT_GATE, activation, × input of the layer ─ INPUT_OUTPUT ─ AFTER_INPUT_NORM ─ + ─ × LAYER_SCALE ─► next layer
     └───────────────────────────────────────────────────────────────────────────────────┘

With `streams`, layers change the first of four residual streams, and the others follow it (`StreamsSpec`); what a layer
makes of its input is added to the others.

An encoder is such a model too: its attention is `bidirectional`, and its head is never used. That of images has no
vocabulary: all its rows are given.

The spec declares only what the reference decoder interprets; a new family adds a field together with its
interpretation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from quire.compute.models.distances import NUM_BUCKETS
from quire.compute.models.parts import (
    STREAM_INS,
    STREAM_OUTS,
    NormScope,
    NormSpec,
    Part,
    PartShape,
    WeightSource,
)
from quire.compute.models.recurrent import ConvolutionSpec, DeltaSpec, MambaSpec, check_recurrence
from quire.compute.models.sublayers import (
    NUM_STREAMS,
    Activation,
    AttentionSpec,
    ExpertsSpec,
    LayerInputsSpec,
    MLPSpec,
    RopeSpec,
    StreamsSpec,
    check_experts,
    check_latent,
    check_rope,
)
from quire.core.errors import CheckpointError
from quire.core.kv_spec import RECURRENT, SHARED, KVCacheSpec, KVHeads


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The settings that differ between layers.

    `window` None: full attention; `rope` None: no rotary positions; `sparse`: experts instead of an MLP; `recurrent`:
    linear attention, a state-space layer or a convolution (`DecoderSpec.recurrence`) instead of attention.

    `heads`: its key-value heads, None: those of the model. `keys_of`: it attends to the keys and values of this earlier
    layer, and has none. `keys_are_values`: it has no VALUE; values are the rows of KEY, before norms and positions.
    `intermediate_size`: that of its MLP, None: that of the model. `attention_norm`, `head_norms`: whether it has the
    norm before attention and those of queries and keys that other layers have. `attends`: whether it has attention or
    states; `transforms`: whether it has an MLP or experts. It has at least one of both. `skips_previous`: its attention
    reads the residual stream as it was before the previous layer, so that states and attention read the same rows.
    `norms_after`: its norms are on the outputs of its sublayers, in a model that has them before sublayers.
    `gate_threshold`: before the activation, each gate of its MLP becomes its distance above the mean of all gates plus
    this many standard deviations, and 0 below that; None: it stays as it is.
    """

    window: int | None
    rope: RopeSpec | None
    sparse: bool = False
    recurrent: bool = False
    heads: KVHeads | None = None
    keys_of: int | None = None
    keys_are_values: bool = False
    intermediate_size: int | None = None
    attends: bool = True
    transforms: bool = True
    attention_norm: bool = True
    head_norms: bool = True
    norms_after: bool = False
    skips_previous: bool = False
    gate_threshold: float | None = None

    @property
    def has_keys(self) -> bool:
        """Whether it stores keys and values, or states."""
        return self.attends and self.keys_of is None

    @property
    def kv_window(self) -> int | None:
        """The window of its keys and values, RECURRENT or SHARED if it has none."""
        if not self.has_keys:
            return SHARED
        return RECURRENT if self.recurrent else self.window


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only or an encoder-only model.

    - `vocab_size` 0: the model has no embedding, and computes given rows only.
    - `norm_before`, `norm_after`, `norm_joined`: norms before each sublayer, on its output (before it
      is added to the residual stream), and on the residual stream after that; in any combination.
    - `parallel`: attention and MLP read the same residual stream; with `shared_norm` also through the same norm.
    - `residual_scale` multiplies the output of a sublayer; `logit_scale` multiplies logits.
    - `final_norm`: whether there is a norm before the head.
    - `embedding_size`: unless None, rows of this size are projected to the hidden size after the
      embedding (Part.EMBEDDING_IN) and back before the head (Part.EMBEDDING_OUT).
    - `joins_states`: such a row is given, and is that of a token, then a hidden state of another model. Each half is
      normalised before the projection (Part.TOKEN_NORM, Part.STATE_NORM).
    - `embedding_scale` multiplies the rows of the embedding, before positions are added.
    - `learned_positions`: the offset of learned positions in their table; None: no learned positions.
    - `token_types`: the rows of a table whose first row is added to each embedded token; 0: no table. Behind the first
      `separator` in a text it is the second row; None: nowhere.
    - `embedding_norm`: whether there is a norm after positions and token types are added.
    - `tied_head`: the embedding is also the head. `head_bias`: the head has a bias.
    - `experts`: of the `sparse` layers. `delta`, `mamba` or `convolution`: of the `recurrent` layers.
    - `layer_inputs`: of all layers; None: none. `layer_scale`: each layer multiplies its output by one number.
    - `streams`: of the residual stream, which is one by default.
    - `laurel_rank`: after attention, x + norm(LAUREL_OUT LAUREL_IN x) is added to the residual stream, where x is the
      input of attention, and the sum is multiplied by √½ (LAuReL). The matrices have this rank; 0: none.
    - `deep_rows`: rows that are given in place of embedded tokens have more numbers, which are added to the outputs of
      this many layers.
    - `sources`: the tensors of each part in a checkpoint. It may also have `ignored_tensors`, and those whose names
      begin with one of the `ignored_prefixes`, which are not used. Checkpoints of the bare decoder lack
      `optional_prefix` in their names. `guess_sources`: those of a layer that guesses the model's next tokens
      (guess_layer.py); empty: the family has none.
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
    guess_sources: Mapping[Part, WeightSource] = field(default_factory=lambda: MappingProxyType({}))
    experts: ExpertsSpec | None = None
    delta: DeltaSpec | None = None
    mamba: MambaSpec | None = None
    convolution: ConvolutionSpec | None = None
    layer_inputs: LayerInputsSpec | None = None
    streams: StreamsSpec | None = None
    laurel_rank: int = 0
    layer_scale: bool = False
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
    joins_states: bool = False
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    token_types: int = 0
    separator: int | None = None
    embedding_norm: bool = False
    deep_rows: int = 0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.attention.latent is not None:
            check_latent(self.attention, self.attention.latent)
        if self.attention.rotates_first and self.attention.qk_norm_scope is NormScope.ALL_HEADS:
            raise CheckpointError("norms of all heads", "after positions", "before positions")
        if self.mlp.activation is Activation.CLAMPED_SWIGLU and not self.mlp.gated:
            raise CheckpointError("activation", self.mlp.activation.value, "another one for an MLP without a gate")
        if self.mlp.activation is Activation.XIELU and (self.mlp.gated or self.experts is not None):
            raise CheckpointError("activation", self.mlp.activation.value, "another one for gates and experts")
        if self.experts is not None:
            check_experts(self.experts, sum(layer.sparse for layer in self.layers))
        if any(layer.recurrent for layer in self.layers):
            _check_recurrence(self)
        _check_mixed(self)
        _check_streams(self)
        for index, layer in enumerate(self.layers):
            attention = self.attention_of(layer)
            if layer.rope is not None:
                latent = self.attention.latent
                check_rope(layer.rope, attention.head_dim if latent is None else latent.rope_dim)
                if latent is not None and layer.rope.query_growth:
                    raise CheckpointError("query growth", layer.rope.query_growth, "0 in a model with latents")
            if attention.num_heads % attention.num_kv_heads:
                heads, kv_heads = attention.num_heads, attention.num_kv_heads
                raise CheckpointError("num_attention_heads", heads, f"a multiple of the {kv_heads} kv heads")
            if layer.keys_of is not None:
                _check_shared(self, index, layer.keys_of)
            if layer.skips_previous:
                _check_skipping(self, index)
            if layer.sparse and self.experts is None:
                raise CheckpointError("layers", "sparse without experts", "a spec of experts for sparse layers")

    def attention_of(self, layer: LayerSpec) -> AttentionSpec:
        """Return the settings of the attention of a layer."""
        attention = self.attention if layer.head_norms else replace(self.attention, qk_norm=None)
        if layer.heads is None:
            return attention
        return replace(attention, num_kv_heads=layer.heads.num_kv_heads, head_dim=layer.heads.head_dim)

    @property
    def recurrence(self) -> DeltaSpec | MambaSpec | ConvolutionSpec | None:
        """The rule of the recurrent layers."""
        return self.delta or self.mamba or self.convolution

    def with_guesses(self, num_tokens: int) -> DecoderSpec:
        """Return the spec whose states can take back this many tokens that were guessed in vain."""
        if self.recurrence is None:
            return self
        names = [name for name in ("delta", "mamba", "convolution") if getattr(self, name) is not None]
        late = {name: replace(getattr(self, name), num_late=1 + num_tokens) for name in names}
        return replace(self, **late)

    @property
    def is_bounded(self) -> bool:
        """Whether the matrices of layers have bounds."""
        return any(source.bounds for source in self.sources.values())

    def with_layers(self, count: int) -> DecoderSpec:
        """Return the spec with its first layers only."""
        return replace(self, layers=self.layers[:count])

    @property
    def first_reader(self) -> int:
        """The first of the last layers that all store nothing: they may compute wanted tokens only."""
        first = len(self.layers)
        while first and not self.layers[first - 1].has_keys:
            first -= 1
        return first

    @property
    def most_intermediate(self) -> int:
        """The intermediate size of the widest MLP."""
        usual = self.mlp.intermediate_size
        return max((layer.intermediate_size or usual for layer in self.layers), default=usual)

    def model_parts(self) -> dict[Part, PartShape]:
        """Return the parts of the model outside of layers."""
        row = self.embedding_size or self.hidden_size
        parts = {Part.EMBEDDING: PartShape((self.vocab_size, row))} if self.vocab_size else {}
        if self.embedding_size is not None:
            parts[Part.EMBEDDING_IN] = PartShape((self.hidden_size, row))
        if self.embedding_size is not None and self.vocab_size:
            parts[Part.EMBEDDING_OUT] = PartShape((row, self.hidden_size))
        if self.joins_states:
            parts |= dict.fromkeys((Part.TOKEN_NORM, Part.STATE_NORM), self.norm.shape(self.hidden_size))
        if self.learned_positions is not None:
            rows = self.context_length + self.learned_positions
            parts[Part.POSITIONS] = PartShape((rows, self.hidden_size))
        if self.token_types:
            parts[Part.TOKEN_TYPES] = PartShape((self.token_types, self.hidden_size))
        if self.embedding_norm:
            parts[Part.EMBEDDING_NORM] = self.norm.shape(self.hidden_size)
        if self.attention.distance_bias:
            parts[Part.DISTANCE_BIAS] = PartShape((NUM_BUCKETS, self.attention.num_heads))
        if self.layer_inputs is not None:
            of_layers = self.layer_inputs.size * len(self.layers)
            num_tokens = self.layer_inputs.num_tokens or self.vocab_size
            parts[Part.LAYER_EMBEDDING] = PartShape((num_tokens, of_layers))
            parts[Part.LAYER_INPUTS] = PartShape((of_layers, self.hidden_size))
            parts[Part.LAYER_INPUTS_NORM] = self.norm.shape(self.layer_inputs.size)
        if self.streams is not None:
            parts |= dict.fromkeys(STREAM_INS + STREAM_OUTS, PartShape((self.hidden_size, self.hidden_size)))
        if self.final_norm:
            parts[Part.FINAL_NORM] = self.norm.shape(self.hidden_size)
        if not self.tied_head:
            parts[Part.HEAD] = PartShape((self.vocab_size, row), self.head_bias)
        return parts

    def layer_parts(self, layer: LayerSpec) -> dict[Part, PartShape]:
        """Return the parts of a layer, without those of its experts."""
        rest = self._transform_parts(layer) | self._norm_parts(layer) | self._input_parts() | self._stream_parts()
        if not layer.attends:
            return rest
        if layer.recurrent and self.recurrence is not None:
            return self.recurrence.parts(self.hidden_size) | rest
        latent = self.attention.latent
        if latent is None:
            return self._attention_parts(layer) | rest
        parts = latent.parts(self.attention.num_heads, self.hidden_size, self.attention.bias)
        return parts | {Part.OUTPUT: self._output_part(self.attention)} | rest

    def expert_parts(self) -> dict[Part, PartShape]:
        """Return the parts of one expert of a sparse layer."""
        if self.experts is None:
            return {}
        size, hidden, bias = self.experts.intermediate_size, self.hidden_size, self.experts.bias
        parts = {Part.EXPERT_UP: PartShape((size, hidden), bias), Part.EXPERT_DOWN: PartShape((hidden, size), bias)}
        if self.mlp.gated:
            parts[Part.EXPERT_GATE] = PartShape((size, hidden), bias)
        return parts

    def _attention_parts(self, layer: LayerSpec) -> dict[Part, PartShape]:
        attention, hidden = self.attention_of(layer), self.hidden_size
        query = attention.num_heads * attention.head_dim
        key = PartShape((attention.num_kv_heads * attention.head_dim, hidden), attention.bias)
        parts = {Part.QUERY: PartShape((query, hidden), attention.bias), Part.KEY: key, Part.VALUE: key}
        parts[Part.OUTPUT] = self._output_part(attention)
        if attention.gated:
            parts[Part.ATTENTION_GATE] = PartShape((query, hidden), attention.bias)
        if attention.sinks:
            parts[Part.SINKS] = PartShape((attention.num_heads,))
        if attention.qk_norm is not None:
            parts[Part.QUERY_NORM] = _head_norm(attention, attention.qk_norm, attention.num_heads)
            parts[Part.KEY_NORM] = _head_norm(attention, attention.qk_norm, attention.num_kv_heads)
        absent = {Part.VALUE} if layer.keys_are_values else set()
        if layer.keys_of is not None:
            absent = {Part.KEY, Part.VALUE, Part.KEY_NORM}
        return {part: shape for part, shape in parts.items() if part not in absent}

    def _output_part(self, attention: AttentionSpec) -> PartShape:
        return PartShape((self.hidden_size, attention.output_dim), attention.output_bias)

    def _input_parts(self) -> dict[Part, PartShape]:
        parts, hidden = {Part.LAYER_SCALE: PartShape((1,))} if self.layer_scale else {}, self.hidden_size
        if self.layer_inputs is not None:
            parts[Part.INPUT_GATE] = PartShape((self.layer_inputs.size, hidden))
            parts[Part.INPUT_OUTPUT] = PartShape((hidden, self.layer_inputs.size))
            parts[Part.AFTER_INPUT_NORM] = self.norm.shape(hidden)
        return parts

    def _stream_parts(self) -> dict[Part, PartShape]:
        """Return the parts of a layer for streams, and those of LAuReL."""
        parts: dict[Part, PartShape] = {}
        hidden, rank, count = self.hidden_size, self.laurel_rank, NUM_STREAMS
        if self.streams is not None:
            parts |= {Part.STREAM_NORM: self.norm.shape(hidden), Part.STREAM_ROUTER: PartShape((count, hidden))}
            parts |= {Part.STREAM_PREDICT: PartShape((count**2, count)), Part.STREAM_CORRECT: PartShape((count, count))}
            parts |= {Part.STREAM_SCALE: PartShape((hidden,))} if self.streams.scales else {}
        if rank:
            parts |= {Part.LAUREL_IN: PartShape((rank, hidden)), Part.LAUREL_OUT: PartShape((hidden, rank))}
            parts[Part.LAUREL_NORM] = self.norm.shape(hidden)
        return parts

    def _transform_parts(self, layer: LayerSpec) -> dict[Part, PartShape]:
        if not layer.transforms:
            return {}
        return self._router_parts() if layer.sparse else self._mlp_parts(layer)

    def _mlp_parts(self, layer: LayerSpec) -> dict[Part, PartShape]:
        mlp, hidden, size = self.mlp, self.hidden_size, layer.intermediate_size or self.mlp.intermediate_size
        parts = {Part.UP: PartShape((size, hidden), mlp.bias), Part.DOWN: PartShape((hidden, size), mlp.bias)}
        if mlp.gated:
            parts[Part.GATE] = PartShape((size, hidden), mlp.bias)
        if mlp.activation is Activation.XIELU:
            parts[Part.XIELU] = PartShape((4,))
        return parts

    def _router_parts(self) -> dict[Part, PartShape]:
        if self.experts is None:
            return {}
        parts = {Part.ROUTER: PartShape((self.experts.num_experts, self.hidden_size), self.experts.bias)}
        if self.experts.offset:
            parts[Part.ROUTER_OFFSET] = PartShape((self.experts.num_experts,))
        if self.experts.factors:
            parts[Part.EXPERT_FACTORS] = PartShape((self.experts.num_experts,))
        if self.experts.own_norms:
            norms = (Part.ROUTER_NORM, Part.EXPERTS_NORM, Part.AFTER_EXPERTS_NORM, Part.AFTER_SHARED_NORM)
            parts |= dict.fromkeys(norms if self.experts.shared_size else norms[:3], self.norm.shape(self.hidden_size))
        if size := self.experts.shared_size:
            bias = self.mlp.bias
            parts[Part.SHARED_UP] = PartShape((size, self.hidden_size), bias)
            parts[Part.SHARED_DOWN] = PartShape((self.hidden_size, size), bias)
            if self.mlp.gated:
                parts[Part.SHARED_GATE] = PartShape((size, self.hidden_size), bias)
            if self.experts.shared_router:
                parts[Part.SHARED_ROUTER] = PartShape((1, self.hidden_size))
        return parts

    def _norm_parts(self, layer: LayerSpec) -> dict[Part, PartShape]:
        both = (Part.ATTENTION_NORM,) if self.shared_norm else (Part.ATTENTION_NORM, Part.MLP_NORM)
        before = both if self.norm_before and not layer.norms_after else ()
        after = (Part.AFTER_ATTENTION_NORM, Part.AFTER_MLP_NORM) if self.norm_after or layer.norms_after else ()
        joined = (Part.JOINED_ATTENTION_NORM, Part.JOINED_MLP_NORM) if self.norm_joined else ()
        absent = set() if layer.attends and layer.attention_norm else {Part.ATTENTION_NORM}
        absent |= set() if layer.transforms else {Part.MLP_NORM}
        names = [part for part in before + after + joined if part not in absent]
        return dict.fromkeys(names, self.norm.shape(self.hidden_size))

    def kv_cache_spec(self, block_size: int, dtype: str = "float32") -> KVCacheSpec:
        """Return the content of a block of KV memory for this model.

        A text that is computed in one step needs all its keys in it, so windows free no blocks.
        """
        whole = self.attention.bidirectional
        spec = KVCacheSpec.from_mixed_layers(
            [((replace(each, window=None) if whole else each).kv_window, each.heads) for each in self.layers],
            KVHeads(self.attention.num_kv_heads, self.attention.head_dim),
            block_size=block_size,
            dtype=dtype,
            latent_dim=0 if self.attention.latent is None else self.attention.latent.rank,
        )
        return spec if self.recurrence is None else spec.with_states(self.recurrence.half_bytes)


def _head_norm(attention: AttentionSpec, norm: NormSpec, num_heads: int) -> PartShape:
    scope, head_dim = attention.qk_norm_scope, attention.head_dim
    if scope is NormScope.EACH_HEAD:
        return PartShape((num_heads, head_dim))
    return norm.shape(head_dim if scope is NormScope.HEAD else num_heads * head_dim)


def _check_mixed(spec: DecoderSpec) -> None:
    attention = spec.attention
    if not all(layer.attends and layer.transforms for layer in spec.layers):
        if not all(layer.attends or layer.transforms for layer in spec.layers):
            raise CheckpointError("layers", "without a sublayer", "at least one in each")
        if not any(layer.has_keys for layer in spec.layers):
            raise CheckpointError("layers", "without attention and states", "at least one that has either")
        if spec.parallel or spec.shared_norm or spec.norm_after or spec.norm_joined or not spec.norm_before:
            raise CheckpointError("norms", "around a missing sublayer", "one before each sublayer")
    if spec.shared_norm and not all(layer.attention_norm for layer in spec.layers):
        raise CheckpointError("layers", "without a shared norm", "a norm for attention and MLP in each")
    if attention.latent is not None and any(layer.heads or layer.keys_are_values for layer in spec.layers):
        raise CheckpointError("layers", "other heads next to latents", "one latent for all layers")
    if attention.bidirectional and (attention.latent is not None or any(layer.recurrent for layer in spec.layers)):
        raise CheckpointError("layers", "recurrent or with latents in an encoder", "heads with keys and values")
    if attention.distance_bias and not attention.bidirectional:
        raise CheckpointError("biases by distance", "in a decoder", "an encoder")
    if attention.value_norm and not all(spec.attention_of(layer).qk_norm for layer in spec.layers):
        raise CheckpointError("norms of values", "without norms of keys", "both, or only those of keys")
    if attention.chunked and attention.bidirectional:
        raise CheckpointError("chunks", "in an encoder", "windows")
    if spec.is_bounded and not all(_is_plain(spec, layer) for layer in spec.layers):
        raise CheckpointError("matrices", "with bounds", "none next to experts, latents, gates or shared keys")
    if spec.layer_inputs is not None and (spec.layer_inputs.size % 16 or not spec.mlp.gated):
        wanted = "a multiple of 16, in a model with gated MLPs"  # engines read 16 numbers at once
        raise CheckpointError("size of layer inputs", spec.layer_inputs.size, wanted)


def _check_streams(spec: DecoderSpec) -> None:
    """Raise unless each layer is attention and then an MLP, if the model has streams, LAuReL or thresholds of gates."""
    thresholds = any(layer.gate_threshold is not None for layer in spec.layers)
    if spec.streams is None and not spec.laurel_rank and not thresholds:
        return
    layers = all(
        layer.attends and layer.transforms and not (layer.sparse or layer.recurrent or layer.norms_after)
        for layer in spec.layers
    )
    is_other = spec.parallel or spec.attention.latent is not None or spec.is_bounded or not spec.mlp.gated
    if not layers or is_other:
        found, allowed = "AltUp, LAuReL or thresholds of gates", "attention, then a gated MLP, in each layer"
        raise CheckpointError("layers", found, allowed)
    if spec.laurel_rank and not (spec.norm_before and all(layer.attention_norm for layer in spec.layers)):
        raise CheckpointError("LAuReL", "without a norm before attention", "one in each layer")
    if spec.streams is not None and (spec.layer_inputs is None or spec.layer_scale or spec.deep_rows):
        raise CheckpointError("AltUp", "without inputs of layers, or with scales", "inputs of layers, and no scales")


def _is_plain(spec: DecoderSpec, layer: LayerSpec) -> bool:
    """Return whether a layer has the seven matrices of Llama, one after the other."""
    has_other = layer.sparse or layer.recurrent or layer.keys_are_values or layer.keys_of is not None
    is_other = spec.parallel or spec.attention.gated or spec.attention.latent is not None or not spec.mlp.gated
    return layer.attends and layer.transforms and not has_other and not is_other


def _check_shared(spec: DecoderSpec, index: int, keys_of: int) -> None:
    layer = spec.layers[index]
    if not 0 <= keys_of < index:
        raise CheckpointError(f"layer {index}", f"keys and values of layer {keys_of}", "those of an earlier layer")
    owner = spec.layers[keys_of]
    has_keys = owner.keys_of is None and not owner.recurrent and not layer.recurrent and spec.attention.latent is None
    if not has_keys or (owner.window, owner.heads) != (layer.window, layer.heads):
        other = f"keys and values of layer {keys_of}"
        raise CheckpointError(f"layer {index}", other, "those of a layer with the same window and heads")


def _check_skipping(spec: DecoderSpec, index: int) -> None:
    """Raise unless engines can keep the output of the states before a layer until its attention has read its rows."""
    layer, before = spec.layers[index], spec.layers[index - 1] if index else None
    has_states = before is not None and before.recurrent and not before.transforms and spec.convolution is None
    is_plain = not (spec.attention.gated or spec.layer_scale or spec.layer_inputs is not None)
    if not (has_states and is_plain and layer.attends and not layer.recurrent):
        allowed = "attention without gates after linear attention or a state-space layer that has no MLP"
        raise CheckpointError(f"layer {index}", "one that skips the previous layer", allowed)


def _check_recurrence(spec: DecoderSpec) -> None:
    rules = [rule for rule in (spec.delta, spec.mamba, spec.convolution) if rule is not None]
    if len(rules) != 1:
        found = f"with {len(rules)} rules" if rules else "without a rule"
        raise CheckpointError("layers", f"recurrent {found}", "one rule for recurrent layers")
    if spec.attention.latent is not None or spec.parallel:
        raise CheckpointError("layers", "recurrent next to latents or parallel", "recurrent, and full attention")
    check_recurrence(rules[0])
