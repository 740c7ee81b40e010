"""The documents tell the truth: what they name exists, their links lead somewhere, and their examples run.

The examples themselves are run by pytest (`--doctest-glob` in pyproject.toml); here we see to it that none escapes.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import re
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "quire"
NOT_OURS = {"build", "dist", "node_modules"}
EXAMPLE_LANGUAGES = {"py", "python", "python3", "pycon"}
FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^`\n]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.MULTILINE)
IDENTIFIER = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?$")

# Said in code letters without being ours: commands, packages of others, the name of this package.
ALSO_KNOWN = {"make", "pickle", "python -O", "quire", "raise", "assert", "long", "-march=native"}


@cache
def documents() -> list[Path]:
    """Every markdown file of the repository. Environments, at its top, are not searched: they have 100,000 files."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not hidden(path.relative_to(ROOT))]
    found = chain(ROOT.glob("*.md"), *(folder.rglob("*.md") for folder in folders))
    return sorted(path for path in found if not hidden(path.relative_to(ROOT)))


def hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in NOT_OURS for part in path.parts)


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_document = pytest.mark.parametrize("path", documents(), ids=relative_name)


# --- what ARCHITECTURE.md names ----------------------------------------------------------------


@cache
def names() -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """All names that the package, its tests' support and the native headers define; and, per class, its members."""
    every: set[str] = set()
    members: dict[str, set[str]] = {}
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi"), *(ROOT / "tests" / "support").glob("*.py")]:
        every |= defined_in(ast.parse(path.read_text(encoding="utf-8")).body, members)
    return frozenset(every), {name: frozenset(found) for name, found in members.items()}


def defined_in(body: list[ast.stmt], members: dict[str, set[str]]) -> set[str]:
    """The names that a body defines; fills the members of its classes."""
    found: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.ClassDef():
                found.add(node.name)
                own = defined_in(node.body, members) | attributes_set_in(node)
                members.setdefault(node.name, set()).update(own)
                found |= own
            case ast.Assign():
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def attributes_set_in(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def problem_with(code: str) -> str | None:
    """What is wrong with a piece of text in code letters, None if nothing is."""
    if code in ALSO_KNOWN or code.startswith(("make ", "quire ", "--", ".venv/")):
        return None
    if "/" in code or re.fullmatch(r"[\w-]+\.(md|py|toml|txt|yaml)", code):
        return None if (ROOT / code).exists() or (PACKAGE / code).exists() else f"there is no file {code}"
    if not IDENTIFIER.match(code):
        return f"{code!r} is neither a path nor a name; say it in plain letters"
    every, members = names()
    *owners, last = code.removesuffix("()").split(".")
    if not owners:
        return None if last in every or hasattr(builtins, last) else f"nothing is called {last}"
    owner = owners[-1]
    if owner not in members:
        return f"there is no class {owner}"
    return None if last in members[owner] else f"{owner} has no {last}"


def test_everything_that_the_architecture_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    codes = CODE.findall(prose(text))
    assert len(codes) > 100
    problems = [problem for code in codes if (problem := problem_with(code))]
    assert not problems


PRESENT_DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/[dh]*/*.md")])
NOT_THERE_YET = {"LLM.generate"}  # and said to be so


def repeated_words(text: str, most: int = 9) -> list[str]:
    """The runs of more than `most` words that a paragraph has twice, as a merge may leave them; tables may repeat."""
    repeated = []
    for paragraph in prose(text).split("\n\n"):
        words = " ".join(line for line in paragraph.splitlines() if not line.startswith("|")).split()
        runs = [" ".join(words[start : start + most + 1]) for start in range(len(words) - most)]
        repeated += sorted({run for run in runs if runs.count(run) > 1})
    return repeated


@pytest.mark.parametrize("path", [path for path in documents() if "corpus" not in path.parts], ids=relative_name)
def test_no_paragraph_says_a_thing_twice(path: Path) -> None:
    assert not repeated_words(path.read_text(encoding="utf-8"))


def test_a_paragraph_that_a_merge_doubled_is_found_out() -> None:
    sentence = "One two three four five six seven eight nine ten\neleven. "
    assert repeated_words(f"{sentence}And\n{sentence}")
    assert not repeated_words(f"{sentence}\n\n{sentence}")  # in different paragraphs, such as steps of instructions


@pytest.mark.parametrize("path", PRESENT_DOCUMENTS, ids=relative_name)
def test_classes_and_files_that_other_documents_name_exist(path: Path) -> None:
    codes = {code for code in CODE.findall(prose(path.read_text(encoding="utf-8"))) if "NAME" not in code}
    clear = {code for code in codes if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?|[\w.-]+/[\w./-]*", code)} - NOT_THERE_YET
    assert not [problem for code in clear if (problem := problem_with(code))]


def test_every_name_in_its_drawings_that_looks_like_a_method_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    calls = {call for fence in FENCE.finditer(text) for call in re.findall(r"\b[A-Z]\w+\.[a-z_]\w*", fence[4])}
    assert len(calls) > 15
    assert not [problem for call in calls if (problem := problem_with(call))]


def test_the_way_of_one_request_has_at_most_twelve_hops() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    [way] = [fence[4] for fence in FENCE.finditer(text.partition("## One request")[2].partition("\n## ")[0])]
    hops = [int(number) for number in re.findall(r"^ *(\d+)  ", way, re.MULTILINE)]
    assert hops == list(range(1, len(hops) + 1))
    assert 8 <= len(hops) <= 12
    assert all(re.search(rf"\b{name}\b", way) for name in ("Frame", "NativeDecoder.run", "EventStream"))


def test_every_folder_of_the_package_is_on_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    codes = CODE.findall(prose(text))
    for folder in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        name = f"{folder.relative_to(PACKAGE)}/"
        assert any(code.startswith(name) for code in codes), f"{name} is not in ARCHITECTURE.md"


@pytest.mark.parametrize(
    "wrong",
    [
        "memory/managers.py",
        "src/quire/nowhere/",
        "NoSuchClass",
        "KVCacheManager.match_suffix",
        "NoSuchClass.match_prefix",
        "no_such_function",
        "missing.md",
        "two words",
    ],
)
def test_a_name_that_does_not_exist_is_found_out(wrong: str) -> None:
    assert problem_with(wrong)


@pytest.mark.parametrize(
    "right",
    [
        "memory/manager.py",
        "src/quire/memory/",
        "KVCacheManager",
        "KVCacheManager.match_prefix",
        "BlockPool.num_free",
        "Request.num_computed",
        "create_policy()",
        "FAMILIES",
        "max_steps_under_way",
        "README.md",
        "make test",
        "ValueError",
    ],
)
def test_a_name_that_exists_passes(right: str) -> None:
    assert problem_with(right) is None


# --- links -------------------------------------------------------------------------------------


def broken_links(path: Path, text: str) -> list[str]:
    """The relative links of a document that lead nowhere."""
    plain = CODE.sub("", prose(text))
    targets = LINK.findall(plain) + REFERENCE.findall(plain)
    relative = [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]
    return [target for target in relative if not leads_somewhere(target, path, text)]


def leads_somewhere(target: str, path: Path, text: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists() or ROOT not in [file, *file.parents]:
        return False
    return not anchor or anchor in anchors(text if file == path else file.read_text(encoding="utf-8"))


@cache
def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = sum(1 for known in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", known))
        found.add(f"{slug}-{again}" if again else slug)
    return found


@each_document
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


def test_a_link_that_leads_nowhere_is_found_out() -> None:
    links = "[a](missing.md) [b](CHANGELOG.md#nowhere) [c](#one-thing) [d](LICENSE) [e](https://example.org) `[f](x)`"
    found = broken_links(ROOT / "README.md", f"# One thing\n{links}\n[g]: gone.md")
    assert found == ["missing.md", "CHANGELOG.md#nowhere", "gone.md"]


# --- examples ----------------------------------------------------------------------------------


def python_fences(text: str) -> list[str]:
    return [fence[4] for fence in FENCE.finditer(text) if fence[3].strip() in EXAMPLE_LANGUAGES]


@cache
def pytest_options() -> dict[str, list[str]]:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    options: dict[str, list[str]] = tools["pytest"]["ini_options"]
    return options


def is_run(path: Path) -> bool:
    """Whether pytest, called without arguments, takes the examples of this file."""
    options = pytest_options()
    globs = [option.partition("=")[2] for option in options["addopts"] if option.startswith("--doctest-glob=")]
    searched = [(ROOT / place).resolve() for place in options["testpaths"]]
    inside = any(place == path or place in path.parents for place in searched)
    return inside and any(path.match(glob) for glob in globs)


@each_document
def test_every_python_example_is_run(path: Path) -> None:
    examples = python_fences(path.read_text(encoding="utf-8"))
    assert all(example.startswith(">>> ") for example in examples), "write it as a doctest, so that it is run"
    assert all(example.endswith("\n\n") for example in examples), "end it with an empty line, or ``` is expected output"
    assert not examples or is_run(path)


@pytest.mark.parametrize("path", [p for p in documents() if is_run(p)], ids=relative_name)
def test_examples_stand_in_fences(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    parser = doctest.DocTestParser()
    assert len(parser.get_examples(text)) == sum(len(parser.get_examples(part)) for part in python_fences(text))


# --- form --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "most"), [("ARCHITECTURE.md", 250), ("docs/design/*.md", 150), ("docs/adr/[0-9]*.md", 70)]
)
def test_pages_stay_short(pattern: str, most: int) -> None:
    paths = list(ROOT.glob(pattern))
    assert paths
    assert not [relative_name(path) for path in paths if len(path.read_text(encoding="utf-8").splitlines()) > most]


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/design/*.md")), ids=relative_name)
def test_a_design_page_has_a_drawing_an_example_and_its_price(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "```text" in text
    assert len(doctest.DocTestParser().get_examples(text)) >= 5
    assert "## What was given up" in text


def decisions() -> list[Path]:
    return sorted(ROOT.glob("docs/adr/[0-9]*.md"))


@pytest.mark.parametrize("path", decisions(), ids=relative_name)
def test_a_decision_has_its_four_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    number = int(path.name.split("-")[0])
    assert text.startswith(f"# {number}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Rejected", "Consequence"]


def test_decisions_are_numbered_without_gaps_and_all_in_the_index() -> None:
    paths = decisions()
    assert [int(path.name.split("-")[0]) for path in paths] == list(range(1, len(paths) + 1))
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    titles = [path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in paths]
    assert re.findall(r"\[(\d+\. [^\]]+)\]\(([^)]+)\)", index) == [
        (title, path.name) for title, path in zip(titles, paths, strict=True)
    ]
    assert len(index.splitlines()) - len(paths) <= 7, "keep the text around the list short"


@pytest.mark.parametrize("folder", ["design", "how-to"])
def test_every_page_is_in_the_index_of_the_documents(folder: str) -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / folder).glob("*.md"):
        assert f"]({folder}/{path.name})" in index
