"""StepPlan and StepResult: to bytes and back, torn, and checked."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError, StepLogError
from quire.core.sampling_params import SamplingParams
from quire.core.step import BlockCopy, BlockMove, RowStart, StepPlan, StepResult, TableChanges, column
from quire.core.wire import WireReader, WireWriter

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
COLUMNS = st.lists(INT32, max_size=5).map(lambda values: array("i", values))
NUMBERS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(), max_size=8)  # lone surrogates included
PAIRS = st.tuples(INT32, INT32)

SAMPLINGS = st.builds(
    SamplingParams,
    n=INT32,
    best_of=st.none() | INT64,
    beam_search=st.booleans(),
    temperature=NUMBERS,
    top_p=NUMBERS,
    top_k=INT32,
    min_p=NUMBERS,
    seed=st.none() | INT64,
    max_tokens=st.none() | INT64,
    min_tokens=INT32,
    stop_token_ids=st.lists(INT32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
ROW_STARTS = st.builds(RowStart, INT32, TEXTS, COLUMNS, INT32, SAMPLINGS, INT32)
PLANS = st.builds(
    StepPlan,
    step_id=INT64,
    rows=COLUMNS,
    starts=COLUMNS,
    counts=COLUMNS,
    samples=COLUMNS,
    num_decodes=INT64,
    row_starts=st.lists(ROW_STARTS, max_size=2).map(tuple),
    released_rows=COLUMNS,
    tables=st.builds(TableChanges, COLUMNS, COLUMNS, COLUMNS, COLUMNS),
    drafts=st.dictionaries(INT64, COLUMNS, max_size=3),
    moves_out=st.lists(PAIRS.map(lambda pair: BlockMove(*pair)), max_size=3).map(tuple),
    copies=st.lists(PAIRS.map(lambda pair: BlockCopy(*pair)), max_size=3).map(tuple),
    moves_in=st.lists(PAIRS.map(lambda pair: BlockMove(*pair)), max_size=3).map(tuple),
)
RESULTS = st.builds(
    StepResult,
    step_id=INT64,
    num_tokens=COLUMNS,
    tokens=COLUMNS,
    parents=COLUMNS,
    failures=st.dictionaries(INT64, TEXTS, max_size=3),
)

PLAN = StepPlan(
    7,
    column(0, 1),
    column(4, 0),
    column(1, 3),
    column(1, 2),
    1,
    (RowStart(1, "é", column(5, 6, 7), 3, SamplingParams(n=2, seed=3, stop_token_ids=(9,)), 1),),
    column(2),
    TableChanges(column(1), column(0), column(0), column(8)),
    {0: column(3)},
    (BlockMove(1, 0),),
    (BlockCopy(2, 3),),
    (BlockMove(4, 5),),
)
RESULT = StepResult(7, column(1, 2), column(5, 6, 7), column(0, 0), {1: "no"})


@given(PLANS)
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    data = plan.to_bytes()
    twin = StepPlan.from_bytes(data)
    assert twin == plan
    assert twin.to_bytes() == data
    assert all(type(copied) is BlockCopy for copied in twin.copies)
    assert all(type(move) is BlockMove for move in (*twin.moves_in, *twin.moves_out))


@given(RESULTS)
def test_a_result_survives_the_wire(result: StepResult) -> None:
    data = result.to_bytes()
    twin = StepResult.from_bytes(data)
    assert twin == result
    assert twin.to_bytes() == data


@given(PLANS)
def test_sampling_parameters_come_back_with_their_types(plan: StepPlan) -> None:
    for start, twin in zip(plan.row_starts, StepPlan.from_bytes(plan.to_bytes()).row_starts, strict=True):
        assert type(twin.sampling.beam_search) is bool and type(twin.sampling.ignore_eos) is bool
        assert repr(twin.sampling) == repr(start.sampling)


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
def test_a_record_cut_anywhere_is_torn(value: StepPlan | StepResult) -> None:
    data = value.to_bytes()
    assert type(value).from_bytes(data) == value
    for length in range(len(data)):
        with pytest.raises(StepLogError):
            type(value).from_bytes(data[:length])


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
def test_a_record_with_something_after_its_end_is_refused(value: StepPlan | StepResult) -> None:
    with pytest.raises(StepLogError, match="goes on after its end"):
        type(value).from_bytes(value.to_bytes() + b"\0")


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_an_altered_record_is_another_value_or_torn_but_never_a_crash(value: StepPlan | StepResult, mask: int) -> None:
    data = value.to_bytes()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= mask
        try:
            twin = type(value).from_bytes(bytes(altered))
        except StepLogError:
            continue
        assert isinstance(twin, type(value))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_torn(data: bytes) -> None:
    for kind in (StepPlan, StepResult):
        try:
            assert isinstance(kind.from_bytes(data), kind)
        except StepLogError as error:
            assert str(error)


def test_a_plan_has_a_small_form() -> None:
    decodes = array("i", range(256))
    plan = StepPlan(1, decodes, decodes, array("i", [1]) * 256, array("i", [1]) * 256, 256)
    assert len(plan.to_bytes()) == 4 * 4 * 256 + 16 * 8


# ---- what a plan must keep ------------------------------------------------------------------------------------------


def test_a_sound_plan_passes() -> None:
    PLAN.check()
    assert PLAN.num_tokens == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": column(4)}, "columns of a plan differ in length"),
        ({"counts": column(1, 2, 3)}, "columns of a plan differ in length"),
        ({"samples": column()}, "columns of a plan differ in length"),
        ({"rows": column(1, 1)}, "a row stands twice"),
        ({"copies": (BlockCopy(1, 3), BlockCopy(2, 3))}, "write the same block"),
        ({"copies": (BlockCopy(1, 4),)}, "write the same block"),
        ({"moves_in": (BlockMove(6, 1), BlockMove(6, 2))}, "write the same block"),
        ({"copies": (BlockCopy(1, 2), BlockCopy(2, 3))}, "reads what another copy or move of it writes"),
        ({"copies": (BlockCopy(4, 3),)}, "reads what another copy or move of it writes"),
        ({"copies": (BlockCopy(3, 3),)}, "reads what another copy or move of it writes"),
        ({"moves_out": (BlockMove(1, 0), BlockMove(2, 0))}, "use the same host block"),
        ({"moves_out": (BlockMove(1, 5),)}, "use the same host block"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_in_order_is_found(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        replace(PLAN, **changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"copies": (BlockCopy(2, 3), BlockCopy(2, 6))},
        {"moves_out": (BlockMove(3, 0),)},
        {"moves_out": (BlockMove(4, 0),)},
        {"moves_out": (BlockMove(1, 0), BlockMove(1, 2))},
    ],
    ids=["one block copied twice", "moved out, then copied into", "moved out, then moved into", "moved out twice"],
)
def test_what_the_order_of_a_plan_allows_passes(changes: dict[str, Any]) -> None:
    replace(PLAN, **changes).check()


# ---- the wire -------------------------------------------------------------------------------------------------------


def test_fields_are_little_endian_with_their_lengths() -> None:
    writer = WireWriter()
    writer.integer(-2)
    writer.text("é")
    writer.column(column(1, -1))
    assert writer.to_bytes().hex() == "feffffffffffffff" + "0200000000000000c3a9" + "080000000000000001000000ffffffff"


def test_absent_and_zero_differ() -> None:
    writer = WireWriter()
    writer.optional_integer(None)
    writer.optional_integer(0)
    reader = WireReader(writer.to_bytes())
    assert (reader.optional_integer(), reader.at_end, reader.optional_integer(), reader.at_end) == (
        None,
        False,
        0,
        True,
    )


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (b"", lambda reader: reader.integer()),
        (bytes(7), lambda reader: reader.number()),
        ((5).to_bytes(8, "little") + b"four", lambda reader: reader.raw()),
        ((-1).to_bytes(8, "little", signed=True), lambda reader: reader.raw()),
        ((1 << 62).to_bytes(8, "little"), lambda reader: reader.column()),
        ((5).to_bytes(8, "little") + bytes(5), lambda reader: reader.column()),
        ((2).to_bytes(8, "little") + b"\xc3\x28", lambda reader: reader.text()),
    ],
    ids=["nothing", "half a number", "short", "negative length", "endless", "odd column", "no text"],
)
def test_a_field_that_is_not_there_is_torn(data: bytes, read: Any) -> None:
    with pytest.raises(StepLogError):
        read(WireReader(data))
