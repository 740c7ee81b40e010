"""GBNF against a plain reader of the same grammars: which texts are allowed, whole and as beginnings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from quire.compute.grammar.compilation import compile_grammar
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.trial_child import ByteTokens
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.serve.translate.gbnf import MAX_LENGTH, lark_of
from support.growth import is_linear

ALPHABET = "ab"
LONGEST = 5
Texts = frozenset[str]

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""JSON objects, as grammars for llama.cpp have them."""


class Node:
    """A part of a grammar: how it is written, and the texts of it, up to a length."""

    def __init__(self, kind: str, *parts: object) -> None:
        self.kind, self.parts = kind, parts

    def __str__(self) -> str:
        parts = [str(part) for part in self.parts]
        match self.kind:
            case "text":
                return f'"{parts[0]}"'
            case "letters":
                return f"[{parts[0]}]"
            case "rule":
                return f"rule-{parts[0]}"
            case "one of":
                return "( " + " | ".join(parts) + " )"
            case "row":
                return "( " + " ".join(parts) + " )"
        return f"({parts[0]}){parts[1]}"

    def texts(self, rules: dict[int, Texts]) -> Texts:
        """Return its texts, those of rules being known so far."""
        match self.kind:
            case "text" | "letters":
                return frozenset([self.parts[0]] if self.kind == "text" else self.parts[0])  # type: ignore[list-item, arg-type]
            case "rule":
                return rules[self.parts[0]]  # type: ignore[index]
            case "one of":
                return frozenset().union(*(part.texts(rules) for part in self.parts))  # type: ignore[attr-defined]
            case "row":
                return joined([part.texts(rules) for part in self.parts])  # type: ignore[attr-defined]
        inner = self.parts[0].texts(rules)  # type: ignore[attr-defined]
        least, most = {
            "*": (0, LONGEST),
            "+": (1, LONGEST),
            "?": (0, 1),
            "{2}": (2, 2),
            "{1,}": (1, LONGEST),
            "{0,2}": (0, 2),
        }[
            self.parts[1]  # type: ignore[index]
        ]
        return frozenset().union(*(joined([inner] * count) for count in range(least, most + 1)))


def joined(parts: list[Texts]) -> Texts:
    found: Texts = frozenset([""])
    for part in parts:
        found = frozenset(a + b for a, b in itertools.product(found, part) if len(a + b) <= LONGEST)
    return found


def draw(rng: random.Random, depth: int, num_rules: int) -> Node:
    kind = rng.choice(
        ["text", "letters", "rule"] if depth == 0 else ["text", "letters", "rule", "one of", "row", "row", "times"]
    )
    if kind == "text":
        return Node("text", "".join(rng.choices(ALPHABET, k=rng.choice([0, 1, 1, 2]))))
    if kind == "letters":
        return Node("letters", rng.choice(["a", "b", "ab"]))
    if kind == "rule":
        return Node("rule", rng.randrange(num_rules))
    if kind == "times":
        return Node("times", draw(rng, depth - 1, num_rules), rng.choice(["*", "+", "?", "{2}", "{1,}", "{0,2}"]))
    return Node(kind, *(draw(rng, depth - 1, num_rules) for _ in range(rng.choice([1, 2, 3]))))


def texts_of(rules: list[Node]) -> Texts:
    known: dict[int, Texts] = {index: frozenset() for index in range(len(rules))}
    while True:
        after = {index: rule.texts(known) for index, rule in enumerate(rules)}
        if after == known:
            return known[0]
        known = after


class Reader:
    """Says whether texts are of a grammar."""

    def __init__(self, gbnf: str) -> None:
        from llguidance import LLTokenizer

        self._tokens = ByteTokens(300, {299: "<end>"}, 299)
        tokenizer = LLTokenizer(self._tokens, eos_token=[299])
        self._matcher = compile_grammar(tokenizer, Grammar.lark(lark_of(gbnf, "grammar")), GrammarLimits())

    def is_begun(self, text: str) -> bool:
        self._matcher.reset()
        ids = self._tokens(text)
        return self._matcher.try_consume_tokens(ids) == len(ids)

    def is_whole(self, text: str) -> bool:
        return self.is_begun(text) and self._matcher.is_accepting()


@pytest.mark.parametrize("seed", range(150))
def test_the_same_texts_are_allowed_as_by_a_plain_reader(seed: int) -> None:
    rng = random.Random(seed)
    num_rules = rng.choice([1, 2, 3])
    rules = [draw(rng, 3, num_rules) for _ in range(num_rules)]
    expected = texts_of(rules)
    lines = ["root ::= rule-0"] + [f"rule-{index} ::= {rule}" for index, rule in enumerate(rules)]
    if not expected:
        return  # what has no short text may have none
    reader = Reader("\n".join(lines))
    for length in range(LONGEST + 1):
        for text in map("".join, itertools.product(ALPHABET, repeat=length)):
            assert reader.is_whole(text) == (text in expected), (text, lines)
    for text in expected:
        for length in range(len(text)):
            assert reader.is_begun(text[:length]), (text, lines)


def test_the_grammar_that_everybody_has() -> None:
    reader = Reader(JSON)
    for text in ('{"a": 1}', "{}", '{"a": [1.5e3, "x\\n\\u00e4"], "b": {"c": null}}\n\t', '{"ü": true}'):
        assert reader.is_whole(text), text
    for text in ('{"a": 01}', "[]", '{"a" 1}', '{"a": "\n"}', '{"a": "\\x"}'):
        assert not reader.is_begun(text), text


def test_characters_are_those_that_the_escapes_say() -> None:
    reader = Reader(r'root ::= "\x41\u00e9\U0001F600\"\\\t" [\]\-^a-c] [^\x5b-\x5D] . [-x] "/" ["/]')
    assert reader.is_whole('Aé😀"\\\t' + "]" + "é" + "\n" + "-" + "/" + "/")
    assert reader.is_whole('Aé😀"\\\t' + "^" + "^" + "😀" + "x" + "/" + '"')
    for wrong in ("Ae", 'Aé😀"\\\td', 'Aé😀"\\\t-['):
        assert not reader.is_begun(wrong)


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("", "the rule root is missing"),
        ('a ::= "x"', "the rule root is missing"),
        ('"x" root ::= "y"', "text before the first rule"),
        ("root ::= b", "the rule b is not defined"),
        ('root ::= "x"\nroot ::= "y"', "the rule root is defined twice"),
        ('root ::= ("x"', "a ( without a )"),
        ('root ::= ("x"\nb ::= "y")', "a ( without a )"),
        ('root ::= "x")', "a ) without a ("),
        ("root ::= *", "a repetition has nothing to repeat"),
        ('root ::= "x" | +', "a repetition has nothing to repeat"),
        ('root ::= "x"{3,2}', "the repetition {3,2} has its maximum below its minimum"),
        ('root ::= "x', "line 1 cannot be read at '\"x'"),
        ('root ::= "x"\n%', "line 2 cannot be read at '%'"),
        ("root ::= []", "a class [] is empty"),
        (r'root ::= "\q"', r"unknown escape \q"),
        (r'root ::= "\ud800"', r"\ud800 is not a character"),
        (r'root ::= "\U00110000"', r"\U00110000 is not a character"),
        ('root ::= "x"{9999999}', "line 1 cannot be read at '{9999999}'"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(gbnf: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        lark_of(gbnf, "grammar")
    assert str(caught.value).endswith(f"allowed: a grammar in GBNF: {reason}")
    assert "\n" not in str(caught.value)


def test_a_long_grammar_is_refused_by_its_length() -> None:
    with pytest.raises(InvalidRequestError, match=rf"at most {MAX_LENGTH} characters"):
        lark_of("root ::= " + '"x" ' * MAX_LENGTH, "grammar")


def test_any_text_is_translated_or_refused() -> None:
    rng = random.Random(1)
    pieces = [
        "root ::= ",
        "b ::= ",
        '"',
        "[",
        "]",
        "(",
        ")",
        "|",
        "*",
        "{2}",
        "{",
        "}",
        "\\",
        "a",
        " ",
        "\n",
        "#",
        "^",
        "-",
        "::=",
        ".",
    ]
    num_taken = 0
    for _ in range(5000):
        text = "root ::= " + "".join(rng.choices(pieces, k=rng.randrange(12)))
        try:
            lark_of(text, "grammar")
        except InvalidRequestError:
            continue
        num_taken += 1
    assert num_taken > 100
    for piece in pieces:
        with suppress(InvalidRequestError):
            lark_of("root ::= " + piece * (MAX_LENGTH // len(piece) - 10), "grammar")


def test_two_rules_never_have_one_name() -> None:
    grammar = lark_of('root ::= a-b-2 a-b a_b\na-b-2 ::= "x"\na-b ::= "y"\na_b ::= "z"\nA_B ::= "u"', "grammar")
    assert grammar.splitlines() == [
        "start: rule_a_b_2 rule_a_b rule3_a_b",
        "rule_a_b_2: /x/",
        "rule_a_b: /y/",
        "rule3_a_b: /z/",
        "rule4_a_b: /u/",
    ]


@pytest.mark.parametrize(
    "text",
    [
        lambda size: "root ::= .\n" + "".join(f"r{index}::=.\n" for index in range(size // 5)),
        lambda size: "root ::= .\n" + "".join(f"r{index:b}::=.\n".replace("0", "-") for index in range(size // 10)),
        lambda size: "root ::= .{1," + " " * size,
        lambda size: "root ::= .{" + " " * size + "1" + " " * size,
        lambda size: "root ::= " + "a" * size,
        lambda size: "root ::= a" + " " * size,
        lambda size: "root ::= " + "a::" * (size // 3),
        lambda size: 'root ::= "' + "\\" * size,
        lambda size: "root ::= [" + "a-" * (size // 2) + "]",
        lambda size: "root ::= " + "(" * size,
    ],
)
def test_reading_takes_time_in_proportion_to_the_text(text: Callable[[int], str]) -> None:
    def read(size: int) -> None:
        with suppress(InvalidRequestError):
            lark_of(text(size), "grammar")

    assert is_linear(read, MAX_LENGTH // 5)
