"""`quire generate` and `quire chat` hold a text to JSON, a schema, an expression, choices or a grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire import cli

QUICK = ("--kv-memory", "4MiB", "--num-threads", "1", "--quiet", "--temperature", "0")
SCHEMA = {
    "type": "object",
    "properties": {"term": {"type": "string", "maxLength": 8}},
    "required": ["term"],
    "additionalProperties": False,
}
GBNF = 'root ::= "{" [0-9]{2} "}"'
LARK = 'start: /[0-9]{2}/ "!"'


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*arguments, *QUICK]) == cli.DONE
    return capsys.readouterr().out.removesuffix("\n")


def test_a_text_has_the_form_of_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        return printed(capsys, "generate", "guide", "-p", "A block is", "--max-tokens", "30", *options)

    file = tmp_path / "form"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    from_text, from_file = text("--json-schema", json.dumps(SCHEMA)), text("--json-schema", f"@{file}")
    assert from_text == from_file
    assert list(json.loads(from_text)) == ["term"]
    assert text("--format", "json").startswith("{")
    assert re.fullmatch("[0-9]{3}", text("--regex", "[0-9]{3}"))
    assert re.fullmatch("[{][0-9]{2}[}]", text("--grammar", GBNF))
    file.write_text(LARK, encoding="utf-8")
    assert re.fullmatch("[0-9]{2}!", text("--grammar", f"@{file}"))


def test_an_answer_is_one_of_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    choices = ("--choice", "used", "--choice", "free")
    assert printed(capsys, "chat", "guide", "Is", "it?", *choices) in ("used", "free")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json-schema", "[1"), "json_schema is '[1'; allowed: a JSON schema"),
        (("--json-schema", '{"type": "objec"}'), "Invalid type: objec"),
        (("--regex", "(a"), "unclosed group"),
        (("--grammar", "@none.gbnf"), "none.gbnf"),
        (("--regex", "a", "--choice", "b"), "not allowed with argument --regex"),
    ],
)
def test_a_form_that_no_text_can_have_is_one_line(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "guide", "-p", "A block is", *options, *QUICK]) != cli.DONE
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
