"""Calls written at random under the grammar of a format: each is read back, and is one that its schema allows."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken

from quire.compute.grammar.compilation import compile_grammar
from quire.compute.grammar.limits import GrammarLimits
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.engine.text.chat_template import ChatTemplate
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.reader import ReadAnswer
from quire.serve.reasoning import COMMAND, GEMMA4, THINK
from quire.serve.tools import TOOL_FORMATS
from quire.serve.tools.base import ReasoningFormat, Thinking, ToolChoice, ToolFormat
from quire.serve.tools.gemma4 import GEMMA4 as GEMMA4_CALLS
from quire.serve.tools.harmony import HARMONY
from quire.serve.tools.lfm2 import KEY, LFM2
from quire.serve.translate.tools import tool_choice_of
from support.random_schemas import SchemaMaker, failure_of
from support.tiny_tokenizer import byte_level

CITIES = ("Rome", 'New "York"', "Zürich")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
MARKS = ("</think>", *COMMAND.marks, *GEMMA4.marks, *(mark for each in TOOL_FORMATS for mark in each.marks))
MAX_TOKENS = 5_000
NOT_NAMES = ('"":', 'quo\\"te', "line\\nbreak")
"""Names of random schemas that calls of Gemma 4 cannot have."""


def cannot_name(tool_format: ToolFormat, schema: dict[str, Any]) -> bool:
    """Return whether a format has no calls with the names of a schema; in LFM2, arguments need names."""
    if tool_format is not LFM2:
        return any(wrong in json.dumps(schema) for wrong in NOT_NAMES)
    properties = schema.get("properties")
    return not properties or not all(map(KEY.fullmatch, properties))


@dataclass(frozen=True)
class Writer:
    """Writes texts at random, of the tokens that a grammar allows."""

    tokenizer: Tokenizer
    guide: llguidance.LLTokenizer
    end_id: int

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        return compile_grammar(self.guide, grammar, GrammarLimits())

    def write(self, grammar: Grammar, seed: int, *, begin: str = "") -> str:
        """Write a text that begins so. Random letters would seldom be a mark, so a mark is tried now and then."""
        draw, matcher = random.Random(seed), self.matcher(grammar)
        ids = self.ids(begin)
        assert matcher.consume_tokens(ids)
        for _ in range(MAX_TOKENS):
            allowed = np.flatnonzero(
                np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            )
            mark = self.ids(draw.choice(MARKS)) if draw.random() < 0.2 else []
            more = mark if mark and matcher.validate_tokens(mark) == len(mark) else [int(draw.choice(allowed))]
            if self.end_id in allowed and (self.end_id in more or draw.random() < 0.3):
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            assert matcher.consume_tokens(more)
            ids += more
        raise AssertionError("it does not end: " + self.tokenizer.decode(ids[-200:]))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []


@cache
def writer(with_tokens: bool, *, are_special: bool = True) -> Writer:
    """A tokenizer that has the marks as tokens, those of one kind special, or that has none of them."""
    library = byte_level()
    if with_tokens:
        special = [
            mark for each in TOOL_FORMATS for mark in each.marks if not re.fullmatch("</?(seed:)?tool_call>", mark)
        ]
        special += [*COMMAND.marks, *GEMMA4.marks]
        library.add_special_tokens([AddedToken(mark, special=are_special, normalized=False) for mark in special])
        others = ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "</think>")
        library.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in others])
    templates = {"default": ChatTemplate("{{ messages }}", {})}
    tokenizer = Tokenizer(library, templates=templates)
    end_id = tokenizer.id_of("<|im_end|>")
    assert end_id is not None
    guide = llguidance.LLTokenizer(library.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[end_id])
    return Writer(tokenizer, guide, end_id)


def form_of(tool_format: ToolFormat | None, choice: ToolChoice, tokenizer: Tokenizer, *, thinks: bool = False) -> Any:
    reasoning: ReasoningFormat | None = THINK if thinks else None
    if tool_format is not None and tool_format.reasoning is not None:
        reasoning = tool_format.reasoning
    return AnswerForm(choice, tool_format, reasoning, tokenizer)


def read(form: AnswerForm, text: str, thinking: Thinking = Thinking.NO) -> ReadAnswer:
    return ReadAnswer.of(form.reader(thinking).read(text, is_last=True))


def require_allowed(answer: ReadAnswer) -> None:
    for call in answer.calls:
        value = json.loads(call.arguments)
        if call.name == "now":
            assert value == {}
        else:
            assert call.name == "weather"
            assert set(value) == {"city", "days"}
            assert value["city"] in CITIES
            assert len(value["days"]) <= 3
            assert all(type(day) is int and 1 <= day <= 7 for day in value["days"])


each_format = pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=lambda each: each.name)
both_tokenizers = pytest.mark.parametrize("with_tokens", [True, False], ids=["tokens", "letters"])


@each_format
@both_tokenizers
def test_required_calls_are_calls_and_nothing_else(tool_format: ToolFormat, with_tokens: bool) -> None:
    pen = writer(with_tokens)
    num_calls = set()
    for choice, thinking in (("required", Thinking.NO), ("required", Thinking.YES), ("required", Thinking.PERHAPS)):
        form = form_of(tool_format, tool_choice_of(TOOLS, choice, None), pen.tokenizer, thinks=True)
        for seed in range(3):
            answer = read(form, pen.write(form.grammar(None, thinking), seed), thinking)
            assert answer.text is None
            assert answer.calls
            require_allowed(answer)
            num_calls.add(len(answer.calls))
    assert tool_format is HARMONY or len(num_calls) > 1


@each_format
@both_tokenizers
def test_one_call_where_one_is_wanted(tool_format: ToolFormat, with_tokens: bool) -> None:
    pen = writer(with_tokens)
    named = tool_choice_of(TOOLS, {"type": "function", "function": {"name": "weather"}}, None)
    for choice in (named, tool_choice_of(TOOLS, "required", False)):
        form = form_of(tool_format, choice, pen.tokenizer)
        for seed in range(3):
            answer = read(form, pen.write(form.grammar(None, Thinking.NO), seed))
            assert answer.text is None
            assert len(answer.calls) == 1
            assert choice is not named or answer.calls[0].name == "weather"
            require_allowed(answer)


@pytest.mark.parametrize(
    "tool_format", [each for each in TOOL_FORMATS if each is not HARMONY], ids=lambda each: each.name
)
@both_tokenizers
def test_free_text_is_held_to_the_schemas_once_a_call_begins(tool_format: ToolFormat, with_tokens: bool) -> None:
    pen = writer(with_tokens)
    form = form_of(tool_format, tool_choice_of(TOOLS, "auto", None), pen.tokenizer)
    grammar = form.grammar(None, Thinking.NO)
    opener = tool_format.marks[0]
    for seed in range(3):
        require_allowed(read(form, pen.write(grammar, seed)))
        for said in ("", "Let me see: "):
            answer = read(form, pen.write(grammar, seed, begin=said + opener))
            assert (answer.text or "") == said.rstrip()
            assert answer.calls
            require_allowed(answer)
    matcher = pen.matcher(grammar)
    plain = pen.ids("No call, but { and < and [ in a text.\nAnother line.")
    assert matcher.consume_tokens(plain)
    assert matcher.is_accepting()


@both_tokenizers
def test_messages_of_harmony_have_the_headers_that_are_allowed(with_tokens: bool) -> None:
    pen = writer(with_tokens)
    form = form_of(HARMONY, tool_choice_of(TOOLS, "auto", None), pen.tokenizer)
    grammar = form.grammar(None, Thinking.PERHAPS)
    thought = "<|channel|>analysis<|message|>Why<|end|><|start|>assistant"
    heads = ("", "<|channel|>final<|message|>So", "<|channel|>commentary to=functions.now", " to=functions.weather")
    for seed, begin, head in itertools.product(range(3), ("", thought, thought * 2), heads):
        answer = read(form, pen.write(grammar, seed, begin=begin + head))
        require_allowed(answer)
        assert (answer.reasoning or "").startswith("Why") or not begin
        assert bool(answer.calls) is ("to=" in head) or not head
    for wrong in (
        "<|channel|>analysis to=functions.now<|message|>",
        "<|channel|>commentary to=functions.other",
        "<|channel|>commentary to=python",
        "So",
        "<|channel|>final<|message|>So<|end|><|start|>",
    ):
        assert pen.matcher(grammar).validate_tokens(pen.ids(wrong)) < len(pen.ids(wrong)) or not with_tokens
    required = form_of(HARMONY, tool_choice_of(TOOLS, "required", None), pen.tokenizer).grammar(None, Thinking.PERHAPS)
    assert not pen.matcher(required).consume_tokens(pen.ids("<|channel|>final"))


def test_harmonys_reasoning_cannot_spell_out_a_mark() -> None:
    pen = writer(True)
    grammar = form_of(HARMONY, tool_choice_of(TOOLS, "auto", None), pen.tokenizer).grammar(None, Thinking.PERHAPS)
    letters = [token for letter in "a <|> <|ends|> <|end|>" for token in pen.ids(letter)]
    for channel, is_spelled in (("analysis", False), ("commentary", False), ("final", True)):
        matcher = pen.matcher(grammar)
        assert matcher.consume_tokens(pen.ids(f"<|channel|>{channel}<|message|>"))
        assert matcher.validate_tokens(letters) == len(letters) - (not is_spelled)


@both_tokenizers
def test_a_schema_holds_the_final_message_of_harmony(with_tokens: bool) -> None:
    pen = writer(with_tokens)
    form = AnswerForm(ToolChoice("none"), None, HARMONY.reasoning, pen.tokenizer)
    grammar = form.grammar(Grammar.json_schema({"enum": [1]}), Thinking.PERHAPS)
    for seed in range(6):
        assert read(form, pen.write(grammar, seed)).text == "1"


@both_tokenizers
def test_a_final_message_of_harmony_that_is_continued_has_no_other_header(with_tokens: bool) -> None:
    pen = writer(with_tokens)
    for choice, tools in ((tool_choice_of(TOOLS, "auto", None), HARMONY), (ToolChoice("none"), None)):
        form = AnswerForm(choice, tools, HARMONY.reasoning, pen.tokenizer, begun="It is ")
        thinking = form.thinking(pen.ids("<|start|>assistant<|channel|>final<|message|>It is "))
        matcher = pen.matcher(form.grammar(Grammar.json_schema({"enum": [1]}), thinking))
        assert matcher.consume_tokens(pen.ids("1"))
        assert matcher.is_accepting()
        assert read(form, "1", thinking) == ReadAnswer(None, "1")


@both_tokenizers
def test_an_answer_of_command_may_have_marks_around_it(with_tokens: bool) -> None:
    pen = writer(with_tokens)
    tools = next(each for each in TOOL_FORMATS if each.name == "command")
    marked = "<|START_THINKING|>Why<|END_THINKING|>" + "<|START_RESPONSE|>{}<|END_RESPONSE|>" * with_tokens
    for answer, text in ((None, "So."), (Grammar.json_schema({"enum": [1]}), "1")):
        for choice, known in ((tool_choice_of(TOOLS, "auto", None), tools), (ToolChoice("none"), None)):
            form = AnswerForm(choice, known, COMMAND, pen.tokenizer)
            grammar = form.grammar(answer, Thinking.PERHAPS)
            if grammar is None:
                continue
            whole = marked.format(text) if with_tokens else marked + text
            matcher = pen.matcher(grammar)
            assert matcher.consume_tokens(pen.ids(whole)), whole
            assert matcher.is_accepting()
            assert read(form, whole, Thinking.PERHAPS) == ReadAnswer("Why", text)


@each_format
@both_tokenizers
def test_an_answer_that_is_held_to_a_schema_beside_calls(tool_format: ToolFormat, with_tokens: bool) -> None:
    pen = writer(with_tokens)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "maxProperties": 1}
    form = form_of(tool_format, tool_choice_of(TOOLS, "auto", None), pen.tokenizer, thinks=True)
    grammar = form.grammar(Grammar.json_schema(schema | {"additionalProperties": False}), Thinking.PERHAPS)
    kinds = set()
    for seed in range(8):
        answer = read(form, pen.write(grammar, seed), Thinking.PERHAPS)
        require_allowed(answer)
        kinds.add(bool(answer.calls))
        if not answer.calls:
            assert isinstance(json.loads(answer.text or "")["ok"], bool)
        else:
            assert answer.text is None
    assert kinds == {True, False}


@both_tokenizers
@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        (Grammar.choice(["yes", "no"]), {"yes", "no"}),
        (Grammar.regex("a/b|c{2}"), {"a/b", "cc"}),
        (Grammar.json_schema({"enum": [1, "é"]}), {"1", '"é"', '"\\u00e9"'}),
        (Grammar.lark('start: ANSWER\nANSWER: "{" /[ab]/ "}"'), {"{a}", "{b}"}),
    ],
    ids=["choice", "regex", "json", "lark"],
)
def test_reasoning_goes_before_what_is_held(with_tokens: bool, grammar: Grammar, allowed: set[str]) -> None:
    pen = writer(with_tokens)
    form = form_of(None, ToolChoice("none"), pen.tokenizer, thinks=True)
    assert form.grammar(None, Thinking.YES) is None
    assert form.grammar(grammar, Thinking.NO) is grammar
    for thinking, begin in ((Thinking.YES, "Why"), (Thinking.PERHAPS, "<think>\nWhy"), (Thinking.PERHAPS, "")):
        for seed in range(3):
            answer = read(form, pen.write(form.grammar(grammar, thinking), seed, begin=begin), thinking)
            assert answer.text in allowed
            assert begin == "" or (answer.reasoning or "").startswith("Why")


def test_arguments_that_nobody_has_named_are_not_written() -> None:
    """A schema that leaves it open, as most do, allows less than it says; one that wants more keeps it."""
    pen = writer(True)
    place = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"], "title": "A place"}
    named = {"properties": {"title": {"const": "t"}, "place": place}, "required": ["title", "place"]}
    for schema, allowed in (
        (named, [{"title": "t", "place": {"x": 1}}]),
        ({}, [{}, {"a": 1}]),
        ({**named, "additionalProperties": {"enum": [2]}}, [{"title": "t", "place": {"x": 1}, "more": 2}]),
        ({"required": ["a"], "properties": {}}, [{"a": 3}]),
        (
            {"properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"], "$defs": {"p": place}},
            [{"p": {"x": 1}}],
        ),
        ({"properties": {"a": {"const": 1}}, "anyOf": [{"properties": {"b": {}}}]}, [{"a": 1, "b": 2}]),
        ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]}, [{"a": 1, "b": 2}]),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        form = form_of(TOOL_FORMATS[0], tool_choice_of(tools, "required", False), pen.tokenizer)
        grammar = form.grammar(None, Thinking.NO)
        for value in allowed:
            text = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(value)}}}\n</tool_call>'
            matcher = pen.matcher(grammar)
            assert matcher.validate_tokens(pen.ids(text)) == len(pen.ids(text))
        if "$defs" in schema or schema is named:
            for seed in range(3):
                [call] = read(form, pen.write(grammar, seed)).calls
                assert json.loads(call.arguments) == allowed[0]


def test_what_cannot_be_kept_is_passed_over_unless_the_tool_is_strict() -> None:
    pen = writer(True)
    unkept = ({"not": {"required": ["x"]}}, {"properties": {"mail": {"type": "string", "pattern": "^(?!a)b"}}})
    for schema, strict in itertools.product(unkept, (False, True)):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
        grammar = form_of(TOOL_FORMATS[0], tool_choice_of(tools, "required", None), pen.tokenizer).grammar(
            None, Thinking.NO
        )
        if strict:
            with pytest.raises(InvalidRequestError, match=r"not|look-around"):
                pen.matcher(grammar)
        else:
            pen.matcher(grammar)


@pytest.mark.parametrize("pen", [writer(True), writer(True, are_special=False), writer(False)])
@pytest.mark.parametrize("tool_format", [GEMMA4_CALLS, LFM2], ids=lambda each: each.name)
def test_values_follow_any_schema(tool_format: ToolFormat, pen: Writer) -> None:
    """Arguments follow the schema of a strict tool, or it is refused; any other tool can be called."""
    num_held = 0
    for seed, strict in itertools.product(range(120), (True, False)):
        schema = SchemaMaker(seed).schema()
        if schema.get("type") != "object" or cannot_name(tool_format, schema):
            continue
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
        form = form_of(tool_format, tool_choice_of(tools, "required", False), pen.tokenizer)
        try:
            grammar = form.grammar(None, Thinking.NO)
        except InvalidRequestError:
            assert strict
            continue
        answer = read(form, pen.write(grammar, seed))
        assert (answer.text, len(answer.calls)) == (None, 1)
        failure = failure_of(schema, answer.calls[0].arguments)
        assert not (failure and strict), (schema, answer)
        num_held += not failure
    assert num_held > 40


def test_gemma_writes_keys_in_alphabetical_order() -> None:
    pen = writer(True)
    tree = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "A": {}}}
    schema = {
        "type": "object",
        "properties": {"zone": {"type": "string"}, "City": {"const": 'New "York"'}, "days": {"$ref": "#/$defs/tree"}},
        "required": ["zone"],
        "$defs": {"tree": tree},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = form_of(GEMMA4_CALLS, tool_choice_of(tools, "auto", None), pen.tokenizer).grammar(None, Thinking.NO)
    call, end = "Yes.<|tool_call>call:f{", "<tool_call|>"
    text, city = '<|"|>a "quoted" <|text<|"|>', 'City:<|"|>New "York"<|"|>'
    for arguments, is_allowed in (
        (f"zone:{text}", True),
        (f"{city},zone:{text}", True),
        (f"{city},days:{{A:[1,{{b:null}}],of:[{{}},{{of:[]}}]}},zone:{text}", True),
        (f"zone:{text},{city}", False),
        (city, False),
        ('zone:"a"', False),
        (f"zone:{text},other:1", False),
        (f"days:{{of:[],A:1}},zone:{text}", False),
    ):
        ids = pen.ids(f"{call}{arguments}}}{end}")
        assert (pen.matcher(grammar).validate_tokens(ids) == len(ids)) is is_allowed, arguments
    spelled = [token for letter in 'zone:<|"|>' for token in pen.ids(letter)]
    matcher = pen.matcher(grammar)
    assert matcher.consume_tokens(pen.ids(f'{call}zone:<|"|>'))
    assert matcher.validate_tokens(spelled) == len(spelled) - 1, "a text cannot spell out the mark that ends it"


@pytest.mark.parametrize("with_tokens", [True, False], ids=["tokens", "letters"])
def test_a_call_of_gemma_without_its_mark_follows_the_schema(with_tokens: bool) -> None:
    pen = writer(with_tokens)
    form = form_of(GEMMA4_CALLS, tool_choice_of(TOOLS, "auto", None), pen.tokenizer)
    grammar = form.grammar(None, Thinking.NO)
    for seed in range(3):
        answer = read(form, pen.write(grammar, seed, begin="call:weather{"))
        assert answer.text is None
        require_allowed(answer)
    for text in ("call:other{", "call: me", "So call:weather{", "call:weather", "cal"):
        assert pen.matcher(grammar).consume_tokens(pen.ids(text)), text
    for text in ("call: weather{", "\ncall:now {", "call:now{a"):
        assert pen.matcher(grammar).validate_tokens(pen.ids(text)) < len(pen.ids(text)), text


@pytest.mark.parametrize("with_tokens", [True, False], ids=["tokens", "letters"])
def test_calls_of_lfm2(with_tokens: bool) -> None:
    """Properties come in the order of the schema, those that are not required may be missing, and values are JSON."""
    pen = writer(with_tokens)
    schema = {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "city": {"enum": ["Rome"]}, "warm": {"$ref": "#/$defs/warm"}},
        "required": ["city"],
        "$defs": {"warm": {"type": "boolean"}},
    }
    none = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    tools.append({"type": "function", "function": {"name": "g", "parameters": none}})
    grammar = form_of(LFM2, tool_choice_of(tools, "auto", None), pen.tokenizer).grammar(None, Thinking.NO)
    for calls, is_allowed in (
        ('f(city="Rome")', True),
        ('f(days=5, city="Rome", warm=true), g(), g(a=null), g(b=null), g(a=null, b=null)', True),
        ('f(city="Rome", days=5)', False),
        ("f(days=5)", False),
        ('f("Rome")', False),
        ("f(city='Rome')", False),
        ('f(city="Rome", warm=5)', False),
        ('f(city="Rome", other=5)', False),
        ("g(b=null, a=null)", False),
        ("h()", False),
        ("g(a=null),g()", False),
        ("", False),
    ):
        ids = pen.ids(f"Yes.<|tool_call_start|>[{calls}]<|tool_call_end|>")
        matcher = pen.matcher(grammar)
        is_call = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
        assert is_call is is_allowed, calls


@pytest.mark.parametrize("name", ["llama3", "gemma4", "lfm2"])
def test_no_text_before_a_mark_begins_like_a_call(name: str) -> None:
    """It would be read as a call that follows no schema."""
    pen = writer(False)
    tool_format = next(each for each in TOOL_FORMATS if each.name == name)
    grammar = form_of(tool_format, tool_choice_of(TOOLS, "auto", None), pen.tokenizer).grammar(None, Thinking.NO)
    call = {"llama3": '{"name": "now", "parameters": {"a', "gemma4": "call:now{a", "lfm2": "[now(a"}[name]
    for said, is_allowed in ((call, False), (f"So {call}", True)):
        ids = pen.ids(said)
        assert (pen.matcher(grammar).validate_tokens(ids) == len(ids)) is is_allowed


def test_reasoning_of_gemma_has_a_title() -> None:
    pen = writer(True)
    form = AnswerForm(tool_choice_of(TOOLS, "auto", None), GEMMA4_CALLS, GEMMA4, pen.tokenizer)
    for thinking, begin in ((Thinking.PERHAPS, "<|channel>thought\n"), (Thinking.YES, "")):
        matcher = pen.matcher(form.grammar(None, thinking))
        assert matcher.consume_tokens(pen.ids(f"{begin}Why?\n<channel|>So.<|tool_call>call:now{{}}<tool_call|>"))
        assert matcher.is_accepting()
        wrong = pen.ids(f"{begin}Why? <|tool_call>")
        assert pen.matcher(form.grammar(None, thinking)).validate_tokens(wrong) == len(wrong) - 1
    assert not pen.matcher(form.grammar(None, Thinking.PERHAPS)).consume_tokens(pen.ids("<|channel>final"))
