"""The image encoders of Idefics 3 and SmolVLM."""

from __future__ import annotations

from typing import Final

from quire.compute.gguf.vision.kind import LANCZOS, EncoderFile, Kind, Object

SIDE_OF_TILES: Final = 4
"""The tiles along the longer edge of an image, for files that do not set that edge."""


def _config(file: EncoderFile) -> Object:
    eye = file.tower("gelu_pytorch_tanh")
    return {"image_token_id": file.token_id, "scale_factor": file.merge, "vision_config": eye}


def _processor(file: EncoderFile) -> Object:
    tile = file.size("image_size")
    return file.pixels() | {
        "do_image_splitting": True,
        "image_processor_type": "Idefics3ImageProcessor",
        "image_seq_len": file.rows_per_side(file.merge) ** 2,
        "max_image_size": {"longest_edge": tile},
        "resample": LANCZOS,
        "size": {"longest_edge": file.size("preproc_image_size", SIDE_OF_TILES * tile)},
    }


IDEFICS3: Final = Kind(
    family="Idefics3ForConditionalGeneration",
    texts={"llama": "llama"},
    text_names=("model.", "model.text_model."),
    tower="model.vision_model.",
    projector="model.connector.modality_projection.",
    in_projector={"mm.model.fc": "proj"},
    output=("mm.model.fc.weight", 0),
    tokens=("<image>",),
    config=_config,
    processor=_processor,
)
