"""The meter of chat templates: what is charged covers what is made; each limit holds at its number, not past it."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.text.template_meter import (
    CHARACTERS_PER_STEP,
    ITEM_STEPS,
    MAX_BITS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_EXPONENT,
    MAX_FORM,
    MAX_PRODUCT,
    MAX_STEPS,
    MAX_TUPLE,
    MAX_WIDTH,
    Meter,
)

ENVIRONMENT = jinja2.Environment()
SHORT = st.text("ab\n", max_size=12)
TEXTS = st.lists(SHORT, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)


def meter(left: int = MAX_STEPS) -> Meter:
    found = Meter(ENVIRONMENT, {}, "a template", {})
    found.left = left
    return found


def cost(charge: Any) -> int:
    """The steps that a charge takes."""
    used = meter()
    charge(used)
    return MAX_STEPS - used.left


def refused(charge: Any) -> str:
    with pytest.raises(OverflowError) as caught:
        charge(meter())
    return str(caught.value)


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_the_last_step_may_be_taken_and_none_after_it() -> None:
    used = meter(5)
    used.charge(5)
    assert used.left == 0
    used.charge(0)
    with pytest.raises(OverflowError, match=r"^it needs more than 10,000,000 steps$"):
        used.charge(1)


def num_parts(value: Any) -> int:
    """Everything in a value, in steps, as the module counts it: a plain walk."""
    if isinstance(value, str):
        return len(value) // CHARACTERS_PER_STEP
    if isinstance(value, dict):
        inner = sum(num_parts(key) + num_parts(item) for key, item in value.items())
        return len(value) * ITEM_STEPS + inner
    if isinstance(value, list | tuple):
        return len(value) * ITEM_STEPS + sum(map(num_parts, value))
    return 0


@given(VALUES)
def test_a_value_weighs_all_that_it_holds_and_reading_it_only_itself(value: Any) -> None:
    assert cost(lambda used: used.weigh(value)) == num_parts(value)
    own = len(value) * ITEM_STEPS if isinstance(value, list | dict) else num_parts(value)
    assert cost(lambda used: used.read(value)) == own
    assert meter().weigh(value) is value
    assert cost(lambda used: used.held(value)) == (0 if isinstance(value, dict) else num_parts(value))


@given(VALUES, st.integers(-3, 5))
def test_a_value_that_is_used_again_is_paid_again(value: Any, times: int) -> None:
    once = num_parts(value)
    assert cost(lambda used: used.weigh_times(value, times)) == once + (once + 1) * max(times, 0)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_may_be_nested_a_hundred_levels_deep() -> None:
    meter().weigh(nested(MAX_DEPTH - 1))
    assert refused(lambda used: used.weigh(nested(MAX_DEPTH))) == "a value is nested more than 100 levels deep"


@given(VALUES, st.sampled_from([repr, ascii, json.dumps]))
def test_the_text_of_a_value_is_paid_before_it_is_made(value: Any, escape: Any) -> None:
    made = json.dumps(value) if escape is json.dumps else escape(value)
    steps = cost(lambda used: used.weigh_text(value, escape))
    num_values = str(value).count(",") + 2
    assert (steps + 2 * num_values) * CHARACTERS_PER_STEP >= len(made)


def test_a_text_is_weighed_in_pieces_and_a_walk_stops_at_the_budget() -> None:
    text = "\0" * 200_001
    assert cost(lambda used: used.weigh_text(text)) in range(100_000, 100_010)
    used = meter(1000)
    with pytest.raises(OverflowError, match="more than"):
        used.weigh_text([text] * 10**6)
    assert refused(lambda used: used.weigh_text(nested(MAX_DEPTH))) == "a value is nested more than 100 levels deep"


# ---- what is made is paid -------------------------------------------------------------------------------------------


def covers(steps: int, made: str, *given_before: str) -> bool:
    """Whether the steps pay for the characters of a text, but for those that were there and a part of a step."""
    return (steps + 1) * CHARACTERS_PER_STEP + sum(map(len, given_before)) > len(made)


@given(SHORT, SHORT, SHORT)
def test_replacing_costs_at_least_what_is_put_in(text: str, old: str, new: str) -> None:
    for options in ([old, new], [new, old]):  # by name, in the other order
        steps = cost(lambda used, options=options: used.replace(text, options))
        assert covers(steps, text.replace(old, new), text)
        assert covers(steps, text.replace(new, old), text)
    assert cost(lambda used: used.method(text, "replace", [old, new])) >= cost(
        lambda used: used.replace(text, [old, new])
    )


@given(SHORT, TEXTS)
def test_joining_costs_at_least_what_comes_of_it(separator: str, texts: list[str]) -> None:
    joined = separator.join(texts)
    assert covers(cost(lambda used: used.join(texts, [separator])), joined, *texts)
    assert covers(cost(lambda used: used.method(separator, "join", [texts])), joined, *texts)
    assert covers(cost(lambda used: used.filter("join", texts, [separator])), joined, *texts)
    pieces = meter()
    assert pieces.concat(texts) == "".join(texts)
    assert covers(MAX_STEPS - pieces.left, "".join(texts))
    assert meter().str_join((1, "a", None)) == "1aNone"


@given(SHORT, st.sampled_from(["center", "ljust", "rjust", "zfill"]), st.integers(-5, MAX_WIDTH))
def test_padding_costs_its_width(text: str, name: str, width: int) -> None:
    steps = cost(lambda used: used.method(text, name, [width]))
    assert covers(steps, getattr(text, name)(width), text)


@given(SHORT, st.integers(0, MAX_WIDTH))
def test_an_indentation_costs_its_width_on_every_line(text: str, width: int) -> None:
    steps = cost(lambda used: used.filter("indent", text, [width]))
    indented = "\n".join(" " * width + line for line in text.split("\n"))
    assert covers(steps, indented, text)


@given(st.lists(st.sampled_from(["%s", "%5s", "%999d", "text", "%%"]), max_size=6), st.integers(0, 9))
def test_filling_a_form_costs_each_field_at_its_widest(fields: list[str], value: int) -> None:
    form = "-".join(fields)
    values = [value] * sum(field in ("%s", "%5s", "%999d") for field in fields)
    made = form % tuple(values)
    assert covers(cost(lambda used: used.fill(form, values)), made, form)


@given(SHORT, st.sampled_from([None, "a", "b", "ab", "\n"]))
def test_pieces_of_a_text_are_paid_as_items(text: str, separator: str | None) -> None:
    options = [] if separator is None else [separator]
    pieces = text.split(*options)
    for name in ("split", "rsplit"):
        assert cost(lambda used, name=name: used.method(text, name, options)) >= (len(pieces) - 1) * ITEM_STEPS


@given(st.one_of(SHORT, TEXTS, st.tuples(SHORT)), st.integers(-2, 20))
def test_a_product_with_a_number_costs_what_it_makes(value: Any, times: int) -> None:
    for operands in ((value, times), (times, value)):
        steps = cost(lambda used, operands=operands: used.multiply("*", *operands))
        made = value * times
        if isinstance(made, str):
            assert covers(steps, made)
        else:
            assert steps >= num_parts(made)


@given(st.one_of(st.tuples(SHORT, SHORT), st.tuples(TEXTS, TEXTS)))
def test_a_sum_is_what_python_makes_and_is_paid(operands: tuple[Any, Any]) -> None:
    left, right = operands
    used = meter()
    assert used.add(left, right) == left + right
    assert MAX_STEPS - used.left == cost(lambda each: each.read(left + right))


# ---- limits, at their number and one past it ------------------------------------------------------------------------

TOO_LARGE = "the product is too large"


@pytest.mark.parametrize(
    ("operator", "at", "past", "words"),
    [
        ("*", ("x", MAX_PRODUCT), ("x", MAX_PRODUCT + 1), TOO_LARGE),
        ("*", (MAX_PRODUCT // 2, "xy"), (MAX_PRODUCT // 2 + 1, "xy"), TOO_LARGE),
        ("*", ([1], MAX_PRODUCT), ([1], MAX_PRODUCT + 1), TOO_LARGE),
        ("*", ((1, 2), MAX_TUPLE // 2), ((1, 2), MAX_TUPLE // 2 + 1), TOO_LARGE),
        ("*", (1 << 4094, 1), (1 << 4094, 2), TOO_LARGE),
        ("*", (-(1 << 4094), 1), (-(1 << 4094), -2), TOO_LARGE),
        ("**", (1 << 63, MAX_EXPONENT), (1 << 63, MAX_EXPONENT + 1), "the exponent is too large"),
        ("**", (1.5, MAX_EXPONENT), (1.5, MAX_EXPONENT + 0.5), "the exponent is too large"),
        ("**", (2, -MAX_EXPONENT), (2, -MAX_EXPONENT - 1), "the exponent is too large"),
        ("**", (1 << 63, 64), (1 << 64, 64), TOO_LARGE),
    ],
)
def test_products_have_a_size(operator: str, at: tuple[Any, Any], past: tuple[Any, Any], words: str) -> None:
    meter().multiply(operator, *at)
    assert refused(lambda used: used.multiply(operator, *past)) == words
    assert MAX_BITS == 4096


def test_tuples_are_short_and_hold_no_other() -> None:
    words = "a tuple has more than 64 values, or contains a tuple"
    longest = (0,) * MAX_TUPLE
    assert meter().short(longest) is longest
    for tuple_ in ((*longest, 0), ((),), (1, (2,))):
        assert refused(lambda used, tuple_=tuple_: used.short(tuple_)) == words
    assert refused(lambda used: used.add(longest, (0,))) == words
    assert meter().add((1,), (2,)) == (1, 2)


@pytest.mark.parametrize(
    ("form", "is_allowed"),
    [
        ("%999d", True),
        ("%1000d", False),
        ("{:999}", True),
        ("{:1000}", False),
        ("{0:.9999}", False),
        ("%*d", False),
        ("{:{}}", False),
        ("{}{}", True),
        ("x" * MAX_FORM, True),
        ("x" * (MAX_FORM + 1), False),
    ],
)
def test_forms_and_their_fields_have_a_width(form: str, is_allowed: bool) -> None:
    calls = (
        lambda used: used.fill(form, [1]),
        lambda used: used.method(form, "format", [1]),
        lambda used: used.filter("format", form, [1]),
    )
    for call in calls:
        if is_allowed:
            call(meter())
        else:
            assert refused(call) == "a format string is too long, or one of its fields too wide"


@pytest.mark.parametrize("name", ["center", "indent", "round"])
def test_widths_have_a_limit_said_as_a_number_or_as_a_text(name: str) -> None:
    value = 1.5 if name == "round" else "x"
    for at, past in ((MAX_WIDTH, -MAX_WIDTH - 1), (" " * MAX_WIDTH, " " * (MAX_WIDTH + 1))):
        meter().filter(name, value, [at])
        assert refused(lambda used, past=past: used.filter(name, value, [past])) == "a width of more than 1024"
    meter().method("x", "zfill", [MAX_WIDTH])
    assert refused(lambda used: used.method("x", "zfill", [MAX_WIDTH + 1])) == "a width of more than 1024"
    meter().method("x", "center", [3, "f" * 9999])  # the second is no width


def test_numbers_from_text_have_as_many_digits_as_python_reads() -> None:
    meter().filter("int", "9" * MAX_DIGITS, [])
    words = "a number of more than 4300 digits"
    assert refused(lambda used: used.filter("int", "9" * (MAX_DIGITS + 1), [])) == words
    assert int("9" * MAX_DIGITS)
    with pytest.raises(ValueError, match="4300"):
        int("9" * (MAX_DIGITS + 1))


@given(TEXTS, st.sampled_from(["map", "select", "sort", "unique", "join", "list"]), TEXTS)
def test_a_filter_of_a_list_is_paid_for_each_item_with_its_options(
    values: list[str], name: str, options: list[str]
) -> None:
    least = len(values) * (ITEM_STEPS + sum(map(len, options)))
    assert cost(lambda used: used.filter(name, values, options)) >= least + len(values) * ITEM_STEPS


def test_a_loop_is_not_a_list() -> None:
    loop: Any = jinja2.runtime.LoopContext([1], jinja2.Undefined)
    assert refused(lambda used: used.read(loop)) == "a loop is not a list"
