"""What is made from the declarations of sampling parameters: wire form, flags, fields of bodies, and the documents."""

from __future__ import annotations

import argparse
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.sampling_options import FLAGS, add_sampling_options, sampling_params
from quire.core.errors import StepLogError
from quire.core.grammar import Grammar
from quire.core.parameters import (
    Biases,
    Choice,
    Integer,
    Number,
    Parameter,
    Place,
    Switch,
    Texts,
    TokenIds,
)
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


@pytest.mark.parametrize(
    ("sampling", "has_penalties", "has_rules"),
    [
        ({}, False, False),
        ({"temperature": 0.0, "top_k": 5, "seed": 3, "stop_token_ids": (3,), "logprobs": 2}, False, False),
        ({"repetition_penalty": 0.9}, True, True),
        ({"presence_penalty": -1.0}, True, True),
        ({"frequency_penalty": 1.0}, True, True),
        ({"logit_bias": {1: 0.0}}, False, True),
        ({"bad_words_ids": ((1,),)}, False, True),
        ({"min_tokens": 1}, False, True),
        ({"allowed_token_ids": (1,)}, False, True),
    ],
)
def test_each_rule_alone_is_a_rule(sampling: dict[str, Any], has_penalties: bool, has_rules: bool) -> None:
    found = SamplingParams(**sampling)
    assert (found.has_penalties, found.has_rules) == (has_penalties, has_rules)


@pytest.mark.parametrize(
    ("sampling", "num_sequences", "num_beams"),
    [
        ({}, 1, 1),
        ({"n": 3}, 3, 1),
        ({"n": 3, "best_of": 5}, 5, 1),
        ({"n": 3, "beam_search": True}, 3, 3),
        ({"n": 3, "best_of": 5, "beam_search": True}, 5, 5),
    ],
)
def test_how_many_sequences_move_side_by_side(sampling: dict[str, Any], num_sequences: int, num_beams: int) -> None:
    found = SamplingParams(**sampling)
    assert (found.num_sequences, found.num_beams) == (num_sequences, num_beams)


def test_lists_become_tuples_and_one_string_is_one_of_them() -> None:
    made = SamplingParams(
        stop="end", bad_words="no", stop_token_ids=[1], bad_words_ids=[[1, 2], (3,)], allowed_token_ids=[4]
    )  # type: ignore[arg-type]
    assert (made.stop, made.bad_words, made.stop_token_ids) == (("end",), ("no",), (1,))
    assert (made.bad_words_ids, made.allowed_token_ids) == (((1, 2), (3,)), (4,))
    assert SamplingParams(logit_bias={5: 1.0, 2: -1.0}).biases == ((2, -1.0), (5, 1.0))
    assert SamplingParams(stop_token_ids=(5,)).ending_tokens(frozenset({9})) == {5, 9}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).ending_tokens(frozenset({9})) == {5}


# ---- the wire -------------------------------------------------------------------------------------------------------


def written(sampling: SamplingParams) -> bytes:
    writer = WireWriter()
    write_sampling(writer, sampling)
    return writer.to_bytes()


def test_neutral_values_take_no_bytes() -> None:
    assert len(written(SamplingParams())) == 8
    assert len(written(SamplingParams(min_p=0.5))) == 8 + 8 + len("min_p") + 8


@pytest.mark.parametrize(
    ("sampling", "name", "form"),
    [
        (SamplingParams(early_stopping=True), "early_stopping", struct.pack("<q", 1)),
        (SamplingParams(early_stopping="never"), "early_stopping", struct.pack("<q", 2)),
        (SamplingParams(ignore_eos=True), "ignore_eos", struct.pack("<q", 1)),
        (SamplingParams(skip_special_tokens=False), "skip_special_tokens", struct.pack("<q", 0)),
        (SamplingParams(logit_bias={7: 0.5, 3: -1}), "logit_bias", struct.pack("<qiiqdd", 8, 3, 7, 16, -1, 0.5)),
        (SamplingParams(bad_words_ids=((5,), (6, 7))), "bad_words_ids", struct.pack("<qqiqii", 2, 4, 5, 8, 6, 7)),
        (SamplingParams(grammar=Grammar("lark", "a", "me")), "grammar", struct.pack("<qq1sq2s", 2, 1, b"a", 2, b"me")),
    ],
)
def test_the_form_is_that_of_the_logs_that_are_kept(sampling: SamplingParams, name: str, form: bytes) -> None:
    """Logs of old must be read: a form that changes needs a new name."""
    expected = struct.pack(f"<qq{len(name)}s", 1, len(name), name.encode()) + form
    assert written(sampling) == expected
    assert read_sampling(WireReader(expected)) == sampling


def test_biases_are_refused_where_their_columns_differ_in_length() -> None:
    writer = WireWriter()
    writer.integer(1)
    writer.text("logit_bias")
    writer.column(array("i", [1, 2]))
    writer.numbers(array("d", [0.5]))
    with pytest.raises(StepLogError, match=r"^the columns of a logit_bias differ in length$"):
        read_sampling(WireReader(writer.to_bytes()))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("min_q", 0.5)], "does not know"),
        ([("min_p", 0.5), ("min_p", 0.5)], "duplicate"),
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
    assert set(DRAW_PARAMETERS) | {"seed", "max_tokens", "penalty_window"} == {declared.name for declared in FLAGS}


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
