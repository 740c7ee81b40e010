"""The wire form of sampling parameters: a part of every plan in which a request takes a row.

A parameter is written by name, and only if it differs from its neutral value. So an unused parameter takes no bytes,
and a new parameter changes no existing plan.
"""

from __future__ import annotations

from array import array
from typing import Any

from quire.core.errors import StepLogError
from quire.core.grammar import GRAMMAR_KINDS, Grammar
from quire.core.parameters import (
    Biases,
    Choice,
    HeldText,
    Integer,
    Kind,
    Number,
    Switch,
    Texts,
    TokenIds,
    TokenSequences,
)
from quire.core.sampling_params import PARAMETERS, SamplingParams
from quire.core.wire import WireReader, WireWriter


def write_sampling(writer: WireWriter, sampling: SamplingParams) -> None:
    """Write sampling parameters."""
    values = {name: getattr(sampling, name) for name in PARAMETERS}
    given = [(declared, values[name]) for name, declared in PARAMETERS.items() if values[name] != declared.default]
    writer.integer(len(given))
    for declared, value in given:
        writer.text(declared.name)
        _write(writer, declared.kind, value)


def read_sampling(reader: WireReader) -> SamplingParams:
    """Read sampling parameters."""
    given: dict[str, Any] = {}
    for _ in range(reader.integer()):
        name = reader.text()
        if name not in PARAMETERS or name in given:
            raise StepLogError("a plan contains a duplicate sampling parameter, or one that this version does not know")
        given[name] = _read(reader, PARAMETERS[name].kind)
    return SamplingParams(**given)


def _write(writer: WireWriter, kind: Kind, value: Any) -> None:
    match kind:
        case Integer() | Switch():
            writer.integer(value)
        case Number():
            writer.number(value)
        case Choice():
            writer.integer(_choices(kind).index(value))
        case Texts():
            writer.integer(len(value))
            for text in value:
                writer.text(text)
        case TokenIds():
            writer.column(array("i", value))
        case TokenSequences():
            writer.integer(len(value))
            for sequence in value:
                writer.column(array("i", sequence))
        case Biases():
            writer.column(array("i", [token for token, _ in value]))
            writer.numbers(array("d", [bias for _, bias in value]))
        case HeldText():
            writer.integer(GRAMMAR_KINDS.index(value.kind))
            writer.text(value.text)
            writer.text(value.owner)


def _read(reader: WireReader, kind: Kind) -> Any:
    match kind:
        case Integer() | Switch():
            value = reader.integer()
            return bool(value) if isinstance(kind, Switch) else value
        case Number():
            return reader.number()
        case Choice():
            return _one_of(_choices(kind), reader.integer())
        case Texts():
            return tuple(reader.text() for _ in range(reader.integer()))
        case TokenIds():
            return tuple(reader.column())
        case TokenSequences():
            return tuple(tuple(reader.column()) for _ in range(reader.integer()))
        case Biases():
            tokens, biases = reader.column(), reader.numbers()
            if len(tokens) != len(biases):
                raise StepLogError("the columns of a logit_bias differ in length")
            return tuple(zip(tokens, biases, strict=True))
        case HeldText():
            return Grammar(_one_of(GRAMMAR_KINDS, reader.integer()), reader.text(), reader.text())


def _choices(kind: Choice) -> tuple[bool | str, ...]:
    return (False, True, *kind.words)


def _one_of(values: tuple[Any, ...], index: int) -> Any:
    if index not in range(len(values)):
        raise StepLogError("a sampling parameter has a value that this version does not know")
    return values[index]
