"""A model folder's JSON settings, read with a type and a range for every field.

No field is trusted: a wrong type, a value out of range or an unknown variant raises a
`CheckpointError` that names the file and the field. A setting that quire would have to ignore is
refused (`require`), because a model without one of its settings generates plausible nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.core.errors import CheckpointError
from quire.core.model_files import ModelFiles

CONFIG_FILE: Final = "config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"
MAX_SIZE: Final = (1 << 24) - 1  # of a vector, a vocabulary, a context: ten times the size in any model
MAX_LENGTH: Final = (1 << 31) - 1  # of a window, or of a context without learned positions
MAX_NUMBER: Final = 1e30


class ConfigFile:
    """A JSON object of settings; `where` names it in errors. Immutable."""

    def __init__(self, where: str, fields: dict[str, object]) -> None:
        self.where = where
        self.fields = fields

    @classmethod
    def read(cls, files: ModelFiles, file: str) -> ConfigFile:
        """Return the settings in one of a model's files."""
        return cls(files.where(file), files.json_object(file))

    def over(self, defaults: Mapping[str, object]) -> ConfigFile:
        """Return these settings with defaults for missing fields, not for null.

        >>> ConfigFile("config.json", {"window": None}).over({"window": 8, "size": 2}).fields
        {'window': None, 'size': 2}
        """
        return ConfigFile(self.where, {**defaults, **self.fields})

    def error(self, field: str, allowed: str) -> CheckpointError:
        """Return the error for a field whose value is not allowed."""
        return CheckpointError(f"{self.where}: {field}", self.fields.get(field), allowed)

    def is_set(self, field: str) -> bool:
        """Return whether the field is present and not null."""
        return self.fields.get(field) is not None

    def size(self, field: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """Return an integer from `low` to `high`; the default replaces a missing field or null."""
        value = self.fields[field] if self.is_set(field) else default
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self.fields[field] if self.is_set(field) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, "a number")
        if not 0 < value <= MAX_NUMBER:
            raise self.error(field, f"a number above 0, at most {MAX_NUMBER:g}")
        return float(value)

    def numbers(self, field: str) -> tuple[float, ...]:
        """Return a list of numbers above 0."""
        value = self.fields.get(field)
        items = value if isinstance(value, list) else []
        if not items or not all(type(item) in (int, float) and 0 < item <= MAX_NUMBER for item in items):
            raise self.error(field, f"a list of numbers above 0, at most {MAX_NUMBER:g}")
        return tuple(map(float, items))

    def optional_number(self, field: str, *, low: float, high: float = MAX_NUMBER) -> float | None:
        """Return a number from `low` to `high`; None if the field is missing or null."""
        value = self.fields.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(field, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.fields[field] if self.is_set(field) else default
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def refuse(self, *fields: str) -> None:
        """Raise if one of these fields is true: no code interprets them."""
        for field in fields:
            if self.flag(field, False):
                raise self.error(field, "false")

    def texts(self, field: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self.fields.get(field)
        if not isinstance(value, list) or not set(map(type, value)) <= {str}:
            raise self.error(field, "a list of strings")
        return tuple(value)

    def section(self, field: str) -> ConfigFile:
        """Return the settings in a nested object; empty if the field is missing or null."""
        value = self.fields[field] if self.is_set(field) else {}
        if not isinstance(value, dict):
            raise self.error(field, "an object")
        return ConfigFile(f"{self.where}: {field}", value)

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids in a field with one id or a list; empty if the field is missing or null."""
        value = self.fields.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise self.error(field, f"one token id or several, from 0 to {vocab_size - 1}")
        return tuple(ids)

    def indices(self, field: str, count: int) -> frozenset[int]:
        """Return the indices below `count` in a list; empty if the field is missing or null."""
        value = self.fields[field] if self.is_set(field) else []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < count for item in value):
            raise self.error(field, f"a list of integers from 0 to {count - 1}")
        return frozenset(value)

    def require(self, field: str, *allowed: str | None) -> None:
        """Raise unless the field is one of the texts `allowed`; None stands for missing or null."""
        if self.fields.get(field) not in allowed:
            raise self.error(field, " or ".join("null" if text is None else repr(text) for text in allowed))
