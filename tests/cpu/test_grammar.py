"""Grammars over tiny vocabularies: the tokens that a mask allows, the text's place in its grammar, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compute.grammar import GrammarCompiler, GrammarLimits, GrammarVerdicts, HeldText, MaskService, Vocabulary
from quire.compute.grammar.trial import TrialSettings
from quire.compute.worker.grammar_rows import MOST_UNSURE, GrammarRows, RowMasks
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.core.guesses import Guesses
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart
from support.grammars import compiler_for, tokens_of, vocabulary_of
from support.tiny_tokenizer import byte_fallback, byte_level, unigram, word_piece

LIBRARY = byte_level()
SIZE = LIBRARY.get_vocab_size(with_added_tokens=True)
ENDS = frozenset([LIBRARY.token_to_id("<|endoftext|>"), LIBRARY.token_to_id("<|im_end|>")])
COMPILER = compiler_for(LIBRARY, vocab_size=SIZE + 40, eos_token_ids=ENDS)
VERDICTS = GrammarVerdicts(COMPILER.vocabulary)
MASKS = MaskService(COMPILER.vocabulary)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "of": {"enum": ["the", "and", 7]}},
    "required": ["name", "age", "of"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(PERSON),
    "object": Grammar.json_object(),
    "regex": Grammar.regex("(the|and) [0-9]{2,4}(lo)*"),
    "choice": Grammar.choice(["hello", "hello the", "é你😀", "\"'", "a.b*c\nd"]),
    "lark": Grammar.lark('start: "the" (" and" "the")* <think> /[a-c]+/'),
}


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    VERDICTS.close()
    MASKS.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[GrammarVerdicts]:
    """Verdicts for which a slow machine has time enough: the reason is then that of the compiler."""
    with pytest.MonkeyPatch.context() as patch:
        settings = partial(TrialSettings, budget_s=60.0, answer_s=600.0)
        patch.setattr("quire.compute.grammar.verdicts.TrialSettings", settings)
        verdicts = GrammarVerdicts(COMPILER.vocabulary)
        verdicts.check(Grammar.regex("a"))  # makes the trial, so that others get settings of their own
    yield verdicts
    verdicts.close()


@cache
def bytes_of(token: int) -> bytes | None:
    """Return the bytes of a token as the library has them; None where it is no text."""
    added = LIBRARY.get_added_tokens_decoder()
    if token in added or token >= SIZE:
        return None
    letters = _byte_letters()
    return bytes(letters[letter] for letter in LIBRARY.id_to_token(token))


@cache
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write the bytes 0 to 255."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return {chr(byte) if byte in plain else chr(next(others)): byte for byte in range(256)}


def mask_after(grammar: Grammar, tokens: list[int], compiler: GrammarCompiler = COMPILER) -> set[int]:
    matcher = compiler.matcher(grammar)
    if tokens:
        matcher.advance(tokens)
    mask = matcher.mask()
    assert matcher.failure == ""
    return tokens_of(mask)


def walk(grammar: Grammar, choose: Any, longest: int = 60) -> list[int]:
    """Return a text of the grammar, its tokens chosen among those allowed; without its end."""
    tokens: list[int] = []
    while len(tokens) < longest:
        token = choose(sorted(mask_after(grammar, tokens)))
        if token in ENDS:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("pattern", ["(the|and) ?[a-c]{1,3}", "é*lo", "[^a]*tion", "x?"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_token_is_allowed_where_the_text_can_still_match(pattern: str, data: st.DataObject) -> None:
    """The oracle: whether some text of the language begins so, by trying what may follow."""
    grammar = Grammar.regex(pattern)
    tokens = walk(grammar, lambda allowed: data.draw(st.sampled_from(allowed)), longest=4)
    text = b"".join(bytes_of(token) or b"" for token in tokens)
    allowed = mask_after(grammar, tokens)
    for token in range(SIZE):
        piece = bytes_of(token)
        if piece is not None:
            assert (token in allowed) == can_begin(pattern, text + piece), (token, piece)
    whole = re.fullmatch(pattern, text.decode("utf-8", "replace")) is not None
    assert all((end in allowed) == whole for end in ENDS)


ENDINGS = ("", "a", "b", "the", "and", "the a", " a", "e a", "he a", "nd a", "d a", "lo", "o", "tion", "ion", "on", "n")


def can_begin(pattern: str, text: bytes) -> bool:
    """Return whether a match of the pattern begins with the bytes; a cut character may be completed by any byte."""
    for tail in (b"", b"\xa9", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80"):
        try:
            whole = (text + tail).decode()
        except UnicodeDecodeError:
            continue
        if any(re.fullmatch(pattern, whole + ending) for ending in ENDINGS):
            return True
    return False


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_state_follows_from_the_text_alone(name: str, data: st.DataObject) -> None:
    """A row that was followed, one that starts anew and the draws behind drafts have the same masks."""
    grammar = GRAMMARS[name]
    tokens = walk(grammar, lambda allowed: data.draw(st.sampled_from(allowed)), longest=12)
    prompt = [1, 2, 3]
    followed, wanted = rows(), SamplingParams(grammar=grammar)
    followed.start(row_start(0, prompt, wanted))
    for count in range(len(tokens) + 1):
        text = array("i", [*prompt, *tokens[:count]])
        again = rows()
        again.start(row_start(5, list(text), wanted, num_prompt=3))
        masks, expected = mask_now(followed, {0: text}), mask_now(again, {5: text})
        assert masks.failures == expected.failures == {}
        assert masks.words.tolist() == expected.words.tolist()
        assert tokens_of(masks.words[0]) == mask_after(grammar, tokens[:count])
    drafts = [*tokens, data.draw(st.integers(0, SIZE - 1)), data.draw(st.integers(0, SIZE - 1))]
    behind = rows()
    behind.start(row_start(0, prompt, wanted))
    for _ in range(2):  # nothing is left of drafts
        masks = mask_now(behind, {0: array("i", prompt)}, {0: drafts})
        for index, place in enumerate(masks.places[0].tolist()):
            is_valid = all(drafts[i] in mask_after(grammar, drafts[:i]) for i in range(index))
            if is_valid and not ENDS.intersection(drafts[:index]):
                assert tokens_of(masks.words[place]) == mask_after(grammar, drafts[:index])
            else:
                assert place == -1


def wait_for_all(masks: MaskService, texts: Iterable[HeldText], seconds: float, enough: object = all) -> None:
    """As if every mask came in time, however busy the machine is."""
    WAIT(masks, texts, 60.0)


WAIT = MaskService.wait


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_guesses_are_cut_at_the_first_that_the_grammar_refuses(name: str, data: st.DataObject) -> None:
    grammar, prompt = GRAMMARS[name], array("i", [1, 2, 3])
    tokens = walk(grammar, lambda allowed: data.draw(st.sampled_from(allowed)), longest=9)
    guesses = [*tokens, data.draw(st.integers(0, SIZE - 1)), data.draw(st.sampled_from(sorted(ENDS)))]
    held = rows()
    held.start(row_start(0, prompt.tolist(), SamplingParams(grammar=grammar)))
    mask_now(held, {0: prompt})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskService, "is_cheap", lambda masks, text: True)
        patch.setattr(MaskService, "wait", wait_for_all)
        asked = {0: Guesses("ngram", array("i", guesses)), 7: Guesses("ngram", array("i", [1, 2]))}
        kept = held.cut({0: prompt, 7: prompt}, asked)
        # The masks behind a part of them are at hand.
        masks = held.mask({0: prompt}, {0: guesses[:2]}, step_s=1.0, num_entries=1)
    assert kept[7] == asked[7]
    expected: list[int] = []
    for token in guesses[:MOST_UNSURE]:
        if ENDS.intersection(expected) or token not in mask_after(grammar, expected):
            break
        expected.append(token)
    assert (kept[0].tokens.tolist() if 0 in kept else []) == expected
    places = masks.places[0].tolist()
    for index, place in enumerate(places[: len(expected)]):
        assert tokens_of(masks.words[place]) == mask_after(grammar, guesses[:index])
    assert masks.most_draws(0) == sum(place >= 0 for place in places)


def test_only_rows_whose_masks_are_known_to_be_cheap_may_have_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses cost masks, and no text may fail, or come late, for a guess."""
    held = rows()
    held.start(row_start(0, [1], SamplingParams(grammar=Grammar.choice(["lo"]))))
    for is_cheap in (True, False):
        monkeypatch.setattr(MaskService, "is_cheap", lambda masks, text, is_cheap=is_cheap: is_cheap)
        assert held.may_guess(0) is is_cheap
        assert held.may_guess(7)


def rows() -> GrammarRows:
    return GrammarRows(MASKS, ENDS)


def mask_now(held: GrammarRows, texts: dict[int, array[int]], drafts: dict[int, list[int]] | None = None) -> RowMasks:
    """Return the masks of rows when all of them are there."""
    while (masks := held.mask(texts, drafts or {}, step_s=1.0, num_entries=len(texts))).late:
        pass
    return masks


def row_start(row: int, tokens: list[int], sampling: SamplingParams, num_prompt: int = 0) -> RowStart:
    return RowStart(row, "r", array("i", tokens), num_prompt or len(tokens), sampling, 99)


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_of_a_grammar_are_what_it_says(name: str) -> None:
    chance = np.random.default_rng(3)
    num_whole = 0
    for _ in range(40):
        tokens = walk(GRAMMARS[name], lambda allowed: int(chance.choice(allowed)))
        if not ENDS.issubset(mask_after(GRAMMARS[name], tokens)):
            continue
        num_whole += 1
        text = LIBRARY.decode(tokens, skip_special_tokens=False)
        if name == "schema":
            person = json.loads(text)
            assert list(person) == ["name", "age", "of"]
            assert isinstance(person["name"], str) and isinstance(person["age"], int)
            assert person["of"] in ["the", "and", 7]
        elif name == "object":
            assert isinstance(json.loads(text), dict)
        elif name == "regex":
            assert re.fullmatch(GRAMMARS[name].text, text)
        elif name == "choice":
            assert text in ["hello", "hello the", "é你😀", "\"'", "a.b*c\nd"]
        else:
            assert re.fullmatch("the( andthe)*<think>[a-c]+", text)
    assert num_whole > 1


def test_where_a_text_can_only_end_only_ends_are_allowed() -> None:
    hello = LIBRARY.encode("hello").ids
    assert mask_after(Grammar.choice(["hello"]), hello) == ENDS
    assert not ENDS & mask_after(Grammar.choice(["hello"]), hello[:-1])
    assert mask_after(Grammar.regex("(hello)?"), []) > ENDS


def test_a_text_that_has_ended_is_not_followed() -> None:
    held = rows()
    held.start(row_start(0, [1], SamplingParams(grammar=Grammar.choice(["lo"]))))
    end = min(ENDS)
    masks = mask_now(held, {0: array("i", [1, *LIBRARY.encode("lo").ids, end])})
    assert (masks.places[0].tolist(), masks.failures) == ([-1], {})
    masks = mask_now(held, {0: array("i", [1, *LIBRARY.encode("lo").ids, end, 7, 8])})
    assert (masks.places[0].tolist(), masks.failures) == ([-1], {})


def test_a_row_that_cannot_go_on_fails_alone() -> None:
    held = rows()
    for row, grammar in enumerate([Grammar.choice(["lo"]), Grammar.regex("[0-9]+")]):
        held.start(row_start(row, [1], SamplingParams(grammar=grammar)))
    wrong = LIBRARY.encode("the").ids
    masks = mask_now(held, {0: array("i", [1, *wrong]), 1: array("i", [1]), 7: array("i", [1])})
    assert list(masks.failures) == [0]
    assert masks.failures[0].startswith("the text's grammar cannot be enforced: ")
    assert "\n" not in masks.failures[0]
    assert tokens_of(masks.words[masks.places[1][0]]) == mask_after(Grammar.regex("[0-9]+"), [])
    assert 7 not in masks.places


def test_a_step_waits_for_expensive_masks_only_where_nothing_else_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        MaskService, "ask", lambda masks, text, drafts=(), most_forced=0: setattr(text, "asked", (0, ()))
    )
    monkeypatch.setattr(
        MaskService, "wait", lambda masks, texts, seconds, enough=all: waits.append(seconds if texts else 0.0)
    )
    held, text = rows(), array("i", [1])
    held.start(row_start(0, [1], SamplingParams(grammar=Grammar.choice(["nobody has asked"]))))
    assert held.mask({0: text, 7: text}, {}, step_s=1.0, num_entries=2).late == {0}
    assert held.mask({0: text}, {}, step_s=1.0, num_entries=2).late == {0}  # beside a part of a prompt
    assert held.late([0, 7]) == {0}
    assert sum(waits) == 0
    assert held.mask({0: text}, {}, step_s=1.0, num_entries=1).late == held.late([0]) == {0}
    assert sum(waits) > 0


def test_a_lexer_that_is_full_of_other_texts_costs_a_text_nothing() -> None:
    """Each text needs few states; all of them together more than there may be."""
    limits = GrammarLimits(max_states=60)
    compiler = compiler_for(LIBRARY, eos_token_ids=ENDS, limits=limits)
    grammar = Grammar.regex("(a[0-9]{9}|b[a-z]{9}|c[A-Z]{9}|d[0-9a-f]{9}|e[x-z]{9}|f[0-4]{9}){1,2}")
    for text in ("a012345678", "babcdefghi", "cABCDEFGHI", "d0a1b2c3d4", "exyzxyzxyz", "f012340123"):
        tokens = LIBRARY.encode(text).ids
        for count in range(len(tokens)):
            assert tokens[count] in mask_after(grammar, tokens[:count], compiler)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema('{"type": "objec"}'), "Invalid type: objec"),
        (Grammar.json_schema("nonsense"), "expected ident"),
        (Grammar.json_schema('{"type": "object"'), "EOF while parsing"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "Unimplemented keys"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
        (Grammar.json_schema({"$ref": "http://127.0.0.1:1/x.json"}), "does not fetch"),
        (Grammar.json_schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
        (Grammar.json_schema({"$ref": "#"}), "no text matches it"),
        (Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text matches it"),
        (Grammar.json_schema('{"items":' * 3000 + "{}" + "}" * 3000), "recursion limit"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex("|".join(map(str, range(90_000)))), "too big"),
        (Grammar.lark("start: /"), "lexer error"),
        (Grammar.lark("start: <|nowhere|>"), "unknown special token"),
        (Grammar.lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "too deeply nested"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_grammar_is_refused_with_the_reason(patient: GrammarVerdicts, grammar: Grammar, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
            patient.check(grammar)
        assert caught.value.field == "grammar"
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


CHAIN = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(5000)) + '\nr5000: "b"'
REFERENCES: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {}}
AT_ONCE = {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(30)]}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.lark(CHAIN),  # the end of the stack
        Grammar.json_schema({"$defs": REFERENCES, "$ref": "#/$defs/a0"}),
        Grammar.json_schema(AT_ONCE),  # hours
    ],
    ids=["rules", "references", "patterns"],
)
def test_what_would_take_the_process_down_is_refused_and_others_go_on(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: one that takes less to compile"):
        VERDICTS.check(grammar)
    VERDICTS.check(Grammar.choice([grammar.kind, "still here"]))


@pytest.mark.parametrize(
    "pattern", ["(((a{1,1000}){1,1000}){1,1000})b", "(a+)+b", "((a|b)*a(a|b){20})", "(x?){500}x{500}"]
)
def test_nested_quantifiers_have_bounded_masks(pattern: str) -> None:
    VERDICTS.check(Grammar.regex(pattern))
    matcher = COMPILER.matcher(Grammar.regex(pattern))
    for _ in range(30):
        mask = matcher.mask()
        if matcher.failure:
            break
        matcher.advance([min(tokens_of(mask) - ENDS)])


def test_recursion_that_can_end_is_a_grammar() -> None:
    tree = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#"}}}, "required": ["of"]}
    VERDICTS.check(Grammar.json_schema(tree))


def test_schemas_reach_nothing_outside(tmp_path: Any) -> None:
    (tmp_path / "x.json").write_text('{"type": "integer"}')
    with pytest.raises(InvalidRequestError, match="does not fetch"):
        VERDICTS.check(Grammar.json_schema({"$ref": (tmp_path / "x.json").as_uri()}))


def test_who_asks_for_the_same_grammar_at_once_compiles_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(LIBRARY, eos_token_ids=ENDS)
    compiled: list[Grammar] = []
    compile_it = compiler._compile

    def counted(grammar: Grammar) -> Any:
        compiled.append(grammar)
        return compile_it(grammar)

    monkeypatch.setattr(compiler, "_compile", counted)
    threads = [threading.Thread(target=compiler.matcher, args=(GRAMMARS["schema"],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [GRAMMARS["schema"]]


def test_the_cache_is_bounded_in_bytes_and_keeps_what_was_used_last() -> None:
    compiler = compiler_for(LIBRARY, eos_token_ids=ENDS, max_cache_bytes=1 << 20)
    first = Grammar.choice(["first"])
    for number in range(60):
        compiler.matcher(first)
        compiler.matcher(Grammar.choice([f"text {number}"]))
        compiler.cache.check()
    assert 2 < len(compiler.cache) < 20
    assert first in compiler.cache and Grammar.choice(["text 3"]) not in compiler.cache
    before = compiler.cache.num_bytes
    matcher = compiler.matcher(Grammar.regex("[a-z]+"))
    matcher.advance(LIBRARY.encode("hellohellohello").ids)
    assert compiler.cache.num_bytes != before
    compiler.cache.check()


def test_a_grammar_too_heavy_for_the_cache_is_used_all_the_same() -> None:
    compiler = compiler_for(LIBRARY, eos_token_ids=ENDS, max_cache_bytes=1000)
    assert mask_after(GRAMMARS["regex"], [], compiler) == mask_after(GRAMMARS["regex"], [])
    assert len(compiler.cache) == 0


def test_ids_that_no_token_has_and_special_tokens_are_never_text() -> None:
    allowed = mask_after(Grammar.regex(r"(.|\n)*"), [])
    assert allowed - ENDS <= {token for token in range(SIZE) if bytes_of(token) is not None}
    assert len(allowed) > 200


@pytest.mark.parametrize("library", [byte_fallback(), unigram()], ids=["byte_fallback", "unigram"])
def test_other_kinds_of_tokenizers(library: Any) -> None:
    end = library.token_to_id("</s>")
    compiler = compiler_for(library, eos_token_ids=frozenset([end]))
    grammar, chance = Grammar.regex("(the |lo)+hello"), np.random.default_rng(1)
    for _ in range(10):
        tokens: list[int] = []
        while (token := int(chance.choice(sorted(mask_after(grammar, tokens, compiler))))) != end:
            tokens.append(token)
        text = b"".join(piece_of(library.id_to_token(token)) for token in tokens)
        assert re.fullmatch(grammar.text, text.decode())


def piece_of(token: str) -> bytes:
    return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()


def test_models_that_cannot_be_held_to_grammars_say_so() -> None:
    with pytest.raises(InvalidRequestError, match="no token that ends a text"):
        GrammarVerdicts(vocabulary_of(LIBRARY, eos_token_ids=frozenset())).check(Grammar.regex("a"))
    with pytest.raises(InvalidRequestError, match="none with this model's tokenizer"):
        compiler_for(word_piece(), eos_token_ids=frozenset([1])).matcher(Grammar.regex("a"))


def test_nothing_is_loaded_before_the_first_grammar() -> None:
    program = (
        "import sys, quire.engine.factory as f; from quire import LLM, SamplingParams\n"
        "with LLM('guide', kv_memory='4MiB') as llm: llm.generate('a', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "assert 'llguidance' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0


def test_a_server_leaves_grammars_to_its_engine() -> None:
    program = """
import asyncio, sys
from quire import EngineConfig, SamplingParams
from quire.core.grammar import Grammar
from quire.engine.replicas.supervised import SupervisedLLM

async def ask():
    async with SupervisedLLM(EngineConfig(model="guide", kv_memory="4MiB")) as llm:
        wanted = SamplingParams(grammar=Grammar.choice(["yes", "no"]), max_tokens=8)
        deltas = [each async for each in llm.deltas(await llm.prepare("a", wanted))]
        return "".join(each.outputs[0].text for each in deltas if each.outputs)

assert asyncio.run(ask()) in ("yes", "no")
assert "llguidance" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0


def test_a_vocabulary_is_read_only_when_it_is_needed() -> None:
    reads: list[bool] = []

    def read() -> dict[str, Any]:
        reads.append(True)
        return dict(json.loads(LIBRARY.to_str()))

    compiler = GrammarCompiler(Vocabulary(read, vocab_size=SIZE, eos_token_ids=ENDS))
    assert not reads
    compiler.open()
    assert reads


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(the|and) reference of the [a-c]{1,3}"),
        Grammar.json_schema({"type": "object", "properties": {"name": {}, "other_name": {}}, "required": ["name"]}),
        Grammar.choice(["position", "positions of a block", "é"]),
    ],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_is_forced_is_the_longest_token_where_all_others_begin_it(grammar: Grammar, data: st.DataObject) -> None:
    tokens = walk(grammar, lambda allowed: data.draw(st.sampled_from(allowed)), 12)
    known = data.draw(st.integers(0, len(tokens)))
    drafts = tokens[known : known + data.draw(st.integers(0, 3))]
    matcher = COMPILER.matcher(grammar)
    if known:
        matcher.advance(tokens[:known])
    before = matcher.mask()
    behind = matcher.masks_behind(drafts)
    found, masks = matcher.forced(drafts, [before, *behind][-1], 5) if len(behind) == len(drafts) else ([], [])
    assert masks == matcher.masks_behind([*drafts, *found])[len(drafts) :]
    assert matcher.mask() == before
    text = tokens[:known] + drafts
    for token in [*found, None]:
        allowed = mask_after(grammar, text) if not text or text[-1] not in ENDS else set()
        texts = [bytes_of(each) for each in allowed]
        is_forced = (
            bool(allowed)
            and None not in texts
            and all(max(filter(None, texts), key=len).startswith(each) for each in texts if each is not None)
        )
        assert token is not None or not is_forced or len(found) == 5
        if token is not None:
            assert is_forced
            assert len(bytes_of(token) or b"") == max(len(each or b"") for each in texts)
            text.append(token)
