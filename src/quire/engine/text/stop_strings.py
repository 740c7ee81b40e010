"""Stop strings in a text that arrives in pieces.

The text ends at the first place where a stop string ends; if several end there, the longest counts. Only this rule
needs no look-ahead, so the text does not depend on how the pieces are cut: with the stop strings "bc" and "abcd" the
text "abcd" stops at "bc", whether it arrives at once or letter by letter. ("The stop string that begins first" would
have to wait, after "abc", for a letter that the model may never write.)

    stop "</end>"      text so far: "so it is</e"
                                             └─┘ held back: it could begin the stop string
                                     └──────┘ safe: emitted

Each string is matched by the method of Knuth, Morris and Pratt: a character takes amortised O(1) steps per stop string.
Searching the held-back text again after every token would be quadratic for long stop strings.
"""

from __future__ import annotations

from quire.core.errors import InvalidRequestError


class StopStrings:
    """Finds the first of several stop strings in a stream of text. Mutable; one per sequence.

    >>> stops = StopStrings(("END",))
    >>> stops.push("the E"), stops.push("ast EN"), stops.push("D of it"), stops.matched
    ('the ', 'East ', '', 'END')
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool = False) -> None:
        if "" in stop:
            raise InvalidRequestError("stop", stop, "strings of at least one character")
        self.matched: str | None = None
        self._matchers = [_Matcher(text) for text in stop]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text; return the text that can be shown now. After a match all text is dropped. Mutates the stream.

        With `may_end` False, a stop string that ends in `text` is ordinary text. One can still begin there.
        """
        if self.matched is not None or not self._matchers:
            return text if self.matched is None else ""
        for position, char in enumerate(text):
            found = [matcher.text for matcher in self._matchers if matcher.advance(char)]
            if found and may_end:
                return self._stop(max(found, key=len), text[: position + 1])
        return self._hold(self._held + text)

    def finish(self) -> str:
        """End the stream; return the text that was held back. Mutates the stream."""
        held, self._held = self._held, ""
        return held

    def _stop(self, matched: str, text: str) -> str:
        self.matched = matched
        shown, self._held = self._held + text, ""
        return shown if self._include else shown[: len(shown) - len(matched)]

    def _hold(self, text: str) -> str:
        # A stop string that is part of the output need not be held back.
        num_held = 0 if self._include else max(matcher.length for matcher in self._matchers)
        safe = len(text) - num_held
        self._held = text[safe:]
        return text[:safe]


class _Matcher:
    """One stop string, and the length of its prefix at the end of the text."""

    __slots__ = ("text", "length", "_fallback")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._fallback = _fallback_lengths(text)

    def advance(self, char: str) -> bool:
        """Add a character; return whether the stop string ends with it. Mutates the matcher."""
        length = self.length
        while length and self.text[length] != char:
            length = self._fallback[length - 1]
        if self.text[length] == char:
            length += 1
        found = length == len(self.text)
        self.length = self._fallback[-1] if found else length
        return found


def _fallback_lengths(text: str) -> list[int]:
    """Return, for each prefix of `text`, the length of its longest proper suffix that is also a prefix of `text`."""
    lengths = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = lengths[length - 1]
        if text[length] == text[position]:
            length += 1
        lengths[position] = length
    return lengths
