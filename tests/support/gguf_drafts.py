"""GGUF files in the making: settings and tensors that can be changed before they become bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.compute.gguf.tokenizer import SPLITTERS

U8, BOOL, U32, I32, F32, STRING, ARRAY, U64 = 0, 7, 4, 5, 6, 8, 9, 10
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", 11: "q", 12: "d"}
WIDTHS = {0: (4, 1), 1: (2, 1), 2: (18, 32), 3: (20, 32), 8: (34, 32), 10: (84, 256), 30: (2, 1)}
"""Types of numbers that tensors have here → the bytes of a block, and its numbers."""


@dataclass
class Pair:
    """A setting in the making: `value` is a number, bytes, or a list with the type of its items."""

    key: bytes
    kind: int
    value: Any
    items: int = 0


@dataclass
class Tensor:
    """A tensor in the making."""

    name: bytes
    dimensions: list[int]
    kind: int
    offset: int = 0
    data: bytes = b""  # empty: any

    @property
    def num_bytes(self) -> int:
        width, size = WIDTHS.get(self.kind, (4, 1))
        count = 1
        for each in self.dimensions:
            count *= each
        return count // size * width


@dataclass
class Draft:
    """A file in the making. `counts`: what the header says of tensors and settings, if not the truth."""

    pairs: list[Pair]
    tensors: list[Tensor]
    version: int = 3
    alignment: int = 32
    counts: tuple[int, int] | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)

    def place(self) -> None:
        """Put the tensors one after the other."""
        offset = 0
        for tensor in self.tensors:
            tensor.offset = offset
            offset += -(-tensor.num_bytes // self.alignment) * self.alignment

    def encoded(self) -> bytes:
        """Return the bytes, and note where their numbers are."""
        out, spans = bytearray(b"GGUF"), self.spans
        spans.clear()

        def number(form: str, value: Any) -> None:
            data = packed(form, value)
            spans.append((len(out), len(data)))
            out.extend(data)

        def text(value: bytes) -> None:
            number("Q", len(value))
            out.extend(value)

        number("I", self.version)
        for count in self.counts or (len(self.tensors), len(self.pairs)):
            number("Q", count)
        for pair in self.pairs:
            text(pair.key)
            number("I", pair.kind)
            _write_value(pair, number, text)
        for tensor in self.tensors:
            text(tensor.name)
            number("I", len(tensor.dimensions))
            for dimension in tensor.dimensions:
                number("Q", dimension)
            number("I", tensor.kind)
            number("Q", tensor.offset)
        out.extend(bytes(-len(out) % self.alignment))
        ends = [tensor.offset + tensor.num_bytes for tensor in self.tensors if tensor.offset < 1 << 16]
        numbers = bytearray(b"\x3c" * min(max(ends, default=0), 1 << 16))
        for tensor in self.tensors:
            if tensor.data and tensor.offset + len(tensor.data) <= len(numbers):
                numbers[tensor.offset : tensor.offset + len(tensor.data)] = tensor.data
        return bytes(out + numbers)


def packed(form: str, value: Any) -> bytes:
    """Return a number as bytes: cut to its width, and 1 in place of what is none."""
    try:
        return struct.pack(f"<{form}", value)
    except (struct.error, OverflowError):
        size = struct.calcsize(form)
        return ((value if isinstance(value, int) else 1) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _write_value(pair: Pair, number: Callable[[str, Any], None], text: Callable[[bytes], None]) -> None:
    def one(kind: int, value: Any) -> None:
        if kind == STRING:
            text(value if isinstance(value, bytes) else str(value).encode())
        elif kind == ARRAY:
            number("I", U8)
            number("Q", 0)
        elif kind in FORMS:
            number(FORMS[kind], value)

    if pair.kind != ARRAY:
        one(pair.kind, pair.value)
        return
    values = pair.value if isinstance(pair.value, list) else [pair.value]
    number("I", pair.items)
    number("Q", len(values))
    for value in values:
        one(pair.items, value)


# --- whole models -------------------------------------------------------------------

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2"),
    *("smollm3", "olmo2", "granite", "chatglm", "glm4", "command-r", "cohere2", "starcoder2", "stablelm"),
    *("deepseek2", "falcon", "gptneox", "gpt-oss", "phi2", "olmoe", "granitemoe", "glm4moe"),
    *("ernie4_5", "mistral3", "qwen3vl", "seed_oss"),
    *("arcee", "exaone4", "hunyuan-dense"),
    *("qwen35", "qwen35moe", "qwen3next"),
    *("gemma4", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h"),
    *("bert", "nomic-bert", "gemma-embedding", "modern-bert"),
    *("afmoe", "exaone-moe", "hunyuan-moe", "minimax-m2", "nemotron"),
    *("apertus", "falcon-h1", "llama4", "mamba2"),
)
BERTS = ("bert", "modern-bert", "nomic-bert")
RECURRENT = ("qwen35", "qwen35moe", "qwen3next")
LFM2 = ("lfm2", "lfm2moe")
MAMBA = ("granitehybrid", "nemotron_h")
SCORED_ALONE = ("afmoe", "exaone-moe", "glm4moe", "minimax-m2")
WITH_SHARED = ("afmoe", "deepseek2", "exaone-moe", "glm4moe", "hunyuan-moe", "llama4", *RECURRENT)
WITH_EXPERTS = (
    *("afmoe", "exaone-moe", "hunyuan-moe", "llama4", "minimax-m2"),
    *("deepseek2", "glm4moe", "gpt-oss", "granitemoe", "lfm2moe", "olmoe", "qwen35moe", "qwen3moe", "qwen3next"),
)
LAYER_NORMS = (
    *(
        "bert",
        "command-r",
        "cohere2",
        "falcon",
        "gptneox",
        "modern-bert",
        "nemotron",
        "nemotron_h",
        "nomic-bert",
        "phi2",
        "starcoder2",
        "stablelm",
    ),
)
WITH_BIASES = ("bert", "gptneox", "gpt-oss", "phi2")
RANK, PLAIN = 16, 4  # of latents; what rotates and values have RANK numbers too
KEYS, VALUES, STATE = 2, 4, 16  # heads of a recurrent layer, and the size of each
INNER = 32  # of a state-space layer
VOCABULARY = [b"a", b"b", b"ab", b"<|im_end|>", b"<unk>", b"c", b"\xe2\x96\x81", b"\xe2\x96\x81a", b"<0x41>", b"<tool>"]
KINDS = [1, 1, 1, 3, 2, 1, 1, 1, 6, 4]
SIZE, HEADS, FEED = 8, 2, 12
DIVISORS = {"llama": ["rope_freqs"], "phi3": ["rope_factors_long", "rope_factors_short"]}


def _tokenizer(draw: random.Random) -> list[Pair]:
    pieces = draw.random() < 0.4
    other = draw.choice([b"gpt2"] * 8 + [b"gemma4", b"bert"])
    scored = b"llama" if draw.random() < 0.8 else b"t5"
    pairs = [
        Pair(b"tokenizer.ggml.model", STRING, scored if pieces else other),
        Pair(b"tokenizer.ggml.tokens", ARRAY, list(VOCABULARY), STRING),
        Pair(b"tokenizer.ggml.token_type", ARRAY, list(KINDS), I32),
        Pair(b"tokenizer.ggml.eos_token_id", U32, 3),
        Pair(b"tokenizer.ggml.bos_token_id", U32, 4),
        Pair(b"tokenizer.ggml.add_bos_token", BOOL, draw.random() < 0.5),
    ]
    if draw.random() < 0.35:
        pairs.append(Pair(b"tokenizer.chat_template", STRING, b"{{ messages[0].content }}<|im_end|>"))
    if draw.random() < 0.1:
        pairs.append(Pair(b"tokenizer.chat_template.tool_use", STRING, b"{{ tools }}{{ bos_token }}"))
    if draw.random() < 0.1:
        pairs.append(Pair(b"tokenizer.ggml.add_eos_token", BOOL, draw.random() < 0.5))
    if draw.random() < 0.1:
        pairs.append(Pair(b"tokenizer.ggml.add_sep_token", BOOL, draw.random() < 0.5))
    if pieces and draw.random() < 0.1:
        pairs.append(Pair(b"tokenizer.ggml.precompiled_charsmap", ARRAY, [1, 2, 255], draw.choice([U8, F32])))
    if pieces:
        pairs.append(Pair(b"tokenizer.ggml.scores", ARRAY, [-float(place) for place in range(len(VOCABULARY))], F32))
        pairs.append(Pair(b"tokenizer.ggml.unknown_token_id", U32, 4))
        pairs.append(Pair(b"tokenizer.ggml.add_space_prefix", BOOL, draw.random() < 0.5))
    else:
        pairs.append(Pair(b"tokenizer.ggml.pre", STRING, draw.choice(sorted(SPLITTERS)).encode()))
        pairs.append(Pair(b"tokenizer.ggml.merges", ARRAY, [b"a b"], STRING))
    return pairs


def _settings(draw: random.Random, name: str) -> list[Pair]:
    def pair(key: str, kind: int, value: Any, *items: int) -> Pair:
        return Pair(f"{name}.{key}".encode(), kind, value, *items)

    pairs = [
        Pair(b"general.architecture", STRING, name.encode()),
        pair("block_count", U32, 1),
        pair("context_length", U32, 64),
        pair("embedding_length", U32, SIZE),
        pair("feed_forward_length", U32, FEED),
        pair("attention.head_count", U32, HEADS),
    ]
    if name == "gpt2":
        return [*pairs, pair("attention.layer_norm_epsilon", F32, 1e-5)]
    epsilon = "attention.layer_norm_epsilon" if name in LAYER_NORMS else "attention.layer_norm_rms_epsilon"
    pairs += [pair("attention.head_count_kv", *_kv_heads(draw, name)), pair(epsilon, F32, 1e-5)]
    if name == "deepseek2":
        pairs += [pair(key, U32, size) for key, size in _latent_sizes(draw).items()]
    else:
        pairs += [pair("attention.key_length", U32, SIZE // HEADS), pair("attention.value_length", U32, SIZE // HEADS)]
    if name in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss", "gemma-embedding"):
        pairs.append(pair("attention.sliding_window", U32, 16))
    if name == "afmoe" or (name in ("exaone-moe", "exaone4", "olmo2") and draw.random() < 0.5):  # some of these
        pairs.append(pair("attention.sliding_window", U32, 16))
        items = draw.choice([BOOL, BOOL, BOOL, U32])
        pairs.append(pair("attention.sliding_window_pattern", ARRAY, [draw.random() < 0.5], items))
    if name in ("command-r", "cohere2"):
        pairs.append(pair("logit_scale", F32, 0.25))
    if name in ("granite", "granitehybrid", "granitemoe"):
        pairs += [pair("attention.scale", F32, 0.5), pair("residual_scale", F32, 0.2), pair("logit_scale", F32, 8.0)]
    if name in ("chatglm", "glm4", "gptneox", "phi2", "stablelm"):
        pairs.append(pair("rope.dimension_count", U32, 2))
    if name == "qwen3vl" or (name == "glm4" and draw.random() < 0.05):
        pairs.append(pair("rope.dimension_sections", ARRAY, [1, 1, 0, draw.choice([0, 0, 0, 1])], U32))
    if name == "gemma2":
        pairs += [pair("attn_logit_softcapping", F32, 50.0), pair("final_logit_softcapping", F32, 30.0)]
    more = (
        *((_expert_settings, WITH_EXPERTS), (_recurrent_settings, RECURRENT)),
        *((_gemma4_settings, ("gemma4",)), (_lfm2_settings, LFM2), (_mamba_settings, (*MAMBA, "falcon-h1", "mamba2"))),
        (_bert_settings, BERTS),
    )
    for settings, names in more:
        pairs += [pair(*each) for each in settings(draw, name)] if name in names else []
    if draw.random() < 0.3:
        pairs += [pair(*each) for each in _scaling_settings(draw, name)]
    if draw.random() < 0.1:
        pairs.append(Pair(b"general.file_type", U32, draw.choice([0, 1, 7, 999])))
    if draw.random() < 0.1:
        pairs.append(Pair(b"general.alignment", U32, 32))
    return pairs


def _gemma4_settings(draw: random.Random, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield the settings of Gemma 4, sometimes some that are refused."""
    yield "attention.sliding_window", U32, 16
    yield "attention.sliding_window_pattern", ARRAY, [draw.random() < 0.05], draw.choice([BOOL] * 9 + [U32])
    yield "attention.shared_kv_layers", U32, draw.random() < 0.05
    yield "attention.key_length_swa", U32, 2
    yield "attention.value_length_swa", U32, 2
    yield "rope.dimension_count", U32, SIZE // HEADS if draw.random() < 0.95 else 2
    yield "rope.freq_base_swa", F32, 10_000.0
    yield "embedding_length_per_layer_input", U32, RANK
    if draw.random() < 0.5:
        yield "final_logit_softcapping", F32, 30.0


def _xielu_settings(draw: random.Random) -> list[Pair]:
    """Return the numbers of an activation, sometimes too many."""
    forms = [*[(F32, 0.5), (ARRAY, [0.5], F32)] * 15, (ARRAY, [0.5, 1.0], F32)]
    return [Pair(f"xielu.{part}".encode(), *draw.choice(forms)) for part in ("alpha_p", "alpha_n", "beta", "eps")]


def _lfm2_settings(draw: random.Random, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield the settings of LFM2, sometimes some that are refused."""
    yield "shortconv.l_cache", U32, 3
    if draw.random() < 0.3:
        yield "attention.sliding_window", U32, draw.choice([0, 16])
    if draw.random() < 0.1:
        yield "attention.causal", BOOL, draw.random() < 0.5


def _mamba_settings(draw: random.Random, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield the settings of state-space layers, sometimes some that are refused."""
    yield "rope.scaling.finetuned", BOOL, draw.random() < 0.05
    sizes = {"conv_kernel": 3, "state_size": STATE, "group_count": 1, "inner_size": INNER, "time_step_rank": 2}
    for key, size in sizes.items():
        yield f"ssm.{key}", U32, size if draw.random() < 0.94 else draw.choice([1, 4, 12])


def _bert_settings(draw: random.Random, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield the setting of BERT that is refused in one of ten files, and the windows of ModernBERT."""
    yield "attention.causal", BOOL, draw.random() < 0.1
    if name == "modern-bert":
        yield "attention.sliding_window", U32, 16
        yield "attention.sliding_window_pattern", U32, 3
        yield "hidden_act", STRING, draw.choice([b"gelu", b"silu"])


def _scaling_settings(draw: random.Random, name: str) -> Iterator[tuple[str, int, Any]]:
    """Yield the settings of scaled positions."""
    yield "rope.scaling.type", STRING, draw.choice([b"none", b"linear", b"yarn"])
    yield "rope.scaling.factor", F32, 4.0
    yield "rope.scaling.original_context_length", U32, 32
    if name == "mistral3":
        yield "rope.scaling.yarn_log_multiplier", F32, draw.choice([0.0, 1.0])
        yield "attention.temperature_scale", F32, draw.choice([0.0, 0.1])


def _recurrent_settings(draw: random.Random, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield the settings of a recurrent layer, sometimes one that is refused."""
    yield "ssm.conv_kernel", U32, 4
    yield "ssm.state_size", U32, STATE
    yield "ssm.group_count", U32, KEYS
    yield "ssm.time_step_rank", U32, VALUES
    yield "ssm.inner_size", U32, VALUES * STATE + (draw.random() < 0.1)
    yield "full_attention_interval", U32, 4
    yield "rope.dimension_count", U32, 2
    if name != "qwen3next":
        yield "rope.dimension_sections", ARRAY, [1, 1, 0, 0], I32
    if draw.random() < 0.2:
        yield "attention.recurrent_layers", ARRAY, [draw.random() < 0.9], draw.choice([BOOL, BOOL, U32])
    if draw.random() < 0.15:
        yield "ssm.v_head_reordered", BOOL, draw.random() < 0.5


def _kv_heads(draw: random.Random, name: str) -> tuple[Any, ...]:
    """Return the number of key-value heads: the type and the value; Granite 4 has a number for each layer.

    So have files of Ollama with recurrent layers, for which it is 0.
    """
    if name in RECURRENT and draw.random() < 0.2:
        return ARRAY, draw.choice([[0, HEADS], [HEADS, 0], [HEADS]]), U32
    if name in ("granite", "gemma4") and draw.random() < 0.3:
        return ARRAY, draw.choice([[HEADS], [HEADS], [1], [HEADS, 1]]), U32
    return U32, HEADS


def _expert_settings(draw: random.Random, name: str) -> Iterator[tuple[str, int, Any]]:
    """Yield the settings of a family with experts, sometimes one that is refused."""
    yield "expert_count", U32, 3
    yield "expert_used_count", U32, 2
    yield "expert_feed_forward_length", U32, FEED
    if name == "granitemoe" and draw.random() < 0.2:
        yield "rope.scaling.finetuned", BOOL, draw.random() < 0.5
    for refused, key in (("granitemoe", "expert_shared_feed_forward_length"), ("olmoe", "attention.clamp_kqv")):
        if name == refused and draw.random() < 0.1:
            yield key, U32, 8
    if name in RECURRENT:
        yield "expert_shared_feed_forward_length", U32, FEED
    if name == "llama4" and draw.random() < 0.3:
        yield "attention.sliding_window", U32, draw.choice([0, 16])
    if name == "lfm2moe":
        yield "expert_gating_func", U32, draw.choice([2, 2, 2, 1])
    if name in SCORED_ALONE:
        yield "expert_gating_func", U32, draw.choice([2, 2, 2, 1])
        yield "expert_shared_count", U32, 1
        yield "rope.dimension_count", U32, 2


def _latent_sizes(draw: random.Random) -> dict[str, int]:
    sizes = {
        **{"attention.kv_lora_rank": RANK, "attention.key_length": 2 * RANK, "attention.value_length": RANK},
        **{"attention.key_length_mla": PLAIN + RANK, "attention.value_length_mla": RANK},
        **{"rope.dimension_count": RANK, "expert_shared_count": 1, "expert_gating_func": 1},
    }
    return sizes | ({"attention.temperature_scale": 1} if draw.random() < 0.05 else {})


def _shapes(draw: random.Random, name: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the tensors of a model: their names and dimensions, fastest first."""
    yield "token_embd.weight", [SIZE, len(VOCABULARY)]
    if name in (*BERTS, "mamba2"):
        yield from (_mamba2_shapes(draw) if name == "mamba2" else _bert_shapes(draw, name))
        return
    norms = ["output_norm"] if name in ("exaone4", "olmo2") else ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    if name in ("command-r", "cohere2", "falcon", "glm4moe", "gpt-oss", "phi2", "seed_oss", *RECURRENT):
        norms.remove("blk.0.ffn_norm")
    if name in ("glm4moe", "gpt-oss", "seed_oss", *RECURRENT):
        norms.append("blk.0.post_attention_norm")
    if name in ("afmoe", "exaone4", "gemma-embedding", "gemma2", "gemma3", "gemma4", "glm4", "olmo2"):
        norms += ["blk.0.post_attention_norm", "blk.0.post_ffw_norm"]
    if name in LFM2:
        norms[0] = draw.choice(["token_embd_norm", "output_norm"])
    for norm in norms:
        yield f"{norm}.weight", [SIZE]
        if name in ("falcon", "gptneox", "nemotron", "phi2", "starcoder2", "stablelm"):
            yield f"{norm}.bias", [SIZE]
    yield from _recurrent_shapes(draw, name) if name in RECURRENT else _attention_shapes(name)
    yield from _feed_shapes(name)
    if name == "gpt2":
        yield "position_embd.weight", [SIZE, 64]
        for part, size in (("attn_qkv", 3 * SIZE), ("attn_output", SIZE), ("ffn_up", FEED), ("ffn_down", SIZE)):
            yield f"blk.0.{part}.bias", [size]
        for norm in norms:
            yield f"{norm}.bias", [SIZE]
    if name == "phi2" or draw.random() < 0.3:
        yield "output.weight", [SIZE, len(VOCABULARY)]
    if name == "phi2":
        yield "output.bias", [len(VOCABULARY)]
    if name in DIVISORS and draw.random() < 0.3:
        for divisors in DIVISORS[name]:
            yield f"{divisors}.weight", [SIZE // HEADS // 2]


def _mamba2_shapes(draw: random.Random) -> Iterator[tuple[str, list[int]]]:
    yield from ((f"{norm}.weight", [SIZE]) for norm in ("output_norm", "blk.0.attn_norm"))
    yield from ((f"blk.0.{part}", shape) for part, shape in _mamba_shapes(draw).items())


def _bert_shapes(draw: random.Random, name: str) -> Iterator[tuple[str, list[int]]]:
    if name == "modern-bert":
        for norm in ("token_embd_norm", "blk.0.ffn_norm", "output_norm"):
            yield f"{norm}.weight", [SIZE]
        yield from _attention_shapes(name)
        yield "blk.0.ffn_up.weight", [SIZE, 2 * FEED]
        yield "blk.0.ffn_down.weight", [FEED, SIZE]
        return
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        yield f"{norm}.weight", [SIZE]
        yield f"{norm}.bias", [SIZE]
    if name != "bert" or draw.random() < 0.5:  # else a DistilBERT
        yield "token_types.weight", [SIZE, 2]
    if name == "bert":
        yield "position_embd.weight", [SIZE, 64]
    yield from _attention_shapes(name)
    yield from _feed_shapes(name)


def _attention_shapes(name: str) -> Iterator[tuple[str, list[int]]]:
    if name in (
        "qwen3",
        "qwen3moe",
        "qwen3vl",
        "gemma-embedding",
        "gemma3",
        "gemma4",
        "apertus",
        "exaone4",
        "hunyuan-dense",
        *("afmoe", "exaone-moe", "hunyuan-moe"),
        *LFM2,
    ):
        yield "blk.0.attn_q_norm.weight", [SIZE // HEADS]
        yield "blk.0.attn_k_norm.weight", [SIZE // HEADS]
    if name == "afmoe":
        yield "blk.0.attn_gate.weight", [SIZE, SIZE]
    if name in ("minimax-m2", "olmo2", "olmoe"):
        yield "blk.0.attn_q_norm.weight", [SIZE]
        yield "blk.0.attn_k_norm.weight", [SIZE]
    if name == "deepseek2":
        yield "blk.0.attn_q.weight", [SIZE, HEADS * (PLAIN + RANK)]
        yield "blk.0.attn_kv_a_mqa.weight", [SIZE, 2 * RANK]
        yield "blk.0.attn_kv_a_norm.weight", [RANK]
        yield "blk.0.attn_k_b.weight", [PLAIN, RANK, HEADS]
        yield "blk.0.attn_v_b.weight", [RANK, RANK, HEADS]
        yield "blk.0.attn_output.weight", [HEADS * RANK, SIZE]
        return
    if name in ("chatglm", "falcon", "gpt2", "gptneox", "modern-bert", "nomic-bert", "phi3"):
        yield "blk.0.attn_qkv.weight", [SIZE, 3 * SIZE]
        if name == "gptneox":
            yield "blk.0.attn_qkv.bias", [3 * SIZE]
    else:
        for part in "qkv":
            yield f"blk.0.attn_{part}.weight", [SIZE, SIZE]
            if name == "qwen2" or name in WITH_BIASES:
                yield f"blk.0.attn_{part}.bias", [SIZE]
    yield "blk.0.attn_output.weight", [SIZE, SIZE]
    if name in WITH_BIASES:
        yield "blk.0.attn_output.bias", [SIZE]
    if name == "gpt-oss":
        yield "blk.0.attn_sinks.weight", [HEADS]


def _make_gemma4(draw: random.Random, pairs: list[Pair], tensors: list[Tensor]) -> None:
    """Add the inputs and the positions of Gemma 4 to a model, sometimes experts; sometimes values are keys."""
    shapes = {
        **{"per_layer_token_embd": [RANK, len(VOCABULARY)], "per_layer_model_proj": [SIZE, RANK]},
        **{"per_layer_proj_norm": [RANK], "blk.0.inp_gate": [SIZE, RANK], "blk.0.proj": [RANK, SIZE]},
        **{"blk.0.post_norm": [SIZE], "blk.0.layer_output_scale": [1]},
    }
    if draw.random() < 0.3:
        norms = ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        shapes |= {f"blk.0.{norm}": [SIZE] for norm in norms}
        apart = {"blk.0.ffn_gate_exps": [SIZE, FEED, 3], "blk.0.ffn_up_exps": [SIZE, FEED, 3]}
        shapes |= apart if draw.random() < 0.3 else {"blk.0.ffn_gate_up_exps": [SIZE, 2 * FEED, 3]}
        shapes |= {"blk.0.ffn_down_exps": [FEED, SIZE, 3], "blk.0.ffn_gate_inp": [SIZE, 3]}
        tensors.extend((Tensor(b"blk.0.ffn_gate_inp.scale", [SIZE], 0), Tensor(b"blk.0.ffn_down_exps.scale", [3], 0)))
        counts = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": FEED}
        pairs.extend(Pair(f"gemma4.{key}".encode(), U32, count) for key, count in counts.items())
    if draw.random() < 0.3:
        tensors[:] = [tensor for tensor in tensors if tensor.name != b"blk.0.attn_v.weight"]
    tensors.extend(Tensor(f"{name}.weight".encode(), dimensions, 0) for name, dimensions in shapes.items())
    divisors = draw.choice([(1.0, 1e30)] * 6 + [(1.0, 1.0), (1.0, 2.0)])
    tensors.append(Tensor(b"rope_freqs.weight", [2], 0, data=struct.pack("<2f", *divisors)))


def _make_lfm2(draw: random.Random, name: str, pairs: list[Pair], tensors: list[Tensor]) -> None:
    """Put a convolution before the layer of an LFM2, mostly."""
    if name == "lfm2moe":
        tensors.append(Tensor(b"blk.0.exp_probs_b.bias", [3], 0))
    shapes = {"conv": [3, SIZE], "in_proj": [SIZE, 3 * SIZE], "out_proj": [SIZE, SIZE]}
    _put_before(draw, pairs, tensors, {f"shortconv.{part}.weight": shape for part, shape in shapes.items()})


def _make_nemotron(draw: random.Random, pairs: list[Pair], tensors: list[Tensor]) -> None:
    """Make three layers of the layer: a state-space layer, attention and an MLP; sometimes in a wrong order."""
    unused = (b"blk.0.ffn_norm.weight", b"blk.0.ffn_gate.weight", b"output.weight")
    tensors[:] = [tensor for tensor in tensors if tensor.name not in unused]
    for tensor in tensors:
        for part, layer in ((b"blk.0.attn_", b"blk.1.attn_"), (b"blk.0.ffn_", b"blk.2.ffn_")):
            tensor.name = tensor.name.replace(part, layer)
    tensors.extend(Tensor(f"blk.{layer}.attn_norm.weight".encode(), [SIZE], 0) for layer in (0, 2))
    tensors.append(Tensor(b"output.weight", [SIZE, len(VOCABULARY)], 0))
    tensors.extend(Tensor(f"blk.0.{part}".encode(), shape, 0) for part, shape in _mamba_shapes(draw).items())
    by_key = {pair.key.rpartition(b".")[2]: pair for pair in pairs}
    by_key[b"block_count"].value = 3
    for key, size, layer in ((b"head_count_kv", HEADS, 1), (b"feed_forward_length", FEED, 2)):
        place = layer if draw.random() < 0.95 else draw.randrange(3)
        by_key[key].value = [size if each == place else 0 for each in range(3)]
        by_key[key].kind, by_key[key].items = ARRAY, U32


def _make_mamba(draw: random.Random, pairs: list[Pair], tensors: list[Tensor]) -> None:
    """Put a state-space layer before the layer of a Granite 4 H, mostly."""
    _put_before(draw, pairs, tensors, _mamba_shapes(draw))


def _mamba_shapes(draw: random.Random) -> dict[str, list[int]]:
    shapes = {"ssm_in.weight": [SIZE, 2 * INNER + 2 * STATE + 2], "ssm_conv1d.weight": [3, INNER + 2 * STATE]}
    shapes |= {"ssm_a": [1, 2], "ssm_d": [1, 2], "ssm_dt.bias": [2], "ssm_norm.weight": [INNER, 1]}
    shapes |= {"ssm_out.weight": [INNER, SIZE]}
    if draw.random() < 0.7:
        shapes["ssm_conv1d.bias"] = [INNER + 2 * STATE]
    return shapes


def _put_before(draw: random.Random, pairs: list[Pair], tensors: list[Tensor], shapes: dict[str, list[int]]) -> None:
    """Put a layer with states before the layer of a model, mostly; sometimes with heads that are refused."""
    if draw.random() < 0.3:
        return
    by_key = {pair.key.rpartition(b".")[2]: pair for pair in pairs}
    by_key[b"block_count"].value, heads = 2, by_key[b"head_count_kv"]
    heads.kind, heads.items, heads.value = ARRAY, U32, draw.choice([[0, HEADS]] * 5 + [[0, HEADS, 0], [0, 0]])
    for tensor in [each for each in tensors if each.name.startswith(b"blk.0.")]:
        second = b"blk.1." + tensor.name.removeprefix(b"blk.0.")
        if tensor.name.startswith(b"blk.0.attn_") and b"attn_norm" not in tensor.name:
            tensor.name = second
        else:
            tensors.append(Tensor(second, list(tensor.dimensions), tensor.kind))
    tensors.extend(Tensor(f"blk.0.{part}".encode(), shape, 0) for part, shape in shapes.items())


def _recurrent_shapes(draw: random.Random, name: str) -> Iterator[tuple[str, list[int]]]:
    keys, values = KEYS * STATE, VALUES * STATE
    if name == "qwen3next" and draw.random() < 0.3:
        yield "blk.0.ssm_in.weight", [SIZE, 2 * keys + 2 * values]
    else:
        yield "blk.0.attn_qkv.weight", [SIZE, 2 * keys + values]
        yield "blk.0.attn_gate.weight", [SIZE, values]
    for part in ("ssm_ba",) if name == "qwen3next" else ("ssm_alpha", "ssm_beta"):
        yield f"blk.0.{part}.weight", [SIZE, 2 * VALUES if name == "qwen3next" else VALUES]
    yield "blk.0.ssm_a", [VALUES]
    yield draw.choice(["blk.0.ssm_dt.bias", "blk.0.ssm_dt"]), [VALUES]
    yield "blk.0.ssm_conv1d.weight", [4, 2 * keys + values]
    yield "blk.0.ssm_norm.weight", [STATE]
    yield "blk.0.ssm_out.weight", [values, SIZE]


def _feed_shapes(name: str) -> Iterator[tuple[str, list[int]]]:
    if name in WITH_EXPERTS:
        yield "blk.0.ffn_gate_inp.weight", [SIZE, 3]
        for part, dimensions in (("gate", [SIZE, FEED]), ("up", [SIZE, FEED]), ("down", [FEED, SIZE])):
            yield f"blk.0.ffn_{part}_exps.weight", [*dimensions, 3]
            if name == "gpt-oss":
                yield f"blk.0.ffn_{part}_exps.bias", [dimensions[1], 3]
            if name in WITH_SHARED:
                yield f"blk.0.ffn_{part}_shexp.weight", dimensions
        if name in RECURRENT:
            yield "blk.0.ffn_gate_inp_shexp.weight", [SIZE]
        if name in SCORED_ALONE:
            yield "blk.0.exp_probs_b.bias", [3]
        if name == "gpt-oss":
            yield "blk.0.ffn_gate_inp.bias", [3]
        return
    plain = (
        "apertus",
        "arcee",
        "bert",
        "falcon",
        "gpt2",
        "gptneox",
        "nemotron",
        "phi2",
        "phi3",
        "chatglm",
        "glm4",
        "starcoder2",
    )
    if name not in plain:
        yield "blk.0.ffn_gate.weight", [SIZE, FEED]
    yield "blk.0.ffn_up.weight", [SIZE, 2 * FEED if name in ("chatglm", "phi3", "glm4") else FEED]
    yield "blk.0.ffn_down.weight", [FEED, SIZE]
    if name in WITH_BIASES:
        yield "blk.0.ffn_up.bias", [FEED]
        yield "blk.0.ffn_down.bias", [SIZE]


def _make_reranker(draw: random.Random, name: str, pairs: list[Pair], tensors: list[Tensor]) -> None:
    """Add what a file has that scores pairs of texts; sometimes with too few labels."""
    labels = draw.choice([[b"yes", b"no"], [b"yes", b"no"], [b"yes"]])
    tensors.append(Tensor(b"cls.output.weight", [SIZE, 2], 0))
    pairs.append(Pair(f"{name}.pooling_type".encode(), U32, draw.choice([4, 4, 4, 1, 2, 3])))
    pairs.append(Pair(f"{name}.classifier.output_labels".encode(), ARRAY, labels, STRING))
    pairs.append(Pair(b"tokenizer.chat_template.rerank", STRING, b'<|im_end|>{query}\n{{ "{document}'))


def whole_model(draw: random.Random) -> Draft:
    """Return a small model that quire runs."""
    return model_of(draw, draw.choice(ARCHITECTURES))


def model_of(draw: random.Random, name: str) -> Draft:
    """Return a small model of an architecture."""
    kind = draw.choice([0, 1, 30])
    shapes = list(_shapes(draw, name))
    tensors = [Tensor(key.encode(), shape, kind if len(shape) > 1 else 0) for key, shape in shapes]
    pairs = _settings(draw, name) + _tokenizer(draw)
    pairs += _xielu_settings(draw) if name == "apertus" else []
    if name == "gemma4":
        _make_gemma4(draw, pairs, tensors)
    if name == "granitehybrid":
        _make_mamba(draw, pairs, tensors)
    if name == "falcon-h1":
        for tensor in tensors:
            tensor.name = tensor.name.replace(b"ffn_norm.weight", b"ffn_norm")
        tensors.extend(Tensor(f"blk.0.{part}".encode(), shape, 0) for part, shape in _mamba_shapes(draw).items())
    if name == "nemotron_h":
        _make_nemotron(draw, pairs, tensors)
    if name in LFM2:
        _make_lfm2(draw, name, pairs, tensors)
    if draw.random() < 0.1:
        _make_reranker(draw, name, pairs, tensors)
    if draw.random() < 0.3:
        draw.shuffle(pairs)
        draw.shuffle(tensors)
    draft = Draft(pairs, tensors, draw.choice([2, 3, 3]))
    draft.place()
    return draft
