"""ModelSource: the origin of a model; it hides the storage format from the code that reads a model.

    "guide", a path, a hub id ──► ModelSource ─┬─► settings ──► read_model ──► ModelDescription
                                               ├─► tokenizer, chat templates ──► Tokenizer
                                               └─► tensors ──► WeightFile ──► WeightReader

A source has named files, like a model folder, and tensors. Each storage format is a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from quire.compute.models.config_file import CONFIG_FILE, ConfigFile
from quire.compute.models.refusals import folder_refusal
from quire.compute.quantized.methods import quantization_of
from quire.compute.quantized.tensors import QuantizedTensors
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.stacked import unstacked
from quire.compute.weights.weight_file import WeightFile
from quire.core.errors import CheckpointError
from quire.core.model_files import MAX_SETTINGS_BYTES, ModelFiles, is_there, read_json_object, read_text


class ModelSource(ModelFiles, Protocol):
    """The files of a model, and its tensors."""

    @property
    def type(self) -> str:
        """The format of a file's numbers, such as Q4_K_M; empty: the settings specify it."""
        ...

    def tensors(self) -> WeightFile:
        """Check all headers and return the tensors, unread. Does not mutate."""
        ...

    def tensors_of(self, folder: str) -> WeightFile:
        """Return the tensors of a step after the model, whose names may begin with its folder. Does not mutate."""
        ...

    def block_types(self) -> Mapping[str, str]:
        """Return the types of the matrices that are stored as blocks, by name; empty if the tensors are not here."""
        ...

    def weight_paths(self) -> list[Path]:
        """Return the files that contain the tensors, in a fixed order. Does not mutate."""
        ...


@dataclass(frozen=True)
class ModelFolder:
    """Implements `ModelSource` with a folder of safetensors, as `save_pretrained` writes it.

    `config_file`: for settings that are stored alone, under another name than config.json. The headers of the tensors
    are read once, at first use.
    """

    folder: Path
    config_file: str = CONFIG_FILE

    @property
    def name(self) -> str:
        """The path of the folder."""
        return str(self.folder)

    @property
    def type(self) -> str:
        """Empty: the settings specify the format."""
        return ""

    def where(self, file: str) -> str:
        """Return the path of a file."""
        return str(self._path(file))

    def has(self, file: str) -> bool:
        """Return whether a file exists, even as a broken link."""
        return is_there(self._path(file))

    def text(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
        """Return the text of a file."""
        return read_text(self._found(file), max_bytes)

    def json_object(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
        """Return the JSON object in a file."""
        return read_json_object(self._found(file), max_bytes)

    def tensors(self) -> WeightFile:
        """Check the headers of the safetensors files and return their tensors, quantised ones as blocks and floats."""
        return self._tensors

    def tensors_of(self, folder: str) -> WeightFile:
        """Return the tensors in a folder of the folder."""
        return Checkpoint.open(self.folder / folder)

    def block_types(self) -> Mapping[str, str]:
        """Return the types of the matrices stored as blocks, by name; empty if the tensors are missing or broken."""
        if self.config_file != CONFIG_FILE or quantization_of(ConfigFile.read(self, CONFIG_FILE), self) is None:
            return {}
        with suppress(CheckpointError):  # loading reports the error
            return self._tensors.block_types
        return {}

    def weight_paths(self) -> list[Path]:
        """Return the safetensors files, by name."""
        return sorted(self.folder.glob("*.safetensors"))

    @cached_property
    def _tensors(self) -> WeightFile:
        checkpoint = unstacked(Checkpoint.open(self.folder))
        method = quantization_of(ConfigFile.read(self, CONFIG_FILE), self)
        return checkpoint if method is None else QuantizedTensors(checkpoint, method)

    def _path(self, file: str) -> Path:
        return self.folder / (self.config_file if file == CONFIG_FILE else file)

    def _found(self, file: str) -> Path:
        """Return the path of a file; if it is missing, the error names relevant files that the folder has."""
        if not self.has(file):
            raise folder_refusal(self.folder, file)
        return self._path(file)
