"""The image encoders that Ollama has in the file of the text model, with other names than llama.cpp's.

Settings are `ARCHITECTURE.vision.*`, and tensors `v.*` and `mm.*`. What a file of llama.cpp says, and Ollama has
elsewhere or in its code, is added to the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.projector_families import KINDS, LLAVA, PROJECTOR
from quire.compute.gguf.projector_kinds import Kind, Object, in_module
from quire.compute.gguf.tensors import IMAGES
from quire.compute.models.config_file import ConfigFile

LAYERS: Final = "vision.block_count"


@dataclass(frozen=True, slots=True)
class OwnEncoder:
    """How the file of a text model has an image encoder: its tensors, and settings by the names that `kind` knows."""

    kind: Kind
    added: Callable[[Settings], Object]


def own_encoder_of(header: GgufHeader) -> OwnEncoder | None:
    """Return how a file has an image encoder next to its text model; None if it has none that quire runs."""
    architecture = header.settings.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in OWN_ENCODERS:
        return None
    has_tensors = any(name.startswith(IMAGES[architecture]) for name in header.tensors)
    return OWN_ENCODERS[architecture] if has_tensors and f"{architecture}.{LAYERS}" in header.settings else None


def own_settings(header: GgufHeader, own: OwnEncoder) -> Settings:
    """Return the settings of the image encoder in the file of a text model. Does not mutate."""
    architecture = str(header.settings["general.architecture"])
    file = ConfigFile(str(header.path), dict(header.settings))
    text = Settings(file, architecture, header.tensors.keys())
    added = ConfigFile(file.where, {**file.fields, **own.added(text)})
    return Settings(added, f"{architecture}.vision", header.tensors.keys())


def _gemma3(text: Settings) -> Object:
    """Return how many patches per side become one row, which follows from the rows of an image."""
    key = text.key("mm.tokens_per_image")
    patches = text.size("vision.image_size") // text.size("vision.patch_size")
    side = isqrt(text.size("mm.tokens_per_image", 256))
    if side**2 != text.size("mm.tokens_per_image", 256) or patches < side or patches % side:
        raise text.file.error(key, f"a square, with a root that divides {patches}")
    return {text.key("vision.projector.scale_factor"): patches // side}


OWN_ENCODERS: Final[Mapping[str, OwnEncoder]] = MappingProxyType(
    {
        "gemma3": OwnEncoder(
            replace(
                KINDS["gemma3"],
                once={
                    **in_module(
                        LLAVA,
                        {
                            "v.patch_embedding": "embeddings.patch_embedding",
                            "v.position_embedding": "embeddings.position_embedding",
                            "v.post_layernorm": "post_layernorm",
                        },
                    ),
                    "mm.mm_input_projection.weight": PROJECTOR + "mm_input_projection_weight",
                    "mm.mm_soft_emb_norm": PROJECTOR + "mm_soft_emb_norm",
                },
                layer={
                    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "kqv"},
                    **{"attn_output": "self_attn.out_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
                    **{"layer_norm1": "layer_norm1", "layer_norm2": "layer_norm2"},
                },
                output=("mm.mm_input_projection.weight", 1),
            ),
            _gemma3,
        ),
    }
)
"""`general.architecture` → its image encoder in the same file."""
