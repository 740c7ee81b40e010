"""Output that nobody reads: whoever prints or logs it goes on."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire.core.threaded_output import ThreadedOutput

LINE = "x" * 1023 + "\n"
UNREAD = """
import sys
from quire.core.threaded_output import thread_output
thread_output()
for number in range(3000):
    print(number, "x" * 1000, file=sys.stderr)
print("done")
raise RuntimeError("the last words")
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        with suppress(OSError):
            os.close(descriptor)


def read_all(descriptor: int, until: bytes) -> bytes:
    data = b""
    while until not in data:
        data += os.read(descriptor, 1 << 16)
    return data


def test_what_is_written_comes_in_its_order(pipe: tuple[int, int]) -> None:
    output = ThreadedOutput(pipe[1])
    for number in range(1000):
        print(number, "é\udc80", file=output, flush=True)
    output.drain(300)
    expected = "".join(f"{number} é\\udc80\n" for number in range(1000))
    assert read_all(pipe[0], b"999 \xc3\xa9\\udc80\n").decode() == expected
    assert (output.fileno(), output.isatty(), output.writable(), output.encoding) == (pipe[1], False, True, "utf-8")


def test_nobody_who_reads_stops_nobody_who_writes(pipe: tuple[int, int]) -> None:
    output = ThreadedOutput(pipe[1], max_waiting_bytes=200 << 10)
    logger = logging.Logger("unread")
    logger.addHandler(logging.StreamHandler(output))
    for _ in range(1000):  # a pipe holds 64 of them, and 200 wait
        logger.warning(LINE[:-1])
    output.drain(0.01)  # waits no longer
    data = b""
    while output._num_waiting_bytes:  # also for a moment after the last of them is in the pipe
        data += os.read(pipe[0], 1 << 16) if select.select([pipe[0]], [], [], 0.01)[0] else b""
    print("after that", file=output)
    data += read_all(pipe[0], b"after that\n")
    assert 200 <= data.count(LINE.encode()) <= 400
    assert b" pieces of output were dropped here: slow reader\n" in data


def test_a_busy_program_loses_no_line_that_has_a_reader(tmp_path: Path) -> None:
    """It never waits, so the thread that writes gets the interpreter a few times a second only."""
    with (tmp_path / "log").open("wb") as file:
        output = ThreadedOutput(file.fileno())
        for _ in range(5000):
            output.write(LINE)
            sum(range(5000))
        output.drain(300)
    assert (tmp_path / "log").read_bytes() == LINE.encode() * 5000


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    output = ThreadedOutput(pipe[1])
    os.close(pipe[0])
    for _ in range(10):
        print("lost", file=output)
    output.drain(300)
    assert not output._num_waiting_bytes


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    output = ThreadedOutput(pipe[1])
    for _ in range(300):
        output.write(LINE)
    output.write("end\n")
    assert read_all(pipe[0], b"end\n") == LINE.encode() * 300 + b"end\n"


def test_threads_do_not_mix_their_lines(pipe: tuple[int, int]) -> None:
    output = ThreadedOutput(pipe[1])
    threads = [threading.Thread(target=lambda: [output.write(LINE) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    data = b""
    while len(data) < 400 * len(LINE):
        data += os.read(pipe[0], 1 << 16)
    assert data == LINE.encode() * 400


def test_a_process_whose_output_is_unread_ends() -> None:
    """It prints three megabytes into a pipe that nobody reads, and its end waits no more than a moment."""
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert process.wait(300) == 1


def test_a_process_whose_output_is_read_says_all_to_its_last_words() -> None:
    done = subprocess.run([sys.executable, "-c", UNREAD.replace("3000", "30")], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count(b"x" * 1000) == 30
    assert done.stderr.endswith(b"RuntimeError: the last words\n")
