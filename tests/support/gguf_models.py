"""Writes the model of a folder as a GGUF file, as llama.cpp's converter does, with the names of the gguf package."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quire.compute.models.source import ModelFolder
from support.gguf_experts import add_experts_after
from support.gguf_gemma3n import add_gemma3n, stacks_of_gemma3n
from support.gguf_gemma4 import add_gemma4, name_of_factors, stacks_of_gemma4
from support.gguf_lfm2 import add_lfm2
from support.gguf_mamba import add_falcon_h1, add_mamba, add_mamba2, add_nemotron, as_mamba, with_factors

ARCHITECTURES = {
    "BertModel": gguf.MODEL_ARCH.BERT,
    "DistilBertModel": gguf.MODEL_ARCH.BERT,
    "DistilBertForSequenceClassification": gguf.MODEL_ARCH.BERT,
    "EuroBertModel": gguf.MODEL_ARCH.EUROBERT,
    "Gemma3TextModel": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
    "JinaEmbeddingsV3Model": gguf.MODEL_ARCH.JINA_BERT_V3,
    "ModernBertModel": gguf.MODEL_ARCH.MODERN_BERT,
    "ModernBertForSequenceClassification": gguf.MODEL_ARCH.MODERN_BERT,
    "NomicBertModel": gguf.MODEL_ARCH.NOMIC_BERT,
    "XLMRobertaModel": gguf.MODEL_ARCH.BERT,
    "XLMRobertaForSequenceClassification": gguf.MODEL_ARCH.BERT,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5,
    "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "ApertusForCausalLM": gguf.MODEL_ARCH.APERTUS,
    "Dots1ForCausalLM": gguf.MODEL_ARCH.DOTS1,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "ExaoneForCausalLM": gguf.MODEL_ARCH.EXAONE,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "NemotronForCausalLM": gguf.MODEL_ARCH.NEMOTRON,
    "SolarOpenForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "YoutuForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "FalconForCausalLM": gguf.MODEL_ARCH.FALCON,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "GlmForCausalLM": gguf.MODEL_ARCH.CHATGLM,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "HunYuanDenseV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeSharedForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "OlmoForCausalLM": gguf.MODEL_ARCH.OLMO,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Gemma3nForCausalLM": gguf.MODEL_ARCH.GEMMA3N,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "Gemma4UnifiedForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "Jais2ForCausalLM": gguf.MODEL_ARCH.JAIS2,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Llama4ForCausalLM": gguf.MODEL_ARCH.LLAMA4,
    "Mamba2ForCausalLM": gguf.MODEL_ARCH.MAMBA2,
    "MiniCPM3ForCausalLM": gguf.MODEL_ARCH.MINICPM3,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "PhiForCausalLM": gguf.MODEL_ARCH.PHI2,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
}

INTERLEAVED = (
    *(gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.INTERNLM2, gguf.MODEL_ARCH.SMOLLM3),
    *(gguf.MODEL_ARCH.ARCEE, gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.GRANITE_MOE, gguf.MODEL_ARCH.MISTRAL3),
    *(gguf.MODEL_ARCH.GRANITE_HYBRID, gguf.MODEL_ARCH.NEMOTRON_H, gguf.MODEL_ARCH.NEMOTRON_H_MOE),
    gguf.MODEL_ARCH.OLMO,
)
QWEN35 = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
NEMOTRONS = (gguf.MODEL_ARCH.NEMOTRON_H, gguf.MODEL_ARCH.NEMOTRON_H_MOE)
GRANITES = (gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.GRANITE_MOE, gguf.MODEL_ARCH.GRANITE_HYBRID)
RECURRENT = (*QWEN35, gguf.MODEL_ARCH.QWEN3NEXT)
WITH_EXPERTS_AFTER = (
    *(gguf.MODEL_ARCH.AFMOE, gguf.MODEL_ARCH.DOTS1, gguf.MODEL_ARCH.ERNIE4_5_MOE, gguf.MODEL_ARCH.EXAONE_MOE),
    *(gguf.MODEL_ARCH.GLM4_MOE, gguf.MODEL_ARCH.MINIMAXM2),
)
LFM2 = (gguf.MODEL_ARCH.LFM2, gguf.MODEL_ARCH.LFM2MOE)
RENAMED = {  # what the converter calls some tensors before it looks for their names
    "e_score_correction_bias.weight": "e_score_correction.bias",
    **{f"{module}.expert_bias.weight": f"{module}.expert_bias.bias" for module in ("feed_forward", "mlp")},
    "linear_attn.A_log.weight": "linear_attn.A_log",
    "linear_attn.dt_bias.weight": "linear_attn.dt_proj.bias",
    **{f"{module}.{name}.weight": f"{module}.{name}" for module in ("mamba", "mixer") for name in ("A_log", "D")},
    **{f"{module}.dt_bias.weight": f"{module}.dt_proj.bias" for module in ("mamba", "mixer")},
}
GEMMAS = (
    *(gguf.MODEL_ARCH.GEMMA, gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3),
    gguf.MODEL_ARCH.GEMMA_EMBEDDING,
)
BERTS = (
    *(gguf.MODEL_ARCH.BERT, gguf.MODEL_ARCH.EUROBERT, gguf.MODEL_ARCH.MODERN_BERT),
    *(gguf.MODEL_ARCH.JINA_BERT_V3, gguf.MODEL_ARCH.NOMIC_BERT),
)


class GgufWriting:
    """One file in the making."""

    def __init__(
        self,
        folder: Path,
        path: Path,
        blocks: Mapping[str, tuple[str, Any]] | None = None,
        *,
        splits: bool = True,
        fuses: bool = False,
        stacks: bool = True,
        architecture: gguf.MODEL_ARCH | None = None,
    ) -> None:
        self.stacks = stacks  # whether the experts of a layer are in one tensor; in Gemma 4, with two matrices of each
        self.blocks = blocks or {}  # the type and the bytes of tensors that are blocks already
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.architecture = architecture or ARCHITECTURES[self.config["architectures"][0]]
        has_states = not {"mamba", "linear_attention"}.isdisjoint(self.config.get("layer_types") or ())
        if self.architecture is gguf.MODEL_ARCH.GRANITE and has_states:
            self.architecture = gguf.MODEL_ARCH.GRANITE_HYBRID
        if self.architecture is gguf.MODEL_ARCH.LLAMA4:
            self.config["moe_intermediate_size"] = self.config["intermediate_size"]
            self.config["intermediate_size"] = self.config["intermediate_size_mlp"]
        if "moe" in self.config.get("layers_block_type", ()):
            self.architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
        self.of_latents = self.architecture in (gguf.MODEL_ARCH.DEEPSEEK2, gguf.MODEL_ARCH.MINICPM3)
        # Whether what makes keys of latents and what makes values are two tensors, or products and gates of Qwen3-Next.
        self.splits = splits and self.architecture in (gguf.MODEL_ARCH.DEEPSEEK2, gguf.MODEL_ARCH.QWEN3NEXT)
        self.writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self.architecture])
        checkpoint = ModelFolder(folder).tensors()
        self.tensors: Mapping[str, Any] = {name: checkpoint.tensor(name) for name in checkpoint.entries}
        if fuses:
            self.tensors = fused(self.tensors)
        listed = len(self.config.get("layers_block_type", ()))
        if self.architecture is gguf.MODEL_ARCH.GEMMA3N:
            self.tensors = stacks_of_gemma3n(self.tensors)
        self.num_layers = listed or int(self.config.get("num_hidden_layers") or self.config["n_layer"])
        # Layers that predict further tokens, which files of GLM-4.5 have.
        layers = [int(name.split(".layers.")[1].split(".")[0]) for name in self.tensors if ".layers." in name]
        self.num_further = max(layers, default=self.num_layers - 1) + 1 - self.num_layers
        self.names = gguf.get_tensor_name_map(self.architecture, self.num_layers + self.num_further)

    def settings(self) -> None:
        config, writer = self.config, self.writer
        writer.add_block_count(self.num_layers + self.num_further)
        if self.architecture is gguf.MODEL_ARCH.GLM4_MOE or self.num_further:
            writer.add_nextn_predict_layers(self.num_further)
        if self.architecture is gguf.MODEL_ARCH.GPT2:
            writer.add_context_length(config["n_positions"])
            writer.add_embedding_length(config["n_embd"])
            writer.add_feed_forward_length(4 * config["n_embd"])
            writer.add_head_count(config["n_head"])
            writer.add_layer_norm_eps(config["layer_norm_epsilon"])
            return
        if self.architecture is gguf.MODEL_ARCH.MAMBA2:
            add_mamba2(writer, config)
            return
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        if self.architecture in (gguf.MODEL_ARCH.GEMMA4, *NEMOTRONS):
            writer.add_head_count(config["num_attention_heads"])
            (add_nemotron if self.architecture in NEMOTRONS else add_gemma4)(writer, config)
            return
        if self.architecture in LFM2:
            add_lfm2(writer, config, self.num_layers)
        elif self.architecture is not gguf.MODEL_ARCH.QWEN35MOE:
            writer.add_feed_forward_length(config.get("ffn_hidden_size") or config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        self._kv_heads()
        named: tuple[str, ...] = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
        named += ("norm_eps",) if self.architecture in (gguf.MODEL_ARCH.MODERN_BERT, gguf.MODEL_ARCH.NEMOTRON) else ()
        epsilon = next((config[name] for name in named if name in config), None)
        if epsilon:
            writer.add_layer_norm_eps(epsilon)
        else:
            writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
        if self.of_latents:
            self._latents()
        elif self.architecture in WITH_EXPERTS_AFTER:
            add_experts_after(writer, config)
        self._states()
        if not self.of_latents and "head_dim" in config and self.architecture is not gguf.MODEL_ARCH.CHATGLM:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        self._factors()
        if config["architectures"][0] in ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM", "Olmo3ForCausalLM"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        windows = (
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "Gemma3TextModel",
            "Cohere2ForCausalLM",
            "Olmo3ForCausalLM",
            "Exaone4ForCausalLM",
            "ExaoneMoeForCausalLM",
            "AfmoeForCausalLM",
            "GptOssForCausalLM",
        )
        if config["architectures"][0] in windows:
            writer.add_sliding_window(config["sliding_window"])
        if config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        self._experts()
        self._rope()

    def _kv_heads(self) -> None:
        config = self.config
        if self.architecture is gguf.MODEL_ARCH.GEMMA3N:
            add_gemma3n(self.writer, config)
        if self.architecture is gguf.MODEL_ARCH.GRANITE_HYBRID:
            add_mamba(self.writer, config)
            return
        kv_heads = config.get("num_kv_heads", config.get("num_key_value_heads"))
        if kv_heads is not None and self.architecture not in (gguf.MODEL_ARCH.GPTNEOX, *LFM2):
            is_listed = config["architectures"] == ["GraniteMoeHybridForCausalLM"]
            count = [kv_heads] * self.num_layers if is_listed else kv_heads
            self.writer.add_head_count_kv(1 if self.of_latents and self.splits else count)

    def _experts(self) -> None:
        config, writer = self.config, self.writer
        named = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
        num_experts = next((config[name] for name in named if name in config), None)
        if num_experts:
            writer.add_expert_count(num_experts)
            used = (config.get(name) for name in ("num_experts_per_tok", "moe_topk", "moe_k"))
            writer.add_expert_used_count(next(filter(None, used)))
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        if self.architecture is gguf.MODEL_ARCH.LLAMA4:
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        if self.architecture is gguf.MODEL_ARCH.HUNYUAN_MOE:
            writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        if num_experts and config.get("shared_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])

    def _latents(self) -> None:
        config, writer = self.config, self.writer
        rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
        if config["q_lora_rank"] is not None:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(rank)
        query, value = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
        if self.splits:
            writer.add_key_length(rank + rope_dim)
            writer.add_value_length(rank)
            writer.add_key_length_mla(query)
            writer.add_value_length_mla(value)
        else:
            writer.add_key_length(query)
            writer.add_value_length(value)
        if "n_routed_experts" in config:
            add_experts_after(writer, config)

    def _states(self) -> None:
        config, writer = self.config, self.writer
        if self.architecture is gguf.MODEL_ARCH.FALCON_H1:
            add_falcon_h1(writer, config)
        if self.architecture not in RECURRENT:
            return
        heads, kinds = config["linear_num_value_heads"], config["layer_types"]
        writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
        writer.add_full_attention_interval(4)
        is_recurrent = [kind == "linear_attention" for kind in kinds]
        if is_recurrent != [bool((layer + 1) % 4) for layer in range(len(kinds))]:
            name = gguf.MODEL_ARCH_NAMES[self.architecture]
            writer.add_array(f"{name}.attention.recurrent_layers", is_recurrent + [False] * self.num_further)

    def _factors(self) -> None:
        config, writer = self.config, self.writer
        if self.architecture in GRANITES:
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])
        if self.architecture is gguf.MODEL_ARCH.STABLELM:
            writer.add_parallel_residual(True)  # as the converter writes where config.json says nothing
        if self.architecture is gguf.MODEL_ARCH.APERTUS:
            adders = (writer.add_xielu_alpha_p, writer.add_xielu_alpha_n, writer.add_xielu_beta, writer.add_xielu_eps)
            for add, name in zip(adders, ("alpha_p", "alpha_n", "beta", "eps"), strict=True):
                stem = f"model.layers.{{}}.mlp.act_fn.{name}"
                add([float(self.tensors[stem.format(layer)].item()) for layer in range(self.num_layers)])
        if "logit_scale" in config:
            writer.add_logit_scale(config["logit_scale"])

    def _rope(self) -> None:
        if self.architecture in BERTS:
            self.writer.add_causal_attention(False)
        if self.architecture is gguf.MODEL_ARCH.BERT:
            return
        rope, writer = self.config["rope_parameters"], self.writer
        if self.architecture is gguf.MODEL_ARCH.MODERN_BERT:
            self._modern_bert(rope["sliding_attention"]["rope_theta"])
        rope = rope.get("full_attention", rope)
        kind = rope["rope_type"]
        head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        if self.of_latents:
            head_dim = self.config["qk_rope_head_dim"]
        turned = int(head_dim * rope.get("partial_rotary_factor", 1))
        writer.add_rope_dimension_count(turned)
        growth = rope["alpha"] ** (head_dim / (head_dim - 2)) if "alpha" in rope else 1
        writer.add_rope_freq_base(rope["rope_theta"] * growth)
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(rope["factor"])
        if self.of_latents and kind == "yarn":
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if self.architecture in (gguf.MODEL_ARCH.QWEN2VL, gguf.MODEL_ARCH.QWEN3VL, gguf.MODEL_ARCH.QWEN3VLMOE):
            writer.add_rope_dimension_sections([*rope.get("mrope_section", [2, 1, turned // 2 - 3]), 0])
        if self.architecture in QWEN35:
            writer.add_rope_dimension_sections([*rope.get("mrope_section", [11, 11, 10]), 0])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if kind in ("yarn", "longrope"):
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if kind == "longrope":
            original, whole = rope["original_max_position_embeddings"], self.config["max_position_embeddings"]
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(whole / original) / math.log(original)))
            for length in ("long", "short"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
        if kind == "llama3":
            writer.add_tensor("rope_freqs.weight", np.array(self._llama3(rope, turned), np.float32))

    def _modern_bert(self, local_base: float) -> None:
        writer, name = self.writer, gguf.MODEL_ARCH_NAMES[self.architecture]
        writer.add_sliding_window(self.config["local_attention"])
        writer.add_uint32(f"{name}.attention.sliding_window_pattern", self.config["global_attn_every_n_layers"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_float32(f"{name}.rope.freq_base_swa", local_base)
        writer.add_string(f"{name}.hidden_act", self.config["hidden_activation"])

    def _llama3(self, rope: dict[str, Any], turned: int) -> list[float]:
        """By what each frequency is divided."""
        divisors = []
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for pair in range(turned // 2):
            wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / turned)
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
            if wavelength < original / high:
                divisors[-1] = 1
            elif wavelength > original / low:
                divisors[-1] = factor
        return divisors

    def weights(self, kind: gguf.GGMLQuantizationType) -> None:
        experts: dict[str, dict[int, Any]] = {}
        for name, numbers in self.tensors.items():
            if ".act_fn." in name:
                continue  # they are settings
            if ".shared_mlp." in name and self.architecture in GRANITES:
                self._add_granite_mlp(name, numbers, kind)
            elif self.of_latents and self.splits and ".kv_b_proj." in name:
                self._add_split(name, numbers, kind)
            elif self.splits and ".in_proj_qkvz." in name:
                self._add_products(name, numbers, kind)
            elif ".experts." in name:
                before, _, rest = name.partition(".experts.")
                expert, _, part = rest.partition(".")
                experts.setdefault(f"{before}.experts.{part}", {})[int(expert)] = numbers
            else:
                self._add(name, self._as_stored(name, numbers), kind)
        if self.architecture is gguf.MODEL_ARCH.GEMMA4:
            for name, numbers in stacks_of_gemma4(experts, has_gate_up=self.stacks).items():
                self._write(name, numbers, kind)
            return
        for name, each in experts.items():
            if not self.stacks:
                self._add_apart(name, each, kind)
                continue
            self._add(name, np.stack([each[expert] for expert in sorted(each)]), kind)

    def _add_granite_mlp(self, name: str, numbers: Any, kind: gguf.GGMLQuantizationType) -> None:
        """Add the gate and the up projection apart, as an MLP next to experts or alone."""
        module = "mlp.shared_expert." if self.config.get("num_local_experts") else "mlp."
        name, parts = name.replace("shared_mlp.", module), np.split(numbers, 2)
        if "output_linear" in name:
            self._add(name.replace("output_linear", "down_proj"), numbers, kind)
            return
        for part, matrix in zip(parts, ("gate_proj", "up_proj"), strict=True):
            self._add(name.replace("input_linear", matrix), part, kind)

    def _add_apart(self, name: str, experts: Mapping[int, Any], kind: gguf.GGMLQuantizationType) -> None:
        """Add each expert as a tensor, as in the first files of Mixtral."""
        stacked = self.names.get_name(name, try_suffixes=(".weight",))
        assert stacked is not None, name
        for expert, numbers in experts.items():
            self._write(stacked.replace("_exps", f".{expert}"), numbers, kind)

    def _add_split(self, name: str, numbers: Any, kind: gguf.GGMLQuantizationType) -> None:
        """Add what makes keys of a latent, transposed, and what makes values, each with a matrix of each head."""
        heads, key = self.config["num_attention_heads"], self.config["qk_nope_head_dim"]
        each = numbers.reshape(heads, -1, numbers.shape[1])
        self._add(name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(each[:, :key].swapaxes(1, 2)), kind)
        self._add(name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(each[:, key:]), kind)

    def _add_products(self, name: str, numbers: Any, kind: gguf.GGMLQuantizationType) -> None:
        """Add the products of Qwen3-Next: all queries, keys and values, and all gates apart."""
        config = self.config
        keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        each = numbers.reshape(keys, -1, numbers.shape[1])
        parts = [part.reshape(-1, numbers.shape[1]) for part in np.split(each, [key, 2 * key, 2 * key + values], 1)]
        self._add(name.replace("qkvz", "qkv"), np.concatenate(parts[:3]), kind)
        self._add(name.replace("qkvz", "z"), parts[3], kind)

    def _as_recurrent(self, name: str, numbers: Any) -> Any:
        """Return the numbers of a tensor of Qwen3.5 or Qwen3-Next as the converter changes them."""
        config = self.config
        if name.endswith("norm.weight") and ".linear_attn." not in name:
            return numbers + np.float32(1)
        part = name.split(".")[-2]
        if part == "conv1d":
            numbers = numbers[:, 0]
        if part == "A_log":
            numbers = -np.exp(numbers)
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        first = {"in_proj_qkv": 2 * keys * config["linear_key_head_dim"]}
        first |= {"conv1d": first["in_proj_qkv"]} | dict.fromkeys(("in_proj_z", "in_proj_a", "in_proj_b"), 0)
        first |= dict.fromkeys(("A_log", "dt_bias", "out_proj"), 0)
        if part not in first or self.architecture is gguf.MODEL_ARCH.QWEN3NEXT:
            return numbers
        axis = int(part == "out_proj")
        numbers = np.moveaxis(numbers, axis, 0)
        values = numbers[first[part] :]
        each = values.reshape(keys, heads // keys, -1, *values.shape[1:])
        turns = np.concatenate([each[:, place] for place in range(heads // keys)])
        numbers = np.concatenate([numbers[: first[part]], turns.reshape(values.shape)])
        return np.ascontiguousarray(np.moveaxis(numbers, 0, axis))

    def _as_stored(self, name: str, numbers: Any) -> Any:
        config = self.config
        if self.architecture in RECURRENT:
            return self._as_recurrent(name, numbers)
        if ".mamba." in name or ".mixer." in name:
            numbers = as_mamba(name, numbers, config)
        if self.architecture is gguf.MODEL_ARCH.FALCON_H1:
            return with_factors(name, numbers, config)
        if ".conv.conv." in name:
            return numbers[:, 0]
        if name.startswith("roberta.embeddings.position_embeddings."):
            numbers = np.ascontiguousarray(numbers[config["pad_token_id"] + 1 :])
        if self.architecture is gguf.MODEL_ARCH.GPT2 and numbers.ndim == 2 and ".h." in name:
            return np.ascontiguousarray(numbers.T)
        if self.architecture in (*GEMMAS, gguf.MODEL_ARCH.NEMOTRON) and name.endswith("norm.weight"):
            return numbers + np.float32(1)
        heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
        part = name.split(".")[-2]
        if part == "query_key_value":
            heads_each = config["num_attention_heads"]
            kv = config.get("num_kv_heads") or heads_each
            turns = numbers.reshape(kv, heads_each // kv + 2, -1, *numbers.shape[1:])
            parts = (turns[:, :-2], turns[:, -2], turns[:, -1])
            return np.concatenate([each.reshape(-1, *numbers.shape[1:]) for each in parts])
        if self.architecture in INTERLEAVED and heads.get(part):
            shape = numbers.shape
            return numbers.reshape(heads[part], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        return numbers

    def _add(self, name: str, numbers: Any, kind: gguf.GGMLQuantizationType) -> None:
        known = name
        for ours, theirs in RENAMED.items():
            known = known.replace(ours, theirs)
        known = known.removeprefix("roberta.").removeprefix("distilbert.").removeprefix("bert.")
        if self.architecture is gguf.MODEL_ARCH.MODERN_BERT:
            known = known.removeprefix("model.")
        if name.startswith("classifier.") and "RobertaFor" not in self.config["architectures"][0]:
            known = known.replace("classifier", "classifier.out_proj")
        if self.architecture is gguf.MODEL_ARCH.LFM2MOE and ".experts." in name:
            known = known.removeprefix("model.")
        if self.architecture in NEMOTRONS and ".experts." in name:
            known = known.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        if self.architecture in GRANITES:
            known = known.replace(".block_sparse_moe.experts.", ".mlp.experts.")
        found = self.names.get_name(known, try_suffixes=(".weight", ".bias")) or name_of_factors(name)
        if found is None and self.architecture in RECURRENT:  # the package has no names for further layers of these
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            found = f"blk.{layer}.nextn.{part.replace('shared_head.', 'shared_head_')}"
        assert found is not None, name
        if name in self.blocks:
            made, data = self.blocks[name]
            self.writer.add_tensor(found, data, raw_dtype=gguf.GGMLQuantizationType[made])
            return
        self._write(found, numbers, kind)

    def _write(self, found: str, numbers: Any, kind: gguf.GGMLQuantizationType) -> None:
        size = gguf.GGML_QUANT_SIZES[kind][0]
        if numbers.ndim < 2 or numbers.shape[-1] % size or found.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
            kind = gguf.GGMLQuantizationType.F32
        self.writer.add_tensor(found, gguf.quants.quantize(numbers, kind), raw_dtype=kind)

    def tokens(self, tokens: Sequence[str], kinds: Sequence[int]) -> None:
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(list(tokens))
        self.writer.add_token_types(list(kinds))
        self.writer.add_token_merges(["a b"])
        self.writer.add_eos_token_id(len(tokens) - 1)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def fused(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model with query, key and value of each layer in one."""
    found: dict[str, Any] = {}
    for name, numbers in tensors.items():
        if ".q_proj." in name:
            parts = [numbers, *(tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "kv")]
            found[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            found[name] = numbers
    return found


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    blocks: Mapping[str, tuple[str, Any]] | None = None,
    *,
    splits: bool = True,
    fuses: bool = False,
    stacks: bool = True,
    architecture: gguf.MODEL_ARCH | None = None,
) -> Path:
    """Write the model of a folder, its matrices as a type of GGUF, with a made-up vocabulary; return the path.

    `blocks`: the types and bytes of matrices that are blocks already. Without `splits`, latents are as in old files,
    and so are the products of Qwen3-Next.
    With `fuses`, query, key and value are one tensor. Without `stacks`, each expert has its own tensors; those of
    Gemma 4 are stacked, but gate and up apart.
    `architecture` replaces that of the folder's family.
    """
    writing = GgufWriting(folder, path, blocks, splits=splits, fuses=fuses, stacks=stacks, architecture=architecture)
    writing.settings()
    writing.tokens(
        ["a", "b", "ab", *(f"<{number}>" for number in range(3, writing.config["vocab_size"]))],
        [1] * writing.config["vocab_size"],
    )
    writing.weights(gguf.GGMLQuantizationType[kind])
    writing.close()
    return path
