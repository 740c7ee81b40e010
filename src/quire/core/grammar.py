"""Grammar: the form that an output must have.

A plain value, as it travels: in the parameters of a request, in messages, in the step log. What it says is known to
`quire.compute.grammar` alone, which compiles it over the tokens of a model; here it is a kind and a text. So nothing
is checked here but that there is a text at all: `quire.core.validate` checks what can be checked without a tokenizer,
and every door has the rest checked, by a `GrammarChecker`, before it enqueues anything.

    json_schema   a JSON Schema: one JSON value, its properties in the order of the schema
    regex         a regular expression that the whole text matches, in the syntax of Rust's regex crate
    lark          a context-free grammar: Lark, as llguidance reads it, with %json {…} and special tokens <name> inside

A list of choices is written as a regular expression: of 5,000 texts, that compiles as fast as alternatives of Lark, and
answers a hundred times as fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from quire.core.errors import InvalidRequestError

GrammarKind = Literal["json_schema", "regex", "lark"]
ESCAPES: Final = str.maketrans({letter: f"\\{letter}" for letter in r"\.+*?()|[]{}^$/&~#-"})
"""How letters are written that a regular expression does not read as themselves."""

GRAMMAR_KINDS: Final[tuple[GrammarKind, ...]] = ("json_schema", "regex", "lark")

CANNOT_HOLD: Final = "the text cannot be held to its grammar"
"""How the error of a text begins whose grammar takes more than it may: its client's doing, not the engine's."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text is held to.

    Its text belongs to a client, so `repr` does not show it: it must not get into a log. The `owner` is the tenant who
    sent it, as the door says: whatever is remembered of grammars is remembered for each owner apart.

    >>> Grammar.json_schema({"type": "integer"})
    Grammar(kind='json_schema')
    >>> Grammar.choice(["yes", "no"]).text
    'yes|no'
    """

    kind: GrammarKind
    text: str = field(repr=False)
    owner: str = field(default="", repr=False)

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of JSON objects, whatever is in them."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | str) -> Grammar:
        """Return the grammar of JSON values that a schema allows; the schema may come as text. Does not mutate."""
        return cls("json_schema", schema if isinstance(schema, str) else _json_text(schema))

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches as a whole."""
        return cls("regex", text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of just these texts, at least one of them."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError("grammar", texts, "at least one text to choose from, and none of them empty")
        return cls("regex", "|".join(text.translate(ESCAPES) for text in dict.fromkeys(texts)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar in the dialect of Lark that llguidance reads."""
        return cls("lark", text)


class GrammarChecker(Protocol):
    """Knows which grammars an engine can hold texts to."""

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason, unless texts can be held to it; from any thread.

        What takes long is kept: asking twice costs once.
        """
        ...

    def knows(self, grammar: Grammar) -> bool:
        """Return whether `check` would answer at once; from any thread."""
        ...

    def condemn(self, grammar: Grammar, reason: str) -> None:
        """Refuse a grammar from now on, because a text could not be held to it; from any thread."""
        ...

    def close(self) -> None:
        """Let go what checking has started. May be called twice."""
        ...


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
        raise InvalidRequestError("grammar", found, "a JSON Schema that can be written as JSON") from error
