"""The settings of a GGUF file in the form of config.json, which families read.

GGUF names a setting ARCHITECTURE.NAME. It leaves out settings that are the same in the entire family. Some settings
follow from the tensors: whether the head is tied, and the divisors of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.encoders import encoder_settings, is_encoder
from quire.compute.gguf.header import GgufHeader, GgufTensor
from quire.compute.gguf.named_settings import KV_HEADS, NEAR_BASE, TURNED, WIDTH, Settings, StateSpace
from quire.compute.gguf.names import Names
from quire.compute.gguf.own_settings import OWN
from quire.compute.gguf.rope_settings import ReadTensor, rope_settings
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.labels import WITHOUT_LABELS
from quire.compute.models.pooling import IDENTITY
from quire.core.errors import ModelError

ARCHITECTURES: Final = MappingProxyType(
    {
        "afmoe": "AfmoeForCausalLM",
        "apertus": "ApertusForCausalLM",
        "arcee": "ArceeForCausalLM",
        "bert": "BertModel",  # also XLM-RoBERTa, without the unused rows of its positions, and DistilBERT
        "chatglm": "GlmForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "command-r": "CohereForCausalLM",
        "deepseek2": "DeepseekV2ForCausalLM",  # also DeepSeek-V3, by the scoring of experts, and Youtu, without
        "dots1": "Dots1ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
        "eurobert": "EuroBertModel",
        "exaone": "ExaoneForCausalLM",
        "exaone-moe": "ExaoneMoeForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "falcon": "FalconForCausalLM",
        "falcon-h1": "FalconH1ForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma-embedding": "Gemma3TextModel",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
        "gemma3n": "Gemma3nForCausalLM",
        "gemma4": "Gemma4ForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "glm4moe": "Glm4MoeForCausalLM",  # also Solar Open
        "gpt-oss": "GptOssForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "gptneox": "GPTNeoXForCausalLM",
        "granite": "GraniteForCausalLM",
        "granitehybrid": "GraniteMoeHybridForCausalLM",
        "granitemoe": "GraniteMoeForCausalLM",
        "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
        "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
        "internlm2": "LlamaForCausalLM",  # its files have the tensors of Llama
        "jais2": "Jais2ForCausalLM",
        "jina-bert-v3": "JinaEmbeddingsV3Model",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2moe": "Lfm2MoeForCausalLM",
        "llama": "LlamaForCausalLM",  # also Mistral, and Mixtral, with experts
        "llama4": "Llama4ForCausalLM",
        "mamba2": "Mamba2ForCausalLM",
        "minicpm3": "MiniCPM3ForCausalLM",
        "minimax-m2": "MiniMaxM2ForCausalLM",
        "mistral3": "Ministral3ForCausalLM",  # also Mistral Small 3, without a growth of queries
        "modern-bert": "ModernBertModel",
        "nemotron": "NemotronForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "nemotron_h_moe": "NemotronHForCausalLM",
        "nomic-bert": "NomicBertModel",
        "olmo": "OlmoForCausalLM",
        "olmo2": "Olmo2ForCausalLM",  # also OLMo 3, with a window
        "olmoe": "OlmoeForCausalLM",
        "phi2": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen25vl": "Qwen2ForCausalLM",  # Ollama's name for Qwen2.5-VL
        "qwen2moe": "Qwen2MoeForCausalLM",
        "qwen2vl": "Qwen2ForCausalLM",  # the text model; images are in a file of their own
        "qwen3": "Qwen3ForCausalLM",
        "qwen35": "Qwen3_5ForCausalLM",
        "qwen35moe": "Qwen3_5MoeForCausalLM",
        "qwen3moe": "Qwen3MoeForCausalLM",
        "qwen3next": "Qwen3NextForCausalLM",
        "qwen3vl": "Qwen3ForCausalLM",
        "qwen3vlmoe": "Qwen3MoeForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
    }
)
"""`general.architecture` → the family that runs it."""

OF_IMAGES: Final = "clip"
"""The architecture of a file with an image encoder only."""

BIASED: Final = frozenset(
    {"arcee", "chatglm", "glm4", "glm4moe", "granite", "granitemoe", "internlm2", "jais2", "llama", "nemotron"}
    | {"seed_oss", "smollm3"}
)
"""Architectures whose models may have biases, by their tensors."""

LAYER_NORMS: Final = MappingProxyType(
    {
        **dict.fromkeys(("bert", "cohere2", "command-r", "gptneox", "nomic-bert", "olmo"), "layer_norm_eps"),
        **dict.fromkeys(("jais2", "jina-bert-v3", "phi2", "stablelm"), "layer_norm_eps"),
        **{
            "falcon": "layer_norm_epsilon",
            "modern-bert": "norm_eps",
            "starcoder2": "norm_epsilon",
            "nemotron": "norm_eps",
        },
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "layer_norm_epsilon"),  # of RMS norms
    }
)
"""Architectures whose epsilon has the name of that of layer norms → its name in config.json."""

USUAL_EPSILONS: Final = MappingProxyType({"gemma3": 1e-6})
"""The epsilon of RMS norms in files that do not set it: those of Ollama."""

LISTED: Final = MappingProxyType({"gemma3n": (WIDTH,), "gemma4": (KV_HEADS, WIDTH)})
"""Architectures with settings that may differ between layers → these settings, which their own function reads."""

RECURRENT: Final = frozenset(
    {"granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"}
)
"""Architectures with layers that have states instead of keys and values."""

WITHOUT_POSITIONS: Final = frozenset({"bert", "granitehybrid", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose heads may not rotate."""

GATE: Final = "blk.0.ffn_gate.weight"
SIZES: Final = MappingProxyType(
    {"gemma3n": {"laurel_rank": "blk.0.laurel_l.weight", "vocab_size_per_layer_input": "per_layer_token_embd.weight"}}
)
"""Architectures with sizes that no setting has → their names in config.json, and the tensors with as many rows."""

FILE_TYPES: Final = MappingProxyType(
    {
        **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
        **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
        **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
        **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
        **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4"},
    }
)
"""`general.file_type` → the usual name of such a file: the type of most of its matrices, and how many are wider."""

CLASSIFIER: Final = "cls.output.weight"
POOLINGS: Final = MappingProxyType({1: "mean", 2: "cls", 3: "lasttoken"})
"""`pooling_type` → the pooling in sentence-transformers. 0: none; 4: the scores of labels, by `cls.output.weight`."""


def architecture_of(header: GgufHeader) -> str:
    """Return `general.architecture`; raises `ModelError` if no family runs it."""
    found = header.settings.get("general.architecture")
    if found == OF_IMAGES:
        advice = "Give the file of its model; this one is found next to it, or named by --mmproj"
        raise ModelError(str(header.path), f"{header.path} has the image encoder of a model only. {advice}")
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
    settings = Settings(ConfigFile(str(header.path), dict(header.settings)), architecture, header.tensors.keys())
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(header, settings),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": _dtype(header),
    }
    encodes = is_encoder(settings)
    if not encodes and not settings.file.flag(settings.key("attention.causal"), True):
        raise settings.file.error(settings.key("attention.causal"), "true: no token attends to later ones")
    if architecture in WITHOUT_LLAMA:
        return config | WITHOUT_LLAMA[architecture](settings)
    config |= _llama_like(settings.of_first_layer(*LISTED.get(architecture, ())))
    if architecture in BIASED:
        config |= {
            "attention_bias": not header.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
            "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        }
    config |= rope_settings(settings, read)
    own = OWN.get(architecture)
    if own is not None:
        config |= own(settings)
    sizes = SIZES.get(architecture, {})
    config |= {name: header.tensors[rows].shape[0] for name, rows in sizes.items() if rows in header.tensors}
    if encodes:
        config |= encoder_settings(settings, header.tensors)
    if architecture == "lfm2" and len(header.tensors[GATE].shape if GATE in header.tensors else ()) == 2:
        config["intermediate_size"] = header.tensors[GATE].shape[0]  # files of Ollama have it before its adjustment
    if architecture not in WITHOUT_POSITIONS:
        _require_positions(settings, config)
    (family,) = ConfigFile(settings.file.where, config).texts("architectures")
    return config | _labels(settings, family, header.tensors.get(CLASSIFIER))


def _require_positions(settings: Settings, config: Mapping[str, object]) -> None:
    """Raise for positions of a part of each head, or of another base with a window, unless the family has them."""
    size, base = config.get("head_dim", settings.head_size), config["rope_theta"]
    for name, usual, meaning, read_as in (
        (TURNED, size, "the size of a head", ("global_head_dim", "partial_rotary_factor", "qk_rope_head_dim")),
        (NEAR_BASE, base, "as rope.freq_base", ("rope_local_base_freq", "rope_parameters")),
    ):
        if config.keys().isdisjoint(read_as) and settings.has(name) and settings.number(name) != usual:
            raise settings.file.error(settings.key(name), f"{usual}, {meaning}")


def _labels(settings: Settings, family: str, classifier: GgufTensor | None) -> dict[str, object]:
    """Return the settings of a model that classifies texts, with rows for labels instead of a head."""
    if classifier is None:
        return {}
    key = settings.key("classifier.output_labels")
    names = (
        settings.file.texts(key) if settings.file.is_set(key) else [f"LABEL_{n}" for n in range(classifier.shape[0])]
    )
    if len(names) != classifier.shape[0]:
        raise settings.file.error(key, f"a name for each of the {classifier.shape[0]} rows of {CLASSIFIER}")
    stem = family
    for ending in WITHOUT_LABELS:
        stem = stem.removesuffix(ending)
    labels = {str(place): name for place, name in enumerate(names)}
    return {"architectures": [f"{stem}ForSequenceClassification"], "id2label": labels}


def pooling_config_of(header: GgufHeader) -> dict[str, object] | None:
    """Return 1_Pooling/config.json for a file; None if the file does not specify the pooling. Does not mutate."""
    kind = header.settings.get(f"{architecture_of(header)}.pooling_type")
    return {"pooling_mode": POOLINGS[kind]} if type(kind) is int and kind in POOLINGS else None


def dense_config_of(header: GgufHeader, file: str) -> dict[str, object] | None:
    """Return N_Dense/config.json, a layer after the pooling; None if the file has none. Does not mutate."""
    folder, _, name = file.partition("/")
    names = Names.of(architecture_of(header), header.tensors.keys())
    tensor = header.tensors.get(names.stored(f"{folder}.linear.weight"))
    if tensor is None or name != "config.json" or len(tensor.shape) != 2:
        return None
    size = {"out_features": tensor.shape[0], "in_features": tensor.shape[1]}
    return {**size, "bias": False, "activation_function": IDENTITY}


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


def _vocab_size(header: GgufHeader, settings: Settings) -> int:
    """Return the number of tokens in the embedding; the setting may count fewer."""
    embedding = header.tensors.get("token_embd.weight")
    return settings.size("vocab_size") if embedding is None else embedding.shape[0]


def _size_of_layers(settings: Settings, name: str, default: int | None, *, low: int = 1) -> int:
    """Return the same size for all layers that have one. A list has 0 for those with states, or without an MLP."""
    found = settings.file.fields.get(key := settings.key(name))
    if settings.architecture in RECURRENT and isinstance(found, list):
        rest = [each for each in found if each != 0]
        settings = replace(settings, file=ConfigFile(settings.file.where, {**settings.file.fields, key: rest}))
    return settings.size(name, default, low=low)


def _llama_like(settings: Settings) -> dict[str, object]:
    heads = settings.size("attention.head_count")
    unused = 0 if settings.architecture == "qwen35moe" else None  # no layer has an MLP of this size
    config: dict[str, object] = {
        "hidden_size": settings.size("embedding_length"),
        "intermediate_size": _size_of_layers(settings, WIDTH, unused, low=0) or 1,
        "num_hidden_layers": settings.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size_of_layers(settings, KV_HEADS, heads),
        "max_position_embeddings": settings.size("context_length"),
        "rope_theta": settings.number("rope.freq_base", 10_000.0),
        "sliding_window": None,
    }
    if settings.architecture in LAYER_NORMS:
        config[LAYER_NORMS[settings.architecture]] = settings.number("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = settings.number(
            "attention.layer_norm_rms_epsilon", USUAL_EPSILONS.get(settings.architecture)
        )
    if settings.has("attention.key_length") and not settings.has("attention.kv_lora_rank"):
        size = config["head_dim"] = settings.size("attention.key_length")
        if settings.size("attention.value_length", size) != size:
            raise settings.file.error(settings.key("attention.value_length"), f"{size}, as attention.key_length")
    return config


def _mamba2(settings: Settings) -> dict[str, object]:
    rule, hidden = StateSpace.of(settings), settings.size("embedding_length")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": settings.size("block_count"),
        "max_position_embeddings": settings.size("context_length"),
        "layer_norm_epsilon": settings.number("attention.layer_norm_rms_epsilon"),
        "num_heads": rule.num_heads,
        "head_dim": rule.head_size,
        "n_groups": rule.num_groups,
        "state_size": rule.state_size,
        "conv_kernel": rule.filter_width,
        "use_conv_bias": rule.has_bias,
        "expand": max(rule.num_heads * rule.head_size // hidden, 1),
    }


def _gpt2(settings: Settings) -> dict[str, object]:
    return {
        "n_embd": settings.size("embedding_length"),
        "n_head": settings.size("attention.head_count"),
        "n_layer": settings.size("block_count"),
        "n_inner": settings.size(WIDTH),
        "n_positions": settings.size("context_length"),
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
    }


WITHOUT_LLAMA: Final = MappingProxyType({"gpt2": _gpt2, "mamba2": _mamba2})
"""Architectures whose files lack settings that Llama has."""
