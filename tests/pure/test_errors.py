"""The errors: the tree that the module draws is the tree of the classes, and errors survive copies."""

from __future__ import annotations

import copy
import pickle
import re
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import errors
from quire.core.errors import (
    CheckpointError,
    InvalidConfigError,
    InvalidRequestError,
    InvalidValueError,
    QuireError,
    RequestTooLargeError,
    UnknownRequestError,
)

VALUE_ERRORS = [InvalidValueError, InvalidRequestError, RequestTooLargeError, InvalidConfigError, CheckpointError]
COPIES: list[Callable[[Exception], Exception]] = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda error, protocol=p: pickle.loads(pickle.dumps(error, protocol))
        for p in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]


def drawn_tree() -> dict[str, list[str]]:
    """Read name and bases of every class from the drawing in the docstring of the module."""
    path: list[str] = []
    bases: dict[str, list[str]] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│├└─ ]*)([A-Z]\w*Error)\b(?: \(also (\w+)\))?", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents = [path[depth - 1]] if depth else ["Exception"]
            bases[found[2]] = parents + ([found[3]] if found[3] else [])
    return bases


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    defined = {
        name: [base.__name__ for base in value.__bases__]
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert drawn_tree() == defined


@pytest.mark.parametrize("kind", VALUE_ERRORS)
def test_a_value_error_names_the_field_the_value_and_what_is_allowed(kind: type[InvalidValueError]) -> None:
    error = kind("block_size", 0, "an integer from 1 to 4096")
    assert str(error) == "block_size is 0; allowed: an integer from 1 to 4096"
    assert (error.field, error.value, error.allowed) == ("block_size", 0, "an integer from 1 to 4096")
    assert isinstance(error, QuireError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", VALUE_ERRORS)
def test_a_value_error_keeps_its_fields_when_copied(
    kind: type[InvalidValueError], copied: Callable[[Exception], Exception]
) -> None:
    error = kind("prompt", ["x" * 200, 1.5, None], "a list of token ids")
    twin = copied(error)
    assert type(twin) is kind
    assert vars(twin) == vars(error)
    assert str(twin) == str(error)


@pytest.mark.parametrize("copied", COPIES)
def test_an_unknown_request_keeps_its_id_when_copied(copied: Callable[[Exception], Exception]) -> None:
    twin = copied(UnknownRequestError("a b"))
    assert isinstance(twin, UnknownRequestError)
    assert twin.request_id == "a b"
    assert str(twin) == "request 'a b' is unknown: it has ended or was never added"


@pytest.mark.parametrize(
    ("length", "shown"), [(78, f"'{'x' * 78}'"), (79, f"'{'x' * 76}..."), (100_000, f"'{'x' * 76}...")]
)
def test_a_value_is_shown_in_at_most_eighty_characters(length: int, shown: str) -> None:
    assert str(InvalidValueError("field", "x" * length, "less")) == f"field is {shown}; allowed: less"
    assert len(shown) == 80


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**5000, "a int too large to print"),
        (-(10**5000), "a int too large to print"),
        (["a", 10**5000], "['a', a int too large to print]"),
    ],
    ids=["long", "negative", "in a list"],
)
def test_a_value_that_python_refuses_to_print_has_a_message_all_the_same(value: object, shown: str) -> None:
    error = InvalidValueError("n", value, "less")
    assert str(error) == f"n is {shown}; allowed: less"
    assert error.value is value


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=100) | st.binary(max_size=100) | st.floats(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(max_size=20), inner) | st.tuples(inner) | st.tuples(inner, inner)
    ),
    max_leaves=30,
)


@given(VALUES)
def test_a_value_is_shown_as_python_shows_its_beginning(value: object) -> None:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    if max_depth(value) < 20:
        assert str(InvalidValueError("n", value, "less")) == f"n is {shown}; allowed: less"


def max_depth(value: object) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return 1 + max(map(max_depth, inner), default=0)


@pytest.mark.parametrize("length", [999, 1000, 1001, 5000])
def test_of_a_strangers_name_the_middle_is_left_out_where_it_is_long(length: int) -> None:
    name = "".join(chr(ord("a") + place % 26) for place in range(length))
    shown = name if length <= 1000 else f"{name[:500]} … {name[-500:]}"
    error = CheckpointError(name, 1, name)
    assert str(error) == f"{shown} is 1; allowed: {shown}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error), "what is short already is not shortened again"


@given(st.text(max_size=60))
def test_what_is_printed_of_a_strangers_name_is_one_line_that_a_terminal_can_print(name: str) -> None:
    shown = str(CheckpointError(name, 1, "x"))
    assert shown.isprintable()
    assert not name.isprintable() or shown == f"{name} is 1; allowed: x"


def test_only_the_beginning_of_a_value_is_looked_at() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (
        nested,
        {str(index): index for index in range(1_000_000)},
        "x" * 10_000_000,
        array("i", bytes(1 << 22)),
    ):
        assert len(str(InvalidRequestError("n", value, "less"))) < 120
    while nested:  # freed one by one, as Python may not be able to at once
        nested = nested.pop()  # type: ignore[assignment]
    assert len(InvalidRequestError("n" * 10_000, 1, "less").field) == 80
