"""What is made from the declarations of sampling parameters: wire form, flags, fields of bodies, and the documents."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.sampling_options import FLAGS, add_sampling_options, sampling_params
from quire.core.errors import StepLogError
from quire.core.parameters import Biases, Choice, Integer, Number, Parameter, Place, Switch, Texts, TokenIds
from quire.core.sampling_params import DRAW_PARAMETERS, PARAMETERS, SamplingParams
from quire.core.sampling_wire import read_sampling, write_sampling
from quire.core.validate import RequestLimits, validate_sampling
from quire.core.wire import WireReader, WireWriter
from quire.serve.openapi import openapi_document
from quire.serve.schemas.sampling import ChoiceFields, SamplingFields
from quire.serve.translate.sampling import PASSED, sampling_of

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "sampling-parameters.md"
IN_BODIES = [declared for declared in PARAMETERS.values() if declared.place is not Place.OWN]


def other_value(declared: Parameter) -> Any:
    """Return an allowed value that is not the neutral one."""
    match declared.kind:
        case Integer() | Number():
            return next(value for value in (declared.kind.high, declared.kind.low) if value != declared.default)
        case Switch():
            return not declared.default
        case Choice():
            return declared.kind.words[0]
        case Texts():
            return ("a",)
        case TokenIds():
            return (1, 2)
        case Biases():
            return ((1, 0.5),)
    raise TypeError(declared.name)


def test_neutral_values_are_allowed() -> None:
    validate_sampling(SamplingParams(), RequestLimits(1, 1, 1, 1))
    assert all(getattr(SamplingParams(), name) == declared.default for name, declared in PARAMETERS.items())


# ---- the wire -------------------------------------------------------------------------------------------------------


def written(sampling: SamplingParams) -> bytes:
    writer = WireWriter()
    write_sampling(writer, sampling)
    return writer.to_bytes()


def test_neutral_values_take_no_bytes() -> None:
    assert len(written(SamplingParams())) == 8
    assert len(written(SamplingParams(min_p=0.5))) == 8 + 8 + len("min_p") + 8


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("min_q", 0.5)], "does not know"),
        ([("min_p", 0.5), ("min_p", 0.5)], "stands twice"),
        ([("early_stopping", 3)], "a value that this version does not know"),
        ([("early_stopping", -1)], "a value that this version does not know"),
        ([("grammar", 3)], "a value that this version does not know"),
    ],
)
def test_what_no_version_writes_is_refused(entries: list[tuple[str, float]], message: str) -> None:
    writer = WireWriter()
    writer.integer(len(entries))
    for name, value in entries:
        writer.text(name)
        (writer.number if isinstance(value, float) else writer.integer)(value)  # type: ignore[arg-type]
    with pytest.raises(StepLogError, match=message):
        read_sampling(WireReader(writer.to_bytes()))


# ---- flags ----------------------------------------------------------------------------------------------------------


def test_every_parameter_of_draws_has_a_flag() -> None:
    assert set(DRAW_PARAMETERS) | {"seed", "max_tokens"} == {declared.name for declared in FLAGS}


@pytest.mark.parametrize("declared", FLAGS, ids=lambda declared: declared.name)
def test_a_flag_sets_its_parameter_and_shows_its_help(declared: Parameter) -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    assert " ".join(declared.help.split()) in " ".join(parser.format_help().split())
    value = other_value(declared)
    given = parser.parse_args([f"--{declared.name.replace('_', '-')}={value}"])
    assert sampling_params(given, SamplingParams()) == SamplingParams(**{declared.name: value})
    assert sampling_params(parser.parse_args([]), SamplingParams(top_k=3)) == SamplingParams(top_k=3)


# ---- bodies ---------------------------------------------------------------------------------------------------------


def test_every_offered_parameter_is_passed_on() -> None:
    assert set(PASSED) == {declared.name for declared in IN_BODIES} - {"logit_bias"} | {"stop"}
    assert set(ChoiceFields.__struct_fields__) - set(SamplingFields.__struct_fields__) >= {"n", "best_of"}


@pytest.mark.parametrize("declared", IN_BODIES, ids=lambda declared: declared.name)
def test_a_field_of_a_body_is_its_parameter(declared: Parameter) -> None:
    value = other_value(declared)
    sent = {str(token): bias for token, bias in value} if isinstance(declared.kind, Biases) else value
    fields = msgspec.convert(json.loads(json.dumps({declared.name: sent})), ChoiceFields, strict=True)
    assert sampling_of(fields, SamplingParams()) == SamplingParams(**{declared.name: value})
    for wrong in ("1", 1.5, {"a": "b"}, 7, True):
        if isinstance(declared.kind, Choice | Switch) and wrong is True:
            continue
        if isinstance(declared.kind, Integer | Number) and type(wrong) in (int, float):
            continue
        with pytest.raises(msgspec.ValidationError, match=declared.name):
            msgspec.convert({declared.name: wrong}, ChoiceFields, strict=True)


@pytest.mark.parametrize("declared", IN_BODIES, ids=lambda declared: declared.name)
def test_the_openapi_document_says_what_a_field_takes(declared: Parameter) -> None:
    schemas = json.loads(openapi_document())["components"]["schemas"]
    bodies = ["CompletionRequest", "ChatRequest"] + ["ResponseRequest"] * (declared.place is not Place.CHOICES)
    for body in bodies:
        field = schemas[body]["properties"][declared.name]
        assert field["description"] == declared.help
        if isinstance(declared.kind, Integer | Number):
            low = "exclusiveMinimum" if getattr(declared.kind, "is_above", False) else "minimum"
            (number,) = [each for each in field["anyOf"] if each["type"] != "null"]
            assert (number[low], number["maximum"]) == (declared.kind.low, declared.kind.high)


# ---- documents ------------------------------------------------------------------------------------------------------


def test_the_table_of_parameters_is_the_declared_one() -> None:
    def line(declared: Parameter) -> str:
        return f"| `{declared.name}` | {declared.kind.allowed} | `{declared.default!r}` | {declared.help} |"

    table = ["| parameter | values | neutral | what it does |", "|---|---|---|---|", *map(line, PARAMETERS.values())]
    assert "\n".join(table) + "\n" in DOCUMENT.read_text(encoding="utf-8"), "\n".join(table)
