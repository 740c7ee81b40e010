"""Compiles one grammar over a vocabulary, within limits."""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.matcher import one_line
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Where JSON allows white space, allow at most one space: models write it so, and none can write spaces forever.
JSON_SPACE: Final = " ?"
KINDS: Final = MappingProxyType({"json_schema": "a schema", "regex": "a regular expression", "lark": "a grammar"})
EXCERPT: Final = re.compile(r"\n *[0-9]+ \| ")
# If only one text can follow, llguidance would tokenize it and allow only the first token. Any matching token is
# equally correct, and the model should choose. This is cheaper too, and for some tokenizers forcing panics.
NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar, limits: GrammarLimits) -> LLMatcher:
    """Return a matcher of an empty text; raises `InvalidRequestError` with the reason if that fails.

    Also makes the first mask, which shows whether any text matches the grammar. Releases the GIL.
    """
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits.for_library())
    except ValueError as error:
        raise _refusal(grammar, str(error)) from error
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher


def _source(grammar: Grammar) -> str:
    """Return the grammar in llguidance's Lark; raises `ValueError` if a schema is not JSON."""
    from llguidance import LLMatcher

    if grammar.kind == "lark":
        return grammar.text + NO_FORCING
    if grammar.kind == "regex":
        converted = json.loads(LLMatcher.grammar_from_regex(grammar.text))
        return str(converted["grammars"][0]["lark_grammar"]) + NO_FORCING
    converted = json.loads(
        LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": JSON_SPACE})
    )
    return f"start: %json {json.dumps(converted['grammars'][0]['json_schema'])}{NO_FORCING}"


def _refusal(grammar: Grammar, message: str) -> InvalidRequestError:
    """Return the error for a message of llguidance, without its excerpts: most are from text that quire wrote."""
    reason = (
        one_line(EXCERPT.split(message)[0]).removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ")
    )
    reason = reason.replace("no token can follow", "no text matches it")
    return InvalidRequestError("grammar", grammar.text, f"{KINDS[grammar.kind]} that can be compiled: {reason}")
