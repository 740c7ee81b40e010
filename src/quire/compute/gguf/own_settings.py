"""The settings of each architecture in addition to Llama's, in the form of config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.expert_settings import (
    GATING,
    afmoe,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    experts_after,
    hunyuan_moe,
    llama4,
    minimax_m2,
    require_sigmoid,
    without_further,
)
from quire.compute.gguf.falcon_h1_settings import falcon_h1
from quire.compute.gguf.gemma_settings import gemma, gemma2, gemma3, gemma3n, gemma4
from quire.compute.gguf.granite_settings import granite, granite_hybrid, granite_moe
from quire.compute.gguf.lfm2_settings import lfm2, lfm2moe
from quire.compute.gguf.named_settings import (
    KV_HEADS,
    SIGMOID,
    TURNED,
    Settings,
    listed_windows,
    local_experts,
    near_layers,
    turned,
)
from quire.compute.gguf.nemotron_settings import nemotron_h, nemotron_h_moe
from quire.compute.gguf.rope_settings import TEMPERATURE, rope_scaling
from quire.compute.models.common import MAX_LAYERS
from quire.compute.models.rope import FULL

SOFTMAX: Final = 1  # of expert_gating_func
LINEAR: Final = "linear_attention"
XIELU: Final = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
IN_TURNS: Final = "ssm.v_head_reordered"


def _apertus(settings: Settings) -> dict[str, object]:
    """Return the numbers of the activation of each layer; one number stands for all layers."""
    count, where = settings.size("block_count", high=MAX_LAYERS), settings.file
    columns = []
    for name in XIELU:
        found = where.fields.get(name)
        numbers = found if isinstance(found, list) else [found] * count
        if len(numbers) != count or not all(isinstance(each, float) and math.isfinite(each) for each in numbers):
            raise where.error(name, f"a number, or one for each of the {count} layers")
        columns.append(numbers)
    return {"xielu": [list(of_layer) for of_layer in zip(*columns, strict=True)]}


def _qwen3moe(settings: Settings) -> dict[str, object]:
    return {
        "num_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen2moe(settings: Settings) -> dict[str, object]:
    size, used = settings.size("feed_forward_length"), settings.size("expert_used_count")
    return {
        "num_experts": settings.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": settings.size("expert_feed_forward_length", max(size // used, 1)),
        "shared_expert_intermediate_size": settings.size("expert_shared_feed_forward_length", size),
    }


def _llama(settings: Settings) -> dict[str, object]:
    """Return the family and experts for Mixtral; empty for models without experts."""
    if not settings.size("expert_count", 0, low=0):
        return {}
    return {"architectures": ["MixtralForCausalLM"], **local_experts(settings)}


def _mistral3(settings: Settings) -> dict[str, object]:
    """Return the family: without scaled positions, the file is Mistral Small 3."""
    named = {} if rope_scaling(settings, lambda _: None) else {"architectures": ["MistralForCausalLM"]}
    return {**named, "head_dim": settings.head_size}


def _gpt_oss(settings: Settings) -> dict[str, object]:
    return {
        **local_experts(settings),
        "intermediate_size": settings.size("expert_feed_forward_length"),
        "sliding_window": settings.size("attention.sliding_window"),
        **near_layers(settings),
    }


def _latents(settings: Settings) -> dict[str, object]:
    """Return the sizes of latents. Old files have KEY_UP and VALUE_UP in one tensor, and other settings for it."""
    rope_dim, heads = settings.size(TURNED), settings.size("attention.head_count")
    query = settings.size("attention.key_length_mla", settings.size("attention.key_length", rope_dim + 128))
    value = settings.size("attention.value_length", max(settings.size("embedding_length") // heads, 1))
    if query <= rope_dim:
        raise settings.file.error(settings.key("attention.key_length_mla"), f"more than the {rope_dim} that rotate")
    has_ranks = settings.has("attention.q_lora_rank")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": settings.size("attention.q_lora_rank") if has_ranks else None,
        "kv_lora_rank": settings.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": query - rope_dim,
        "v_head_dim": settings.size("attention.value_length_mla", value),
        "kv_b_split": "blk.0.attn_k_b.weight" in settings.tensors,
    }


def _deepseek2(settings: Settings) -> dict[str, object]:
    """Return the settings that only DeepSeek's models have; without experts, the file is Youtu.

    A file has only one of yarn's two strengths, which are equal in published models.
    """
    if settings.has(TEMPERATURE):
        raise settings.file.error(settings.key(TEMPERATURE), "none: no scores by position are run with latents")
    if not settings.size("expert_count", 0, low=0):
        return {**_latents(settings), "architectures": ["YoutuForCausalLM"]}
    is_v3 = settings.size(GATING, SOFTMAX, high=SIGMOID) == SIGMOID
    num_groups = settings.size("expert_group_count", 1)
    return {
        **_latents(settings),
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "topk_method": "noaux_tc" if is_v3 else "greedy" if num_groups == 1 else "group_limited_greedy",
        **experts_after(settings),
    }


def _ernie4_5(settings: Settings) -> dict[str, object]:
    return {"head_dim": settings.head_size, "use_bias": "blk.0.ffn_up.bias" in settings.tensors}


def _falcon(settings: Settings) -> dict[str, object]:
    """Return Falcon's settings in the form of newer models, which covers older ones."""
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": settings.size("attention.head_count_kv", settings.size("attention.head_count")),
        "num_ln_in_parallel_attn": 2 if any(".attn_norm_2." in name for name in settings.tensors) else 1,
        "bias": "blk.0.attn_qkv.bias" in settings.tensors,
        "ffn_hidden_size": settings.size("feed_forward_length"),
    }


def _gptneox(settings: Settings) -> dict[str, object]:
    return {
        **turned(settings),
        "use_parallel_residual": settings.file.flag(settings.key("use_parallel_residual"), True),
    }


def _sections(settings: Settings) -> dict[str, object]:
    """Return no settings. Positions have four parts, of which three are equal in a text, and the last one is 0."""
    key = settings.key("rope.dimension_sections")
    found = settings.file.fields.get(key, [])
    if not isinstance(found, list) or any(found[3:]):
        raise settings.file.error(key, "a list with 0 as its fourth number")
    return {}


def _rotating_part(settings: Settings) -> dict[str, object]:
    """Return the sizes of the heads of GLM. Files of vision models have pairs in another order, and sections."""
    if settings.has("rope.dimension_sections"):
        raise settings.file.error(settings.key("rope.dimension_sections"), "none: no positions of images are run")
    return {**turned(settings), "head_dim": settings.head_size}


def _glm4(settings: Settings) -> dict[str, object]:
    return {**_rotating_part(settings), "qkv_fused": "blk.0.attn_qkv.weight" in settings.tensors}


def _glm4moe(settings: Settings) -> dict[str, object]:
    """Return the settings that only GLM-4.5 and Solar Open have."""
    require_sigmoid(settings)
    return {
        **_rotating_part(settings),
        **experts_after(settings),
        **without_further(settings),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in settings.tensors,
    }


def _nemotron(settings: Settings) -> dict[str, object]:
    """Return the settings of Nemotron, whose files include the 1 in norms."""
    return {**turned(settings), "head_dim": settings.head_size, "norm_unit_offset": False}


def _recurrent(settings: Settings) -> dict[str, object]:
    """Return the settings of Qwen3.5. Files count the layers that predict further tokens, and include 1 in norms."""
    heads, inner = settings.size("ssm.time_step_rank"), settings.size("ssm.inner_size")
    if inner % heads:
        raise settings.file.error(settings.key("ssm.inner_size"), f"a multiple of the {heads} value heads")
    num_further = settings.size("nextn_predict_layers", 0, low=0)
    count = settings.size("block_count", low=num_further + 1, high=num_further + MAX_LAYERS) - num_further
    return {
        **turned(settings),
        **_sections(settings),
        "head_dim": settings.head_size,
        "num_hidden_layers": count,
        "num_nextn_predict_layers": num_further,
        "layer_types": _recurrent_layers(settings, count),
        "linear_conv_kernel_dim": settings.size("ssm.conv_kernel"),
        "linear_key_head_dim": settings.size("ssm.state_size"),
        "linear_num_key_heads": settings.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "rms_norm_unit_offset": False,
    }


def _recurrent_layers(settings: Settings, count: int) -> list[str]:
    """Return the type of each layer: from a list of the recurrent ones, or else all are recurrent but each fourth.

    Files of Ollama have a list of key-value heads, with 0 for recurrent layers.
    """
    interval = settings.size("full_attention_interval", 4)
    listed = settings.file.fields.get(key := settings.key("attention.recurrent_layers"))
    expected = [bool((layer + 1) % interval) for layer in range(count)] if listed is None else listed
    if not isinstance(expected, list) or len(expected) < count or not set(map(type, expected)) <= {bool}:
        raise settings.file.error(key, f"a list of booleans, one for each of the {count} layers")
    heads = settings.file.fields.get(key := settings.key(KV_HEADS))
    if isinstance(heads, list) and 0 in heads and [not each for each in heads[:count]] != expected[:count]:
        raise settings.file.error(key, "a number, or a list with 0 for exactly the recurrent layers")
    return [LINEAR if is_recurrent else FULL for is_recurrent in expected[:count]]


def _qwen35(settings: Settings) -> dict[str, object]:
    """Return the settings of Qwen3.5, whose files have value heads in turns; only Ollama says so."""
    if not settings.file.flag(settings.key(IN_TURNS), True):
        raise settings.file.error(settings.key(IN_TURNS), "true, as in other files of Qwen3.5")
    recurrent = _recurrent(settings)
    has_turns = recurrent["linear_num_value_heads"] != recurrent["linear_num_key_heads"]
    return {**recurrent, "linear_outputs_in_turns": has_turns}


def _qwen35moe(settings: Settings) -> dict[str, object]:
    return {**_qwen35(settings), **_experts_next(settings)}


def _qwen3next(settings: Settings) -> dict[str, object]:
    """Return the settings of Qwen3-Next. Its first files have the products of a recurrent layer in one tensor."""
    if settings.file.flag(settings.key(IN_TURNS), False):
        raise settings.file.error(settings.key(IN_TURNS), "false, as in other files of Qwen3-Next")
    is_split = any(".attn_gate." in name for name in settings.tensors)
    return {**_recurrent(settings), **_experts_next(settings), "qkvz_split": is_split}


def _experts_next(settings: Settings) -> dict[str, object]:
    """Return the settings of experts in each layer, next to an MLP with a weight for every token."""
    return {
        **_qwen3moe(settings),
        "shared_expert_intermediate_size": settings.size("expert_shared_feed_forward_length"),
    }


def _phi3(settings: Settings) -> dict[str, object]:
    window = settings.size("attention.sliding_window", 0, low=0)
    return {**turned(settings), "sliding_window": window or None}


def _olmo(settings: Settings) -> dict[str, object]:
    """Return no settings; refuses a limit of queries, keys and values."""
    if settings.has("attention.clamp_kqv"):
        raise settings.file.error(settings.key("attention.clamp_kqv"), "none: no queries, keys and values are clipped")
    return {}


def _olmoe(settings: Settings) -> dict[str, object]:
    return {
        **_olmo(settings),
        "num_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
    }


def _olmo2(settings: Settings) -> dict[str, object]:
    """Return the family and windows for OLMo 3, whose settings list the layers with a window; empty for OLMo 2."""
    windows = listed_windows(settings)
    return {**windows, "architectures": ["Olmo3ForCausalLM"]} if windows else {}


def _cohere(settings: Settings) -> dict[str, object]:
    own = {"logit_scale": settings.number("logit_scale"), "use_qk_norm": "blk.0.attn_q_norm.weight" in settings.tensors}
    return {**own, **turned(settings)}


def _cohere2(settings: Settings) -> dict[str, object]:
    return {
        **_cohere(settings),
        "sliding_window": settings.size("attention.sliding_window"),
        **near_layers(settings),
    }


def _stablelm(settings: Settings) -> dict[str, object]:
    """Return the settings that only StableLM has. Its parallel-residual setting is wrong if config.json had none."""
    return {
        **turned(settings),
        "use_qkv_bias": "blk.0.attn_q.bias" in settings.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in settings.tensors,
    }


def _seed_oss(settings: Settings) -> dict[str, object]:
    return {"head_dim": settings.head_size, "attention_out_bias": "blk.0.attn_output.bias" in settings.tensors}


def _starcoder2(settings: Settings) -> dict[str, object]:
    return {"use_bias": "blk.0.ffn_up.bias" in settings.tensors}


OWN: Final[Mapping[str, Callable[[Settings], dict[str, object]]]] = MappingProxyType(
    {
        "afmoe": afmoe,
        "apertus": _apertus,
        "chatglm": _glm4,
        "cohere2": _cohere2,
        "command-r": _cohere,
        "deepseek2": _deepseek2,
        "dots1": dots1,
        "ernie4_5": _ernie4_5,
        "ernie4_5-moe": ernie4_5_moe,
        "exaone-moe": exaone_moe,
        "exaone4": listed_windows,
        "falcon": _falcon,
        "falcon-h1": falcon_h1,
        "gemma": gemma,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "gemma3n": gemma3n,
        "gemma4": gemma4,
        "glm4": _glm4,
        "glm4moe": _glm4moe,
        "gpt-oss": _gpt_oss,
        "gptneox": _gptneox,
        "granite": granite,
        "granitehybrid": granite_hybrid,
        "granitemoe": granite_moe,
        "hunyuan-moe": hunyuan_moe,
        "lfm2": lfm2,
        "lfm2moe": lfm2moe,
        "llama": _llama,
        "llama4": llama4,
        "minicpm3": _latents,
        "minimax-m2": minimax_m2,
        "mistral3": _mistral3,
        "nemotron": _nemotron,
        "nemotron_h": nemotron_h,
        "nemotron_h_moe": nemotron_h_moe,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmoe": _olmoe,
        "phi2": turned,
        "phi3": _phi3,
        "qwen2moe": _qwen2moe,
        "qwen2vl": _sections,
        "qwen35": _qwen35,
        "qwen35moe": _qwen35moe,
        "qwen3moe": _qwen3moe,
        "qwen3next": _qwen3next,
        "qwen3vl": _sections,
        "qwen3vlmoe": lambda settings: {**_qwen3moe(settings), **_sections(settings)},
        "seed_oss": _seed_oss,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
    }
)
"""The settings of an architecture in addition to Llama's."""
