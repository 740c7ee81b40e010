"""Texts of a model as scripts, cut anywhere, with everything that an answer may have: for tests of what is rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from quire.engine.outputs import CompletionDelta, Logprob
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.reasoning import THINK
from quire.serve.tools.base import Tool, ToolChoice
from quire.serve.tools.hermes import HERMES
from support.scripted_model import Script, delta
from support.tiny_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level())
PROMPTS = {"thinks": "<think>\n", "answers": "</think>\n", "may think": "assistant\n"}

BITS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "é", "😀", "\u2028", '"', "{", "}"),
        *("So.", "<thi", "</", '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'),
        *('<tool_call>\n{"name": "add", "arguments": {"a": "b"}}\n</tool_call>', '{"name": "none"}', "data: "),
    ]
)
PIECES = st.lists(
    st.tuples(st.lists(BITS, max_size=4).map("".join), st.lists(st.integers(0, 300), max_size=3)),
    min_size=1,
    max_size=7,
)
"""One text: its pieces, each with the tokens that brought it."""

ENDS = st.sampled_from([("stop", None), ("stop", "end"), ("stop", 7), ("length", None)])
TEXTS = st.lists(st.tuples(PIECES, ENDS), min_size=1, max_size=2)


def entry(token_id: int) -> dict[int, Logprob]:
    """What the engine tells of a token: itself, then others."""
    others = {token_id + 1: Logprob(-0.1, 1, f"<{token_id + 1}>"), token_id + 2: Logprob(-9.0, 3, "far")}
    return {token_id: Logprob(-1.5, 2, f"<{token_id}>")} | others


def script_of(texts: Sequence[Any]) -> Script:
    """All texts of one prompt, in turns, each with log-probabilities."""
    script, generated = [], 0
    for turn in range(max(len(pieces) for pieces, _ in texts)):
        outputs = []
        for index, (pieces, (reason, stop)) in enumerate(texts):
            if turn < len(pieces):
                text, ids = pieces[turn]
                generated += len(ids)
                is_last = turn == len(pieces) - 1
                known = [entry(token_id) for token_id in ids]
                end = {"finish_reason": reason, "stop_reason": stop} if is_last else {}
                outputs.append(CompletionDelta(index, text, ids, known, **end))
        script.append(delta(*outputs, generated=generated, cached=1))
    return script


def form(mode: Any, *, calls: bool = True, thinks: bool = True) -> AnswerForm:
    tools = (Tool("add", {}), Tool("now", {}))
    return AnswerForm(ToolChoice(mode, tools), HERMES if calls else None, THINK if thinks else None, TOKENIZER)


FORMS = st.one_of(
    st.none(),
    st.builds(form, st.sampled_from(["auto", "required", "named"]), calls=st.booleans(), thinks=st.booleans()),
)
