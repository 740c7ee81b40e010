"""TextMatcher over a matcher of our own: what it asks, when it begins again with a lexer of its own, and what it keeps.

The stand-in knows the words of a small language letter by letter, tells its mask as the bytes of the letters that may
come next, and fails when the lexer that it shares has made too many states, as that of llguidance does.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.grammar.matcher import TextMatcher, one_line

WORDS = ("abc", "abd", "ax", "b", "ca")
LETTERS = {token: letter for token, letter in enumerate("abcdx")}
IDS = {letter: token for token, letter in LETTERS.items()}


class Lexer:
    """States that all matchers of a grammar make together; a state is made once."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.states: set[str] = set()


class Matcher:
    """A stand-in for `LLMatcher`. A failed one stays failed."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer
        self.text = ""
        self.error = ""

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error

    def is_stopped(self) -> bool:
        return self.is_error() or self.text in WORDS

    def _reach(self, text: str) -> bool:
        self.lexer.states.add(text)
        if len(self.lexer.states) > self.lexer.most:
            self.error = "LexerTooComplex:\n too many states <non-verbose/><backtrace> at 1"
        return not self.error

    def consume_tokens(self, tokens: list[int]) -> bool:
        for token in tokens:
            text = self.text + LETTERS[token]
            if not self.error and not any(word.startswith(text) for word in WORDS):
                self.error = "NoExtensionBias"
            if self.error or not self._reach(text):
                return False
            self.text = text
        return True

    def try_consume_tokens(self, tokens: list[int]) -> int:
        (token,) = tokens
        if not any(word.startswith(self.text + LETTERS[token]) for word in WORDS):
            return 0
        return int(self.consume_tokens(tokens))

    def rollback(self, count: int) -> None:
        assert count <= len(self.text)
        self.text = self.text[: len(self.text) - count]

    def compute_bitmask(self) -> bytes:
        if self.error or not self._reach(f"{self.text}?"):
            return b"garbage!"
        follow = {word[len(self.text)] for word in WORDS if word.startswith(self.text) and word != self.text}
        return mask_of(follow) + b"padding"


def mask_of(letters: set[str]) -> bytes:
    return sum(1 << IDS[letter] for letter in letters).to_bytes(2, "little")


def matcher(shared: Lexer | None = None, *, most: int = 1000) -> tuple[TextMatcher, list[Lexer], list[int]]:
    """A matcher, the lexers that it has had made, and the advances that it has told of."""
    made: list[Lexer] = []
    advances: list[int] = []

    def renew() -> Matcher:
        made.append(Lexer(most))
        return Matcher(made[-1])

    inner = Matcher(shared or Lexer())
    matcher = TextMatcher(
        inner,  # type: ignore[arg-type]
        2,
        renew=renew,  # type: ignore[arg-type]
        note_advance=advances.append,
        bytes_of=lambda token: bytes([token]),
    )
    return matcher, made, advances


def full(room: int = 0) -> Lexer:
    """A lexer that other texts have filled, but for some states."""
    lexer = Lexer(10 + room)
    lexer.states |= {f"other {number}" for number in range(10)}
    return lexer


def ids(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


words = st.sampled_from(sorted({word[:end] for word in WORDS for end in range(len(word) + 1)} - {""}))


@given(text=words, cuts=st.lists(st.integers(0, 3)), room=st.integers(0, 8))
def test_masks_are_those_of_the_text_alone_however_full_the_shared_lexer_is(
    text: str, cuts: list[int], room: int
) -> None:
    alone, _, _ = matcher()
    crowded, made, advances = matcher(full(room))
    done = 0
    for end in [*sorted({cut for cut in cuts if cut < len(text)}), len(text)]:
        for each in (alone, crowded):
            each.advance(ids(text[done:end]))
        assert alone.mask() == crowded.mask()
        done = end
    assert (alone.failure, crowded.failure) == ("", "")
    assert sum(advances) == len(text), "to begin again is no advance of the text"
    assert len(made) <= 1


def test_a_text_begins_again_once_and_then_tells_why_it_fails() -> None:
    text, made, _ = matcher(full(), most=2)
    text.advance(ids("a"))
    assert (text.failure, len(made)) == ("", 1)
    assert text.mask() == mask_of({"b", "x"})
    text.advance(ids("b"))
    assert text.failure == "LexerTooComplex: too many states"
    text.advance(ids("c"))
    text.mask()
    assert (text.failure, len(made)) == ("LexerTooComplex: too many states", 1)


def test_what_the_grammar_forbids_is_a_failure_with_any_lexer() -> None:
    text, made, _ = matcher()
    text.advance(ids("ab"))
    text.advance(ids("x"))
    assert (text.failure, len(made)) == ("no token can follow", 1)


@given(begun=words, drafts=st.text("abcdx", max_size=4), room=st.integers(0, 12))
def test_masks_behind_drafts_are_those_of_texts_that_have_gone_there(begun: str, drafts: str, room: int) -> None:
    for lexer in (Lexer(), full(room)):
        text, _, _ = matcher(lexer)
        text.advance(ids(begun))
        before = text.mask()
        found = text.masks_behind(ids(drafts))
        expected = []
        for end in range(1, len(drafts) + 1):
            here = begun + drafts[:end]
            if begun + drafts[: end - 1] in WORDS or not any(word.startswith(here) for word in WORDS):
                break
            there, _, _ = matcher()
            there.advance(ids(here))
            expected.append(there.mask())
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or lexer.most < 1000, "only for want of states it finds fewer"
        assert not text.failure
        assert text.mask() == before, "the text itself has not advanced"


@pytest.mark.parametrize(("room", "num_masks"), [(0, 2), (1, 0), (2, 0), (4, 1), (5, 2)])
def test_a_mask_that_the_lexer_had_no_room_for_is_not_returned(room: int, num_masks: int) -> None:
    """The text takes a state, and each draft one to reach it and one for its mask; without any, it begins again."""
    text, _, _ = matcher(full(room))
    text.advance(ids("a"))
    assert text.masks_behind(ids("bc")) == [mask_of({"c", "d"}), mask_of(set())][:num_masks]
    assert text.failure == ""


def test_no_mask_is_made_for_a_text_that_is_whole() -> None:
    text, _, _ = matcher()
    text.advance(ids("ax"))
    assert text.masks_behind(ids("a")) == []
    assert text.masks_behind([]) == []


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("a\n  b\tc", "a b c"),
        ("too big <non-verbose/>", "too big"),
        ("NoExtensionBias<backtrace>\n0: core::fmt", "no token can follow"),
        ("x" * 301, "x" * 300),
    ],
)
def test_a_message_of_the_library_becomes_one_line(message: str, line: str) -> None:
    assert one_line(message) == line
