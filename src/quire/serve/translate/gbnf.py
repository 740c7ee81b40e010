"""Translates GBNF, llama.cpp's grammars, into llguidance's Lark.

    root ::= "no" | [0-9]+ ws            start: (/n/ /o/) | /[0-9]/+ rule_ws
    ws   ::= [ ]*                 ──►    rule_ws: /[ ]/*

Both write alternatives, groups and repetitions in the same way, so a grammar is translated token by token: rule names
are made valid in Lark, and characters are escaped as in Lark. A rule ends where the next one begins. Each letter is its
own terminal, because GBNF has no words: "if" can be the start of "iffy".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from quire.core.errors import InvalidRequestError

MAX_LENGTH: Final = 32 << 10
"""Maximum characters of a grammar: the event loop parses it."""
TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<rule>[\w-]+)[ \t]*::=
    |(?P<name>[\w-]+)
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<letters>(?:[^\]\\]|\\.)*)\]
    |(?P<any>\.)
    |\{[ ]*+(?P<least>\d{1,6})[ ]*+(?:(?P<comma>,)[ ]*+(?P<most>\d{0,6})[ ]*+)?\}
    |(?P<mark>[|()*+?])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
NAMED: Final = {"n": "\n", "r": "\r", "t": "\t"}
LARGEST: Final = 0x10FFFF
OPEN: Final = frozenset({"|", "("})
"""Marks after which an alternative begins. It also begins at the start of a rule."""


class _Letter(NamedTuple):
    """A character of a class; an escaped one never marks a range or a complement."""

    text: str
    is_escaped: bool


def lark_of(gbnf: str, field: str) -> str:
    r"""Return the same grammar in Lark; raises `InvalidRequestError`, which names `field`. Does not mutate.

    >>> print(lark_of('root ::= "a" ws-2 | [^"\\x5d]{2}\nws-2 ::= [ ]*', "grammar"))
    start: /a/ rule_ws_2 | /[^"\]]/{2,2}
    rule_ws_2: /[ ]/*
    """
    if len(gbnf) > MAX_LENGTH:
        raise InvalidRequestError(field, f"{len(gbnf)} characters", f"at most {MAX_LENGTH} characters of GBNF")
    try:
        return _translated(gbnf)
    except ValueError as error:
        raise InvalidRequestError(field, gbnf, f"a grammar in GBNF: {error}") from None


def _translated(gbnf: str) -> str:
    tokens = list(_tokens(gbnf))
    names: dict[str, str] = {}
    given: set[str] = set()
    for token in tokens:
        if (name := token["rule"]) is not None:
            if name in names:
                raise ValueError(f"the rule {name} is defined twice")
            names[name] = _rule_name(name, given)
            given.add(names[name])
    if "root" not in names:
        raise ValueError("the rule root is missing")
    pieces: list[str] = []
    depth, is_begun = 0, False  # depth of groups; whether the alternative has content
    for token in tokens:
        if (name := token["rule"]) is not None:
            _end_alternative(pieces, is_begun, depth)
            pieces.append(f"\n{names[name]}:")
            is_begun = False
            continue
        if not pieces:
            raise ValueError("text before the first rule")
        mark = token["mark"]
        if mark in ("|", ")") and not is_begun:
            pieces.append('""')
        if mark == "(":
            depth += 1
        elif mark == ")":
            depth -= 1
            if depth < 0:
                raise ValueError("a ) without a (")
        elif (mark in ("*", "+", "?") or token["least"] is not None) and not is_begun:
            raise ValueError("a repetition has nothing to repeat")
        pieces.append(_piece(token, names))
        is_begun = mark not in OPEN
    _end_alternative(pieces, is_begun, depth)
    return _joined(pieces)


def _end_alternative(pieces: list[str], is_begun: bool, depth: int) -> None:
    """End a rule. Mutates."""
    if depth:
        raise ValueError("a ( without a )")
    if pieces and not is_begun:
        pieces.append('""')


def _tokens(gbnf: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(gbnf):
        match = TOKEN.match(gbnf, place)
        if match is None:
            line = gbnf.count("\n", 0, place) + 1
            raise ValueError(f"line {line} cannot be read at {gbnf[place : place + 20]!r}")
        if match["space"] is None:
            yield match
        place = match.end()


def _rule_name(name: str, taken: set[str]) -> str:
    if name == "root":
        return "start"
    wanted = re.sub(r"\W|-", "_", name).lower()
    return f"rule_{wanted}" if f"rule_{wanted}" not in taken else f"rule{len(taken)}_{wanted}"


def _piece(token: re.Match[str], names: dict[str, str]) -> str:
    if (name := token["name"]) is not None:
        if name not in names:
            raise ValueError(f"the rule {name} is not defined")
        return names[name]
    if (text := token["text"]) is not None:
        return _literal("".join(letter.text for letter in _letters(text)))
    if (letters := token["letters"]) is not None:
        return _letter_class(list(_letters(letters)))
    if token["any"] is not None:
        return r"/(?s:.)/"
    if (least := token["least"]) is not None:
        most = token["most"] if token["comma"] else least
        if most and int(most) < int(least):
            raise ValueError(f"the repetition {token[0]} has its maximum below its minimum")
        return f"{{{int(least)},{most}}}"
    return token["mark"]


def _letters(text: str) -> Iterator[_Letter]:
    for match in ESCAPE.finditer(text):
        code = match[1] or match[2] or match[3]
        if code is not None:
            number = int(code, 16)
            if number > LARGEST or 0xD800 <= number < 0xE000:
                raise ValueError(f"{match[0]} is not a character")
            yield _Letter(chr(number), is_escaped=True)
        elif match[4] is not None:
            if match[4] not in 'nrt"\\[]-^':
                raise ValueError(f"unknown escape {match[0]}")
            yield _Letter(NAMED.get(match[4], match[4]), is_escaped=True)
        else:
            yield _Letter(match[5], is_escaped=False)


def _literal(text: str) -> str:
    """Return a text letter by letter: a terminal for the whole word would hide letters from other rules."""
    letters = [f"/{_escaped(letter)}/" for letter in text]
    return '""' if not letters else letters[0] if len(letters) == 1 else f"({' '.join(letters)})"


def _letter_class(letters: list[_Letter]) -> str:
    if not letters or (len(letters) == 1 and letters[0] == _Letter("^", is_escaped=False)):
        raise ValueError("a class [] is empty")
    first = letters[0]
    is_complement = first == _Letter("^", is_escaped=False)
    rest = letters[1:] if is_complement else letters
    shown = [
        "-" if letter == _Letter("-", is_escaped=False) and 0 < index < len(rest) - 1 else _escaped(letter.text)
        for index, letter in enumerate(rest)
    ]
    return f"/[{'^' if is_complement else ''}{''.join(shown)}]/"


def _escaped(letter: str) -> str:
    """Return a character escaped for a regular expression in Lark."""
    if letter.isalnum() or letter in " _,;:'\"<>=!%@`":
        return letter
    if letter.isascii() and letter.isprintable():
        return f"\\{letter}"
    return f"\\x{{{ord(letter):X}}}"


def _joined(pieces: list[str]) -> str:
    """Return pieces as lines, each repetition directly after its element."""
    text = ""
    for piece in pieces:
        text += piece if piece[0] in "\n*+?{" else f" {piece}"
    return text.lstrip("\n")
