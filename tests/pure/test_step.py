"""StepPlan and StepResult: what a plan may not say, and the bytes they become."""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvariantError, StepLogError
from quire.core.grammar import GRAMMAR_KINDS, Grammar
from quire.core.guesses import GUESSERS, Guesses
from quire.core.hypothesis import Hypothesis
from quire.core.logprobs import TokenLogprobs
from quire.core.parameters import (
    Biases,
    Choice,
    HeldText,
    Integer,
    Kind,
    Number,
    Parameter,
    Switch,
    Texts,
    TokenIds,
    TokenSequences,
)
from quire.core.pooling import Pooling
from quire.core.sampling_params import PARAMETERS, SamplingParams
from quire.core.step import BlockCopy, BlockMove, RowStart, StepPlan, StepResult, TableChanges, column

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NUMBERS = st.floats(allow_nan=False)
COLUMNS = st.lists(INT32, max_size=5).map(lambda values: array("i", values))
TEXTS = st.text(st.characters(), max_size=8)  # lone surrogates included


def values_of(declared: Parameter) -> st.SearchStrategy[Any]:
    """Return the values that a parameter may have on the wire, its neutral one among them."""
    kinds: dict[type[Kind], st.SearchStrategy[Any]] = {
        Integer: INT64,
        Number: NUMBERS,
        Switch: st.booleans(),
        Choice: st.sampled_from([False, True, "never"]),
        Texts: st.lists(TEXTS, max_size=3).map(tuple),
        TokenIds: st.lists(INT32, max_size=4).map(tuple),
        TokenSequences: st.lists(st.lists(INT32, max_size=3).map(tuple), max_size=3).map(tuple),
        Biases: st.dictionaries(INT32, NUMBERS, max_size=3),
        HeldText: st.builds(Grammar, st.sampled_from(GRAMMAR_KINDS), TEXTS),
    }
    return st.just(declared.default) | kinds[type(declared.kind)]


SAMPLINGS = st.builds(SamplingParams, **{name: values_of(declared) for name, declared in PARAMETERS.items()})
POOLINGS = st.none() | st.builds(Pooling, st.sampled_from(("last", "mean")), INT32)
ROW_STARTS = st.builds(RowStart, INT32, TEXTS, COLUMNS, INT32, SAMPLINGS, INT32, INT32, INT32, pooling=POOLINGS)


def tuples_of(pair: type[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.builds(pair, INT32, INT32), max_size=3).map(tuple)


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
    drafts=st.dictionaries(INT32, COLUMNS, max_size=3),
    moves_out=tuples_of(BlockMove),
    copies=tuples_of(BlockCopy),
    moves_in=tuples_of(BlockMove),
    proposals=st.dictionaries(INT32, INT32, max_size=3),
    depths=st.dictionaries(INT32, INT32, max_size=3),
)
ROWS = st.integers(0, 1 << 30)
ENTRIES = st.builds(
    TokenLogprobs, NUMBERS, INT64, COLUMNS, st.lists(NUMBERS, max_size=3).map(lambda values: array("d", values))
)
REPORTS = st.dictionaries(ROWS, st.lists(ENTRIES, max_size=2).map(tuple), max_size=2)
FOUND = st.builds(Hypothesis, st.lists(INT32, max_size=3).map(tuple), NUMBERS, NUMBERS)
SEARCHES = st.dictionaries(ROWS, st.lists(FOUND, max_size=2).map(tuple), max_size=2)
RESULTS = st.builds(
    StepResult,
    INT64,
    COLUMNS,
    COLUMNS,
    COLUMNS,
    st.dictionaries(ROWS, TEXTS, max_size=3),
    REPORTS,
    REPORTS,
    SEARCHES,
    st.dictionaries(ROWS, st.builds(Guesses, st.sampled_from(GUESSERS), COLUMNS), max_size=3),
    st.dictionaries(ROWS, st.binary(max_size=9), max_size=2),
    INT64,
)

RULED = SamplingParams(
    seed=1,
    stop_token_ids=(2,),
    repetition_penalty=1.5,
    logit_bias={4: 1.0, 3: -2.0},
    bad_words_ids=((1, 2), (3,)),
    allowed_token_ids=(5, 6),
    grammar=Grammar.regex("é+"),
)
PLAN = StepPlan(
    step_id=7,
    rows=column(0, 1),
    starts=column(4, 0),
    counts=column(1, 3),
    samples=column(1, 0),
    num_decodes=1,
    row_starts=(RowStart(1, "né", column(5, 6, 7), 3, RULED, 9, branch=1),),
    released_rows=column(2),
    tables=TableChanges(column(1), column(0), column(0), column(9)),
    drafts={1: column(8, 9)},
    moves_out=(BlockMove(1, 0),),
    copies=(BlockCopy(2, 3),),
    moves_in=(BlockMove(4, 1),),
    proposals={0: 5},
    depths={0: 3},
)
RESULT = StepResult(
    7,
    column(1, 0),
    column(42),
    column(0, 1),
    {1: "it failed: é"},
    logprobs={0: (TokenLogprobs(-0.5, 1, column(42, 7), array("d", [-0.5, -1.5])),)},
    prompt_logprobs={1: (TokenLogprobs(-2.5, 3, column(), array("d")),)},
    searches={0: (Hypothesis((5, 6), -1.25, -0.5), Hypothesis((), 0.0, 0.0))},
    proposals={0: Guesses("suffix", column(9, 11))},
    vectors={1: b"vec"},
    duration_us=1500,
    draft_us=400,
)


@given(PLANS)
def test_a_plan_survives_the_round_trip(plan: StepPlan) -> None:
    data = plan.to_bytes()
    copy = StepPlan.from_bytes(data)
    assert copy == plan
    assert copy.to_bytes() == data


@given(RESULTS)
def test_a_result_survives_the_round_trip(result: StepResult) -> None:
    data = result.to_bytes()
    copy = StepResult.from_bytes(data)
    assert copy == result
    assert copy.to_bytes() == data


def test_what_is_read_has_the_types_that_were_written() -> None:
    copy = StepPlan.from_bytes(PLAN.to_bytes())
    assert [type(pair) for pair in (copy.moves_out[0], copy.copies[0], copy.moves_in[0])] == [
        BlockMove,
        BlockCopy,
        BlockMove,
    ]
    sampling = copy.row_starts[0].sampling
    assert sampling.beam_search is False
    assert sampling.ignore_eos is False
    assert sampling.best_of is None


@given(PLANS, st.data())
def test_equal_plans_give_equal_bytes_and_others_do_not(plan: StepPlan, data: st.DataObject) -> None:
    other = data.draw(st.just(StepPlan.from_bytes(plan.to_bytes())) | PLANS)
    if other == plan:
        assert other.to_bytes() == plan.to_bytes()
    else:
        assert other.to_bytes() != plan.to_bytes()


def test_equal_plans_give_equal_bytes_whatever_the_order_of_their_drafts() -> None:
    one = replace(PLAN, drafts={0: column(1), 1: column(2)})
    two = replace(PLAN, drafts={1: column(2), 0: column(1)})
    assert one == two
    assert one.to_bytes() == two.to_bytes()


def test_equal_results_give_equal_bytes_whatever_the_order_of_their_failures() -> None:
    one = replace(RESULT, failures={0: "a", 1: "b"})
    two = replace(RESULT, failures={1: "b", 0: "a"})
    assert one == two
    assert one.to_bytes() == two.to_bytes()


@given(SAMPLINGS)
def test_sampling_parameters_keep_their_place_beside_others(sampling: SamplingParams) -> None:
    start = RowStart(0, "a", column(1), 1, sampling, 9)
    copy = StepPlan.from_bytes(replace(PLAN, row_starts=(start, PLAN.row_starts[0])).to_bytes())
    assert copy.row_starts == (start, PLAN.row_starts[0])


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
def test_torn_bytes_are_refused_wherever_they_are_cut(value: StepPlan | StepResult) -> None:
    data = value.to_bytes()
    for length in range(len(data)):
        with pytest.raises(StepLogError):
            type(value).from_bytes(data[:length])


@given(PLANS, st.data())
def test_any_torn_plan_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    whole = plan.to_bytes()
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(StepLogError):
        StepPlan.from_bytes(whole[:length])


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
def test_bytes_left_over_are_refused(value: StepPlan | StepResult) -> None:
    with pytest.raises(StepLogError, match="1 bytes are left over"):
        type(value).from_bytes(value.to_bytes() + b"\0")


@pytest.mark.parametrize("value", [PLAN, RESULT], ids=["plan", "result"])
@pytest.mark.parametrize("flipped", [0x01, 0x02, 0x80, 0xFF])
def test_altered_bytes_raise_nothing_but_a_step_log_error(value: StepPlan | StepResult, flipped: int) -> None:
    whole = value.to_bytes()
    num_refused = 0
    for position in range(len(whole)):
        altered = bytearray(whole)
        altered[position] ^= flipped
        try:
            type(value).from_bytes(bytes(altered))
        except StepLogError:
            num_refused += 1
    assert num_refused > 0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_raise_a_step_log_error(data: bytes) -> None:
    for kind in (StepPlan, StepResult):
        with suppress(StepLogError):
            assert isinstance(kind.from_bytes(data), kind)


def test_a_plan_has_a_small_form() -> None:
    decodes, ones = array("i", range(256)), array("i", [1]) * 256
    plan = StepPlan(1, decodes, decodes, ones, ones, 256)
    assert len(plan.to_bytes()) == 4 * (4 * 256) + 19 * 8


def test_a_plan_counts_the_tokens_that_it_computes() -> None:
    assert PLAN.num_tokens == 4


def test_table_changes_have_a_column_for_each_part_of_an_entry() -> None:
    changes = TableChanges.of([(1, 2, 3, 4), (5, 6, 7, 8)])
    assert len(changes) == 2
    assert (changes.rows, changes.groups, changes.indices, changes.blocks) == (
        column(1, 5),
        column(2, 6),
        column(3, 7),
        column(4, 8),
    )
    assert len(TableChanges()) == len(TableChanges.of([])) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": column(0)}, "the columns of a plan differ in length"),
        ({"starts": column(0)}, "the columns of a plan differ in length"),
        ({"counts": column(1, 1, 1)}, "the columns of a plan differ in length"),
        ({"samples": column()}, "the columns of a plan differ in length"),
        ({"rows": column(1, 1)}, "a plan contains a row twice"),
        ({"copies": (BlockCopy(1, 3), BlockCopy(2, 3))}, "write the same block"),
        ({"moves_in": (BlockMove(4, 1), BlockMove(4, 2))}, "write the same block"),
        ({"copies": (BlockCopy(1, 4),)}, "write the same block"),
        ({"copies": (BlockCopy(1, 2), BlockCopy(2, 3))}, "reads a block that another copy or move of the plan writes"),
        ({"copies": (BlockCopy(2, 2),)}, "reads a block that another copy or move of the plan writes"),
        ({"copies": (BlockCopy(4, 3),)}, "reads a block that another copy or move of the plan writes"),
        ({"moves_out": (BlockMove(1, 0), BlockMove(2, 0))}, "use the same host block"),
        ({"moves_out": (BlockMove(1, 1),)}, "use the same host block"),
    ],
)
def test_check_refuses_a_plan_that_cannot_be_carried_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        replace(PLAN, **changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"copies": (BlockCopy(2, 3), BlockCopy(2, 5))},  # one block, copied twice
        {"moves_out": (BlockMove(3, 0),)},  # moved out first, then written by a copy
        {"moves_out": (BlockMove(4, 0),)},  # moved out first, then moved in again
        {"moves_in": (BlockMove(4, 1), BlockMove(5, 1))},  # one host block, read twice
        {"moves_out": (BlockMove(1, 0), BlockMove(1, 2))},  # one block, moved out for two branches that shared it
        {"rows": column(), "starts": column(), "counts": column(), "samples": column()},
    ],
)
def test_check_allows_what_the_order_of_a_step_makes_possible(changes: dict[str, Any]) -> None:
    replace(PLAN, **changes).check()


def test_a_result_is_written_as_the_logs_that_are_kept_have_it() -> None:
    """Logs of old must be read: what is written for a result may not change by itself."""
    failure = "it failed: é".encode()
    assert RESULT.to_bytes() == b"".join(
        [
            struct.pack("<q", 7),
            struct.pack("<qii qi qii", 8, 1, 0, 4, 42, 8, 0, 1),
            struct.pack(f"<qqq{len(failure)}s", 1, 1, len(failure), failure),
            struct.pack("<qqq dq qii qdd", 1, 0, 1, -0.5, 1, 8, 42, 7, 16, -0.5, -1.5),
            struct.pack("<qqq dq qq", 1, 1, 1, -2.5, 3, 0, 0),
            struct.pack("<qqq qiidd qdd", 1, 0, 2, 8, 5, 6, -1.25, -0.5, 0, 0.0, 0.0),
            struct.pack("<qqqqii", 1, 0, 2, 8, 9, 11),
            struct.pack("<qqq3s", 1, 1, 3, b"vec"),
            struct.pack("<qqq", 1500, 400, 0),
        ]
    )


def test_a_request_takes_a_row_without_reports_of_its_prompt_unless_they_are_wanted() -> None:
    start = RowStart(1, "r", column(5), 1, SamplingParams(), 9)
    assert (start.branch, start.num_prompt_logits) == (0, 0)
    wanted = replace(PLAN, row_starts=(replace(start, num_prompt_logits=4),))
    assert StepPlan.from_bytes(wanted.to_bytes()).row_starts[0].num_prompt_logits == 4


def test_a_column_of_pairs_must_be_one() -> None:
    plan = replace(PLAN, tables=TableChanges(), row_starts=(), drafts={}, proposals={}, depths={})
    data = replace(plan, moves_out=(), copies=(), moves_in=()).to_bytes()
    tail = struct.pack("<q", 0) * 8  # moves out, copies, moves in, drafts, proposals, depths, transfers, rows taken
    assert data.endswith(tail)
    for place in range(3):
        columns = [struct.pack("<qi", 4, 1) if place == number else struct.pack("<q", 0) for number in range(3)]
        with pytest.raises(StepLogError, match=r"^a column of pairs has an odd length$"):
            StepPlan.from_bytes(data[: -len(tail)] + b"".join(columns) + struct.pack("<qqqqq", 0, 0, 0, 0, 0))
