"""Files with an image encoder in the making: small ones, each for a small text model."""

from __future__ import annotations

import random
from collections.abc import Iterator

from quire.compute.gguf.vision.kinds import KINDS
from support.gguf_drafts import ARRAY, BOOL, F32, SIZE, STRING, U32, Draft, Pair, Tensor, model_of

ROWS, INNER = 16, 24  # of the tower
SIDE, PATCH = 4, 8  # patches along an edge, pixels along a patch
TEXTS = {
    **{
        "gemma3": "gemma3",
        "gemma4v": "gemma4",
        "idefics3": "llama",
        "internvl": "qwen2",
        "lfm2": "lfm2",
        "mlp": "llama",
        "pixtral": "llama",
    },
    "qwen3vl_merger": "qwen3vl",
}
SINGLES = {
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "mistral3": "pixtral",
    **dict.fromkeys(("qwen25vl", "qwen3vl"), "qwen3vl_merger"),
}
"""The text model of a file that has its image encoder → the kind of this one."""

TOKENS = {
    "gemma3": [b"<image_soft_token>", b"<start_of_image>", b"<end_of_image>"],
    "gemma4v": [b"<|image|>", b"<|image>", b"<image|>"],
    "idefics3": [b"<image>", b"<fake_token_around_image>"],
    "internvl": [b"<IMG_CONTEXT>", b"<img>", b"</img>"],
    "lfm2": [b"<image>", b"<|image_start|>", b"<|image_end|>", b"<|img_thumbnail|>"],
    "mlp": [b"<image>"],
    "pixtral": [b"[IMG]", b"[IMG_BREAK]", b"[IMG_END]"],
    "qwen3vl_merger": [b"<|image_pad|>"],
}


def whole_pair(draw: random.Random) -> tuple[Draft, Draft]:
    """Return a text model and an image encoder, mostly for it."""
    kind = draw.choice(sorted(TEXTS))
    text = model_of(draw, TEXTS[kind] if draw.random() < 0.97 else "phi2")
    _add_tokens(text, TOKENS[kind][draw.random() < 0.05 :])
    if kind == "qwen3vl_merger":
        key = b"qwen3vl.rope.dimension_sections"
        text.pairs = [pair for pair in text.pairs if pair.key != key]
        text.pairs.append(Pair(key, ARRAY, [1, 1, 0, 0], U32))
    number = draw.choice([0, 1, 30])
    tensors = [Tensor(name.encode(), shape, number if len(shape) > 1 else 0) for name, shape in _shapes_of(draw, kind)]
    if draw.random() < 0.04:
        tensors.append(Tensor(KINDS[kind].once["v.patch_embd"].encode() + b".weight", [ROWS], 0))
    if draw.random() < 0.04:
        wide = next(tensor for tensor in tensors if tensor.name == KINDS[kind].output[0].encode())
        wide.dimensions = [2 * each for each in wide.dimensions]
    if draw.random() < 0.1:
        tensors = [tensor for tensor in tensors if tensor.name not in (b"mm.1.weight", b"v.position_embd.weight")]
    encoder = Draft(_settings(draw, kind), tensors)
    encoder.place()
    return text, encoder


def whole_single(draw: random.Random) -> Draft:
    """Return a text model with its image encoder in the same file, as Ollama has them."""
    name = draw.choice(sorted(SINGLES))
    is_qwen = name in ("qwen25vl", "qwen3vl")
    text = model_of(draw, "qwen2" if name == "qwen25vl" else name)
    text.pairs = [pair for pair in text.pairs if pair.key != b"qwen3vl.rope.dimension_sections"]
    _add_tokens(text, TOKENS[SINGLES[name]][draw.random() < 0.05 :])
    for pair in text.pairs if name == "qwen25vl" else ():
        pair.key = pair.key.replace(b"qwen2.", b"qwen25vl.")
        pair.value = b"qwen25vl" if pair.key == b"general.architecture" else pair.value
    text.pairs += _own_settings(draw, name)
    number = draw.choice([0, 1, 30])
    for stored, shape in _qwen_shapes(name) if is_qwen else _shapes_of(draw, SINGLES[name]):
        theirs = _name_in_ollama(stored, shape, name).encode()
        if stored != "v.token_embd.img_break":
            text.tensors.append(Tensor(theirs, shape, number if len(shape) > 1 else 0))
    text.place()
    return text


def _qwen_shapes(name: str) -> Iterator[tuple[str, list[int]]]:
    if name == "qwen3vl":
        yield "v.patch_embed.weight", [PATCH, PATCH, 2, 3 * ROWS]
        yield "v.patch_embed.bias", [ROWS]
        yield "v.pos_embed.weight", [ROWS, SIDE**2]
        stems = [(f"v.blk.0.attn_{part}", ROWS, ROWS) for part in ("q", "k", "v", "out")]
        stems += [("v.blk.0.mlp.linear_fc1", ROWS, INNER), ("v.blk.0.mlp.linear_fc2", INNER, ROWS)]
        stems += [("v.merger.linear_fc1", 4 * ROWS, 4 * ROWS), ("v.merger.linear_fc2", 4 * ROWS, SIZE)]
        for stem, inputs, outputs in stems:
            yield f"{stem}.weight", [inputs, outputs]
            yield f"{stem}.bias", [outputs]
        for norm in ("v.blk.0.norm1", "v.blk.0.norm2", "v.merger.norm"):
            yield f"{norm}.weight", [ROWS]
            yield f"{norm}.bias", [ROWS]
        return
    for frame in range(2):
        yield f"v.patch_embd_{frame}.weight", [PATCH, PATCH, 3, ROWS]
    products = [(f"v.blk.0.attn_{part}", ROWS, ROWS) for part in ("q", "k", "v", "out")]
    products += [("v.blk.0.ffn_gate", ROWS, INNER), ("v.blk.0.ffn_up", ROWS, INNER), ("v.blk.0.ffn_down", INNER, ROWS)]
    products += [("v.merger.mlp.0", 4 * ROWS, 4 * ROWS), ("v.merger.mlp.2", 4 * ROWS, SIZE)]
    for stem, inputs, outputs in products:
        yield f"{stem}.weight", [inputs, outputs]
        yield f"{stem}.bias", [outputs]
    for norm in ("v.blk.0.ln1", "v.blk.0.ln2", "v.merger.ln_q"):
        yield f"{norm}.weight", [ROWS]


def _own_settings(draw: random.Random, name: str) -> list[Pair]:
    sizes = {
        **{"vision.attention.head_count": 2, "vision.block_count": 1, "vision.embedding_length": ROWS},
        **{"vision.feed_forward_length": INNER, "vision.image_size": SIDE * PATCH, "vision.patch_size": PATCH},
        **{
            "vision.num_channels": 3,
            "vision.window_size": 8 * PATCH,
            "mm.tokens_per_image": draw.choice([4, 4, 4, 16, 3]),
        },
    }
    pairs = [Pair(f"{name}.vision.attention.layer_norm_epsilon".encode(), F32, 1e-6)]
    if name == "gemma4":
        sizes["vision.projector.scale_factor"] = 1
    if name == "qwen25vl":
        pairs.append(Pair(b"qwen25vl.rope.mrope_section", ARRAY, [1, 1, 0], U32))
        whole = draw.choice([[0], [0], [0], [1], [0, 0], []])
        pairs.append(Pair(b"qwen25vl.vision.fullatt_block_indexes", ARRAY, whole, U32))
    if name == "qwen3vl":
        pairs.append(Pair(b"qwen3vl.mrope_sections", ARRAY, [1, 1, 0], U32))
        deep = draw.choice([[], [], [], [5]])
        pairs.append(Pair(b"qwen3vl.vision.deepstack_visual_indexes", ARRAY, deep, U32))
    return [*pairs, *(Pair(f"{name}.{key}".encode(), U32, size) for key, size in sizes.items())]


def _name_in_ollama(stored: str, shape: list[int], name: str) -> str:
    """Return the name that Ollama has for a tensor."""
    if name in ("gemma4", "qwen25vl", "qwen3vl"):
        return stored
    if name == "mistral3":
        for theirs, ours in (
            *(("v.patch_embd", "v.patch_conv"), ("v.pre_ln", "v.encoder_norm"), (".attn_out", ".attn_output")),
            *((".ln1", ".attn_norm"), (".ln2", ".ffn_norm"), ("mm.input_norm", "mm.norm")),
            *(("patch_merger", "patch_merger.merging_layer"), ("mm.1", "mm.linear_1"), ("mm.2", "mm.linear_2")),
        ):
            stored = stored.replace(theirs, ours)
        return stored
    if ".ffn_" in stored:
        stem, _, end = stored.rpartition(".")
        return f"{stem.rpartition('.')[0]}.mlp.fc{1 if shape[-1] == INNER else 2}.{end}"
    for theirs, ours in (
        *(("v.patch_embd", "v.patch_embedding"), ("v.position_embd", "v.position_embedding")),
        *(("v.post_ln", "v.post_layernorm"), (".attn_out", ".attn_output"), (".ln", ".layer_norm")),
        *(("mm.soft", "mm.mm_soft"), ("mm.input", "mm.mm_input")),
    ):
        stored = stored.replace(theirs, ours)
    return stored


def _add_tokens(text: Draft, tokens: list[bytes]) -> None:
    """Add tokens to the vocabulary of a model, and rows to its embedding."""
    new = {b"tokens": tokens, b"scores": [0.0] * len(tokens), b"token_type": [3] * len(tokens)}
    for pair in text.pairs:
        added = new.get(pair.key.removeprefix(b"tokenizer.ggml."))
        if added is not None:
            pair.value = [*pair.value, *added]
    for tensor in text.tensors:
        if tensor.name in (b"token_embd.weight", b"output.weight", b"per_layer_token_embd.weight"):
            tensor.dimensions[1] += len(tokens)
    text.place()


def _settings(draw: random.Random, kind: str) -> list[Pair]:
    sizes = {
        **{"attention.head_count": 2, "block_count": 1, "embedding_length": ROWS, "feed_forward_length": INNER},
        **{"image_size": SIDE * PATCH, "patch_size": PATCH, "projection_dim": SIZE, "projector.scale_factor": 2},
        **{"spatial_merge_size": 2, "preproc_image_size": 64},
    }
    if kind == "gemma4v":
        sizes["projector.scale_factor"] = 1  # with 2, its table of positions would be most of the file
    pairs = [
        Pair(b"general.architecture", STRING, b"clip"),
        Pair(b"clip.has_vision_encoder", BOOL, 1),
        Pair(b"clip.projector_type", STRING, kind.encode()),
        Pair(draw.choice([b"clip.use_gelu", b"clip.use_silu"]), BOOL, draw.randrange(2)),
        Pair(b"clip.vision.attention.layer_norm_epsilon", F32, 1e-6),
        Pair(b"clip.vision.image_mean", ARRAY, [0.5, 0.5, 0.5], F32),
        Pair(b"clip.vision.image_std", ARRAY, [0.5, 0.5, 0.5], F32),
        *(Pair(f"clip.vision.{name}".encode(), U32, size) for name, size in sizes.items()),
    ]
    if kind == "mlp" and draw.random() < 0.3:
        pairs.append(Pair(b"clip.vision.feature_layer", ARRAY, draw.choice([[1], [1], [0, 1]]), U32))
    if kind == "mlp" and draw.random() < 0.2:
        sides = [SIDE * PATCH * draw.choice([1, 2, 2, 2, 3, 3]) for _ in range(draw.choice([2, 2, 4, 4, 3]))]
        pairs.append(Pair(b"clip.vision.image_grid_pinpoints", ARRAY, sides, U32))
    if kind == "mlp" and draw.random() < 0.3:
        merged = draw.choice([b"spatial_unpad", b"flat"])
        pairs.append(Pair(b"clip.vision.mm_patch_merge_type", STRING, merged))
    return pairs


def _shapes_of(draw: random.Random, kind: str) -> Iterator[tuple[str, list[int]]]:
    return _gemma4_shapes(draw) if kind == "gemma4v" else _shapes(draw, kind)


def _shapes(draw: random.Random, kind: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the names of tensors, with the dimensions as files have them: those of an input first."""
    is_clip, is_pixtral = kind == "internvl" or (kind == "mlp" and draw.random() < 0.7), kind == "pixtral"
    yield "v.patch_embd.weight", [PATCH, PATCH, 3, ROWS]
    if kind == "qwen3vl_merger":
        yield "v.patch_embd.weight.1", [PATCH, PATCH, 3, ROWS if draw.random() < 0.8 else INNER]
    if not (is_clip or is_pixtral) or kind == "internvl":
        yield "v.patch_embd.bias", [ROWS]
    if is_clip:
        yield "v.class_embd", [ROWS, 1, 1][: draw.choice([1, 3])]
    around = ("v.pre_ln",) if is_clip or is_pixtral else () if kind == "mlp" else ("v.post_ln",)
    for norm in around if kind != "internvl" else ():
        yield f"{norm}.weight", [ROWS]
        if not is_pixtral:
            yield f"{norm}.bias", [ROWS]
    if kind == "mlp" and draw.random() < 0.2:
        yield "v.post_ln.weight", [ROWS]
    if not is_pixtral:
        yield "v.position_embd.weight", [ROWS, SIDE**2 + is_clip]
    swaps = draw.random() < 0.3 and not is_pixtral
    up, down = ("ffn_down", "ffn_up") if swaps else ("ffn_up", "ffn_down")
    products = [(f"attn_{each}", ROWS, ROWS) for each in ("q", "k", "v", "out")]
    if kind == "qwen3vl_merger":
        products = [("attn_qkv", ROWS, 3 * ROWS), ("attn_out", ROWS, ROWS)]
    for part, inputs, outputs in (*products, (up, ROWS, INNER)):
        yield f"v.blk.0.{part}.weight", [inputs, outputs]
        if not is_pixtral:
            yield f"v.blk.0.{part}.bias", [outputs]
    yield f"v.blk.0.{down}.weight", [INNER, ROWS]
    if is_pixtral:
        yield "v.blk.0.ffn_gate.weight", [ROWS, INNER]
    else:
        yield f"v.blk.0.{down}.bias", [ROWS]
    for norm in ("ln1", "ln2"):
        yield f"v.blk.0.{norm}.weight", [ROWS]
        if not is_pixtral:
            yield f"v.blk.0.{norm}.bias", [ROWS]
    yield from _connector(draw, kind)


def _gemma4_shapes(draw: random.Random) -> Iterator[tuple[str, list[int]]]:
    yield "v.patch_embd.weight", [PATCH, PATCH, 3, ROWS]
    yield "v.position_embd.weight", [ROWS, 280 if draw.random() < 0.9 else 8, 2]
    products = [(f"attn_{each}", ROWS, ROWS) for each in ("q", "k", "v", "out")]
    products += [("ffn_gate", ROWS, INNER), ("ffn_up", ROWS, INNER), ("ffn_down", INNER, ROWS)]
    ends = [f"{side}_{end}" for side in ("input", "output") for end in ("min", "max")]
    for part, inputs, outputs in products:
        yield f"v.blk.0.{part}.weight", [inputs, outputs]
    for part, _, _ in products if draw.random() < 0.6 else ():
        yield from ((f"v.blk.0.{part}.{end}", [1]) for end in ends[draw.random() < 0.01 :])
    for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
        yield f"v.blk.0.{norm}.weight", [ROWS]
    for norm in ("attn_q_norm", "attn_k_norm"):
        yield f"v.blk.0.{norm}.weight", [ROWS // 2]
    for vector in ("v.std_bias", "v.std_scale") if draw.random() < 0.5 else ():
        yield vector, [ROWS]
    yield "mm.input_projection.weight", [ROWS, SIZE]
    yield "a.blk.0.attn_q.weight", [ROWS, ROWS]


def _connector(draw: random.Random, kind: str) -> Iterator[tuple[str, list[int]]]:
    match kind:
        case "gemma3":
            yield "mm.soft_emb_norm.weight", [ROWS]
            yield "mm.input_projection.weight", [SIZE, ROWS]
        case "idefics3":
            yield "mm.model.fc.weight", [4 * ROWS, SIZE]
        case "internvl":
            yield "v.blk.0.ls1.weight", [ROWS if draw.random() < 0.95 else INNER]
            yield "v.blk.0.ls2.weight", [ROWS]
            yield "mm.model.mlp.0.weight", [4 * ROWS]
            yield "mm.model.mlp.0.bias", [4 * ROWS]
            yield "mm.model.mlp.1.weight", [4 * ROWS, SIZE]
            yield "mm.model.mlp.1.bias", [SIZE]
            yield "mm.model.mlp.3.weight", [SIZE, SIZE]
            yield "mm.model.mlp.3.bias", [SIZE]
        case "lfm2":
            if draw.random() < 0.7:
                yield "mm.input_norm.weight", [4 * ROWS]
                yield "mm.input_norm.bias", [4 * ROWS]
            yield "mm.1.weight", [4 * ROWS, INNER]
            yield "mm.1.bias", [INNER]
            yield "mm.2.weight", [INNER, SIZE]
            yield "mm.2.bias", [SIZE]
        case "mlp":
            yield "mm.0.weight", [ROWS, SIZE]
            yield "mm.0.bias", [SIZE]
            yield "mm.2.weight", [SIZE, SIZE]
            yield "mm.2.bias", [SIZE]
            if draw.random() < 0.5:
                yield "model.image_newline", [SIZE]
        case "qwen3vl_merger":
            yield "mm.0.weight", [4 * ROWS, 4 * ROWS]
            yield "mm.0.bias", [4 * ROWS]
            yield "mm.2.weight", [4 * ROWS, SIZE]
            yield "mm.2.bias", [SIZE]
        case _:
            yield "v.token_embd.img_break", [SIZE]
            yield "mm.input_norm.weight", [ROWS]
            yield "mm.patch_merger.weight", [4 * ROWS, ROWS]
            yield "mm.1.weight", [ROWS, SIZE]
            yield "mm.2.weight", [SIZE, SIZE]
