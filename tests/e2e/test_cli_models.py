"""`quire generate`, `quire chat` and `quire doctor MODEL`: what goes to stdout, what to stderr, and how they end."""

from __future__ import annotations

import argparse
import ast
import errno
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from quire.cli.engine_options import OTHERWISE_SAID, add_engine_options, engine_config
from quire.cli.options import environment_name
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.engine import progress
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml, write_llama2

SETTINGS = {"vocab_size": 384, "eos_token_id": 383}
QUICK = ("--kv-memory", "1MiB", "--num-threads", "1", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_chatml(write_tiny_qwen3(tmp_path_factory.mktemp("model"), settings=SETTINGS)))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in fields(EngineConfig):
        monkeypatch.delenv(environment_name(field.name), raising=False)


class Command:
    """Runs a command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str, stdin: str = "", **variables: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)
        status = cli.main(arguments)
        return status, *self._capsys.readouterr()


@pytest.fixture
def quire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


# ---- settings -----------------------------------------------------------------------------------------------------


def parse(*arguments: str, **environ: str) -> EngineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_options(parser)
    return engine_config(parser.parse_args(arguments), environ)


def test_every_setting_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    text = parser.format_help()
    for field in fields(EngineConfig):
        if field.name not in OTHERWISE_SAID:
            assert f"--{field.name.replace('_', '-')}" in text
            assert environment_name(field.name) in text


def test_a_flag_goes_before_the_environment_and_that_before_the_default() -> None:
    assert parse() == EngineConfig()
    assert parse(QUIRE_BLOCK_SIZE="32").block_size == 32
    assert parse("--block-size", "64", QUIRE_BLOCK_SIZE="32").block_size == 64
    assert parse("here", QUIRE_MODEL="there").model == "here"
    assert parse(QUIRE_MODEL="there").model == "there"


def test_settings_are_read_as_their_kind() -> None:
    made = parse("--no-enable-prefix-caching", "--kv-memory", "2MiB", "--max-model-len", "none", "--swap-space", "1k")
    assert (made.enable_prefix_caching, made.kv_memory, made.max_model_len, made.swap_space) == (
        False,
        2 << 20,
        None,
        1024,
    )
    assert parse(QUIRE_ENABLE_PREFIX_CACHING="off", QUIRE_SEED="7").seed == 7
    assert parse(QUIRE_KV_MEMORY="none", QUIRE_TOKENIZER="none", QUIRE_NUM_THREADS="2").num_threads == 2


@pytest.mark.parametrize(
    ("name", "value"), [("QUIRE_BLOCK_SIZE", "x"), ("QUIRE_SEED", ""), ("QUIRE_ENABLE_PREFIX_CACHING", "maybe")]
)
def test_what_the_environment_gets_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{name} is "):
        parse(**{name: value})


# ---- generate ------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_the_rest_to_stderr(quire: Command, folder: str) -> None:
    status, out, err = quire("generate", folder, *QUICK, "-p", "hello")
    assert status == 0
    assert out.endswith("\n")
    assert "KV blocks" in err
    count = r"^6 tokens · [\d.]+ s · \d+ tok/s · 0 of \d+ prompt tokens from the cache · cut off by --max-tokens$"
    assert re.search(count, err, re.MULTILINE)
    assert quire("generate", folder, *QUICK, "-p", "hello", "--quiet") == (0, out, "")
    assert quire("generate", *QUICK, "-q", stdin="hello\n", QUIRE_MODEL=folder) == (0, out, "")


def test_text_is_generated_where_torch_is_not_installed() -> None:
    """In a process of its own, in an environment that has no torch: that of `make test`."""
    code = "import sys; from quire.cli import main; status = main(); print(sorted(sys.modules)); sys.exit(status)"
    arguments = ["generate", "--raw", "-p", "A block is", "--max-tokens", "4", "--kv-memory", "4MiB"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text, modules = done.stdout.rstrip("\n").rsplit("\n", 1)
    assert text
    assert "quire._native" in modules
    assert not {"torch", "transformers"} & set(ast.literal_eval(modules))


def test_prompts_come_from_files_too(quire: Command, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("hello")
    plain = quire("generate", folder, *QUICK, "-q", "-p", "hello")
    assert quire("generate", folder, *QUICK, "-q", "--prompt-file", str(file)) == plain
    assert quire("generate", folder, *QUICK, "-q", "--prompt-file", str(tmp_path / "none"))[0] == cli.FAILED
    file.write_bytes(b"\xff\xfe\xff")
    status, out, err = quire("generate", folder, *QUICK, "-q", "--prompt-file", str(file))
    assert (status, out) == (cli.MISUSED, "")
    assert "a text in UTF-8" in err


def test_json_is_one_object_with_every_field(quire: Command, folder: str) -> None:
    status, out, err = quire("generate", folder, *QUICK, "-q", "-p", "hello", "--json", "-n", "2")
    assert (status, err) == (0, "")
    value = json.loads(out)
    assert [len(each["token_ids"]) for each in value["outputs"]] == [6, 6]
    assert value["finished"] is True
    assert value["metrics"]["num_generated_tokens"] == 12


def test_every_prompt_that_is_given_is_run(quire: Command, folder: str) -> None:
    alone = [quire("generate", folder, *QUICK, "-q", "-p", text)[1] for text in ("hello", "the")]
    both = ("generate", folder, *QUICK, "-q", "-p", "hello", "-p", "the")
    assert quire(*both)[1] == f"=== prompt 1 of 2\n{alone[0]}=== prompt 2 of 2\n{alone[1]}"
    answers = [json.loads(line) for line in quire(*both, "--json")[1].splitlines()]
    assert [each["outputs"][0]["text"] + "\n" for each in answers] == alone
    assert quire(*both, "--prompt-file", "-")[0] == cli.MISUSED


def test_a_prompt_is_a_message_or_a_text(quire: Command, folder: str) -> None:
    def num_prompt_tokens(*arguments: str) -> int:
        return len(
            json.loads(quire("generate", folder, *QUICK, "-p", "hello", "--json", *arguments)[1])["prompt_token_ids"]
        )

    assert num_prompt_tokens("--raw") < num_prompt_tokens("--chat") == num_prompt_tokens()


def test_several_texts_are_numbered_and_stop_strings_and_seeds_heeded(quire: Command, folder: str) -> None:
    options = ("-p", "hello", "-q", "--temperature", "1", "--seed", "3", "-n", "2")
    first = quire("generate", folder, *QUICK, *options)
    assert first == quire("generate", folder, *QUICK, *options)
    assert "--- 1 of 2\n" in first[1]
    assert "--- 2 of 2\n" in first[1]
    whole = quire("generate", folder, *QUICK, "-q", "-p", "hello")[1].rstrip("\n")
    stopped = quire("generate", folder, *QUICK, "-q", "-p", "hello", "--stop", whole[3])[1].rstrip("\n")
    assert stopped == whole[: whole.index(whole[3])]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("-p", ""), 2, "prompt is ''"),
        (("-p", "x", "--temperature", "nan"), 2, "temperature is nan"),
        (("-p", "x", "--repetition-penalty", "0"), 2, "repetition_penalty is 0"),
        (("-p", "x", "--presence-penalty", "-3"), 2, "presence_penalty is -3"),
        (("-p", "x", "--frequency-penalty", "2.5"), 2, "frequency_penalty is 2.5"),
        (("-p", "x", "--top-k", "many"), 2, "argument --top-k"),
        (("-p", "x", "--block-size", "7.5"), 2, "argument --block-size"),
        (("-p", "x", "--kv-memory", "lots"), 2, "kv_memory is 'lots'"),
        (("-p", "x", "--dtype", "int3"), 2, "dtype is 'int3'"),
        (("-p", "x", "--weights", "int3"), 2, "weights is 'int3'; allowed: one of auto, widened, int8, int4"),
        (("-p", "x", "--kv-dtype", "int3"), 2, "kv_dtype is 'int3'; allowed: one of auto, bfloat16, float16, float32"),
        (("-p", "x" * 9000), 2, "Shorten the prompt"),
        (("-p", "x", "--beams", "1000"), 2, "--beams is 1000; allowed: an integer from 1 to "),
        (("-p", "x", "--best-of", "1000"), 2, "best_of is 1000; allowed: an integer from 1 to "),
        (("-p", "x", "--prompt-file", "y"), 2, "not allowed with"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    quire: Command, folder: str, arguments: tuple[str, ...], status: int, message: str
) -> None:
    found, out, err = quire("generate", folder, *QUICK, "-q", *arguments)
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert err.startswith("quire")
    assert message in err


def test_a_request_that_fails_is_one_line_and_status_1(
    quire: Command, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("no")

    monkeypatch.setattr("quire.compute.worker.worker.Worker._compute", fail)
    status, _, err = quire("generate", folder, *QUICK, "-q", "-p", "hello")
    assert (status, err.count("\n")) == (cli.FAILED, 1)
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate guide --prompt x --temperature -1", "temperature is -1.0; allowed: "),
        (
            "generate guide --prompt x --beams 2 --temperature 1",
            "temperature is 1.0; allowed: 0 in a beam search",
        ),
        ("generate guide --prompt x --beams 2 --format json", "allowed: no grammar in a beam search"),
        ("generate guide --prompt x --length-penalty 2", "length_penalty is 2.0; allowed: 1.0 outside a beam search"),
        ("generate guide --prompt x --beams 2 -n 3", "--beams is 2; allowed: at least 3, the number of texts (-n)"),
        ("generate guide --prompt x --best-of 2 -n 3", "--best-of is 2; allowed: at least 3, the number of texts (-n)"),
        ("generate guide --prompt x --kv-memory 0.5", "kv_memory is '0.5'; allowed: a number of bytes, or a size such"),
        ("generate guide --prompt x --prompt ''", "prompt is ''; allowed: a text of at least one character"),
        ("generate guide", "prompt is ''; allowed: a text of at least one character"),
        ("chat guide --temperature -1", "temperature is -1.0; allowed: "),
        ("chat guide --top-p 2", "top_p is 2.0; allowed: "),
        (
            "embed guide --prompt x",
            "guide names no pooling, the way to make a vector. Choose one: --pooling last or mean",
        ),
    ],
)
def test_what_is_wrong_whatever_the_model_is_said_before_it_is_loaded(
    quire: Command, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        pytest.fail("the model was loaded")

    for command in ("generate", "chat", "embed"):
        monkeypatch.setattr(f"quire.cli.{command}.load", load)
    status, out, err = quire(*shlex.split(line))
    assert (status, out, err.count("\n")) == (cli.MISUSED, "", 1)
    assert message in err


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_a_pipe_talks_line_by_line_and_later_turns_hit_the_cache(quire: Command, folder: str) -> None:
    status, out, err = quire("chat", folder, *QUICK, stdin="hello " * 9 + "\n\nhello\n/nothing\n/help\n")
    assert status == 0
    counts = re.findall(r"tok/s · (\d+) of (\d+) prompt tokens from the cache", err)
    assert len(counts) == 2
    assert int(counts[0][0]) == 0
    assert int(counts[1][0]) >= int(counts[0][1]) // 16 * 16 > 0  # the full blocks of the first turn
    assert "/nothing is not a command" in err
    assert "/system TEXT" in err
    assert out.count("\n") >= 2


def test_clear_and_system_begin_anew(quire: Command, folder: str) -> None:
    def answers(stdin: str, *options: str) -> list[str]:
        status, out, err = quire("chat", folder, *QUICK, "-q", *options, stdin=stdin)
        assert (status, err) == (0, "")
        return [out]

    assert answers("hello\n/clear\nhello\n")[0] == answers("hello\n")[0] * 2
    assert answers("/system be brief\nhello\n") == answers("hello\n", "--system", "be brief")
    assert answers("hello\n/exit\nhello\n") == answers("hello\n")


def test_a_conversation_that_is_too_long_says_how_to_go_on(quire: Command, folder: str) -> None:
    status, out, err = quire("chat", folder, *QUICK, "-q", "--max-model-len", "64", stdin="x" * 200 + "\nhello\n")
    assert status == cli.FAILED
    assert "/clear starts over" in err
    assert out


def test_a_model_without_a_template_is_sent_to_generate(quire: Command, tmp_path: Path) -> None:
    write_llama2(write_tiny_qwen3(tmp_path, settings=SETTINGS))
    status, _, err = quire("chat", str(tmp_path), *QUICK)
    assert status == cli.MISUSED
    assert "quire generate --raw" in err
    assert quire("generate", str(tmp_path), *QUICK, "-q", "-p", "the")[0] == 0


def read_until(ours: int, wanted: str, seen: str = "") -> str:
    deadline = time.monotonic() + 300
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen += os.read(ours, 1 << 12).decode(errors="replace")
        except OSError as error:
            assert error.errno == errno.EIO
            raise AssertionError(seen) from error
    return seen


@pytest.fixture
def slow(quire: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Commands for which every load takes long enough to be shown."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    return quire


def test_a_terminal_shows_how_far_the_loading_is_and_then_no_more(slow: Command, folder: str) -> None:
    def seen(*arguments: str, term: str = "xterm") -> str:
        ours, theirs = pty.openpty()
        with open(theirs, "w", encoding="utf-8", closefd=False) as stream, redirect_stderr(stream):
            status, out, _ = slow("generate", folder, *QUICK, "-p", "hello", *arguments, TERM=term)
        assert status == 0 and "loading" not in out
        os.write(theirs, b"<end>")
        os.close(theirs)
        text = read_until(ours, "<end>")
        os.close(ours)
        return text

    text = seen()
    assert re.match(r"\rloading 0 B of [\d.]+ \w+, 0 %\x1b\[K", text)
    loading, model = text.rindex("loading"), text.index("Qwen3ForCausalLM")
    assert loading < text.index("\r\x1b[K", loading) < model
    assert "loading" not in seen("--quiet")
    assert "loading" not in seen(term="dumb")


def test_a_pipe_shows_nothing_of_the_loading(slow: Command, folder: str) -> None:
    status, out, err = slow("generate", folder, *QUICK, "-p", "hello")
    assert status == 0 and "loading" not in out + err


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_says_where_the_memory_would_go_and_loads_nothing(
    quire: Command, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr("quire.engine.factory.EngineBlueprint.build", fail)
    status, out, err = quire("doctor", folder, "--kv-memory", "1MiB")
    assert (status, err) == (0, "")
    for fact in ("Qwen3ForCausalLM", "KV blocks", "total", "with a chat template"):
        assert fact in out
    assert quire("doctor", folder + "/nowhere")[0] == cli.MISUSED
