"""Declarations of request parameters: kind and range, neutral value, place (where clients can set it) and help.

A declaration is a field of a dataclass. The check of requests, the wire form, the columns of draws, flags, the fields
of HTTP bodies and the tables in the documents are all made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        """The values, in words."""
        return f"an integer from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number; `is_above` excludes `low` itself."""

    low: float
    high: float
    is_above: bool = False

    @property
    def allowed(self) -> str:
        """The values, in words."""
        if self.is_above:
            return f"a number above {self.low:g}, at most {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Switch:
    """True or False."""

    allowed: str = "True or False"


@dataclass(frozen=True, slots=True)
class Choice:
    """True, False, or one of some words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """The values, in words."""
        return f"True, False or {' or '.join(f'{chr(34)}{word}{chr(34)}' for word in self.words)}"


@dataclass(frozen=True, slots=True)
class Texts:
    """A tuple of strings."""

    most: int
    longest: int

    @property
    def allowed(self) -> str:
        """The values, in words."""
        return f"at most {self.most} strings"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A tuple of token ids. Without `most`: at least one id, and at most as many as the vocabulary has."""

    most: int | None = None

    @property
    def allowed(self) -> str:
        """The values, in words."""
        return "None, or a tuple of token ids" if self.most is None else f"a tuple of at most {self.most} token ids"


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """A tuple of tuples of token ids."""

    most: int
    longest: int

    @property
    def allowed(self) -> str:
        """The values, in words."""
        return f"at most {self.most} tuples of token ids"


@dataclass(frozen=True, slots=True)
class Biases:
    """A number for each of some token ids."""

    most: int
    number: Number

    @property
    def allowed(self) -> str:
        """The values, in words."""
        return f"a number for each of at most {self.most} token ids"


@dataclass(frozen=True, slots=True)
class HeldText:
    """A grammar that a text must follow."""

    allowed: str = "None, or a Grammar"


Kind = Integer | Number | Switch | Choice | Texts | TokenIds | TokenSequences | Biases | HeldText


class Place(Enum):
    """Where clients can set a parameter."""

    DRAW = "a column of each draw, a flag and a field of every body"
    TEXT = "a field of every body"
    CHOICES = "a field of the bodies that can request several texts"
    OWN = "in a form of its own, or only in Python"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A declared parameter."""

    name: str
    default: Any
    kind: Kind
    place: Place
    help: str
    has_flag: bool


def parameter(kind: Kind, default: Any, place: Place, text: str, *, flag: bool = False) -> Any:
    """Declare a parameter as a field of a dataclass; parameters of draws always have a flag."""
    has_flag = flag or place is Place.DRAW
    metadata = {"kind": kind, "place": place, "help": text, "has_flag": has_flag}
    return dataclasses.field(default=default, metadata=metadata)


def parameters_of(kind: type[Any]) -> Mapping[str, Parameter]:
    """Return the declared parameters of a dataclass, by name. Pure."""
    fields = dataclasses.fields(kind)
    return MappingProxyType({field.name: Parameter(field.name, field.default, **field.metadata) for field in fields})
