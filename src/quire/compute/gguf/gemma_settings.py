"""The settings of Gemma 1 to 4 and 3n in addition to Llama's, in the form of config.json."""

from __future__ import annotations

from statistics import NormalDist
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.named_settings import KV_HEADS, NEAR_BASE, PATTERN, WIDTH, Settings, near_layers
from quire.compute.models.common import MAX_LAYERS
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import FULL, FULL_BASE, LOCAL_BASE, SLIDING

WIDE_HEADS: Final = MappingProxyType({"gemma2": 46, "gemma3": 62})
"""The number of layers of the Gemmas (27B) that scale scores by hidden size / heads, not by the size of a head."""

CAP: Final = "final_logit_softcapping"
CAPS: Final = MappingProxyType({"attn_logit_softcapping": 50.0, CAP: 30.0})
WINDOW: Final = 4096
"""The soft caps and the window of Gemma 2 in its first files, which do not have them."""

SIZE: Final = "attention.key_length"
LONG: Final = 131_072


def gemma(settings: Settings) -> dict[str, object]:
    """Return the settings of the first Gemma. The file's norms already include the 1 of 1 + weight."""
    return {"head_dim": settings.size(SIZE, 256), "rms_norm_unit_offset": False}


def gemma2(settings: Settings) -> dict[str, object]:
    """Return the settings of Gemma 2: soft caps, and those of Gemma 3 too."""
    caps = {cap: settings.number(cap, usual) for cap, usual in CAPS.items()}
    return {**_with_windows(settings, WINDOW), **caps}


def gemma3(settings: Settings) -> dict[str, object]:
    """Return the settings of Gemma 3. Files of Ollama leave out what its code has, or name it in another way.

    The sizes that read images have positions divided by 8, which files with 128k of context and images may not say.
    """
    base = settings.number("rope.global.freq_base", FULL_BASE)
    local = settings.number("rope.local.freq_base", LOCAL_BASE)
    config: dict[str, object] = {
        **_with_windows(settings),
        "rope_theta": settings.number("rope.freq_base", base),
        "rope_local_base_freq": settings.number(NEAR_BASE, local),
    }
    reads_images = settings.has("vision.block_count") and settings.size("context_length") >= LONG
    if reads_images and not (settings.has("rope.scaling.type") or settings.has("rope.scaling.factor")):
        config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    return config


def _with_windows(settings: Settings, window: int | None = None) -> dict[str, object]:
    """Return the settings of Gemma 2 and 3. The file's norms already include the 1 of 1 + weight."""
    heads, size = settings.size("attention.head_count"), settings.size(SIZE, 256)
    is_wide = settings.size("block_count") == WIDE_HEADS[settings.architecture]
    return {
        "head_dim": size,
        "query_pre_attn_scalar": settings.size("embedding_length") // heads if is_wide else size,
        "sliding_window": settings.size("attention.sliding_window", window),
        "rms_norm_unit_offset": False,
        **near_layers(settings),
    }


def gemma4(settings: Settings) -> dict[str, object]:
    """Return the settings of Gemma 4, with the heads of each layer that has not the usual ones.

    Layers with keys that are the values too have no tensor of values. Files may have tensors of keys and values for
    layers that attend to those of others.
    """
    count = settings.size("block_count", high=MAX_LAYERS)
    is_near = _windows(settings, count)
    if is_near[-1]:
        key = settings.key(PATTERN)
        raise settings.file.error(key, f"booleans for the {count} layers, the last one false")
    num_shared = settings.size("attention.shared_kv_layers", 0, low=0, high=count - 1)
    kv_heads = settings.sizes(KV_HEADS, count, settings.size("attention.head_count"))
    size, near_size = _head_size(settings, ""), _head_size(settings, "_swa")
    usual = {"head_dim": near_size, "num_key_value_heads": kv_heads[is_near.index(True) if any(is_near) else 0]}
    heads = [
        {"head_dim": near_size if near else size, "num_key_value_heads": number}
        for near, number in zip(is_near, kv_heads, strict=True)
    ]
    values = [f"blk.{layer}.attn_v.weight" for layer in range(count - num_shared) if not is_near[layer]]
    width, is_doubled = _width(settings, count, num_shared)
    return {
        **usual,
        "global_head_dim": size,
        "per_layer_config": {str(layer): each for layer, each in enumerate(heads) if each != usual},
        "attention_k_eq_v": settings.tensors.isdisjoint(values),
        "layer_types": [SLIDING if near else FULL for near in is_near],
        "sliding_window": settings.size("attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": width,
        "use_double_wide_mlp": is_doubled,
        "hidden_size_per_layer_input": settings.size("embedding_length_per_layer_input", 0, low=0),
        CAP: settings.number(CAP) if settings.has(CAP) else None,
        **_experts(settings),
    }


def _experts(settings: Settings) -> dict[str, object]:
    if not settings.size("expert_count", 0, low=0):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": settings.size("expert_count"),
        "top_k_experts": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
    }


def _windows(settings: Settings, count: int) -> list[bool]:
    """Return whether each layer has a window."""
    found = settings.file.fields.get(key := settings.key(PATTERN))
    if not isinstance(found, list) or len(found) != count or set(map(type, found)) != {bool}:
        raise settings.file.error(key, f"a list of booleans, one for each of the {count} layers")
    return found


def _head_size(settings: Settings, kind: str) -> int:
    """Return the size of the heads of a kind of layers, which rotate as a whole: unused frequencies are divisors."""
    size = settings.size(f"{SIZE}{kind}")
    for name in (f"attention.value_length{kind}", f"rope.dimension_count{kind}"):
        if settings.size(name, size) != size:
            raise settings.file.error(settings.key(name), f"{size}, as attention.key_length{kind}")
    return size


def _width(settings: Settings, count: int, num_shared: int) -> tuple[int, bool]:
    """Return the size of MLPs, and whether it is twice as much in layers with the keys and values of others."""
    widths = settings.sizes(WIDTH, count)
    width = widths[0]
    if widths == [width] * count:
        return width, False
    if widths == [width] * (count - num_shared) + [2 * width] * num_shared:
        return width, True
    raise settings.file.error(settings.key(WIDTH), "one size, or twice as much for the layers without keys and values")


def gemma3n(settings: Settings) -> dict[str, object]:
    """Return the settings of Gemma 3n. Files of Ollama have other names for the sizes of heads and the local base.

    They leave out the cap of logits, which all published models have. Converters write the number of shared layers as
    an integer or a float, and -inf for layers without a threshold of gates.
    """
    count = settings.size("block_count", high=MAX_LAYERS)
    local = settings.number("rope.freq_base_local", LOCAL_BASE)
    return {
        "head_dim": settings.size(SIZE, settings.size("head_dim", 256)),
        "intermediate_size": settings.sizes(WIDTH, count),
        "sliding_window": settings.size("attention.sliding_window"),
        "layer_types": [SLIDING if near else FULL for near in _windows(settings, count)],
        "num_kv_shared_layers": _num_shared(settings, count),
        "rope_theta": settings.number("rope.freq_base", FULL_BASE),
        "rope_local_base_freq": settings.number("rope.freq_base_swa", local),
        "hidden_size_per_layer_input": settings.size("embedding_length_per_layer_input"),
        "altup_num_inputs": settings.size("altup.num_inputs"),
        "altup_active_idx": settings.size("altup.active_idx", 0, low=0),
        "altup_correct_scale": settings.file.flag(settings.key("altup.correct_scale"), True),
        **({CAP: settings.number(CAP)} if settings.has(CAP) else {}),
        **_shares(settings, count),
    }


def _num_shared(settings: Settings, count: int) -> int:
    key = settings.key("attention.shared_kv_layers")
    found = settings.file.fields.get(key)
    whole = int(found) if isinstance(found, float) and found.is_integer() else found
    return ConfigFile(settings.file.where, {key: whole}).size(key, low=0, high=count - 1)


def _shares(settings: Settings, count: int) -> dict[str, object]:
    """Return the share of gates below the threshold of each layer, if the file has thresholds."""
    found = settings.file.fields.get(key := settings.key("activation_sparsity_scale"))
    if found is None:
        return {}
    if not isinstance(found, list) or len(found) != count or not set(map(type, found)) <= {float}:
        raise settings.file.error(key, f"a number for each of the {count} layers")
    return {"activation_sparsity_pattern": [NormalDist().cdf(deviations) for deviations in found]}
