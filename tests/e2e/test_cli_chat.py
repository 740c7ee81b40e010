"""`quire chat` on a real terminal (a pty): wrapped answers, pasted turns, Ctrl-C, and what a person is greeted with."""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from quire.cli.turn_reader import PROMPT
from support.smollm2 import smollm2_path

COLUMNS = 40
PATIENCE_S = 300
ESCAPES = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")
PASTE = "\x1b[200~{}\x1b[201~"


class Chat:
    """A conversation on a terminal of 40 columns, typed into and read from as a person would."""

    def __init__(self, *arguments: str, term: str = "xterm-256color") -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        variables = {"TERM": term, "NO_COLOR": "1", "PYTHONUTF8": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "INPUTRC")}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "quire", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=kept | variables,
        )
        os.close(theirs)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def expect(self, text: str) -> str:
        """Read until a text appears; return what was written before its end."""
        while text not in self.seen:
            assert select.select([self._ours], [], [], PATIENCE_S)[0], f"no {text!r} in {self.seen!r}"
            assert self._read(), f"ended without {text!r}: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C at the prompt, and Enter: right after the prompt, Python sees the signal with the next key."""
        self.type("\x03")
        self.type("\n")

    def end(self) -> str:
        """Read what is left and wait for the end."""
        while self._read():
            pass
        assert self.process.wait(300) is not None
        return self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(300)
        os.close(self._ours)

    def _read(self) -> bool:
        try:
            chunk = os.read(self._ours, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        self.seen = ESCAPES.sub("", self.seen + self._decoder.decode(chunk)).replace("\r\n", "\n")
        return bool(chunk)


@pytest.fixture
def chats() -> Iterator[list[Chat]]:
    """Conversations that are ended with the test."""
    opened: list[Chat] = []
    yield opened
    for each in opened:
        each.close()


def open_chat(chats: list[Chat], *arguments: str, model: str = "guide", term: str = "xterm-256color") -> Chat:
    chats.append(Chat(model, "--temperature", "0", *arguments, term=term))
    return chats[-1]


def test_a_person_is_greeted_in_two_lines_told_how_to_leave_and_an_arrow_repeats(chats: list[Chat]) -> None:
    chat = open_chat(chats)
    greeting = chat.expect(PROMPT)
    assert "guide, 2,048 tokens of context" in greeting
    assert "/bye leaves" in " ".join(greeting.split())
    assert "KV memory" not in greeting and "activations" not in greeting
    assert "--temperature 0.7" not in " ".join(greeting.split())
    assert max(map(len, greeting.splitlines())) <= COLUMNS
    chat.type("/system Be brief.\n")
    chat.expect(PROMPT)
    chat.type("\x1b[A")
    chat.expect("/system Be brief.")
    chat.type("\n")
    chat.expect(PROMPT)
    chat.type("/bye\n")
    chat.end()
    assert chat.process.returncode == 0


def test_the_memory_of_one_person_holds_the_context_once(chats: list[Chat]) -> None:
    chat = open_chat(chats, "--verbose")
    greeting = " ".join(chat.expect(PROMPT).split())
    assert "1 sequence of 2,048 tokens at once" in greeting
    assert "at most 1 sequence and 512 tokens" in greeting
    chat.type("\x04")
    chat.end()
    assert chat.process.returncode == 0
    chat = open_chat(chats, "--verbose", "--max-num-seqs", "4")
    assert "4 sequences of 2,048 tokens at once" in " ".join(chat.expect(PROMPT).split())


def test_answers_are_wrapped_to_the_terminal(chats: list[Chat]) -> None:
    chat = open_chat(chats, "--max-tokens", "120")
    chat.expect(PROMPT)
    chat.type("What is a block table?\n")
    lines = chat.expect("cache").splitlines()
    answer = lines[1 : next(index for index, text in enumerate(lines) if re.match(r"\d+ tokens · ", text))]
    assert len(answer) > 2
    assert max(map(len, answer)) <= COLUMNS


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_pasted_text_is_one_turn(chats: list[Chat], term: str) -> None:
    chat = open_chat(chats, "--max-tokens", "1", term=term)
    chat.expect(PROMPT)
    pasted = "One paragraph.\n\nAnother one.\n/bye is no command here"
    chat.type(PASTE.format(pasted) + "\n" if term != "dumb" else "One paragraph.\n\nAnother one.\n")
    chat.expect("cache")
    chat.expect(PROMPT)
    chat.type("/bye\n")
    rest = chat.end()
    assert chat.process.returncode == 0
    assert "cache" not in rest


def test_a_pasted_text_comes_with_its_lines(chats: list[Chat]) -> None:
    chat = open_chat(chats, "--max-tokens", "1")
    chat.expect(PROMPT)

    def num_prompt_tokens(text: str) -> int:
        chat.type(text)
        found = re.search(r"of (\d+) prompt", " ".join((chat.expect("prompt") + "prompt").split()))
        assert found is not None
        chat.expect(PROMPT)
        chat.type("/clear\n")
        chat.expect(PROMPT)
        return int(found[1])

    one, two = num_prompt_tokens("a table\n"), num_prompt_tokens(PASTE.format("a table\n\na table\n\na table") + "\n")
    assert two > one + 4


def test_ctrl_c_stops_the_answer_and_not_the_session(chats: list[Chat]) -> None:
    smollm2_path()
    chat = open_chat(chats, "--temperature", "0", model="smollm2")
    chat.expect(PROMPT)
    chat.type("Write a long story about a harbour, with ten chapters.\n")
    chat.expect("\n")
    chat.expect(" ")  # the answer has begun
    chat.type("\x03")
    chat.expect("(stopped)")
    chat.expect(PROMPT)
    chat.interrupt()
    chat.expect("Ctrl-C again leaves")
    chat.type("/?\n")  # what is typed between takes the first Ctrl-C back
    chat.expect("/clear")
    chat.expect(PROMPT)
    chat.interrupt()
    chat.expect("Ctrl-C again leaves")
    chat.expect(PROMPT)
    chat.interrupt()
    assert "Traceback" not in chat.end()
    assert chat.process.returncode == 0


def test_sampling_is_calm_where_nobody_says_how(chats: list[Chat]) -> None:
    smollm2_path()
    note = "quire chat uses --temperature 0.7 --top-p 0.95"
    chats.append(Chat("smollm2"))
    assert note in " ".join(chats[-1].expect(PROMPT).split())
    assert note not in " ".join(open_chat(chats, model="smollm2").expect(PROMPT).split())
