"""What is in a JSON text is counted as a reader would count it, and the count ends at the bound."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.core.json_bounds import DEFAULT_BOUNDS, JsonBounds, require_bounded

MEBIBYTE = 1 << 20
ANY = JsonBounds(max_values=1 << 30, max_numbers=1 << 30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def num_values(value: Any) -> int:
    """All values and keys, as a reader of JSON meets them."""
    if isinstance(value, dict):
        return 1 + sum(1 + num_values(item) for item in value.values())
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 1


@given(JSON, st.sampled_from([None, 0, 3]), st.booleans())
def test_everything_is_counted_once(value: Any, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert require_bounded(text, ANY) == require_bounded(bytearray(text), ANY) == num_values(value)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("piece", ["a", '"', "\\", '\\"', "\u2028", "[1,", "\U0001f600", " ", "\n"])
def test_texts_of_any_length_are_one_value(piece: str, size: int) -> None:
    value = {"text": piece * size, "more": [piece * size, 5], piece * size: "last"}
    for is_ascii in (True, False):
        assert require_bounded(json.dumps(value, ensure_ascii=is_ascii).encode(), ANY) == num_values(value)


@pytest.mark.parametrize("count", [1, 64, 65, 66, 129, 5000])
def test_lists_of_numbers_are_counted_however_they_are_written(count: int) -> None:
    for separator in (",", ", ", " ,\n\t", "," + " " * 5000):
        text = "[" + separator.join(["17", "-2.5e7", "null"][index % 3] for index in range(count)) + "]"
        assert require_bounded(text.encode(), ANY) == 1 + count


@given(st.binary(max_size=60))
def test_what_is_no_json_does_no_harm(text: bytes) -> None:
    require_bounded(text, ANY)


@pytest.mark.parametrize(
    "text", [b"", b'"', b'"a', b'"a\\', b'{"a":"' + b"b" * 100_000, b":" * 100_000, b"\0" * 100_000]
)
def test_torn_text_ends(text: bytes) -> None:
    require_bounded(text, ANY)


@pytest.mark.parametrize(
    ("begin", "piece", "what"),
    [
        (b'{"prompt": "a", "metadata": [', b"[],", "texts, lists and objects"),
        (b'{"prompt": "a", "metadata": [', b"{},", "texts, lists and objects"),
        (b'{"prompt": "a", "metadata": [', b'"",', "texts, lists and objects"),
        (b'{"prompt": "a", "metadata": {"deep": {', b'"k": 1,', "texts, lists and objects"),
        (b'{"prompt": "a", "metadata": [', b"1,", "numbers"),
        (b'{"prompt": "a", "metadata": [', b"null ,", "numbers"),
    ],
)
def test_the_first_value_too_many_is_refused_under_the_name_of_its_field(begin: bytes, piece: bytes, what: str) -> None:
    text = begin + piece * (8 * MEBIBYTE // len(piece))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=f"metadata is 'over .* {what}'") as caught:
            require_bounded(text, DEFAULT_BOUNDS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.field == "metadata"
    assert peak < 100_000  # nothing is made of what is counted
    with pytest.raises(InvalidRequestError, match="messages"):
        require_bounded(text, DEFAULT_BOUNDS, "messages[0].arguments")


def test_bounds_are_reached_and_not_passed() -> None:
    require_bounded(json.dumps(["a"] * 9).encode(), JsonBounds(max_values=10))
    require_bounded(json.dumps([1] * 10).encode(), JsonBounds(max_numbers=10))
    for value in (["a"] * 10, [1] * 11):
        with pytest.raises(InvalidRequestError):
            require_bounded(json.dumps(value).encode(), JsonBounds(10, 10))


def test_deep_nesting_is_found_before_a_reader_falls_into_it() -> None:
    require_bounded(b"[" * 500 + b"]" * 500, ANY)
    for text in (b"[" * 600, b'{"a":' * 600):
        with pytest.raises(RecursionError):
            require_bounded(text, ANY)


def test_the_bounds_are_those_that_stand_here_to_the_value() -> None:
    assert DEFAULT_BOUNDS == JsonBounds() == JsonBounds(max_values=32_768, max_numbers=65_536)
    texts, numbers = (["a"] * 32_767, [1] * 65_536)
    for most in (texts, numbers):
        require_bounded(json.dumps(most).encode(), DEFAULT_BOUNDS)
        with pytest.raises(InvalidRequestError) as caught:
            require_bounded(json.dumps([*most, most[0]]).encode(), DEFAULT_BOUNDS)
        limit, what = (32_768, "texts, lists and objects") if most is texts else (65_536, "numbers")
        assert str(caught.value) == f"body is 'over {limit} {what}'; allowed: at most {limit} in one request"


@pytest.mark.parametrize("begin", [b"[", b'{"a":'])
def test_512_levels_are_read_and_one_more_is_not(begin: bytes) -> None:
    require_bounded(begin * 512, ANY)
    require_bounded(b"[" + b"[]," * 2000 + begin * 511, ANY)  # what has ended is no level
    with pytest.raises(RecursionError):
        require_bounded(begin * 513, ANY)
    with pytest.raises(RecursionError):
        require_bounded(b"[" + b"[]," * 2000 + begin * 512, ANY)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"a": {"deep": 1}, "b": [1, 1]}', "b"),
        (b'{"a": 1, "b": {"deep": [1, 1]}}', "b"),
        (b'[{"a": 1, "b": [1, 1]}]', "body"),
        (b'{"\xff": [1, 1, 1]}', "\ufffd"),
        (b'{"a" : "b", "c"\n:[1, 1, 1]}', "c"),
        (b'{"": [1, 1, 1]}', "body"),
    ],
)
def test_the_field_of_the_outermost_object_is_named_and_no_other(text: bytes, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        require_bounded(text, JsonBounds(max_numbers=2))
    assert caught.value.field == name
