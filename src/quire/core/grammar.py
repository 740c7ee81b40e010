"""Grammar: the form that an output must have.

A plain value, for the parameters of a request, messages and the step log: a kind and a text. Only
`quire.compute.grammar` understands the text, and compiles it over the tokens of a model. So this module does not check
the text. `quire.core.validate` checks what it can without a tokenizer, and every door has a `GrammarChecker` for the
rest, which it calls before it enqueues anything.

    json_schema   a JSON Schema: one JSON value, its properties in the order of the schema
    regex         a regular expression that the whole text matches, in the syntax of Rust's regex crate
    lark          a context-free grammar: Lark, as llguidance reads it, with %json {…} and special tokens <name> inside

A list of choices is written as a regular expression: with 5,000 texts, it compiles as fast as alternatives in Lark, and
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
"""The escapes of characters that are special in a regular expression."""

GRAMMAR_KINDS: Final[tuple[GrammarKind, ...]] = ("json_schema", "regex", "lark")

CANNOT_HOLD: Final = "the text's grammar cannot be enforced"
"""The start of the error of a text whose grammar exceeds its limits: the client's fault, not the engine's."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a text must have.

    The text belongs to a client and must not get into a log, so `repr` does not show it. The `owner` is the tenant who
    sent it, set by the door: everything cached about grammars is separate for each owner.

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
        """Return the grammar of JSON objects with any content."""
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
            raise InvalidRequestError("grammar", texts, "at least one text to choose from, and no empty text")
        return cls("regex", "|".join(text.translate(ESCAPES) for text in dict.fromkeys(texts)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar in the dialect of Lark that llguidance reads."""
        return cls("lark", text)


class GrammarChecker(Protocol):
    """Decides which grammars an engine can enforce."""

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason unless texts can follow the grammar; from any thread.

        Caches the result, so a second call is cheap.
        """
        ...

    def knows(self, grammar: Grammar) -> bool:
        """Return whether `check` would return at once; from any thread."""
        ...

    def condemn(self, grammar: Grammar, reason: str) -> None:
        """Refuse a grammar from now on, because a text could not follow it; from any thread."""
        ...

    def close(self) -> None:
        """End the processes that check grammars. May be called twice."""
        ...


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InvalidRequestError("grammar", problem, "a JSON Schema that can be written as JSON") from error
