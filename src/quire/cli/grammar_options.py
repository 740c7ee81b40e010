"""The form that a text must have, as options of a command: JSON, a schema, a regular expression, choices, a grammar."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Final

from quire.cli.session import in_utf8
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar

FILE_MARK: Final = "@"


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, of which a command can have one. Mutates the parser."""
    group = parser.add_argument_group("form of the text", f"{FILE_MARK}FILE instead of a text reads it from a file")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("json",), help="a JSON object")
    form.add_argument("--json-schema", metavar="SCHEMA", help="JSON that this schema allows")
    form.add_argument("--regex", metavar="TEXT", help="text that this regular expression matches")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeat it for each")
    form.add_argument("--grammar", metavar="TEXT", help="text of this grammar, in the GBNF of llama.cpp or in Lark")


def grammar(arguments: argparse.Namespace) -> Grammar | None:
    """Return the grammar of the given option, or None. Raises `InvalidRequestError` if it is not valid."""
    if arguments.format is not None:
        return Grammar.json_object()
    if arguments.json_schema is not None:
        return Grammar.json_schema(_schema(_text(arguments.json_schema)))
    if arguments.regex is not None:
        return Grammar.regex(_text(arguments.regex))
    if arguments.choice is not None:
        return Grammar.choice(arguments.choice)
    if arguments.grammar is not None:
        from quire.serve.translate.grammar import held_to_grammar

        return held_to_grammar(_text(arguments.grammar), "grammar").grammar
    return None


def _text(given: str) -> str:
    if not given.startswith(FILE_MARK):
        return given
    path = Path(given.removeprefix(FILE_MARK))
    return in_utf8(partial(path.read_text, encoding="utf-8"), str(path))


def _schema(text: str) -> dict[str, object]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequestError("json_schema", text, "a JSON schema: the text of an object, or @FILE")
    return schema
