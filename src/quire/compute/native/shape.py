"""A `DecoderSpec` in the form of the compiled core (`DecoderShape` in native/include/quire/decoder.h)."""

from __future__ import annotations

from dataclasses import asdict

from quire.compute.adapters.folder import RANK_STEP
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.recurrent import ConvolutionSpec, DeltaSpec, MambaSpec
from quire.compute.models.sublayers import ExpertsSpec, LatentSpec, LayerInputsSpec, RopeSpec, Scoring
from quire.core.kv_spec import KVCacheSpec


def decoder_shape(spec: DecoderSpec, kv_spec: KVCacheSpec, adapter_rank: int = 0) -> dict[str, object]:
    """Return the fields of a `DecoderShape`; `adapter_rank` is the highest rank of its adapters."""
    attention, experts = spec.attention, spec.experts
    ropes = list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope is not None))
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "embedding_size": spec.embedding_size or spec.hidden_size,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": spec.most_intermediate,
        **_experts(experts),
        "gated": spec.mlp.gated,
        "tied_head": spec.tied_head,
        "qk_norm": "none" if attention.qk_norm is None else attention.qk_norm_scope.value,
        "rotates_first": attention.rotates_first,
        "gated_attention": attention.gated,
        "value_norm": attention.value_norm,
        "bidirectional": attention.bidirectional,
        "ahead_in_windows": attention.ahead_in_windows,
        "chunked": attention.chunked,
        "bounded": spec.is_bounded,
        "biased_length": spec.context_length if attention.distance_bias else 0,
        "parallel": spec.parallel,
        "shared_norm": spec.shared_norm,
        "activation": spec.mlp.activation.value,
        "norm": _norm(spec.norm),
        "head_norm": _norm(attention.qk_norm or spec.norm),
        "attention_scale": attention.scale,
        "score_soft_cap": attention.score_soft_cap or 0.0,
        "residual_scale": spec.residual_scale,
        "logit_scale": spec.logit_scale,
        "logit_soft_cap": spec.logit_soft_cap or 0.0,
        "embedding_scale": spec.embedding_scale,
        "has_streams": spec.streams is not None,
        "laurel_rank": spec.laurel_rank,
        "deep_rows": spec.deep_rows,
        "adapter_rank": -(-adapter_rank // RANK_STEP) * RANK_STEP,
        "separator": -1 if spec.separator is None else spec.separator,
        "learned_positions": -1 if spec.learned_positions is None else spec.learned_positions,
        "ropes": [_rope(rope) for rope in ropes],
        "layers": _layers(spec, kv_spec, ropes),
        **({} if attention.latent is None else {"latent": _latent(attention.latent)}),
        **({} if spec.delta is None else {"delta": _delta(spec.delta)}),
        **({} if spec.mamba is None else {"delta": _mamba(spec.mamba, spec.norm)}),
        **({} if spec.convolution is None else {"convolution": _convolution(spec.convolution)}),
        **({} if spec.layer_inputs is None else {"layer_inputs": _layer_inputs(spec.layer_inputs)}),
    }


def _layer_inputs(inputs: LayerInputsSpec) -> dict[str, object]:
    return {**asdict(inputs), "num_tokens": inputs.num_tokens or 0}


def _experts(experts: ExpertsSpec | None) -> dict[str, object]:
    return {
        "num_experts": 0 if experts is None else experts.num_experts,
        "experts_per_token": 0 if experts is None else experts.experts_per_token,
        "expert_size": 0 if experts is None else experts.intermediate_size,
        "normalize_experts": experts is not None and experts.normalize_weights,
        "sigmoid_experts": experts is not None and experts.scoring is Scoring.SIGMOID,
        "mixes_experts": experts is not None and experts.scoring is Scoring.SPARSE_MIXER,
        "expert_margin": 0.0 if experts is None else experts.margin,
        "expert_scale": 1.0 if experts is None else experts.scale,
        "num_expert_groups": 1 if experts is None else experts.num_groups,
        "groups_per_token": 1 if experts is None else experts.groups_per_token,
        "group_best": 1 if experts is None else experts.group_best,
        "shared_size": 0 if experts is None else experts.shared_size,
        "score_scale": 1.0 if experts is None else experts.score_scale,
        "weighs_inputs": experts is not None and experts.weighs_inputs,
    }


def _latent(latent: LatentSpec) -> dict[str, object]:
    return {
        "rank": latent.rank,
        "rope_dim": latent.rope_dim,
        "plain_dim": latent.plain_dim,
        "value_dim": latent.value_dim,
        "query_rank": latent.query_rank or 0,
        "norm": _norm(latent.norm),
    }


def _delta(delta: DeltaSpec) -> dict[str, object]:
    return {
        "num_heads": delta.num_heads,
        "num_key_heads": delta.num_key_heads,
        "key_dim": delta.key_dim,
        "value_dim": delta.value_dim,
        "filter_width": delta.filter_width,
        "outputs_in_turns": delta.outputs_in_turns,
        "num_late": delta.num_late,
        "record_heads": delta.states.heads,
        "rate_scale": delta.rate_scale,
        "mamba": False,
        "norm": _norm(delta.norm),
    }


def _mamba(mamba: MambaSpec, norm: NormSpec) -> dict[str, object]:
    return {
        "num_heads": mamba.num_heads,
        "num_key_heads": mamba.num_groups,
        "key_dim": mamba.key_dim,
        "value_dim": mamba.value_dim,
        "filter_width": mamba.filter_width,
        "outputs_in_turns": False,
        "num_late": mamba.num_late,
        "record_heads": mamba.states.heads,
        "rate_scale": 1.0,
        "mamba": True,
        "norm": _norm(mamba.norm or norm),
    }


def _convolution(convolution: ConvolutionSpec) -> dict[str, object]:
    return {
        "size": convolution.size,
        "filter_width": convolution.filter_width,
        "chunk": convolution.chunk,
        "num_late": convolution.num_late,
    }


def _layers(spec: DecoderSpec, kv_spec: KVCacheSpec, ropes: list[RopeSpec]) -> list[dict[str, object]]:
    homes = {
        layer: (index, *divmod(rank, kv_spec.layers_per_place(group)))
        for index, group in enumerate(kv_spec.groups)
        for rank, layer in enumerate(group.layers)
    }
    layers: list[dict[str, object]] = []
    for index, layer in enumerate(spec.layers):
        home = homes.get(index if layer.keys_of is None else layer.keys_of)
        group, place, part = (-1, 0, 0) if home is None else home
        layers.append(
            {
                "window": layer.window or 0,
                "rope": -1 if layer.rope is None else ropes.index(layer.rope),
                "sparse": layer.sparse,
                "recurrent": layer.recurrent,
                "kv_group": group,
                "kv_place": place,
                "kv_part": part,
                "num_kv_heads": 0 if layer.heads is None else layer.heads.num_kv_heads,
                "head_dim": 0 if layer.heads is None else layer.heads.head_dim,
                "has_keys": layer.has_keys,
                "attends": layer.attends,
                "transforms": layer.transforms,
                "keys_are_values": layer.keys_are_values,
                "skips_previous": layer.skips_previous,
                "cuts_gates": layer.gate_threshold is not None,
                "gate_threshold": layer.gate_threshold or 0.0,
            }
        )
    return layers


def _norm(norm: NormSpec) -> dict[str, object]:
    return {"epsilon": norm.epsilon, "center": norm.kind is NormKind.LAYER, "unit_offset": norm.unit_offset}


def _rope(rope: RopeSpec) -> dict[str, object]:
    return {
        "rotary_dim": rope.rotary_dim,
        "scale": rope.scale,
        "inverse_frequencies": list(rope.inverse_frequencies),
        "axes": list(rope.axes),
        "query_growth": rope.query_growth,
        "growth_length": rope.growth_length,
        "growth_offset": rope.growth_offset,
    }
