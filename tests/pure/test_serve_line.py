"""The line of a call: who makes a request for the engine, who names a refusal, and in which order the verbs stand."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import quire.serve
from quire.serve.endpoints import line

SERVE = Path(quire.serve.__file__).parent
VERBS = ("fields_of", "translate", "enter", "prepare", "collect", "render")


@cache
def callers() -> dict[str, frozenset[str]]:
    """The name of each function or class that the server calls → the files that call it."""
    found = defaultdict(set)
    for path in SERVE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found[node.func.id].add(path.relative_to(SERVE).as_posix())
    return {name: frozenset(files) for name, files in found.items()}


def callers_of(name: str) -> frozenset[str]:
    return callers().get(name, frozenset())


def calls_of(function: Callable[..., object]) -> list[str]:
    """The names of what a function calls, in the order of the lines."""
    tree = ast.parse(inspect.getsource(function))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(node.lineno, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) for node in calls]
    return [name for _, name in sorted(names)]


def test_only_translate_makes_requests_for_the_engine() -> None:
    assert callers_of("GenerationRequest") == {
        "translate/cache.py",
        "translate/chat.py",
        "translate/completions.py",
        "translate/embeddings.py",
        "translate/llama_server.py",
        "translate/messages.py",
        "translate/ollama.py",
        "translate/responses.py",
    }


def test_a_refusal_of_the_engine_is_raised_in_one_place_and_named_in_one() -> None:
    assert callers_of("RefusedPrompt") == {"run/generation.py"}
    assert callers_of("named") == {"endpoints/line.py"}
    assert callers_of("renamed") == {"translate/names.py"}


def test_fields_become_sampling_parameters_in_translate_alone() -> None:
    files = callers_of("SamplingParams") | callers_of("sampling_of")
    assert "default_sampling.py" in files  # checks a setting of the server, when it starts
    assert len(files) > 1
    assert all(path.startswith("translate/") for path in files - {"default_sampling.py"})


def test_every_endpoint_that_generates_goes_along_the_one_line() -> None:
    names = ("llama_server", "messages", "ollama", "openai")
    assert callers_of("answer_text") == {f"endpoints/{name}.py" for name in names}
    assert callers_of("prepare") == {"endpoints/line.py"}


def test_the_line_names_each_verb_in_order() -> None:
    called = calls_of(line.answer_text)
    at = called.index("admitted")
    called[at : at + 1] = calls_of(line.admitted)
    order = list(dict.fromkeys(name for name in called if name in VERBS and name != "render"))
    assert order == [verb for verb in VERBS if verb != "render"]
    assert called.count("render") == 2  # a stream, and an answer in one piece
    assert called.index("render") > called.index("prepare")
