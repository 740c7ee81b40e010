"""WordWrap: no word is lost or broken, no line is too long, and it does not matter in which pieces a text comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.word_wrap import WordWrap, columns_of

WORDS = st.text(alphabet="abé字😀\u0301", min_size=1, max_size=6)


def wrapped(pieces: list[str], columns: int) -> str:
    written: list[str] = []
    wrap = WordWrap(written.append, columns)
    for piece in pieces:
        wrap.write(piece)
    wrap.end()
    assert "" not in written
    return "".join(written)


@given(st.lists(st.lists(WORDS, max_size=12), max_size=5), st.integers(14, 30), st.data())
def test_lines_are_short_and_words_whole(paragraphs: list[list[str]], columns: int, data: st.DataObject) -> None:
    text = "\n".join(" ".join(words) for words in paragraphs)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = wrapped(pieces, columns)
    assert shown == wrapped([text], columns)
    assert "".join(shown.split()) == "".join(text.split())
    assert all(sum(map(columns_of, line)) <= columns for line in shown.split("\n"))
    assert shown.count("\n") >= text.count("\n")
    narrow = [word for words in paragraphs for word in words if not any(columns_of(each) == 2 for each in word)]
    assert set(narrow) <= set(shown.replace("\n", " ").split(" "))


def test_indentation_stays_and_the_blank_at_a_break_goes() -> None:
    assert wrapped(["  - one two three four"], 12) == "  - one two\nthree four"
    assert wrapped(["a\tb"], 12) == "a    b"


def test_code_in_a_fence_and_long_words_pass_unchanged() -> None:
    code = "```python\nprint('a very long line of code', 1)\n```\n"
    assert wrapped([code + "one two three"], 8) == code + "one two\nthree"
    address = "http://example.org/a/very/long/address"
    assert wrapped([f"see {address} now"], 12) == f"see\n{address} now"


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x1b[2J", "\r", "\x9b31m", "\x00\x08"])
def test_control_characters_do_not_reach_the_terminal(text: str) -> None:
    shown = wrapped([f"a{text}b ```\n```\n{text}\n```"], 40)
    assert not {"\x1b", "\x07", "\r", "\x9b", "\x00", "\x08"} & set(shown)
