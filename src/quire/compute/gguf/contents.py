"""GgufContents: what is in a model's GGUF file, as the files and tensors of a Hugging Face folder.

`GgufFile` (source.py) says where a file is, and imports this only to read one: most models are folders.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Final

from quire.compute.gguf.generation import generation_config_of
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.projector import PairTensors, Projector
from quire.compute.gguf.settings import config_of, dense_config_of, file_type_of, pooling_config_of
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.gguf.tokenizer import tokenizer_config_of, tokenizer_json_of
from quire.compute.gguf.vision.kinds import own_encoder_of

POOLING: Final = "1_Pooling/config.json"


class GgufContents:
    """The contents of a file, and of the one with its image encoder. Each header is read once, at first use."""

    def __init__(self, path: Path, image_encoder: Path | None) -> None:
        self._path = path
        self._image_encoder = image_encoder

    @property
    def has_own_encoder(self) -> bool:
        """Whether the file has an image encoder next to the text model."""
        return own_encoder_of(self._header) is not None

    @property
    def type(self) -> str:
        """The format of its numbers, such as Q4_K_M."""
        return file_type_of(self._header)

    @cached_property
    def tokenizer_json(self) -> str:
        """The text of tokenizer.json."""
        return tokenizer_json_of(self._header)

    @cached_property
    def tensors(self) -> GgufTensors:
        """The tensors, already checked with the header; maps nothing yet."""
        return GgufTensors(self._header) if self._projector is None else PairTensors(self._projector)

    def json_object(self, file: str) -> dict[str, object] | None:
        """Return the settings in a file of this name; None if the model has no such file."""
        match file:
            case "config.json":
                config = config_of(self._header, self.tensors.setting)
                return config if self._projector is None else self._projector.config(config)
            case "generation_config.json":
                return generation_config_of(self._header)
            case "tokenizer_config.json":
                return tokenizer_config_of(self._header)
        return self.step(file)

    def step(self, file: str) -> dict[str, object] | None:
        """Return the settings of a step after the model, None if the file has none."""
        return pooling_config_of(self._header) if file == POOLING else dense_config_of(self._header, file)

    def processor(self) -> dict[str, object] | None:
        """Return how images are cut and scaled; None if the model reads text only."""
        return None if self._projector is None else self._projector.processor()

    @cached_property
    def _header(self) -> GgufHeader:
        return GgufHeader.read(self._path)

    @cached_property
    def _projector(self) -> Projector | None:
        return None if self._image_encoder is None else Projector.read(self._image_encoder, self._header)
