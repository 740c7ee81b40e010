"""The tree of errors, and what an error says."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

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

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]
INVALID_VALUES = [InvalidValueError, InvalidRequestError, RequestTooLargeError, InvalidConfigError, CheckpointError]


def drawn_tree() -> dict[str, str | None]:
    """The tree in the docstring of the module: each error, and the one it hangs from."""
    parents: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        found = re.match(r"^( {4}(?:[│ ] {3})*)(?:[├└]── )?(\w+Error)\b", line)
        if found is None:
            continue
        depth = line.index(found[2])
        path = [(other, name) for other, name in path if other < depth]
        parents[found[2]] = path[-1][1] if path else None
        path.append((depth, found[2]))
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    real = {cls.__name__: None if cls is QuireError else cls.__bases__[0].__name__ for cls in CLASSES}
    assert drawn_tree() == real


def test_every_error_is_a_quire_error() -> None:
    assert all(issubclass(cls, QuireError) for cls in CLASSES)


def test_the_built_in_errors_that_the_tree_names_are_bases() -> None:
    assert issubclass(InvalidValueError, ValueError)
    assert issubclass(UnknownRequestError, KeyError)


def test_a_message_names_field_value_and_what_is_allowed() -> None:
    error = InvalidRequestError("top_p", 1.5, "a number from 0 to 1")
    assert str(error) == "top_p is 1.5; allowed: a number from 0 to 1"
    assert (error.field, error.value, error.allowed) == ("top_p", 1.5, "a number from 0 to 1")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a" * 78, "'" + "a" * 78 + "'"),
        ("a" * 79, "'" + "a" * 76 + "..."),
        (list(range(10_000)), repr(list(range(10_000)))[:77] + "..."),
    ],
)
def test_a_long_value_is_cut_to_eighty_characters(value: object, shown: str) -> None:
    assert str(InvalidValueError("field", value, "less")) == f"field is {shown}; allowed: less"
    assert len(shown) == 80


@pytest.mark.parametrize("value", [10**5000, [10**5000], -(10**5000)], ids=["integer", "list", "negative"])
def test_a_value_that_python_refuses_to_print_has_a_message_all_the_same(value: object) -> None:
    error = InvalidValueError("n", value, "less")
    assert str(error).startswith("n is ")
    assert str(error).endswith("; allowed: less")
    assert len(str(error)) < 120


@pytest.mark.parametrize("cls", INVALID_VALUES)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_can_be_copied_and_sent_to_another_process(cls: type[InvalidValueError], again: object) -> None:
    error = cls("field", [1, 2], "something else")
    assert callable(again)
    twin = again(error)
    assert type(twin) is cls
    assert (twin.field, twin.value, twin.allowed, str(twin)) == ("field", [1, 2], "something else", str(error))


def test_an_unknown_request_is_named_without_the_quotes_of_a_key_error() -> None:
    error = UnknownRequestError("r7")
    assert str(error) == "request 'r7' is unknown; it has ended, or was never added"
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.request_id, str(twin)) == ("r7", str(error))
