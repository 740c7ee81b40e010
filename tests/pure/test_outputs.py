"""From updates of sequences to outputs: text, ends, log-probabilities, and what goes wrong with one request alone."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.logprobs import TokenLogprobs
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, AnyCommand, Fail, Stop
from quire.engine.outputs import Logprob, RequestMetrics, RequestOutput
from quire.engine.progress import LoadingLine, ProgressBar, short_number
from quire.engine.text.output_processor import OutputProcessor, PreparedRequest, RequestText
from quire.engine.text.tokenizer import Tokenizer
from support.tiny_tokenizer import byte_level

PROMPT = [72, 73]


class Link:
    """Notes what it is to pass on."""

    def __init__(self) -> None:
        self.commands: list[AnyCommand] = []

    def send(self, command: AnyCommand) -> None:
        self.commands.append(command)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


class Door:
    """A processor with one request in it."""

    def __init__(self, tokenizer: Tokenizer | None, **wanted: Any) -> None:
        self.clock, self.link = ManualClock(), Link()
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(self.link, tokenizer, self.clock)
        self.delivered: list[RequestText] = []
        self.request = self.add("r", **wanted)

    def add(self, name: str, **wanted: Any) -> RequestText:
        sampling = SamplingParams(**wanted)
        prepared = PreparedRequest(Add(name, array("i", PROMPT), sampling), name, "hi", sampling)
        return self.processor.add(prepared, self.delivered.append)

    def send(self, tokens: str | list[int], branch: int = 0, name: str = "r", **fields: Any) -> RequestOutput:
        assert self.tokenizer is not None or isinstance(tokens, list)
        ids = self.tokenizer.encode(tokens) if isinstance(tokens, str) and tokens else list(tokens)  # type: ignore[union-attr]
        logprobs = fields.pop("logprobs", [])
        fields.setdefault("waited_s", 0.0)
        self.processor.process([SequenceUpdate(name, branch, ids, logprobs, 1, **fields)])  # type: ignore[arg-type]
        return self.request.output()


# ---- text and ends -----------------------------------------------------------------------------------------------


def test_no_stop_string_ends_a_text_of_min_tokens_tokens(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, stop=("b",), min_tokens=3)
    assert door.send("abb").outputs[0].finish_reason is None
    last = door.send("ab!").outputs[0]
    assert (last.text, last.token_ids, last.stop_reason) == ("abba", tokenizer.encode("abbab"), "b")
    assert door.link.commands == [Stop("r", 0)]


def test_a_stop_string_that_the_last_character_completes_is_seen_before_min_tokens_only_as_text(
    tokenizer: Tokenizer,
) -> None:
    door = Door(tokenizer, stop=("b",), min_tokens=2, max_tokens=2)
    last = door.send("ab", finish_reason=FinishReason.LENGTH).outputs[0]
    assert (last.text, last.finish_reason) == ("ab", "length")


def test_snapshots_grow_and_the_last_one_is_whole(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer)
    door.clock.advance(1.0)
    first = door.send("hello")
    assert (first.outputs[0].text, first.finished, first.outputs[0].finish_reason) == ("hello", False, None)
    door.clock.advance(2.0)
    last = door.send(" the end", finish_reason=FinishReason.LENGTH)
    assert (last.outputs[0].text, last.finished, last.outputs[0].finish_reason) == ("hello the end", True, "length")
    assert (last.prompt, last.prompt_token_ids, last.num_cached_tokens) == ("hi", PROMPT, 1)
    assert first.outputs[0].text == "hello"  # a snapshot stays what it was
    metrics = last.metrics
    assert (metrics.time_to_first_token_s, metrics.duration_s) == (1.0, 3.0)
    assert metrics.tokens_per_s == pytest.approx((metrics.num_generated_tokens - 1) / 2.0)
    assert door.link.commands == []


def test_a_character_comes_when_it_is_whole_and_a_torn_one_at_the_end(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer)
    ids = tokenizer.encode("aß")
    assert len(ids) == 3
    assert door.send(ids[:2]).outputs[0].text == "a"
    assert door.send(ids[2:]).outputs[0].text == "aß"
    assert door.send(ids[1:2], finish_reason=FinishReason.LENGTH).outputs[0].text == "aß\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "so it is "), (True, "so it is END")])
def test_a_stop_string_ends_the_text_and_tells_the_engine(tokenizer: Tokenizer, include: bool, text: str) -> None:
    door = Door(tokenizer, stop="END", include_stop_str_in_output=include)
    assert door.send("so it is E").outputs[0].text == ("so it is E" if include else "so it is ")
    ids = tokenizer.encode("ND and on")
    output = door.send(ids).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "END")
    assert output.token_ids == tokenizer.encode("so it is E") + ids[:2]  # what came after is dropped
    assert door.link.commands == [Stop("r", 0)]
    assert door.send("more").outputs[0].text == text  # steps that were under way


def test_what_a_stop_string_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, stop="END")
    output = door.send("the EN", finish_reason=FinishReason.LENGTH).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("the EN", "length", None)


@pytest.mark.parametrize(
    ("asked_for", "include", "text"), [(False, False, "ab"), (True, False, "ab"), (True, True, "abc")]
)
def test_the_token_that_ends_a_text_is_a_token_but_no_text(
    tokenizer: Tokenizer, asked_for: bool, include: bool, text: str
) -> None:
    ids = tokenizer.encode("abc")
    stop_token_ids = ids[-1:] if asked_for else []
    door = Door(tokenizer, stop_token_ids=stop_token_ids, include_stop_str_in_output=include)
    output = door.send(ids, finish_reason=FinishReason.STOP).outputs[0]
    assert (output.text, output.token_ids) == (text, ids)
    assert output.stop_reason == (ids[-1] if asked_for else None)


def test_special_tokens_are_shown_only_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), *tokenizer.special_token_ids]
    assert Door(tokenizer).send(ids).outputs[0].text == "a"
    assert "<|im_end|>" in Door(tokenizer, skip_special_tokens=False).send(ids).outputs[0].text


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    output = Door(None).send([5, 6], finish_reason=FinishReason.LENGTH).outputs[0]
    assert (output.text, output.token_ids) == ("", [5, 6])


# ---- several sequences, log-probabilities ---------------------------------------------------------------------------


def entry(logprob: float, rank: int = 1, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(logprob, rank, array("i", [i for i, _ in top]), array("d", [value for _, value in top]))


def test_sequences_end_on_their_own(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, n=2)
    assert not door.send("a", 1, finish_reason=FinishReason.STOP).finished
    output = door.send("b", 0, finish_reason=FinishReason.LENGTH)
    assert output.finished
    assert [(each.index, each.finish_reason) for each in output.outputs] == [(0, "length"), (1, "stop")]


def test_logprobs_name_the_token_and_the_likeliest(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, logprobs=2)
    a, b = tokenizer.encode("ab")
    output = door.send([a, b], logprobs=[entry(-0.5, 1, (a, -0.5), (b, -2.0)), entry(-3.0, 7, (a, -0.1), (0, -2.5))])
    assert output.outputs[0].cumulative_logprob == -3.5
    assert output.outputs[0].logprobs == [
        {a: Logprob(-0.5, 1, "a"), b: Logprob(-2.0, 2, "b")},
        {b: Logprob(-3.0, 7, "b"), a: Logprob(-0.1, 1, "a"), 0: Logprob(-2.5, 2, tokenizer.token_text(0))},
    ]
    assert Door(tokenizer).send([a]).outputs[0].logprobs is None


PIECES = st.lists(st.tuples(st.integers(0, 1), st.text("abé你 END", max_size=4), st.booleans()), max_size=8)


@given(PIECES, st.sampled_from([None, 0, 1]))
def test_deltas_add_up_to_the_output_and_tell_each_end_once(pieces: list[Any], logprobs: int | None) -> None:
    tokenizer = Tokenizer(byte_level())
    door, whole = (Door(tokenizer, n=2, stop="END", logprobs=logprobs, prompt_logprobs=0) for _ in range(2))
    told = (entry(-1.0, 1),) * (len(PROMPT) - 1)
    taken = []
    for branch, text, takes in [*pieces, (0, "", True), (1, "", True)]:
        if door.request.sequences[branch].finish_reason is None:
            ids = tokenizer.encode(text) if text else []
            for each in (door, whole):
                each.send(ids, branch, logprobs=[entry(-0.5, 1, (7, -0.5))] * len(ids), prompt_logprobs=told)
        if takes:
            taken.append(door.request.take_delta())
    for branch in range(2):
        if door.request.sequences[branch].finish_reason is None:
            for each in (door, whole):
                each.send([], branch, finish_reason=FinishReason.LENGTH)
    taken += [door.request.take_delta(), door.request.take_delta()]
    assert taken[-1].outputs == []
    output = whole.request.output()
    for each in output.outputs:
        parts = [part for delta in taken for part in delta.outputs if part.index == each.index]
        assert "".join(part.text for part in parts) == each.text
        assert [token for part in parts for token in part.token_ids] == each.token_ids
        if logprobs is None:
            assert each.logprobs is None
            assert all(part.logprobs is None for part in parts)
        else:
            assert [row for part in parts for row in part.logprobs or ()] == each.logprobs
        ends = [(part.finish_reason, part.stop_reason) for part in parts]
        assert ends == [(None, None)] * (len(parts) - 1) + [(each.finish_reason, each.stop_reason)]
    prompts = [delta.prompt_logprobs for delta in taken if delta.prompt_logprobs is not None]
    assert prompts == ([output.prompt_logprobs] if output.prompt_logprobs is not None else [])
    counts = [delta.num_generated_tokens for delta in taken]
    assert counts == sorted(counts)
    assert counts[-1] == sum(len(each.token_ids) for each in output.outputs)


def test_log_probabilities_are_made_when_they_are_read_and_kept_until_they_are_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def noted(*fields: Any) -> Logprob:
        made.append(fields)
        return Logprob(*fields)

    monkeypatch.setattr("quire.engine.text.logprob_list.Logprob", noted)
    door = Door(tokenizer, n=2, best_of=2, logprobs=2, prompt_logprobs=2)
    likely = entry(-0.5, 1, (1, -0.5), (2, -2.0))
    fields: dict[str, Any] = {"prompt_logprobs": (likely,) * (len(PROMPT) - 1), "waited_s": 0.0}
    for branch in range(2):
        door.processor.process([SequenceUpdate("r", branch, [1, 2], [likely] * 2, 1, **fields)])
    delta = door.request.take_delta()
    assert made == []
    entries = [each for part in delta.outputs for each in part.logprobs or ()]
    assert [list(each) for each in entries] == [[1, 2], [2, 1]] * 2 and len(made) == 8
    assert delta.prompt_logprobs is not None and delta.prompt_logprobs[0] is None
    assert [each.logprobs for each in door.request.output().outputs] == [[], []], "what is told is not kept"
    assert door.request.output().prompt_logprobs is None


def test_texts_that_a_search_has_found_are_told_at_the_end_best_first(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, n=2, best_of=3, beam_search=True, temperature=0, length_penalty=2.0)
    found = {0: ("ab", -3.0), 1: ("abcd", -4.0), 2: ("a", -1.0)}
    for branch, (text, total) in found.items():
        assert door.request.take_delta().outputs == []
        door.send(text, branch, finish_reason=FinishReason.LENGTH, cumulative_logprob=total)
    [last] = [door.request.take_delta()]
    assert [(part.index, part.text) for part in last.outputs] == [(0, "abcd"), (1, "ab")]
    best, second = door.request.output().outputs
    assert (best.score, best.cumulative_logprob) == (-4.0 / 4**2, -4.0)
    assert (second.score, second.cumulative_logprob) == (-3.0 / 2**2, -3.0)


def test_the_prompt_is_told_with_the_first_token_and_stays(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, prompt_logprobs=1, n=2)
    reports = tuple(entry(-0.5 * place, 2, (PROMPT[0], -0.25)) for place in range(1, len(PROMPT)))
    assert door.request.output().prompt_logprobs is None
    assert door.send("a", 1).prompt_logprobs is None  # they come with the first sequence
    first = door.send("a", prompt_logprobs=reports).prompt_logprobs
    assert first is not None and first[0] is None and len(first) == len(PROMPT)
    text = tokenizer.token_text(PROMPT[1])
    assert (first[1] or {})[PROMPT[1]] == Logprob(-0.5, 2, text)
    assert door.send("b", finish_reason=FinishReason.LENGTH).prompt_logprobs == first
    assert Door(tokenizer).send("a", prompt_logprobs=reports).prompt_logprobs is None  # nobody asked


def test_a_prompt_that_failed_is_told_as_far_as_it_came(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, prompt_logprobs=0)
    output = door.send("", prompt_logprobs=(entry(-1.0),), finish_reason=FinishReason.ERROR, error="broken")
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 2
    assert Door(tokenizer, prompt_logprobs=0).send("", finish_reason=FinishReason.ERROR).prompt_logprobs is None


def test_of_best_of_the_most_likely_are_returned_and_numbered_anew(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, n=2, best_of=3)
    for branch, logprob in enumerate([-3.0, -9.0, -1.0]):
        output = door.send("abc"[branch], branch, logprobs=[entry(logprob)], finish_reason=FinishReason.LENGTH)
    assert [(each.index, each.text) for each in output.outputs] == [(0, "c"), (1, "a")]
    assert output.outputs[0].logprobs is None  # asked for by us, not by the caller


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_broken_tokenizer_ends_one_request_and_no_other(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(tokenizer, n=2)
    other = door.add("other")

    def fail(token_ids: list[int]) -> str:
        raise ZeroDivisionError("no text today")

    monkeypatch.setattr(door.request.sequences[1]._detokenizer, "append", fail)
    door.send("x", 1)
    output = door.send("good", name="other")
    assert [each.finish_reason for each in output.outputs] == ["error", "error"]
    assert "ZeroDivisionError: no text today" in output.error
    assert door.link.commands == [Fail("r", output.error)]
    assert other.output().outputs[0].text == "good"


def test_an_error_of_the_engine_is_told(tokenizer: Tokenizer) -> None:
    output = Door(tokenizer).send("", finish_reason=FinishReason.ERROR, error="the logits are not finite")
    assert (output.outputs[0].finish_reason, output.error) == ("error", "the logits are not finite")


def test_an_abort_delivers_what_there_is_once(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer)
    door.send("half")
    door.processor.abort("r")
    door.processor.abort("r")
    output = door.request.output()
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("half", "abort", True)
    assert door.link.commands == [Abort("r")]
    assert len(door.delivered) == 2
    door.send("late")
    assert len(door.delivered) == 2


# ---- progress -------------------------------------------------------------------------------------------------------


class FakeTerminal:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.written = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer)
    door.send("ab", finish_reason=FinishReason.LENGTH)
    for is_terminal in (True, False):
        stream, clock = FakeTerminal(is_terminal), ManualClock()
        bar = ProgressBar(1, stream, clock)  # type: ignore[arg-type]
        clock.advance(0.5)
        bar.note(door.request)
        bar.close()
        bar.close()
        if is_terminal:
            assert "Processed prompts 1/1, 4.0 tok/s in, 4.0 tok/s out" in stream.written
            assert stream.written.count("\n") == 1
        else:
            assert stream.written == ""


def test_progress_is_drawn_ten_times_a_second_at_most_and_counts_only_what_has_ended(tokenizer: Tokenizer) -> None:
    under_way, ended = Door(tokenizer), Door(tokenizer, n=2)
    under_way.send("abc")
    for branch in (0, 1):
        ended.send("ab", branch, finish_reason=FinishReason.LENGTH)
    stream, clock = FakeTerminal(is_terminal=True), ManualClock(7.0)
    bar = ProgressBar(2, stream, clock)  # type: ignore[arg-type]
    clock.advance(0.0625)
    bar.note(ended.request)
    assert stream.written == "", "too soon"
    clock.advance(0.0625)
    bar.note(under_way.request)
    drawn = "\rProcessed prompts 1/2, 16 tok/s in, 32 tok/s out\x1b[K"
    assert stream.written == drawn
    clock.advance(0.0625)
    bar.note(under_way.request)
    assert stream.written == drawn
    clock.advance(0.8125)
    bar.close()
    assert stream.written == drawn + "\rProcessed prompts 1/2, 2.0 tok/s in, 4.0 tok/s out\x1b[K\n"
    bar.note(under_way.request)
    assert stream.written.endswith("\n"), "what is closed stays as it is"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0"),
        (9.94, "9.9"),
        (10.0, "10"),
        (999.4, "999"),
        (1000.0, "1.0k"),
        (999_949.0, "999.9k"),
        (1e6, "1.0M"),
        (2.56e9, "2560.0M"),
    ],
)
def test_rates_are_short(value: float, shown: str) -> None:
    assert short_number(value) == shown


def test_a_bar_of_nothing_is_not_drawn() -> None:
    stream, clock = FakeTerminal(is_terminal=True), ManualClock()
    ProgressBar(0, stream, clock).close()  # type: ignore[arg-type]
    assert stream.written == ""


def test_loading_is_shown_on_a_terminal_once_it_takes_long_and_cleared_at_the_end() -> None:
    stream, clock = FakeTerminal(is_terminal=True), ManualClock()
    line = LoadingLine(stream, clock)  # type: ignore[arg-type]
    line.note(1 << 20, 3 << 20, "weights")
    assert stream.written == ""
    clock.advance(0.5)
    line.note(2 << 20, 3 << 20, "weights")
    drawn = "\rloading 2.0 MiB of 3.0 MiB, 66 %\x1b[K"
    assert stream.written == drawn
    clock.advance(0.05)
    line.note(3 << 20, 3 << 20, "weights")  # too soon to be drawn again
    clock.advance(0.1)
    line.note(3, 11, "graphs")
    drawn += "\rrecording graphs 3/11\x1b[K"
    line.close()
    line.close()
    assert stream.written == drawn + "\r\x1b[K"


def test_loading_is_not_shown_where_nobody_watches_or_nobody_waits() -> None:
    for is_terminal, waited_s in ((False, 10.0), (True, 0.25)):
        stream, clock = FakeTerminal(is_terminal), ManualClock()
        line = LoadingLine(stream, clock)  # type: ignore[arg-type]
        clock.advance(waited_s)
        line.note(1, 0, "weights")
        line.close()
        assert stream.written == ""


def test_metrics_say_nothing_where_nothing_is_known() -> None:
    assert RequestMetrics(1.0).tokens_per_s is None
    assert RequestMetrics(1.0, 2.0, 2.0, 1).tokens_per_s is None
