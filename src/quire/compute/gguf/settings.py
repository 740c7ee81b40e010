"""The settings of a GGUF file in the form of config.json, which families read.

GGUF names a setting ARCHITECTURE.NAME. It leaves out settings that are the same in the entire family. Some settings
follow from the tensors: whether the head is tied, and the divisors of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.gguf.header import GgufHeader, GgufTensor, same_number
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.rope import FULL, SLIDING
from quire.core.errors import ModelError

ARCHITECTURES: Final = MappingProxyType(
    {
        "arcee": "ArceeForCausalLM",
        "chatglm": "GlmForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "command-r": "CohereForCausalLM",
        "deepseek2": "DeepseekV2ForCausalLM",  # also DeepSeek-V3, distinguished by the scoring of experts
        "ernie4_5": "Ernie4_5ForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "falcon": "FalconForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "glm4moe": "Glm4MoeForCausalLM",
        "gpt-oss": "GptOssForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "gptneox": "GPTNeoXForCausalLM",
        "granite": "GraniteForCausalLM",
        "granitemoe": "GraniteMoeForCausalLM",
        "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
        "internlm2": "LlamaForCausalLM",  # its files have the tensors of Llama
        "llama": "LlamaForCausalLM",  # also Mistral, and Mixtral, with experts
        "minicpm3": "MiniCPM3ForCausalLM",
        "mistral3": "Ministral3ForCausalLM",  # also Mistral Small 3, without a growth of queries
        "olmo2": "Olmo2ForCausalLM",  # also OLMo 3, with a window
        "olmoe": "OlmoeForCausalLM",
        "phi2": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2moe": "Qwen2MoeForCausalLM",
        "qwen2vl": "Qwen2ForCausalLM",  # the text model; images are in a file of their own
        "qwen3": "Qwen3ForCausalLM",
        "qwen3moe": "Qwen3MoeForCausalLM",
        "qwen3vl": "Qwen3ForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
    }
)
"""`general.architecture` → the family that runs it."""

BIASED: Final = frozenset(
    {"arcee", "chatglm", "glm4", "glm4moe", "granite", "granitemoe", "internlm2", "llama", "seed_oss", "smollm3"}
)
"""Architectures whose models may have biases, by their tensors."""

LAYER_NORMS: Final = MappingProxyType(
    {
        **dict.fromkeys(("cohere2", "command-r", "gptneox", "phi2", "stablelm"), "layer_norm_eps"),
        **{"falcon": "layer_norm_epsilon", "starcoder2": "norm_epsilon"},
    }
)
"""Architectures with layer norms → the name of their epsilon in config.json."""

WIDE_HEADS: Final = MappingProxyType({"gemma2": 46, "gemma3": 62})
"""The number of layers of the Gemmas (27B) that scale scores by hidden size / heads, not by the size of a head."""

FILE_TYPES: Final = MappingProxyType(
    {
        **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
        **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
        **{21: "Q2_K_S", 25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4"},
    }
)
"""`general.file_type` → the usual name of such a file: the type of most of its matrices, and how many are wider."""

CLASSIFIER: Final = "cls.output.weight"
POOLINGS: Final = MappingProxyType({1: "mean", 2: "cls", 3: "lasttoken"})
"""`pooling_type` → the pooling in sentence-transformers. 0: none; 4: the scores of labels, by `cls.output.weight`."""

SOFTMAX: Final = 1  # of expert_gating_func
SIGMOID: Final = 2
YARN_LOG: Final = "rope.scaling.yarn_log_multiplier"
TEMPERATURE: Final = "attention.temperature_scale"
ReadTensor = Callable[[str], FloatArray | None]
"""The name of a tensor in the file → its numbers, or None."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of one architecture, each by its name after the dot, and the names of its tensors."""

    file: ConfigFile
    architecture: str
    tensors: Collection[str]

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.file.is_set(self.key(name))

    def size(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_LENGTH) -> int:
        key = self.key(name)
        found = self.file.fields.get(key)
        file = ConfigFile(self.file.where, {key: same_number(found)}) if isinstance(found, list) else self.file
        return file.size(key, default, low=low, high=high)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number as it was written before it became float32: 1e-06, not 9.99999997e-07."""
        return float(str(np.float32(self.file.number(self.key(name), default))))

    def word(self, name: str) -> str | None:
        found = self.file.fields.get(self.key(name))
        if found is not None and not isinstance(found, str):
            raise self.file.error(self.key(name), "a text")
        return found


def architecture_of(header: GgufHeader) -> str:
    """Return `general.architecture`; raises `ModelError` if no family runs it."""
    found = header.settings.get("general.architecture")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        message = (
            f"{header.path}: a model of the architecture {found!r:.80}, which quire cannot run. Use one of {known}"
        )
        raise ModelError(str(header.path), message)
    return found


def config_of(header: GgufHeader, read: ReadTensor) -> dict[str, object]:
    """Return config.json for a file. Does not mutate."""
    architecture = architecture_of(header)
    settings = _Settings(ConfigFile(str(header.path), dict(header.settings)), architecture, header.tensors.keys())
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(header, settings),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": _dtype(header),
    }
    if architecture == "gpt2":
        return config | _gpt2(settings)
    config |= _llama_like(settings)
    if architecture in BIASED:
        config |= {
            "attention_bias": not header.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
            "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        }
    rope = _rope_scaling(settings, read)
    if rope:
        config["rope_scaling"] = rope
    own = OWN.get(architecture)
    if own is not None:
        config |= own(settings)
    return config | _labels(settings, header.tensors.get(CLASSIFIER))


def _labels(settings: _Settings, classifier: GgufTensor | None) -> dict[str, object]:
    """Return the settings of a model that classifies texts, with rows for labels instead of a head."""
    if classifier is None:
        return {}
    key = settings.key("classifier.output_labels")
    names = (
        settings.file.texts(key) if settings.file.is_set(key) else [f"LABEL_{n}" for n in range(classifier.shape[0])]
    )
    if len(names) != classifier.shape[0]:
        raise settings.file.error(key, f"a name for each of the {classifier.shape[0]} rows of {CLASSIFIER}")
    stem = ARCHITECTURES[settings.architecture].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    labels = {str(place): name for place, name in enumerate(names)}
    return {"architectures": [f"{stem}ForSequenceClassification"], "id2label": labels}


def pooling_config_of(header: GgufHeader) -> dict[str, object] | None:
    """Return 1_Pooling/config.json for a file; None if the file does not specify the pooling. Does not mutate."""
    kind = header.settings.get(f"{architecture_of(header)}.pooling_type")
    return {"pooling_mode": POOLINGS[kind]} if type(kind) is int and kind in POOLINGS else None


def _dtype(header: GgufHeader) -> str:
    """Return the dtype of the matrices: their own if all have the same, else the dtype of computations."""
    names = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return "float32" if names == {"F32"} else "float16" if names == {"F16"} else "bfloat16"


def file_type_of(header: GgufHeader) -> str:
    """Return the usual name of a file's format; without that setting, the type of most bytes."""
    stated = header.settings.get("general.file_type")
    if type(stated) is int and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    num_bytes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        num_bytes[tensor.type.name] += tensor.num_bytes
    return max(num_bytes, key=num_bytes.__getitem__, default="")


def _vocab_size(header: GgufHeader, settings: _Settings) -> int:
    """Return the number of tokens in the embedding; the setting may count fewer."""
    embedding = header.tensors.get("token_embd.weight")
    return settings.size("vocab_size") if embedding is None else embedding.shape[0]


def _llama_like(settings: _Settings) -> dict[str, object]:
    heads = settings.size("attention.head_count")
    config: dict[str, object] = {
        "hidden_size": settings.size("embedding_length"),
        "intermediate_size": settings.size("feed_forward_length", low=0) or 1,
        "num_hidden_layers": settings.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.size("attention.head_count_kv", heads),
        "max_position_embeddings": settings.size("context_length"),
        "rope_theta": settings.number("rope.freq_base", 10_000.0),
        "sliding_window": None,
    }
    if settings.architecture in LAYER_NORMS:
        config[LAYER_NORMS[settings.architecture]] = settings.number("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = settings.number("attention.layer_norm_rms_epsilon")
    if settings.has("attention.key_length") and not settings.has("attention.kv_lora_rank"):
        size = config["head_dim"] = settings.size("attention.key_length")
        if settings.size("attention.value_length", size) != size:
            raise settings.file.error(settings.key("attention.value_length"), f"{size}, as attention.key_length")
    return config


def _rope_scaling(settings: _Settings, read: ReadTensor) -> dict[str, object]:
    """Return the scaling of positions; empty if there is none."""
    long, short = read("rope_factors_long.weight"), read("rope_factors_short.weight")
    original = "rope.scaling.original_context_length"
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": settings.size(original, settings.size("context_length")),
        } | _given("attention_factor", settings, "rope.scaling.attn_factor")
    divisors = read("rope_freqs.weight")
    if divisors is not None:
        return {"rope_type": "divided", "divisors": divisors.tolist()}
    kind = settings.word("rope.scaling.type")
    if kind in (None, "none") or not settings.has("rope.scaling.factor"):
        return {}
    if kind not in ("linear", "yarn"):
        raise settings.file.error(settings.key("rope.scaling.type"), "none, linear or yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": settings.number("rope.scaling.factor")}
    if kind == "yarn":
        if settings.has(original):
            scaling["original_max_position_embeddings"] = settings.size(original)
        for beta in ("beta_fast", "beta_slow"):
            scaling |= _given(beta, settings, f"rope.scaling.yarn_{beta}")
        if settings.architecture == "gpt-oss":
            scaling["truncate"] = False
        if settings.architecture == "deepseek2" and settings.has(YARN_LOG):
            strength = float(f"{10 * settings.number(YARN_LOG):.7g}")
            scaling |= {"mscale": strength, "mscale_all_dim": strength}
        if settings.architecture == "mistral3":
            scaling |= _mistral3_yarn(settings)
    return scaling


def _mistral3_yarn(settings: _Settings) -> dict[str, object]:
    """Return the strengths of yarn and the growth of queries, which files may have as 0."""
    names = {"mscale_all_dim": YARN_LOG, "llama_4_scaling_beta": TEMPERATURE}
    found = {field: settings.file.optional_number(settings.key(name), low=0) for field, name in names.items()}
    given: dict[str, object] = {field: float(str(np.float32(number))) for field, number in found.items() if number}
    return given | ({"mscale": 1.0} if "mscale_all_dim" in given else {})


def _given(field: str, settings: _Settings, name: str) -> dict[str, object]:
    return {field: settings.number(name)} if settings.has(name) else {}


def _gpt2(settings: _Settings) -> dict[str, object]:
    return {
        "n_embd": settings.size("embedding_length"),
        "n_head": settings.size("attention.head_count"),
        "n_layer": settings.size("block_count"),
        "n_inner": settings.size("feed_forward_length"),
        "n_positions": settings.size("context_length"),
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
    }


def _qwen3moe(settings: _Settings) -> dict[str, object]:
    return {
        "num_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen2moe(settings: _Settings) -> dict[str, object]:
    size, used = settings.size("feed_forward_length"), settings.size("expert_used_count")
    return {
        "num_experts": settings.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": settings.size("expert_feed_forward_length", max(size // used, 1)),
        "shared_expert_intermediate_size": settings.size("expert_shared_feed_forward_length", size),
    }


def _llama(settings: _Settings) -> dict[str, object]:
    """Return the family and experts for Mixtral; empty for models without experts."""
    if not settings.size("expert_count", 0, low=0):
        return {}
    return {"architectures": ["MixtralForCausalLM"], **_local_experts(settings)}


def _mistral3(settings: _Settings) -> dict[str, object]:
    """Return the family: without scaled positions, the file is Mistral Small 3."""
    named = {} if _rope_scaling(settings, lambda _: None) else {"architectures": ["MistralForCausalLM"]}
    return {**named, "head_dim": _head_size(settings)}


def _local_experts(settings: _Settings) -> dict[str, object]:
    return {
        "num_local_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
    }


def _gpt_oss(settings: _Settings) -> dict[str, object]:
    return {
        **_local_experts(settings),
        "intermediate_size": settings.size("expert_feed_forward_length"),
        "sliding_window": settings.size("attention.sliding_window"),
    }


def _latents(settings: _Settings) -> dict[str, object]:
    """Return the sizes of latents. Old files have KEY_UP and VALUE_UP in one tensor, and other settings for it."""
    rope_dim, heads = settings.size("rope.dimension_count"), settings.size("attention.head_count")
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


def _deepseek2(settings: _Settings) -> dict[str, object]:
    """Return the settings that only DeepSeek's models have.

    A file has only one of yarn's two strengths, which are equal in published models.
    """
    if settings.has(TEMPERATURE):
        raise settings.file.error(settings.key(TEMPERATURE), "none: no scores by position are run with latents")
    is_v3 = settings.size("expert_gating_func", SOFTMAX) == SIGMOID
    num_groups = settings.size("expert_group_count", 1)
    return {
        **_latents(settings),
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "topk_method": "noaux_tc" if is_v3 else "greedy" if num_groups == 1 else "group_limited_greedy",
        **_experts_after(settings),
    }


def _experts_after(settings: _Settings) -> dict[str, object]:
    """Return the settings of experts in most layers, next to an MLP for every token."""
    return {
        "first_k_dense_replace": settings.size("leading_dense_block_count", 0, low=0),
        "n_routed_experts": settings.size("expert_count"),
        "n_shared_experts": settings.size("expert_shared_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
        "norm_topk_prob": settings.file.flag(settings.key("expert_weights_norm"), False),
        "n_group": settings.size("expert_group_count", 1),
        "topk_group": settings.size("expert_group_used_count", 1),
    }


def _ernie4_5(settings: _Settings) -> dict[str, object]:
    return {"head_dim": _head_size(settings), "use_bias": "blk.0.ffn_up.bias" in settings.tensors}


def _falcon(settings: _Settings) -> dict[str, object]:
    """Return Falcon's settings in the form of newer models, which covers older ones."""
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": settings.size("attention.head_count_kv", settings.size("attention.head_count")),
        "num_ln_in_parallel_attn": 2 if any(".attn_norm_2." in name for name in settings.tensors) else 1,
        "bias": "blk.0.attn_qkv.bias" in settings.tensors,
        "ffn_hidden_size": settings.size("feed_forward_length"),
    }


def _gptneox(settings: _Settings) -> dict[str, object]:
    return {
        **_turned(settings),
        "use_parallel_residual": settings.file.flag(settings.key("use_parallel_residual"), True),
    }


def _head_size(settings: _Settings) -> int:
    heads, hidden = settings.size("attention.head_count"), settings.size("embedding_length")
    return settings.size("attention.key_length", max(hidden // heads, 1))


def _turned(settings: _Settings) -> dict[str, object]:
    """Return the fraction of each head that rotates."""
    size = _head_size(settings)
    return {"partial_rotary_factor": settings.size("rope.dimension_count", size) / size}


def _sections(settings: _Settings) -> dict[str, object]:
    """Return no settings. Positions have four parts, of which three are equal in a text, and the last one is 0."""
    key = settings.key("rope.dimension_sections")
    found = settings.file.fields.get(key, [])
    if not isinstance(found, list) or any(found[3:]):
        raise settings.file.error(key, "a list with 0 as its fourth number")
    return {}


def _rotating_part(settings: _Settings) -> dict[str, object]:
    """Return the sizes of the heads of GLM. Files of vision models have pairs in another order, and sections."""
    if settings.has("rope.dimension_sections"):
        raise settings.file.error(settings.key("rope.dimension_sections"), "none: no positions of images are run")
    return {**_turned(settings), "head_dim": _head_size(settings)}


def _glm4(settings: _Settings) -> dict[str, object]:
    return {**_rotating_part(settings), "qkv_fused": "blk.0.attn_qkv.weight" in settings.tensors}


def _glm4moe(settings: _Settings) -> dict[str, object]:
    """Return the settings that only GLM-4.5 has. Its files count the layers that predict further tokens, too."""
    if settings.size("expert_gating_func", SIGMOID) != SIGMOID:
        raise settings.file.error(settings.key("expert_gating_func"), f"{SIGMOID}, a sigmoid")
    num_further = settings.size("nextn_predict_layers", 0, low=0)
    return {
        **_rotating_part(settings),
        **_experts_after(settings),
        "num_hidden_layers": settings.size("block_count", low=num_further + 1) - num_further,
        "num_nextn_predict_layers": num_further,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in settings.tensors,
    }


def _phi3(settings: _Settings) -> dict[str, object]:
    window = settings.size("attention.sliding_window", 0, low=0)
    return {**_turned(settings), "sliding_window": window or None}


def _granite(settings: _Settings) -> dict[str, object]:
    if not settings.file.flag(settings.key("rope.scaling.finetuned"), True):
        raise settings.file.error(settings.key("rope.scaling.finetuned"), "true: no Granite without positions is run")
    scales = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    given = {field: settings.number(name) for field, name in scales.items() if settings.has(name)}
    return {**given, "attention_multiplier": settings.number("attention.scale", _head_size(settings) ** -0.5)}


def _granite_moe(settings: _Settings) -> dict[str, object]:
    own = {**_granite(settings), **_local_experts(settings)}
    if not settings.has("expert_shared_feed_forward_length"):
        return own
    size = settings.size("expert_shared_feed_forward_length")
    family = "GraniteMoeSharedForCausalLM"
    return {**own, "architectures": [family], "shared_intermediate_size": size, "shared_mlp_split": True}


def _olmoe(settings: _Settings) -> dict[str, object]:
    if settings.has("attention.clamp_kqv"):
        raise settings.file.error(settings.key("attention.clamp_kqv"), "none: no queries, keys and values are clipped")
    return {"num_experts": settings.size("expert_count"), "num_experts_per_tok": settings.size("expert_used_count")}


def _olmo2(settings: _Settings) -> dict[str, object]:
    """Return the family and windows for OLMo 3, whose settings list the layers with a window; empty for OLMo 2."""
    windows = _listed_windows(settings)
    return {**windows, "architectures": ["Olmo3ForCausalLM"]} if windows else {}


def _listed_windows(settings: _Settings) -> dict[str, object]:
    """Return the window and the list of layers that have one; empty without a window."""
    if not settings.has("attention.sliding_window"):
        return {}
    config: dict[str, object] = {"sliding_window": settings.size("attention.sliding_window")}
    pattern = settings.file.fields.get(key := settings.key("attention.sliding_window_pattern"))
    if pattern is None:
        return config
    if not isinstance(pattern, list) or not set(map(type, pattern)) <= {bool}:
        raise settings.file.error(key, "a list of booleans, one for each layer")
    return {**config, "layer_types": [SLIDING if has_window else FULL for has_window in pattern]}


def _cohere(settings: _Settings) -> dict[str, object]:
    own = {"logit_scale": settings.number("logit_scale"), "use_qk_norm": "blk.0.attn_q_norm.weight" in settings.tensors}
    return {**own, **_turned(settings)}


def _cohere2(settings: _Settings) -> dict[str, object]:
    return {**_cohere(settings), "sliding_window": settings.size("attention.sliding_window")}


def _stablelm(settings: _Settings) -> dict[str, object]:
    """Return the settings that only StableLM has. Its parallel-residual setting is wrong if config.json had none."""
    return {
        **_turned(settings),
        "use_qkv_bias": "blk.0.attn_q.bias" in settings.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in settings.tensors,
    }


def _seed_oss(settings: _Settings) -> dict[str, object]:
    return {"head_dim": _head_size(settings), "attention_out_bias": "blk.0.attn_output.bias" in settings.tensors}


def _starcoder2(settings: _Settings) -> dict[str, object]:
    return {"use_bias": "blk.0.ffn_up.bias" in settings.tensors}


def _gemma1(settings: _Settings) -> dict[str, object]:
    return {"head_dim": settings.size("attention.key_length", 256), "rms_norm_unit_offset": False}


def _gemma(settings: _Settings) -> dict[str, object]:
    """Return the settings that only Gemma 2 and 3 have. The file's norms already include the 1 of 1 + weight."""
    heads, size = settings.size("attention.head_count"), settings.size("attention.key_length", 256)
    is_wide = settings.size("block_count") == WIDE_HEADS[settings.architecture]
    return {
        "head_dim": size,
        "query_pre_attn_scalar": settings.size("embedding_length") // heads if is_wide else size,
        "sliding_window": settings.size("attention.sliding_window"),
        "rms_norm_unit_offset": False,
    }


def _gemma2(settings: _Settings) -> dict[str, object]:
    caps = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    given = {field: settings.number(name) for field, name in caps.items() if settings.has(name)}
    return _gemma(settings) | dict.fromkeys(caps) | given


OWN: Final[Mapping[str, Callable[[_Settings], dict[str, object]]]] = MappingProxyType(
    {
        "chatglm": _glm4,
        "cohere2": _cohere2,
        "command-r": _cohere,
        "deepseek2": _deepseek2,
        "ernie4_5": _ernie4_5,
        "exaone4": _listed_windows,
        "falcon": _falcon,
        "gemma": _gemma1,
        "gemma2": _gemma2,
        "gemma3": _gemma,
        "glm4": _glm4,
        "glm4moe": _glm4moe,
        "gpt-oss": _gpt_oss,
        "gptneox": _gptneox,
        "granite": _granite,
        "granitemoe": _granite_moe,
        "llama": _llama,
        "minicpm3": _latents,
        "mistral3": _mistral3,
        "olmo2": _olmo2,
        "olmoe": _olmoe,
        "phi2": _turned,
        "phi3": _phi3,
        "qwen2moe": _qwen2moe,
        "qwen2vl": _sections,
        "qwen3moe": _qwen3moe,
        "qwen3vl": _sections,
        "seed_oss": _seed_oss,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
    }
)
"""The settings of an architecture in addition to Llama's."""
