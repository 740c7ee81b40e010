"""Model families: the architecture of a model, read from its settings only.

`read_model` returns the facts that are needed before memory is allocated: the spec (and from it the shape
of the KV cache), the vocabulary, the context length, the tokens that end a text, and the makers' sampling
defaults. A family is one module with a function `decoder_spec(config, max_length)`, imported only when a
model needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, ConfigFile
from quire.compute.models.generation import GenerationDefaults
from quire.compute.models.heads import head_of
from quire.compute.models.labels import CLASSIFIES, MASKED, SCORE_TENSOR, WITHOUT_LABELS, Labels, labels_of
from quire.compute.models.pooling import DenseStep, dense_steps, longest_text
from quire.compute.models.refusals import family_refusal
from quire.compute.models.rope import rope_notices
from quire.compute.models.source import ModelSource
from quire.compute.models.vision import ENCODERS, IMAGE_SETTINGS, read_vision
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.quantized.methods import quantization_of
from quire.core.errors import CheckpointError

if TYPE_CHECKING:
    from quire.compute.adapters.folder import Adapter

FAMILIES: Final = MappingProxyType(
    {
        "AfmoeForCausalLM": "quire.compute.models.afmoe",
        "ApertusForCausalLM": "quire.compute.models.apertus",
        "ArceeForCausalLM": "quire.compute.models.arcee",
        "BambaForCausalLM": "quire.compute.models.bamba",
        "BertModel": "quire.compute.models.bert",
        "Cohere2ForCausalLM": "quire.compute.models.cohere2",
        "Cohere2MoeForCausalLM": "quire.compute.models.cohere2_moe",
        "CohereForCausalLM": "quire.compute.models.cohere",
        "CwmForCausalLM": "quire.compute.models.cwm",
        "DeepseekV2ForCausalLM": "quire.compute.models.deepseek",
        "DeepseekV3ForCausalLM": "quire.compute.models.deepseek",
        "DistilBertModel": "quire.compute.models.distil_bert",
        "Dots1ForCausalLM": "quire.compute.models.dots1",
        "Ernie4_5ForCausalLM": "quire.compute.models.ernie4_5",
        "Ernie4_5_MoeForCausalLM": "quire.compute.models.ernie4_5_moe",
        "EuroBertModel": "quire.compute.models.euro_bert",
        "Exaone4ForCausalLM": "quire.compute.models.exaone4",
        "ExaoneForCausalLM": "quire.compute.models.exaone",
        "ExaoneMoeForCausalLM": "quire.compute.models.exaone_moe",
        "FalconH1ForCausalLM": "quire.compute.models.falcon_h1",
        "FalconForCausalLM": "quire.compute.models.falcon",
        "GPT2LMHeadModel": "quire.compute.models.gpt2",
        "GPTNeoXForCausalLM": "quire.compute.models.gpt_neox",
        "Gemma2ForCausalLM": "quire.compute.models.gemma2",
        "Gemma3ForCausalLM": "quire.compute.models.gemma3",
        "Gemma3ForConditionalGeneration": "quire.compute.models.gemma3",
        "Gemma3nForCausalLM": "quire.compute.models.gemma3n",
        "Gemma3nForConditionalGeneration": "quire.compute.models.gemma3n",
        "Gemma3TextModel": "quire.compute.models.embedding_gemma",
        "Gemma4ForCausalLM": "quire.compute.models.gemma4",
        "Gemma4ForConditionalGeneration": "quire.compute.models.gemma4",
        "Gemma4UnifiedForCausalLM": "quire.compute.models.gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration": "quire.compute.models.gemma4_unified",
        "GemmaForCausalLM": "quire.compute.models.gemma",
        "Glm4ForCausalLM": "quire.compute.models.glm4",
        "Glm4MoeForCausalLM": "quire.compute.models.glm4_moe",
        "Glm4MoeLiteForCausalLM": "quire.compute.models.glm4_moe_lite",
        "Glm4vForConditionalGeneration": "quire.compute.models.glm4v",
        "Glm4vMoeForConditionalGeneration": "quire.compute.models.glm4v",
        "GlmForCausalLM": "quire.compute.models.glm4",
        "GptOssForCausalLM": "quire.compute.models.gpt_oss",
        "GraniteForCausalLM": "quire.compute.models.granite",
        "GraniteMoeForCausalLM": "quire.compute.models.granite_moe",
        "GraniteMoeHybridForCausalLM": "quire.compute.models.granite_hybrid",
        "GraniteMoeSWAForCausalLM": "quire.compute.models.granite_moe_swa",
        "GraniteMoeSharedForCausalLM": "quire.compute.models.granite_moe",
        "GraniteSWAForCausalLM": "quire.compute.models.granite_swa",
        "HeliumForCausalLM": "quire.compute.models.helium",
        "HunYuanDenseV1ForCausalLM": "quire.compute.models.hunyuan",
        "HunYuanMoEV1ForCausalLM": "quire.compute.models.hunyuan_moe",
        "HyperCLOVAXForCausalLM": "quire.compute.models.hyperclovax",
        "Idefics3ForConditionalGeneration": "quire.compute.models.idefics3",
        "InternVLForConditionalGeneration": "quire.compute.models.internvl",
        "Jais2ForCausalLM": "quire.compute.models.jais2",
        "JinaEmbeddingsV3Model": "quire.compute.models.jina_embeddings_v3",
        "Lfm2ForCausalLM": "quire.compute.models.lfm2",
        "Lfm2MoeForCausalLM": "quire.compute.models.lfm2_moe",
        "Lfm2VlForConditionalGeneration": "quire.compute.models.lfm2_vl",
        "Lfm3ForCausalLM": "quire.compute.models.lfm3",
        "LlamaForCausalLM": "quire.compute.models.llama",
        "Llama4ForCausalLM": "quire.compute.models.llama4",
        "Llama4ForConditionalGeneration": "quire.compute.models.llama4",
        "LlavaForConditionalGeneration": "quire.compute.models.llava",
        "LlavaNextForConditionalGeneration": "quire.compute.models.llava_next",
        "MellumForCausalLM": "quire.compute.models.mellum",
        "MiniCPM3ForCausalLM": "quire.compute.models.minicpm3",
        "MiniMaxM2ForCausalLM": "quire.compute.models.minimax_m2",
        "Mamba2ForCausalLM": "quire.compute.models.mamba2",
        "MPNetModel": "quire.compute.models.mpnet",
        "Ministral3ForCausalLM": "quire.compute.models.ministral3",
        "MinistralForCausalLM": "quire.compute.models.ministral",
        "Mistral3ForConditionalGeneration": "quire.compute.models.mistral3",
        "MistralForCausalLM": "quire.compute.models.mistral",
        "MixtralForCausalLM": "quire.compute.models.mixtral",
        "ModernBertModel": "quire.compute.models.modern_bert",
        "NemotronForCausalLM": "quire.compute.models.nemotron",
        "NemotronHForCausalLM": "quire.compute.models.nemotron_h",
        "NomicBertModel": "quire.compute.models.nomic_bert",
        "OPTForCausalLM": "quire.compute.models.opt",
        "OlmoForCausalLM": "quire.compute.models.olmo",
        "Olmo2ForCausalLM": "quire.compute.models.olmo2",
        "Olmo3ForCausalLM": "quire.compute.models.olmo3",
        "OlmoHybridForCausalLM": "quire.compute.models.olmo_hybrid",
        "OlmoeForCausalLM": "quire.compute.models.olmoe",
        "PhiForCausalLM": "quire.compute.models.phi",
        "Phi3ForCausalLM": "quire.compute.models.phi3",
        "PhiMoEForCausalLM": "quire.compute.models.phimoe",  # in the published folder
        "PhimoeForCausalLM": "quire.compute.models.phimoe",
        "Qwen2ForCausalLM": "quire.compute.models.qwen2",
        "Qwen2MoeForCausalLM": "quire.compute.models.qwen2_moe",
        "Qwen2VLForConditionalGeneration": "quire.compute.models.qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "quire.compute.models.qwen2_vl",
        "Qwen3NextForCausalLM": "quire.compute.models.qwen3_next",
        "Qwen3_5ForCausalLM": "quire.compute.models.qwen3_5",
        "Qwen3_5ForConditionalGeneration": "quire.compute.models.qwen3_5",
        "Qwen3_5MoeForCausalLM": "quire.compute.models.qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration": "quire.compute.models.qwen3_5_moe",
        "Qwen3ForCausalLM": "quire.compute.models.qwen3",
        "Qwen3MoeForCausalLM": "quire.compute.models.qwen3_moe",
        "Qwen3VLForConditionalGeneration": "quire.compute.models.qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration": "quire.compute.models.qwen3_vl_moe",
        "RobertaModel": "quire.compute.models.xlm_roberta",
        "SeedOssForCausalLM": "quire.compute.models.seed_oss",
        "SmolLM3ForCausalLM": "quire.compute.models.smollm3",
        "SmolVLMForConditionalGeneration": "quire.compute.models.idefics3",
        "SolarOpenForCausalLM": "quire.compute.models.solar_open",
        "StableLmForCausalLM": "quire.compute.models.stablelm",
        "Starcoder2ForCausalLM": "quire.compute.models.starcoder2",
        "VaultGemmaForCausalLM": "quire.compute.models.vaultgemma",
        "XLMRobertaModel": "quire.compute.models.xlm_roberta",
        "YoutuForCausalLM": "quire.compute.models.youtu",
    }
)
"""The first of `architectures` in config.json → the module of its family."""

SAVED_AS: Final = MappingProxyType({("LlamaForCausalLM", "exaone"): "ExaoneForCausalLM"})
"""`architectures` and `model_type` in folders of transformers 5, where it runs a family with another one's code."""

OF_EACH_LAYER: Final = "Gemma4"
"""The families whose layers may have settings of their own."""

ENCODER: Final = "an encoder: it makes vectors or scores of texts, and generates no text"
MAX_SUPPRESSED: Final = 256
TEXT_ONLY: Final = "a multimodal model: only its text model is served"
NO_SETTINGS: Final = f"a multimodal model without {IMAGE_SETTINGS}: only its text model is served"
TYPES: Final = MappingProxyType({"float32": "F32", "bfloat16": "BF16", "float16": "F16"})


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The settings of a model; `spec` has the vocabulary, context length and KV cache.

    `source` has the files and tensors. `dtype` is the checkpoint's. `notices` are facts that a user should see at the
    start, one line each. `quantization`: how the weights of a folder are quantised, empty if they are not. `draft`: the
    smaller model that guesses tokens for this one, or its own layer that guesses. `adapters`: the adapters that
    requests may name, by name. `labels`: of a model that classifies texts. `generates`: whether the model can continue
    a text. `dense`: the layers after the pooling of vectors. `longest_text`: the makers' limit of the tokens of a text;
    None: the context. `suppressed`: the tokens that no text may have. `vision`: its encoder of images; None: it reads
    text only.
    """

    source: ModelSource
    architecture: str
    spec: DecoderSpec
    eos_token_ids: tuple[int, ...]
    dtype: str
    generation: GenerationDefaults
    notices: tuple[str, ...]
    quantization: str = ""
    draft: ModelDescription | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    labels: Labels | None = None
    generates: bool = True
    dense: tuple[DenseStep, ...] = ()
    longest_text: int | None = None
    suppressed: tuple[int, ...] = ()
    vision: VisionSpec | None = None

    def with_image_limit(self, max_patches: int) -> ModelDescription:
        """Return the model with an image encoder for images of at most this many patches. Does not mutate."""
        return self if self.vision is None else replace(self, vision=self.vision.with_limit(max_patches))

    @property
    def vector_size(self) -> int:
        """The numbers of a vector."""
        return self.dense[-1].num_outputs if self.dense else self.spec.hidden_size

    @property
    def scorer_bytes(self) -> int:
        """The bytes of the layers after the pooling, in float32, and of those that score labels, in float64."""
        size = sum((step.num_inputs + step.bias) * step.num_outputs * 4 for step in self.dense)
        if self.labels is None:
            return size
        rows = len(self.labels.names) + self.spec.hidden_size * self.spec.attention.bidirectional
        return size + rows * (self.spec.hidden_size + 1) * 8

    @property
    def weight_type(self) -> str:
        """The format of the stored weights, such as Q4_K_M, gptq or BF16."""
        return self.source.type or self.quantization.partition(",")[0] or TYPES[self.dtype]


def read_model(source: ModelSource, max_length: int | None = None, *, images: bool = True) -> ModelDescription:
    """Read the settings of a model; touches no weights.

    `max_length` is the longest text to run, if the caller limits or extends it: rope scalings that depend on the
    current length are frozen for it. `images`: whether to read the settings of its image encoder.
    """
    config = ConfigFile.read(source, CONFIG_FILE)
    architecture = _architecture(config)
    classifies = architecture.endswith(CLASSIFIES)
    spec = _spec_of(architecture, config, max_length)
    for part in (config, config.section("text_config")):
        _require_usual(part, architecture, spec)
    if classifies:  # the model has no head: the embedding takes its place, and is never multiplied
        ignored = spec.ignored_tensors | {SCORE_TENSOR}
        spec = replace(spec, tied_head=True, head_bias=False, ignored_tensors=ignored)
    generation = ConfigFile(source.where(GENERATION_CONFIG_FILE), {})
    if source.has(GENERATION_CONFIG_FILE):
        generation = ConfigFile.read(source, GENERATION_CONFIG_FILE)
    head = head_of(_family(architecture), config) if classifies and spec.attention.bidirectional else None
    dtype, quantization = _dtype(config), quantization_of(config, source)
    vision = read_vision(_family(architecture), config, source, spec) if images and not classifies else None
    is_part = config.is_set("text_config") or config.is_set("vision_config")
    has_encoder = images and _family(architecture) in ENCODERS and config.is_set("vision_config")
    of_text = (NO_SETTINGS if has_encoder else TEXT_ONLY,) if is_part else rope_notices(config, max_length)
    notices = of_text if vision is None else ()
    notices += (ENCODER,) if spec.attention.bidirectional else ()
    return ModelDescription(
        source=source,
        architecture=architecture,
        spec=spec,
        eos_token_ids=_eos_token_ids(generation, config, spec.vocab_size),
        dtype=dtype,
        generation=GenerationDefaults.read(generation),
        notices=notices,
        quantization="" if quantization is None else quantization.name,
        labels=labels_of(config, head) if classifies else None,
        generates=not classifies and not spec.attention.bidirectional,
        dense=() if classifies else tuple(dense_steps(source, spec.hidden_size)),
        longest_text=longest_text(source) if spec.attention.bidirectional and not classifies else None,
        suppressed=_suppressed(generation, spec.vocab_size),
        vision=vision,
    )


def _spec_of(architecture: str, config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec by the settings; errors name the file even if the spec itself raised them."""
    try:
        spec: DecoderSpec = import_module(FAMILIES[_family(architecture)]).decoder_spec(config, max_length)
    except CheckpointError as error:
        if error.field.startswith(config.where):
            raise
        raise CheckpointError(f"{config.where}: {error.field}", error.value, error.allowed) from error
    return spec


def _require_usual(config: ConfigFile, architecture: str, spec: DecoderSpec) -> None:
    """Raise for settings of any family in transformers that change its layers, as embedding models from Qwen2 do."""
    if not (spec.attention.bidirectional or config.flag("is_causal", True)):
        raise config.error("is_causal", "true: no token attends to later ones")
    single = config.section("per_layer_config")
    if single.fields and not architecture.startswith(OF_EACH_LAYER):
        raise single.error(next(iter(single.fields)), "null: each layer has the settings of the model")


def _architecture(config: ConfigFile) -> str:
    """Return the family's name; refuses families that no engine of quire can run."""
    architectures = config.texts("architectures")
    if not architectures or _family(architectures[0]) not in FAMILIES:
        named = architectures[0] if architectures else None
        raise family_refusal(config.where, named, FAMILIES, has_code=config.is_set("auto_map"))
    kind = config.fields.get("model_type")
    return SAVED_AS.get((architectures[0], str(kind)), architectures[0])


def _family(architecture: str) -> str:
    """Return the name of a family in `FAMILIES`, also for its classifying models and those with another head."""
    names = [architecture.replace(CLASSIFIES, ending) for ending in WITHOUT_LABELS]
    names.append(architecture.replace(MASKED, "Model"))
    return next((name for name in names if name in FAMILIES), architecture)


def _dtype(config: ConfigFile) -> str:
    """Return the dtype of the checkpoint: `dtype` in transformers 5, `torch_dtype` in 4, perhaps of the text model."""
    if not (config.is_set("dtype") or config.is_set("torch_dtype")):
        config = config.section("text_config")
    field = "dtype" if config.is_set("dtype") else "torch_dtype"
    found = config.fields.get(field)
    name = "float32" if found is None else found.removeprefix("torch.") if isinstance(found, str) else ""
    if name not in TYPES:
        raise config.error(field, f"one of {', '.join(TYPES)}")
    return name


def _suppressed(generation: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that the generation settings forbid, each once."""
    found = tuple(dict.fromkeys(generation.token_ids("suppress_tokens", vocab_size)))
    if len(found) > MAX_SUPPRESSED:
        raise generation.error("suppress_tokens", f"at most {MAX_SUPPRESSED} token ids")
    return found


def _eos_token_ids(generation: ConfigFile, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text, from the generation settings, the config, or a nested model's config."""
    for settings in (generation, config, config.section("text_config")):
        if chosen := settings.token_ids("eos_token_id", vocab_size):
            return chosen
    return ()
