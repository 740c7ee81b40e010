"""The kinds of image encoders, by the names that files of llama.cpp and of Ollama have for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufHeader, GgufTensor
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.tensors import IMAGES
from quire.compute.gguf.vision.gemma3 import GEMMA3, GEMMA3_OF_OLLAMA
from quire.compute.gguf.vision.gemma4 import GEMMA4, GEMMA4_OF_OLLAMA
from quire.compute.gguf.vision.idefics3 import IDEFICS3
from quire.compute.gguf.vision.internvl import INTERNVL
from quire.compute.gguf.vision.kind import Kind, OwnEncoder
from quire.compute.gguf.vision.lfm2_vl import LFM2_VL
from quire.compute.gguf.vision.llava import LLAVA, LLAVA_NEXT, NEWLINES
from quire.compute.gguf.vision.pixtral import MERGER, PIXTRAL, PIXTRAL_12B, PIXTRAL_OF_OLLAMA
from quire.compute.gguf.vision.qwen_vl import QWEN2_5_VL, QWEN2_5_VL_OF_OLLAMA, QWEN2_VL, QWEN3_VL, QWEN3_VL_OF_OLLAMA
from quire.compute.models.config_file import ConfigFile

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "gemma3": GEMMA3,
        "gemma4v": GEMMA4,
        "idefics3": IDEFICS3,
        "internvl": INTERNVL,
        "lfm2": LFM2_VL,
        "mlp": LLAVA,
        "pixtral": PIXTRAL,
        "qwen2.5vl_merger": QWEN2_5_VL,
        "qwen2vl_merger": QWEN2_VL,
        "qwen3vl_merger": QWEN3_VL,
    }
)
"""`clip.projector_type` → the kind."""

OWN_ENCODERS: Final[Mapping[str, OwnEncoder]] = MappingProxyType(
    {
        "gemma3": GEMMA3_OF_OLLAMA,
        "gemma4": GEMMA4_OF_OLLAMA,
        "mistral3": PIXTRAL_OF_OLLAMA,
        "qwen25vl": QWEN2_5_VL_OF_OLLAMA,
        "qwen3vl": QWEN3_VL_OF_OLLAMA,
    }
)
"""`general.architecture` → the image encoder that Ollama has in the same file."""

LAYERS: Final = "vision.block_count"


def kind_of(name: str, tensors: Mapping[str, GgufTensor]) -> Kind:
    """Return the kind of a file with these tensors."""
    if name == "mlp" and not tensors.keys().isdisjoint(NEWLINES):
        return LLAVA_NEXT
    return PIXTRAL_12B if name == "pixtral" and MERGER not in tensors else KINDS[name]


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
    added = ConfigFile(file.where, {**file.fields, **own.added(text, header.tensors)})
    return Settings(added, f"{architecture}.vision", header.tensors.keys())
