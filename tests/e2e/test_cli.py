"""The command line from outside: what it prints, where, in which colours, and how it ends."""

from __future__ import annotations

import errno
import fcntl
import http.client
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from pathlib import Path

import pytest

import quire
from quire import cli
from quire.cli import demo
from quire.cli.demo.stage import ERASE_BELOW, ERASE_LINE, HIDE_CURSOR, SHOW_CURSOR, Stage
from quire.cli.terminal import Terminal, detect
from quire.core.errors import InvalidConfigError, QuireError
from quire.core.granted import core_quota, granted_cores, memory_bytes, memory_limit

QUIRE = [sys.executable, "-m", "quire"]
ESCAPE = "\x1b"
AMBIENT = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM", "PYTHONIOENCODING")


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in AMBIENT}
    return kept | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | variables


def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*QUIRE, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(**variables),
        timeout=300,
        check=False,
    )


def printed_here(*arguments: str, **variables: str) -> str:
    """Return what a command prints that runs in this process, with an output that is no terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stream):
        for name in AMBIENT:
            patch.delenv(name, raising=False)
        for name, value in environment(**variables).items():
            patch.setenv(name, value)
        assert cli.main(arguments) == cli.DONE
    stream.seek(0)
    return stream.read()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal of 100 columns and 40 rows: its two ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    yield ours, theirs
    os.close(ours)


def start_on(terminal: tuple[int, int], *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command on the terminal and close our copy of its end."""
    _, theirs = terminal
    process = subprocess.Popen(
        [*QUIRE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True
    )
    os.close(theirs)
    return process


def read_all(ours: int) -> str:
    """Read what is written to the terminal until the other end is closed."""
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode()


# ---- main -----------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert call("--version").stdout == f"quire {quire.__version__}\n"
    shown = call("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    for command in ("chat", "generate", "serve", "demo", "bench", "doctor", "config"):
        assert re.search(rf"^ +{command} +\w", shown.stdout, re.MULTILINE)
    assert "\nfirst steps:\n  quire chat " in shown.stdout


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_command_explains_itself(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([command, "--help"]) == cli.DONE
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith(f"usage: quire {command}")
    assert [line for line in shown.out.partition("\n\n")[2].splitlines() if len(line) > 80] == []


def test_the_benchmark_of_make_bench_is_there() -> None:
    assert cli.main(["bench", "control", "--help"]) == cli.DONE


@pytest.mark.parametrize(
    "arguments", [["sing"], ["--loud"], ["demo", "--loud"], ["chat", "--loud"], ["demo", "loudly"], ["bench", "x"]]
)
def test_misuse_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"quire( \w+)?: error: .+\n", printed.err)


def test_without_a_command_help_is_shown() -> None:
    done = call()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: quire")


def test_only_the_command_that_runs_is_imported() -> None:
    program = (
        "import sys; from quire.cli import main; main(['{}']);"
        "print(*sorted(name for name in sys.modules if name.startswith('quire.')), file=sys.stderr)"
    )
    helped = subprocess.run(
        [sys.executable, "-c", program.format("--help")], capture_output=True, text=True, check=True
    )
    assert helped.stderr.split() == ["quire.cli", "quire.core", "quire.core.errors"]
    examined = subprocess.run(
        [sys.executable, "-c", program.format("doctor")], capture_output=True, text=True, check=True
    )
    assert "quire.cli.demo" not in examined.stderr.split()
    assert "quire.memory" not in examined.stderr.split()


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (InvalidConfigError("num_blocks", 0, "1 or more"), "num_blocks is 0; allowed: 1 or more", cli.MISUSED),
        (QuireError("one\n  two"), "one two", cli.FAILED),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "model"),
            "model: No such file or directory",
            cli.FAILED,
        ),
    ],
)
def test_errors_are_one_line_and_a_status(
    error: Exception, message: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("quire.cli.doctor.examine", fail)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr() == ("", f"quire: error: {message}\n")


def test_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("quire.cli.doctor.examine", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_full_disk_is_one_line_and_status_1() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*QUIRE, "demo", "--fast"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert (done.returncode, done.stderr) == (1, "quire: error: No space left on device\n")


def test_closed_pipe_is_silent() -> None:
    process = subprocess.Popen(
        [*QUIRE, "demo", "--fast"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(300), errors) == (cli.PIPE_CLOSED, b"")


def test_closed_stdout_is_silent() -> None:
    command = ["sh", "-c", 'exec "$0" -m quire doctor >&-', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [QUIRE, [str(Path(sys.executable).with_name("quire"))]], ids=["module", "script"])
def test_an_interrupt_is_silent_while_modules_are_imported(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'quire.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n",
        encoding="utf-8",
    )
    variables = environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, env=variables, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (cli.INTERRUPTED, "", "")


def test_interrupt_ends_with_130_and_gives_the_cursor_back(terminal: tuple[int, int]) -> None:
    process = start_on(terminal, "demo")
    seen = b""
    while HIDE_CURSOR.encode() not in seen:
        seen += os.read(terminal[0], 1 << 16)
    process.send_signal(signal.SIGINT)
    rest = read_all(terminal[0])
    assert process.wait(300) == cli.INTERRUPTED
    assert "Traceback" not in rest
    assert (seen.decode(errors="replace") + rest).rstrip().endswith(SHOW_CURSOR)


# ---- colour, width, encoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "is_coloured"),
    [
        ([], {}, False),
        (["--color", "always"], {}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "0"}, False),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
    ],
)
def test_colour_is_for_terminals_unless_asked_for(
    arguments: list[str], variables: dict[str, str], is_coloured: bool
) -> None:
    assert (ESCAPE in printed_here("doctor", *arguments, **variables)) == is_coloured


def test_terminals_without_256_colours_get_16() -> None:
    few = printed_here("demo", "--fast", "--color", "always", TERM="linux")
    assert ";5;" not in few
    assert "\x1b[1;97;44m" in few
    assert "\x1b[1;38;5;231;48;5;25m" in printed_here("demo", "--fast", "--color", "always")


def test_terminal_is_recognised(terminal: tuple[int, int]) -> None:
    process = start_on(terminal, "demo", "--fast", "--serve-for", "0")
    text = read_all(terminal[0])
    assert process.wait(300) == 0
    assert "\x1b[1m" in text
    assert ERASE_BELOW not in text
    assert HIDE_CURSOR not in text
    widths = [len(re.sub(r"\x1b\[[0-9;]*m", "", shown)) for shown in text.split("\r\n")]
    assert max(widths) == 100


def test_dumb_terminals_and_strange_encodings_are_plain() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert not detect(stream, {}).unicode
    assert detect(stream, {"TERM": "dumb"}, "always").num_colours == 256
    assert not detect(stream, {"TERM": "dumb"}).interactive


@pytest.fixture(scope="module")
def drawn() -> str:
    """What the demonstration prints."""
    return printed_here("demo", "--fast", COLUMNS="120")


def test_ascii_keeps_the_shape(drawn: str) -> None:
    spelled = call("demo", "--fast", COLUMNS="120", PYTHONIOENCODING="ascii").stdout
    assert spelled.isascii()
    assert not drawn.isascii()
    assert list(map(len, spelled.splitlines())) == list(map(len, drawn.splitlines()))


@pytest.mark.parametrize("columns", [20, 46, 80, 119, 200])
def test_demonstration_keeps_to_the_columns(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["demo"]) == cli.DONE
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(columns, 120)


# ---- the demonstration ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(drawn: str) -> str:
    """What the demonstration says, on one line."""
    return " ".join(drawn.split())


@pytest.mark.parametrize(
    "fact",
    [
        "40 of 108 slots hold a token; 16 + 28 + 24 = 68 are wasted (63%)",
        "took the next free one, 3: its table is [0, 3]",
        "24 of 64 now, against 68 of 108 above",
        "64 slots = 40 stored + 24 fragmented (38%)",
        "its table is [5, 12, 3]",
        "34 2 3 2 50 = 3 × 16 + 2",
        "B's table [0, 1, 2, 4] begins with A's blocks, and their reference counts rise (counts of blocks 0, 1, 2: "
        "2, 2, 2)",
        "The prefix takes 3 blocks instead of 9: 6 blocks saved.",
        "blocks: 6 saved by sharing",
        "Its references are dropped (counts of blocks 0, 1, 2: 2, 2, 2); B and C are not affected.",
        "Block 3, which only A held, is free.",
        "All counts are 0, but the 3 blocks of the system prompt keep their content",
        "48 of its 54 prompt tokens come from cached blocks",
        "A copied it to block 2 and B copied it to block 3, because others still held block 1.",
        "2 leave copy←1 copy←1",
        "D needs 5 blocks and 4 are free, so one cached block must be evicted: block 3",
        "E frees its memory and waits; the 3 tokens it has generated are kept.",
        "Of the 32 tokens that E had computed, 32 were still cached",
        "C's 2 blocks are copied to the host",
        "2 blocks moved to the host",
        "C continues where it stopped, now in blocks [4, 5]",
        "1 block moved back",
        "A What is a block table?",
        "tokens of their prompts: the system prompt is stored once, and computed once.",
        "6 saved by sharing",
        "tokens a second on this machine",
        "0d ███ from disk",
        "32 of the 51 tokens of its prompt came from disk",
        "0d C 1d C 2 C 3 C 4 5",
        "5h C",
    ],
)
def test_demonstration_shows(story: str, fact: str) -> None:
    assert fact in story


def test_demonstration_takes_fifteen_seconds_at_most() -> None:
    pauses: list[float] = []
    stage = Stage(io.StringIO(), Terminal(interactive=True, rows=50), pauses.append)
    for number, chapter in enumerate(demo.story(), start=1):
        stage.play(number, chapter)
    assert 5 < sum(pauses) <= 15


def test_demonstration_ends_with_the_guide_and_a_crowd_until_it_is_interrupted(terminal: tuple[int, int]) -> None:
    process = start_on(terminal, "demo", "--fast")
    seen = b""
    while (found := re.search(rb"http://127\.0\.0\.1:(\d+)/", seen)) is None or b"Ctrl-C" not in seen:
        seen += os.read(terminal[0], 1 << 16)
    with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=300)) as connection:
        connection.request("GET", "/live")
        live = connection.getresponse()
        totals = {"generated_tokens": 0}
        assert json.loads(live.readline())["model"] == "guide"
        while not totals["generated_tokens"]:
            totals = json.loads(live.readline())["totals"]
    process.send_signal(signal.SIGINT)
    rest = read_all(terminal[0])
    assert process.wait(300) == 0
    assert "Traceback" not in rest


def test_demonstration_serves_so_long_where_it_is_told_so(drawn: str, capsys: pytest.CaptureFixture[str]) -> None:
    served = call("demo", "--fast", "--serve-for", "1.5").stdout
    assert "http://127.0.0.1:" in served
    assert "stops after 1.5 seconds" in served
    assert "http://" not in drawn
    for text in ("-1", "soon", "nan", "1e9"):
        assert cli.main(["demo", f"--serve-for={text}"]) == cli.MISUSED
        refused = capsys.readouterr()
        assert refused.out == ""
        assert "seconds from 0" in refused.err


def test_animation_ends_as_the_last_picture() -> None:
    still, moving = io.StringIO(), io.StringIO()
    Stage(still, Terminal(), None).play(1, demo.story()[0])
    Stage(moving, Terminal(interactive=True, rows=50), lambda _: None).play(1, demo.story()[0])
    assert replay(moving.getvalue()) == still.getvalue().splitlines()


def replay(written: str) -> list[str]:
    """Carry out the escape codes of an animation."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\??\d*[A-Za-z]|[^\x1b\n]+|\n", written):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[\d+A", token):
            row -= int(token[2:-1])
        elif token == ERASE_BELOW:
            del lines[row:]
            lines.append("")
        elif token == ERASE_LINE:
            lines[row] = lines[row][:column]
        elif not token.startswith(ESCAPE):
            lines[row] = lines[row][:column] + token + lines[row][column + len(token) :]
            column += len(token)
    return lines[:-1]


def test_nothing_is_redrawn_that_does_not_fit_on_the_screen() -> None:
    low = io.StringIO()
    Stage(low, Terminal(interactive=True, rows=10), lambda _: None).play(1, demo.story()[0])
    assert ESCAPE not in low.getvalue()


# ---- doctor -----------------------------------------------------------------------------------------------------


def test_doctor_fits_on_a_screen_and_finds_everything() -> None:
    done = call("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines[1:])) <= 80
    for name in ("python", "numpy", "compiled core", "cores", "memory", "torch"):
        assert any(shown[3:].startswith(f"{name} ") for shown in lines)
    assert "everything needed is here" in lines[-1]


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setitem(sys.modules, "quire._native", None)
    assert cli.main(["doctor", "--color", "never"]) == 1
    shown = capsys.readouterr().out
    assert "pip install numpy" in shown
    assert "inacloneofquire:pipinstall--force-reinstall." in "".join(shown.split())
    assert "needs attention: numpy, compiled core" in shown


def test_granted_cores_and_memory_of_this_machine() -> None:
    assert 1 <= granted_cores() <= (os.cpu_count() or 1)
    quota, limit = core_quota(), memory_limit()
    assert quota is None or quota > 0
    assert limit is None or limit > 0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_control_groups_of_version_2_bind_through_their_parents(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "outer/inner/cpu.max", "max 100000\n")
    write(groups / "outer/cpu.max", "150000 100000\n")
    write(groups / "outer/inner/memory.max", "2147483648\n")
    write(groups / "outer/memory.max", "1073741824\n")
    assert core_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == 1 << 30


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/job\n3:memory:/job\n1:name=systemd:/job\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "cpu/job/cpu.cfs_quota_us", "50000\n")
    write(groups / "cpu/job/cpu.cfs_period_us", "100000\n")
    write(groups / "cpu/cpu.cfs_quota_us", "-1\n")
    write(groups / "cpu/cpu.cfs_period_us", "100000\n")
    write(groups / "memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    assert core_quota(tmp_path) == 0.5
    assert memory_limit(tmp_path) is None


def test_systems_that_say_nothing_grant_everything(tmp_path: Path) -> None:
    assert core_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None
    assert memory_bytes("MemTotal", tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemTotal:       2048 kB\nHugePages: x\n")
    assert memory_bytes("MemTotal", tmp_path) == 2048 * 1024
    assert memory_bytes("HugePages", tmp_path) is None
