"""Text that knows its authors: whatever is done to it, each character of a client stays the client's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from quire.engine.text import template_sandbox
from quire.engine.text.client_text import (
    CLIENT,
    TEMPLATE,
    ClientMarkup,
    ClientText,
    from_client,
    joined,
    owners_of,
    plain,
)
from support.template_trials import expressions

# Each author has letters, spaces and line breaks of its own, so that a character shows whose it is.
OURS, THEIRS = "abAß \n<|", "0§¤\u2003\u2028"
MIXED = st.text(OURS + THEIRS, max_size=12)
SHORT = st.text(OURS + THEIRS, min_size=1, max_size=2)
COUNTS = st.integers(-1, 3)
AUTHORS = {char: TEMPLATE for char in OURS} | {char: CLIENT for char in THEIRS}


def authors(text: str) -> str:
    return "".join(AUTHORS.get(char, TEMPLATE) for char in text)


def written(text: str) -> str:
    """A text whose owners are the authors of its characters."""
    owners = authors(text)
    if CLIENT not in owners:
        return text
    return ClientText(text, owners if TEMPLATE in owners else "")


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def same(result: Any, expected: Any) -> bool:
    """Whether a result is what `str` gives, each character with its author."""
    texts = list(texts_in(result))
    return result == expected and all(owners_of(text) == authors(text) for text in texts)


@given(MIXED, SHORT, MIXED, COUNTS)
def test_methods_give_what_those_of_str_give_with_the_authors(text: str, sought: str, new: str, count: int) -> None:
    own = ClientText(text, authors(text))
    for name, options in {
        "replace": [(sought, new), (sought, new, count)],
        "split": [(), (None, count), (sought,), (sought, count)],
        "rsplit": [(), (None, count), (sought,), (sought, count)],
        "splitlines": [(), (True,)],
        "partition": [(sought,)],
        "rpartition": [(sought,)],
        "removeprefix": [(sought,)],
        "removesuffix": [(sought,)],
        **{name: [(), (sought + new,)] for name in ("strip", "lstrip", "rstrip")},
        **{name: [(len(text) + 3,), (len(text) + 4, sought[0])] for name in ("center", "ljust", "rjust")},
    }.items():
        for option in options:
            ours = getattr(own, name)(*map(lambda each: written(each) if isinstance(each, str) else each, option))
            assert same(ours, getattr(text, name)(*option)), (name, option)
    for name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper", "zfill"):
        ours = getattr(own, name)(*([9] if name == "zfill" else []))
        assert ours == getattr(text, name)(*([9] if name == "zfill" else []))
        assert all(owner == CLIENT for char, owner in zip(ours, owners_of(ours), strict=True) if char in THEIRS)


@given(MIXED, MIXED, st.integers(-13, 13), st.integers(-13, 13), COUNTS)
def test_sums_products_and_parts_have_the_authors(text: str, other: str, start: int, end: int, times: int) -> None:
    own = ClientText(text, authors(text))
    assert same(own + written(other), text + other) and same(own * times, text * times)
    assert same(own[start:end], text[start:end]) and same(own[::-1], text[::-1]) and same(list(own), list(text))
    assert same(own.join([written(other)] * 3), text.join([other] * 3))
    assert own == text and hash(own) == hash(text) and str(own) is own and (not text or text[0] in own)


def rendered(source: str, **variables: Any) -> str:
    template, _ = template_sandbox.compile_template(source, lambda: datetime(2026, 1, 31))
    return joined("", list(template.generate(variables)))


@pytest.mark.parametrize(
    "source",
    [
        "{{ v }}|{{ v ~ 'b' }}{{ 'a' + v + 'b' }}{{ v * 2 }}{{ 2 * v }}",
        "{{ '%s<%s' % ('a', v) }}{{ '%(v)5s' % {'v': v} }}{{ '%s' | format(v) }}{{ '%-9s|' | format(v) }}",
        "{{ '{}<{:>9}|'.format('a', v) }}{{ '{v}'.format(v=v) }}",
        "{{ ['a', v, 'b'] | join('<') }}{{ ['a', 'b'] | join(v) }}{{ [{'k': v}] | join('', attribute='k') }}",
        "{{ '<'.join(['a', v]) }}{{ 'a<b'.replace('<', v) }}{{ 'a<b' | replace('<', v) }}{{ v | replace('0', 'a') }}",
        "{% for c in 'a' ~ v ~ 'b' %}{{ c }}{% endfor %}{{ v | list | join }}{{ v | reverse }}{{ v[0] }}",
        "{% set y %}a{{ v }}b{% endset %}{{ y }}{% macro f(x) %}<{{ x }}{{ caller() }}{% endmacro %}"
        "{% call f(v) %}a{{ v }}{% endcall %}{% filter upper %}a{{ v }}b{% endfilter %}",
        "{{ ('a' ~ v ~ 'b') | trim('b') | upper | string | center(20) }}{{ ('<a' ~ v) | safe }}",
        "{% for i in [1, 2] recursive %}{{ loop.cycle('a', v) }}{{ loop(['b']) if i == 1 }}{% endfor %}",
        "{{ {'a': v}.get('a') }}{{ {'a': v}.a }}{{ (namespace(x=v)).x }}{{ [v, 'a'] | sort | last }}{{ none or v }}",
    ],
)
@pytest.mark.parametrize("text", ["0§¤", "§", "a§<¤", "§ \u2003b"])
def test_templates_keep_the_authors(source: str, text: str) -> None:
    """Each character of the result has its author, and the text is the one that plain strings give."""
    ours = rendered(source, v=written(text))
    assert ours == rendered(source, v=text)
    assert owners_of(ours) == authors(plain(ours))


VALUES: list[Any] = [
    *(written("§¤§"), written("a§<b¤ "), "ab %s {}", ClientMarkup("§<"), Markup("a<"), 7, {written("§"): written("¤")}),
    *(written("§¤").upper, {"a": written("§")}.items()),
    *([written("§"), "a", written("¤b")], [[written("§a"), ("b", written("¤"))]]),
]


@pytest.mark.parametrize(
    "form", ["{{ %s }}", "{% for x in %s %}{{ x }}{% endfor %}", "{{ (%s) | map('trim') | join }}"]
)
def test_no_operation_gives_a_clients_character_to_the_template(form: str) -> None:
    """Every filter, test, method and operator, on every kind of value."""
    options = VALUES if form == "{{ %s }}" else VALUES[:3]
    num_rendered = 0
    for expression in dict.fromkeys(expressions()):
        source = form.replace("%s", f"({expression})")
        template, names = template_sandbox.compile_template(source, lambda: datetime(2026, 1, 31))
        for value in VALUES:
            for option in options if "a" in names else options[:1]:
                try:
                    pieces = list(template.generate({"v": value, "a": option, "b": written("¤a§")}))
                except Exception:  # most operations are not defined for most values
                    continue
                num_rendered += 1
                text = joined("", pieces)
                owners = owners_of(text)
                wrong = [
                    char for char, owner in zip(plain(text), owners, strict=True) if char in "§¤" and owner == TEMPLATE
                ]
                assert not wrong and len(owners) == len(text), (expression, value, option)
    assert num_rendered > 1000


def test_json_of_a_client_is_marked_at_every_depth() -> None:
    data = {"a": ["b", {"c": "d"}], "e": 1, "f": None, "g": ""}
    marked = from_client(data)
    assert marked == data
    texts = [*marked, *marked["a"][1], marked["a"][0], marked["a"][1]["c"]]
    assert all(isinstance(text, ClientText) for text in texts)
