"""The names of the tensors of GGUF files, and those of Hugging Face for the same tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ONCE: Final = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
CLASSIFIER: Final = MappingProxyType({"cls.output": "score"})  # of all architectures
LAYER: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
NORM_AFTER_ATTENTION: Final = MappingProxyType(
    {
        **{name: ours for name, ours in LAYER.items() if name != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
    }
)
"""The norm before the MLP, by the other name that some files have for it."""

EXPERTS: Final = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
        "ffn_up_exps": "mlp.experts.{expert}.up_proj",
        "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    }
)
MIXTRAL_EXPERTS: Final = MappingProxyType(
    {
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    }
)
GRANITE_EXPERTS: Final = MappingProxyType(
    {theirs: ours.replace("mlp", "block_sparse_moe") for theirs, ours in EXPERTS.items()}
)
GEMMA4_EXPERTS: Final = MappingProxyType({theirs: ours.removeprefix("mlp.") for theirs, ours in EXPERTS.items()})
LFM2_EXPERTS: Final = MappingProxyType(
    {theirs: ours.replace("block_sparse_moe", "feed_forward") for theirs, ours in MIXTRAL_EXPERTS.items()}
)
NEMOTRON_EXPERTS: Final = MappingProxyType({theirs: ours.replace("mlp", "mixer") for theirs, ours in EXPERTS.items()})
EXPERTS_OF: Final = MappingProxyType(
    {
        "gemma4": GEMMA4_EXPERTS,
        "granitehybrid": GRANITE_EXPERTS,
        "granitemoe": GRANITE_EXPERTS,
        "lfm2moe": LFM2_EXPERTS,
        "nemotron_h_moe": NEMOTRON_EXPERTS,
        **dict.fromkeys(("llama", "minimax-m2"), MIXTRAL_EXPERTS),
    }
)
"""Architectures whose experts have other names."""

GATE_UP: Final = "ffn_gate_up_exps"
GATE_AND_UP: Final = ("ffn_gate_exps", "ffn_up_exps")
"""The matrices in a tensor that has the gate of each expert, and then its up projection."""

OF_EXPERT: Final = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(\w+)")
OLD_EXPERT: Final = re.compile(r"blk\.\d+\.(ffn_(?:gate|up|down))\.(\d+)")
"""A matrix of one expert in the first files of Mixtral, which do not stack experts: its part, and the expert."""

GEMMA: Final = MappingProxyType(
    {
        **LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GEMMA4: Final = MappingProxyType(
    {
        **GEMMA,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    }
)
GEMMA4_ONCE: Final = MappingProxyType(
    {
        **ONCE,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
LFM2: Final = MappingProxyType(
    {
        **LAYER,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b": "feed_forward.expert_bias",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    }
)
PHI2: Final = MappingProxyType({**LAYER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"})
ROW: Final = "ffn_gate_inp_shexp"
"""A matrix of one row, which older files have as a vector."""

WEIGHTS: Final = MappingProxyType(
    {
        "exp_probs_b": ".bias",
        "ssm_a": "",
        "ssm_d": "",
        "ssm_dt": ".bias",
        "ffn_gate_inp.scale": "",
        "ffn_down_exps.scale": "",
    }
)
"""Parts with a weight whose name does not end in `.weight` → its end. The first is `ExpertsSpec.offset`."""

WEIGHTS_OF: Final = MappingProxyType({"falcon-h1": {**WEIGHTS, "ffn_norm": ""}})
"""Architectures with other such parts."""

SHARED: Final = MappingProxyType(
    {
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
    }
)
SHARED_EXPERT: Final = MappingProxyType(
    {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        ROW: "mlp.shared_expert_gate",
    }
)
FURTHER: Final = MappingProxyType(
    {
        **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
    }
)
"""Tensors of the layers that predict further tokens."""

LATENTS: Final = MappingProxyType(
    {
        **LAYER,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        **SHARED,
    }
)
RECURRENT: Final = MappingProxyType(
    {
        **{**NORM_AFTER_ATTENTION, **SHARED_EXPERT, **FURTHER},
        "attn_gate": "linear_attn.in_proj_z",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "ssm_a": "linear_attn.A_log",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
"""Layers of which most have linear attention by the gated delta rule."""

GRANITE_MLP: Final = MappingProxyType(
    {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj", "down": "shared_mlp.output_linear"}
)
GRANITE_MOE: Final = MappingProxyType(
    {
        **LAYER,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **{f"ffn_{part}_shexp": name for part, name in GRANITE_MLP.items()},
    }
)
MAMBA: Final = MappingProxyType(
    {
        "ssm_a": "mamba.A_log",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_d": "mamba.D",
        "ssm_dt": "mamba.dt_bias",
        "ssm_in": "mamba.in_proj",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    }
)
"""State-space layers."""

NEMOTRON_ONCE: Final = MappingProxyType(
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
)
NEMOTRON: Final = MappingProxyType(
    {
        "attn_norm": "norm",
        **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
        **{theirs: ours.replace("mamba", "mixer") for theirs, ours in MAMBA.items()},
    }
)

HUNYUAN: Final = MappingProxyType(
    {**LAYER, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)
FALCON_H1_ONCE: Final = MappingProxyType({**ONCE, "output_norm": "model.final_layernorm"})
FALCON_H1: Final = MappingProxyType(
    {
        **{**LAYER, **MAMBA, "ffn_norm": "pre_ff_layernorm"},
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    }
)
LAYERS: Final = MappingProxyType(
    {
        "afmoe": MappingProxyType(
            {
                **{**LAYER, **SHARED},
                "attn_gate": "self_attn.gate_proj",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b": "mlp.expert_bias",
            }
        ),
        "dots1": MappingProxyType({**LAYER, **SHARED}),
        "ernie4_5-moe": MappingProxyType({**LAYER, **SHARED, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}),
        "exaone-moe": MappingProxyType({**LAYER, **SHARED, **FURTHER, "exp_probs_b": "mlp.e_score_correction_bias"}),
        **dict.fromkeys(("deepseek2", "minicpm3"), LATENTS),
        "gemma2": GEMMA,
        **dict.fromkeys(("chatglm", "phi3"), MappingProxyType({**LAYER, "ffn_up": "mlp.gate_up_proj"})),
        "glm4": MappingProxyType(
            {
                **LAYER,
                "ffn_up": "mlp.gate_up_proj",
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            }
        ),
        "glm4moe": MappingProxyType(
            {
                **NORM_AFTER_ATTENTION,
                **{**SHARED, **FURTHER},
            }
        ),
        "seed_oss": NORM_AFTER_ATTENTION,
        "gpt-oss": MappingProxyType(
            {
                **NORM_AFTER_ATTENTION,
                "attn_sinks": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            }
        ),
        "granitehybrid": MappingProxyType({**GRANITE_MOE, **MAMBA}),
        "granitemoe": GRANITE_MOE,
        "hunyuan-dense": HUNYUAN,
        "hunyuan-moe": MappingProxyType(
            {
                **HUNYUAN,
                "ffn_gate_inp": "mlp.gate.wg",
                **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
            }
        ),
        "llama": MappingProxyType({**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"}),
        **dict.fromkeys(
            ("exaone4", "olmo2"),
            MappingProxyType({name: ours for name, ours in GEMMA.items() if name not in ("attn_norm", "ffn_norm")}),
        ),
        "minimax-m2": MappingProxyType(
            {
                **LAYER,
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
            }
        ),
        "qwen2moe": MappingProxyType({**LAYER, **SHARED_EXPERT}),
        **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), RECURRENT),
        "starcoder2": MappingProxyType({**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    }
)
FALCON_ONCE: Final = MappingProxyType(
    {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}
)
FALCON_LAYER: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
TWO_NORMS: Final = MappingProxyType({"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
GPTNEOX_ONCE: Final = MappingProxyType(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}
)
GPTNEOX_LAYER: Final = MappingProxyType(
    {
        **{name: ours.replace("self_attention", "attention") for name, ours in FALCON_LAYER.items()},
        "ffn_norm": "post_attention_layernorm",
    }
)
GPT2_ONCE: Final = MappingProxyType(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }
)
GPT2_LAYER: Final = MappingProxyType(
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
)
EMBEDDING_ONCE: Final = MappingProxyType({**ONCE, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"})
GEMMA3_ONCE: Final = MappingProxyType({**ONCE, "dense.0": "2_Dense.linear", "dense.1": "3_Dense.linear"})
"""As in files of Ollama, whose EmbeddingGemma is a Gemma 3 with a pooling."""

BERT_ONCE: Final = MappingProxyType(
    {
        "token_embd": "bert.embeddings.word_embeddings",
        "position_embd": "bert.embeddings.position_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "token_embd_norm": "bert.embeddings.LayerNorm",
        "cls": "classifier.dense",
        "cls.output": "classifier.out_proj",
    }
)
BERT_LAYER: Final = MappingProxyType(
    {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    }
)
TOKEN_TYPES: Final = "token_types.weight"
"""A BERT without them is a DistilBERT."""

DISTIL_BERT_ONCE: Final = MappingProxyType(
    {
        "token_embd": "distilbert.embeddings.word_embeddings",
        "position_embd": "distilbert.embeddings.position_embeddings",
        "token_embd_norm": "distilbert.embeddings.LayerNorm",
        "cls": "pre_classifier",
        "cls.output": "classifier",
    }
)
DISTIL_BERT_LAYER: Final = MappingProxyType(
    {
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    }
)
MODERN_BERT_ONCE: Final = MappingProxyType(
    {
        "token_embd": "model.embeddings.tok_embeddings",
        "token_embd_norm": "model.embeddings.norm",
        "output_norm": "model.final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    }
)
MODERN_BERT_LAYER: Final = MappingProxyType(
    {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    }
)
NOMIC_ONCE: Final = MappingProxyType(
    {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
    }
)
NOMIC_LAYER: Final = MappingProxyType(
    {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    }
)
OWN: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, str], str]]] = MappingProxyType(
    {
        "bert": (BERT_ONCE, BERT_LAYER, "bert.encoder.layer."),
        "falcon-h1": (FALCON_H1_ONCE, FALCON_H1, "model.layers."),
        "gemma-embedding": (EMBEDDING_ONCE, GEMMA, "model.layers."),
        "gemma3": (GEMMA3_ONCE, GEMMA, "model.layers."),
        "gpt2": (GPT2_ONCE, GPT2_LAYER, "transformer.h."),
        "gptneox": (GPTNEOX_ONCE, GPTNEOX_LAYER, "gpt_neox.layers."),
        "modern-bert": (MODERN_BERT_ONCE, MODERN_BERT_LAYER, "model.layers."),
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), (NEMOTRON_ONCE, NEMOTRON, "backbone.layers.")),
        "nomic-bert": (NOMIC_ONCE, NOMIC_LAYER, "encoder.layers."),
        "phi2": (MappingProxyType({**ONCE, "output_norm": "model.final_layernorm"}), PHI2, "model.layers."),
    }
)
"""Architectures with names of their own: outside layers, in layers, and before the number of a layer."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an architecture's tensors: those outside layers, those of each layer, and those of each expert.

    `has_stacks`: whether all experts of a layer are in one tensor; `has_gate_up`: with gate and up of each together.
    """

    architecture: str
    once: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str
    has_stacks: bool = True
    has_gate_up: bool = False

    @classmethod
    def of(cls, architecture: str, tensors: Collection[str]) -> Names:
        """Return the names of an architecture, in a file with these tensors."""
        if architecture == "bert" and TOKEN_TYPES not in tensors:
            return cls(architecture, DISTIL_BERT_ONCE, DISTIL_BERT_LAYER, "distilbert.transformer.layer.")
        if architecture in OWN:
            return cls(architecture, *OWN[architecture])
        match architecture:
            case "falcon":
                norms = TWO_NORMS if any(".attn_norm_2." in name for name in tensors) else {}
                return cls(architecture, FALCON_ONCE, {**FALCON_LAYER, **norms}, "transformer.h.")
            case "gemma4":
                has_gate_up = any(f".{GATE_UP}." in name for name in tensors)
                return cls(architecture, GEMMA4_ONCE, GEMMA4, "model.layers.", has_gate_up=has_gate_up)
            case "lfm2" | "lfm2moe":
                once = {name: ours for name, ours in ONCE.items() if name != "output_norm"}
                norm = "output_norm" if "output_norm.weight" in tensors else "token_embd_norm"  # the first: Ollama
                return cls(architecture, {**once, norm: "model.embedding_norm"}, LFM2, "model.layers.")
            case "llama":
                has_stacks = not any(OLD_EXPERT.fullmatch(name.rpartition(".")[0]) for name in tensors)
                return cls(architecture, ONCE, LAYERS["llama"], "model.layers.", has_stacks)
        layer: Mapping[str, str] = LAYERS.get(architecture, LAYER)
        if architecture == "granitehybrid" and not any(".ffn_gate_inp." in name for name in tensors):
            layer = {**LAYER, **MAMBA, **{f"ffn_{part}": name for part, name in GRANITE_MLP.items()}}
        return cls(architecture, ONCE, layer, "model.layers.")

    @property
    def experts(self) -> Mapping[str, str]:
        """The names of the tensors of an expert."""
        return EXPERTS_OF.get(self.architecture, EXPERTS)

    @property
    def weights(self) -> Mapping[str, str]:
        """The parts with a weight whose name does not end in `.weight`, and its end."""
        return WEIGHTS_OF.get(self.architecture, WEIGHTS)

    def stored(self, name: str) -> str:
        """Return the file's name for a tensor of Hugging Face; the same name if files have no other."""
        stem, _, kind = name.rpartition(".")
        where, theirs = "", key_of({**CLASSIFIER, **self.once}, stem)
        if stem.startswith(self.prefix):
            layer, _, part = stem.removeprefix(self.prefix).partition(".")
            where, theirs = f"blk.{layer}.", self._stored_part(part)
        return name if theirs is None else f"{where}{theirs}{self.weights.get(theirs, f'.{kind}')}"

    def _stored_part(self, part: str) -> str | None:
        of_expert = OF_EXPERT.fullmatch(part)
        if of_expert is None:
            return key_of(self.layer, part)
        module, expert, matrix = of_expert.groups()
        stack = key_of(self.experts, f"{module}.{{expert}}.{matrix}")
        if self.has_gate_up and stack in GATE_AND_UP:
            return GATE_UP
        return stack if stack is None or self.has_stacks else f"{stack.removesuffix('_exps')}.{expert}"


def key_of(names: Mapping[str, str], ours: str) -> str | None:
    """Return the name in a file of what is `ours` in a checkout; None: it has none."""
    return next((theirs for theirs, name in names.items() if name == ours), None)
