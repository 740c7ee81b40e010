"""`quire chat` and `quire generate` with a model that a test has written: turns, interrupts, and what is printed."""

from __future__ import annotations

import argparse
import io
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli import embed, generate
from quire.cli.chat import COMMANDS, HELP, Conversation, _talk
from quire.cli.generate import _as_prompt, _generate, _read_prompt, _searching
from quire.cli.session import describe, remark, stream_text, until_interrupted
from quire.cli.terminal import Terminal
from quire.cli.turn_reader import pipe_reader
from quire.core.errors import ExecutionError, InvalidRequestError, RequestTooLargeError
from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from support.tiny_images import file_of, picture

METRICS = RequestMetrics(10.0, 10.5, 12.5, 41)


def snapshot(text: str, *more: str, error: str = "", score: float | None = None) -> RequestOutput:
    outputs = [
        CompletionOutput(index, each, [1], finish_reason="stop", error=error, score=score)
        for index, each in enumerate((text, *more))
    ]
    return RequestOutput("r", None, [1, 2, 3], outputs, False, 2, METRICS)


class SpokenModel:
    """A model whose answers are given: the pieces of each, and an exception where it ends so."""

    def __init__(self, answers: list[list[str | BaseException]]) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        self.num_open = 0
        self.outputs: list[RequestOutput] = []
        self.used_tqdm: bool | None = None
        self.tokenizer: Any = SimpleNamespace(has_chat_template=True)
        self.adapters: dict[str, Any] = {}
        self.report: Any = SimpleNamespace(reads_images=False)

    def stream(self, messages: Any, _: SamplingParams, adapter: str | None = None) -> Iterator[RequestOutput]:
        self.asked.append([dict(message) for message in messages])
        self.num_open += 1
        try:
            text = ""
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                text += piece
                yield snapshot(text)
        finally:
            self.num_open -= 1

    def generate(
        self, prompts: Any, _: SamplingParams, *, use_tqdm: bool, adapter: str | None = None
    ) -> list[RequestOutput]:
        self.used_tqdm = use_tqdm
        return self.outputs[: len(prompts)]


def reading(lines: list[str | BaseException]) -> Callable[[], str]:
    def read() -> str:
        if not lines:
            raise EOFError
        line = lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def talk(
    answers: list[list[str | BaseException]],
    lines: list[str | BaseException],
    *,
    is_watched: bool = False,
    is_quiet: bool = False,
    system: str = "",
) -> tuple[SpokenModel, int]:
    model = SpokenModel(answers)
    terminal = None if is_quiet else Terminal()
    conversation = Conversation(model, SamplingParams(), system, terminal)  # type: ignore[arg-type]
    status = _talk(conversation, reading(list(lines)), is_watched)
    assert model.num_open == 0
    return model, status


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ---- a conversation -------------------------------------------------------------------------------------------------

LINES = st.lists(
    st.one_of(
        st.tuples(
            st.just("say"), st.sampled_from(["Hi", "Why?", "é 😀"]), st.sampled_from(["", "stop", "refuse", "cut"])
        ),
        st.tuples(st.just("/clear")),
        st.tuples(st.just("/system"), st.sampled_from(["", "Be brief."])),
        st.tuples(st.just("/help")),
        st.tuples(st.just("")),
    ),
    max_size=10,
)


@given(LINES, st.sampled_from(["", "Be kind."]))
def test_each_question_is_asked_with_all_that_was_said_before(script: list[Any], system: str) -> None:
    history: list[dict[str, str]] = []
    expected, answers, lines = [], [], []
    instructions = system
    for step in script:
        match step:
            case ("say", text, end):
                lines.append(f"  {text}\n")
                before = [{"role": "system", "content": instructions}] if instructions else []
                expected.append([*before, *history, user(text)])
                refusal = InvalidRequestError("prompt", "long", "less")
                pieces: list[Any] = {"stop": [KeyboardInterrupt()], "refuse": [refusal]}.get(end, ["So", ".\n", "Yes"])
                answers.append([*pieces, KeyboardInterrupt()] if end == "cut" else pieces)
                if end in ("", "cut"):
                    history += [user(text), assistant("So.\nYes")]
            case ("/clear",):
                lines.append("/clear\n")
                history = []
            case ("/system", text):
                lines.append(f"/system {text}\n")
                history, instructions = [], text
            case (other,):
                lines.append(f"{other}\n")
    model, status = talk(answers, lines, is_watched=True, is_quiet=True, system=system)
    assert model.asked == expected
    assert model.answers == []
    assert status == 0


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_script_is_told_by_the_status_that_a_turn_failed(
    is_watched: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals = [
        InvalidRequestError("stop", "", "more"),
        RequestTooLargeError("prompt", "long", "less").saying("It is long."),
    ]
    model, status = talk([[refusals[0]], [refusals[1]], ["Yes"]], ["a", "b", "c"], is_watched=is_watched, is_quiet=True)
    assert (model.answers, status) == ([], 0 if is_watched else 1)
    out, err = capsys.readouterr()
    assert out.startswith("Yes\n")
    assert err.splitlines() == [f"error: {refusals[0]}", "error: It is long; /clear starts over"]


def test_answers_go_to_stdout_and_all_else_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    talk([["One", " two"], ["Three"]], ["a", "b", "/exit", "never read"])
    out, err = capsys.readouterr()
    assert out == "One two\nThree\n"
    assert err == "41 tokens · 2.50 s · 20 tok/s · 2 of 3 prompt tokens from the cache\n" * 2


def test_quiet_prints_answers_and_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = InvalidRequestError("prompt", "9 tokens", "at most 8")
    talk([["One"], [refusal]], ["a", "b", "/what now", "/clera"], is_quiet=True)
    out, err = capsys.readouterr()
    assert out == "One\n"
    assert err == (
        "error: prompt is '9 tokens'; allowed: at most 8\n"
        "/what is not a command; /? lists them\n"
        "/clera is not a command; did you mean /clear?\n"
    )


def test_an_answer_that_failed_on_its_way_says_so_even_where_it_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    model = SpokenModel([])
    failed = snapshot("So", error="the tokenizer is broken")
    model.stream = lambda *_, **__: (each for each in [failed])  # type: ignore[method-assign]
    for terminal in (None, Terminal()):
        Conversation(model, SamplingParams(), "", terminal).say("Hi")  # type: ignore[arg-type]
        assert capsys.readouterr() == ("So\n", "error: the tokenizer is broken\n")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    talk([], ["/help", "/?"], is_quiet=True)
    assert capsys.readouterr().err == 2 * (HELP + "\n")
    assert {command for command in COMMANDS if command not in HELP} == {"/quit"}  # a habit, and no second way


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit", " /exit \n"])
def test_a_word_leaves(word: str) -> None:
    model, status = talk([], [word, "never asked"])
    assert (model.asked, status) == ([], 0)


def test_an_interrupt_leaves_a_pipe_and_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str | BaseException] = ["a", KeyboardInterrupt(), "b", KeyboardInterrupt(), KeyboardInterrupt(), "c"]
    model, status = talk([["So", KeyboardInterrupt()], ["Yes"]], lines, is_watched=True, is_quiet=True)
    out, err = capsys.readouterr()
    assert (out, status) == ("So\n\nYes\n\n\n", 0)
    assert err == "(stopped)\n" + 2 * "Ctrl-C again leaves; so do Ctrl-D and /bye.\n"
    assert len(model.asked) == 2, "the last line was read after the second Ctrl-C"
    with pytest.raises(KeyboardInterrupt):
        talk([["So", KeyboardInterrupt()]], ["a"])


def test_a_signal_waits_for_the_end_of_a_step() -> None:
    steps: list[str] = []

    def answer() -> Iterator[RequestOutput]:
        for text in ("a", "ab", "abc"):
            signal.raise_signal(signal.SIGINT)
            steps.append(text)  # the step is complete
            yield snapshot(text)

    before, shown = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        shown += [each.outputs[0].text for each in until_interrupted(answer())]
    assert steps == ["a"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_pipe_is_read_line_by_line_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo"))
    read = pipe_reader()
    assert [read() for _ in range(3)] == ["one\n", "\n", "two"]
    with pytest.raises(EOFError):
        read()


# ---- what both commands share ---------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=3), max_size=8))
def test_a_text_is_written_as_it_grows_and_each_part_once(pieces: list[str]) -> None:
    written: list[str] = []
    texts = ["".join(pieces[: index + 1]) for index in range(len(pieces))]
    last = stream_text(map(snapshot, texts), written.append)
    assert "".join(written) == "".join(pieces)
    assert "" not in written
    assert (last is None) == (not pieces)
    assert last is None or last.outputs[0].text == texts[-1]


def test_a_count_leaves_out_what_is_not_known() -> None:
    output = snapshot("x")
    unknown = RequestOutput("r", None, [1], output.outputs, True, 0, RequestMetrics(10.0))
    assert describe(unknown, None) == "0 tokens · 0 of 1 prompt tokens from the cache"


@pytest.mark.parametrize(
    ("reason", "max_tokens", "end"),
    [
        ("length", 1, " · cut off by --max-tokens"),
        ("length", 2, " · cut off: the context is full"),
        ("length", None, " · cut off: the context is full"),
        ("stop", 1, "from the cache"),
    ],
)
def test_a_count_says_what_cut_an_answer(reason: str, max_tokens: int | None, end: str) -> None:
    outputs = [CompletionOutput(0, "x", [1], finish_reason="stop"), CompletionOutput(1, "y", [2], finish_reason=reason)]
    output = RequestOutput("r", None, [1], outputs, True, 0, RequestMetrics(10.0))
    assert describe(output, max_tokens).endswith(end)


def test_each_line_of_a_remark_is_faint_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    remark("one\ntwo", Terminal(num_colours=256))
    assert capsys.readouterr().err == "\x1b[38;5;243mone\x1b[0m\n\x1b[38;5;243mtwo\x1b[0m\n"


# ---- quire generate -------------------------------------------------------------------------------------------------


def arguments(**given: Any) -> argparse.Namespace:
    plain = dict.fromkeys(("best_of", "beams", "length_penalty", "early_stopping", "prompt_file"))
    return argparse.Namespace(**{**plain, "n": 1, "json": False, "quiet": False, **given})


def test_beams_start_from_nothing_but_what_is_said() -> None:
    makers = SamplingParams(temperature=0.6, repetition_penalty=1.1, top_k=20)
    found = _searching(arguments(n=2, beams=4, length_penalty=0.5, early_stopping="never"), makers)
    assert (found.n, found.best_of, found.beam_search) == (2, 4, True)
    assert (found.temperature, found.repetition_penalty) == (0.0, 1.0)
    assert (found.length_penalty, found.early_stopping) == (0.5, "never")
    said = _searching(arguments(beams=4, temperature=0.3, repetition_penalty=1.2), makers)
    assert (said.temperature, said.repetition_penalty) == (0.3, 1.2)
    assert _searching(arguments(n=3, best_of=5), makers) == SamplingParams(
        temperature=0.6, repetition_penalty=1.1, top_k=20, n=3, best_of=5
    )
    for word, value in generate.EARLY_STOPPING.items():
        assert _searching(arguments(early_stopping=word), makers).early_stopping == value


@pytest.mark.parametrize(
    ("text", "chat", "has_template", "is_message"),
    [
        ("Hi", None, True, True),
        ("Hi", None, False, False),
        ("Hi", True, False, True),
        ("Hi", False, True, False),
    ],
)
def test_a_prompt_is_a_message_where_that_was_asked_for_or_the_model_takes_them(
    text: str, chat: bool | None, has_template: bool, is_message: bool
) -> None:
    model: Any = SpokenModel([])
    model.tokenizer.has_chat_template = has_template
    assert _as_prompt(model, text, chat) == ([user(text)] if is_message else text)
    model.tokenizer = None
    assert _as_prompt(model, text, None) == text


def printed(model: SpokenModel, num_prompts: int, sampling: SamplingParams, capsys: Any, **given: Any) -> str:
    prompts: list[Any] = ["p"] * num_prompts
    _generate(model, prompts, sampling, arguments(**given))  # type: ignore[arg-type]
    return str(capsys.readouterr().out)


def test_one_text_is_streamed_and_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = SpokenModel([["So", "."], ["So.", "\n"], [""], []])
    model.stream = lambda *_, **__: (snapshot(text) for text in accumulate(model.answers.pop(0)))  # type: ignore[method-assign]
    for expected in ("So.\n", "So.\n", "\n"):
        assert printed(model, 1, SamplingParams(), capsys) == expected
    with pytest.raises(ExecutionError, match="the engine returned nothing"):
        printed(model, 1, SamplingParams(), capsys)


def test_several_texts_are_under_the_prompt_and_the_number_that_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    model = SpokenModel([])
    model.outputs = [snapshot("a", "b"), snapshot("c", "d", score=-1.25)]
    assert printed(model, 2, SamplingParams(n=2), capsys) == (
        "=== prompt 1 of 2\n--- 1 of 2\na\n--- 2 of 2\nb\n"
        "=== prompt 2 of 2\n--- 1 of 2, score -1.2500\nc\n--- 2 of 2, score -1.2500\nd\n"
    )
    assert model.used_tqdm
    model.outputs = [snapshot("a"), snapshot("b")]
    assert printed(model, 2, SamplingParams(), capsys, quiet=True) == "=== prompt 1 of 2\na\n=== prompt 2 of 2\nb\n"
    assert model.used_tqdm is False
    model.outputs = [snapshot("a", "b")]
    assert printed(model, 1, SamplingParams(n=2), capsys) == "--- 1 of 2\na\n--- 2 of 2\nb\n"


def test_json_is_one_line_for_each_prompt_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    model = SpokenModel([])
    model.outputs = [snapshot("é\n"), snapshot("b")]
    lines = printed(model, 2, SamplingParams(), capsys, json=True).splitlines()
    assert "é" in lines[0]
    first, second = map(json.loads, lines)
    assert (first["outputs"][0]["text"], second["outputs"][0]["text"]) == ("é\n", "b")
    assert first["metrics"] == {
        "arrival_s": 10.0,
        "first_token_s": 10.5,
        "finished_s": 12.5,
        "num_generated_tokens": 41,
        "num_steps": 0,
        "time_to_first_token_s": 0.5,
        "tokens_per_s": 20.0,
    }
    assert model.used_tqdm is False


@contextmanager
def stdin(text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(text))
        yield


def test_a_prompt_from_a_pipe_loses_one_line_end_and_a_file_none(tmp_path: Any) -> None:
    with stdin("Hi\n\n"):
        assert _read_prompt(arguments()) == "Hi\n"
    with stdin("Hi"):
        assert _read_prompt(arguments(prompt_file="-")) == "Hi"
    path = tmp_path / "prompt"
    path.write_bytes("é\n".encode())
    assert _read_prompt(arguments(prompt_file=str(path))) == "é\n"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError) as caught:
        _read_prompt(arguments(prompt_file=str(path)))
    assert (caught.value.field, caught.value.allowed) == ("file", "a text in UTF-8")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_other_bytes_than_utf8_are_refused_on_stdin_too(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (lambda: _read_prompt(arguments()), pipe_reader(), lambda: embed._lines(None)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), "utf-8", errors=errors))
        with pytest.raises(InvalidRequestError, match=r"^file is 'stdin'; allowed: a text in UTF-8$"):
            read()


def test_an_image_is_shown_with_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = file_of(picture(8, 8))
    (tmp_path / "cat.png").write_bytes(pixels)
    (tmp_path / "notes.txt").write_text("A cat")
    model = SpokenModel([["A cat"], ["Yes"], ["A dog"]])
    model.report = SimpleNamespace(reads_images=True)
    conversation = Conversation(model, SamplingParams(), "", None)  # type: ignore[arg-type]
    lines: list[Any] = [f"/image {tmp_path}/cat.png", "What?", "Sure?", "/image cat.txt", "/image", "/clear", "Who?"]
    lines.insert(1, f"/image {tmp_path}/notes.txt")
    assert _talk(conversation, reading(lines), False) == 1
    image = {"type": "image", "image": pixels, "where": f"{tmp_path}/cat.png"}  # what errors about it will name
    shown = [image, {"type": "text", "text": "What?"}]
    first = [{"role": "user", "content": shown}, assistant("A cat")]
    assert model.asked == [first[:1], [*first, user("Sure?")], [user("Who?")]]
    errors = capsys.readouterr().err
    assert errors.count("error: image is") == 2 and "is '5 bytes of another format" in errors
    model.report = SimpleNamespace(reads_images=False)
    with pytest.raises(InvalidRequestError, match="this model reads text only"):
        conversation.show(f"{tmp_path}/cat.png")
