"""ProcessorSettings: how a model's makers prepare images, from preprocessor_config.json or processor_config.json.

A newer folder has one file, in which the settings of images are a section. Every number is bounded: the files come from
a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from quire.core.errors import CheckpointError
from quire.core.model_files import ModelFiles

IMAGES_FILE: Final = "preprocessor_config.json"
MODEL_FILE: Final = "config.json"
PROCESSOR_FILE: Final = "processor_config.json"
MAX_EDGE: Final = 4096
"""The most pixels of an edge after resizing, as in `transformers`."""

MOST_PATCHES: Final = 1 << 16
NUM_FILTERS: Final = 6
MOST_TIMES: Final = 100


class ProcessorSettings:
    """Settings with defaults; errors name the file. Immutable."""

    def __init__(
        self,
        where: str,
        fields: Mapping[str, object],
        model: Mapping[str, object] | None = None,
        max_patches: int = MOST_PATCHES,
    ) -> None:
        """Make settings; `model` has those of the model itself, from config.json.

        `max_patches`: the most patches of an image that its encoder takes.
        """
        self.where = where
        self.fields = fields
        self.max_patches = max_patches
        self._model = model or {}

    @classmethod
    def read(cls, files: ModelFiles, max_patches: int = MOST_PATCHES) -> ProcessorSettings:
        """Return the settings of a model folder; raises `CheckpointError` if it has none for images."""
        whole = files.json_object(PROCESSOR_FILE) if files.has(PROCESSOR_FILE) else {}
        model = files.json_object(MODEL_FILE) if files.has(MODEL_FILE) else {}
        section = whole.pop("image_processor", None)
        if isinstance(section, dict):
            return cls(files.where(PROCESSOR_FILE), {**section, **whole}, model, max_patches)
        return cls(files.where(IMAGES_FILE), {**files.json_object(IMAGES_FILE), **whole}, model, max_patches)

    def kind(self) -> str:
        """Return the name of the class that prepares images, without the ending of its variant; empty if none is named.

        >>> ProcessorSettings("", {"image_processor_type": "CLIPImageProcessorFast"}).kind()
        'CLIPImageProcessor'
        """
        names = (self.fields.get(key) for key in ("image_processor_type", "feature_extractor_type"))
        name = next((name for name in names if isinstance(name, str)), "")
        return name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")

    def integer(self, name: str, default: int | None = None, *, most: int = MAX_EDGE) -> int:
        """Return an integer from 1 to `most`; the default replaces a missing field or null."""
        return self._integer(name, self._field(name, default), most)

    def text(self, name: str, default: str) -> str:
        """Return a text that is not empty."""
        value = self._field(name, default)
        if not isinstance(value, str) or not value:
            raise self.error(name, value, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is on or off."""
        value = self._field(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number from 1 to `MOST_TIMES`."""
        value = self._field(name, default)
        if type(value) not in (int, float) or not 1 <= cast(float, value) <= MOST_TIMES:
            raise self.error(name, value, f"a number from 1 to {MOST_TIMES}")
        return cast(float, value)

    def filter(self, default: int) -> int:
        """Return the number of Pillow's filter for resizing."""
        value = self._field("resample", default)
        if type(value) is not int or not 0 <= value < NUM_FILTERS:
            raise self.error("resample", value, f"an integer from 0 to {NUM_FILTERS - 1}")
        return value

    def edge(self, name: str, key: str, default: int | None = None, *, most: int = MAX_EDGE) -> int:
        """Return a number of pixels in an object such as {"longest_edge": 364}; a plain number is also taken."""
        value = self._field(name, default)
        if isinstance(value, Mapping):
            found = value.get(key)
            return self._integer(f"{name}.{key}", default if found is None else found, most)
        return self._integer(name, value, most)

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """Return the height and width in an object with both; a plain number is both."""
        return self.edge(name, "height", default), self.edge(name, "width", default)

    def of_model(self, name: str) -> int | None:
        """Return a number from 1 on in the model's own settings, or in those of its image encoder; None without it."""
        vision = self._model.get("vision_config")
        for fields in (self._model, vision if isinstance(vision, dict) else {}):
            if type(value := fields.get(name)) is int and value > 0:
                return value
        return None

    def of_text_model(self, name: str) -> object:
        """Return a setting of the model's text model; None without it."""
        text = self._model.get("text_config")
        return text.get(name) if isinstance(text, dict) else None

    def has_key(self, name: str, key: str) -> bool:
        """Return whether a setting is an object with this key."""
        value = self.fields.get(name)
        return isinstance(value, Mapping) and value.get(key) is not None

    def colours(self, name: str, default: tuple[float, float, float]) -> tuple[float, ...]:
        """Return a number from 0 to 1 for each of red, green and blue."""
        value = self._field(name, default)
        items = tuple(value) if isinstance(value, list | tuple) else ()
        if len(items) != len(default) or not all(type(item) in (int, float) and 0 <= item <= 1 for item in items):
            raise self.error(name, value, "three numbers from 0 to 1")
        return items

    def error(self, name: str, value: object, allowed: str) -> CheckpointError:
        """Return the error for a setting whose value is not allowed."""
        return CheckpointError(f"{self.where}: {name}", value, allowed)

    def _field(self, name: str, default: object) -> object:
        value = self.fields.get(name)
        return default if value is None else value

    def _integer(self, name: str, value: object, most: int) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(name, value, f"an integer from 1 to {most}")
        return value
