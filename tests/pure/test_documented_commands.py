"""Commands in the documents are taken as they are printed: by the parsers of quire, by make, and by pip's extras."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import cli
from quire.cli.habits import as_quire

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```(sh|text)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
STARTS = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S* )*(?:\.venv/bin/)?(?:quire|make|pip|python3?) .*)$")
ENDS = ("|", "&", "&&", "||", ";", ">", ">>", "<", "2>")
COLUMNS = re.compile(r"\s{2,}")


def commands(path: Path) -> Iterator[tuple[str, str]]:
    """The commands of a page, each with the line that it is on. Two spaces begin what a list says of a command."""
    for kind, block in FENCE.findall(path.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            found = STARTS.match(line.strip())
            if found is None or "…" in line or line.count("'") % 2:  # a quote that ends on a later line
                continue
            text = found[1]
            if not line.strip().startswith("$ ") and kind == "text":
                text = COLUMNS.split(text)[0]
            yield text, line


EVERY = [(path, text) for path in PAGES for text, _ in commands(path)]


def words_of(text: str) -> list[str]:
    """The words of the first command of a line, without variables before it."""
    words = shlex.split(text, comments=True)
    end = next((index for index, word in enumerate(words) if word in ENDS), len(words))
    start = next(index for index, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return words[start:end]


@pytest.mark.parametrize(("path", "text"), EVERY, ids=[f"{path.stem}: {text[:60]}" for path, text in EVERY])
def test_a_command_is_taken_as_printed(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = words_of(text)
    match Path(program).name:
        case "quire":
            require_quire(arguments, capsys)
        case "make":
            arguments = arguments[:1]  # of a list of targets
            known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
            assert {word for word in arguments if "=" not in word and not word.startswith("-")} <= known
        case "pip":
            require_extras(arguments)
        case _:
            scripts = [word for word in arguments if word.endswith(".py") and "/" in word]
            assert all((ROOT / script).is_file() for script in scripts)


def require_quire(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    taken, answer = as_quire(arguments)
    assert not answer
    try:
        cli._make_parser(taken).parse_args(taken)
    except SystemExit as ended:  # --help, --version
        assert ended.code == 0, capsys.readouterr().err


def require_extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in arguments:
        found = re.fullmatch(r"(?:quire|\.)\[([\w,]+)\]", word)
        if found:
            assert set(found[1].split(",")) <= set(project["optional-dependencies"])


def test_there_are_many() -> None:
    programs = [Path(words_of(text)[0]).name for _, text in EVERY]
    assert programs.count("quire") > 50
    assert programs.count("make") > 10


def test_make_lists_every_target_that_has_a_help() -> None:
    helped = re.findall(r"^([^\s:#]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in shown.splitlines()] == helped
