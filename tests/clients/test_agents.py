"""Claude Code and the Codex CLI as users run them: each runs a command that the model calls, and reports its answer."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from directed import SENTENCE, direct_messages, direct_responses, directed

MODULES = Path(os.environ["QUIRE_NODE_MODULES"])
CLAUDE = MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
CODEX = MODULES / "@openai" / "codex" / "bin" / "codex.js"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
COMMAND = "echo it ran | tee made.txt"
PROVIDER = """
model = "guide"
model_provider = "quire"
model_context_window = 65536

[model_providers.quire]
name = "quire"
base_url = "{address}/v1"
wire_api = "responses"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that a program works in."""
    made = tmp_path / "work"
    made.mkdir()
    return made


def run(script: Path, *arguments: str, folder: Path, **variables: str) -> list[Any]:
    """Run a program; return the objects that it prints, one in a line."""
    kept = {"PATH": os.environ["PATH"], "HOME": str(folder.parent)}
    done = subprocess.run(
        ["node", script, *arguments],
        cwd=folder,
        env=kept | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_claude(address: str, tool: str, folder: Path) -> list[Any]:
    """Run Claude Code, which may use this tool."""
    return run(
        CLAUDE,
        *("-p", "Do it.", "--allowedTools", tool),
        *("--output-format", "stream-json", "--verbose", "--include-partial-messages"),
        folder=folder,
        ANTHROPIC_BASE_URL=address,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="guide",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="guide",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        ENABLE_TOOL_SEARCH="true",
    )


def test_claude_code_runs_a_command(long_server: str, folder: Path) -> None:
    change = direct_messages("Bash", {"command": COMMAND, "description": "Make a file"})
    with directed(long_server, change) as (address, calls):
        events = run_claude(address, "Bash", folder)
    assert (folder / "made.txt").read_text() == "it ran\n"
    [result] = [event for event in events if event["type"] == "result"]
    assert (result["is_error"], json.loads(result["result"]), result["num_turns"]) == (False, SENTENCE, 2)
    usage = result["usage"]
    assert usage["input_tokens"] > 0 and usage["cache_read_input_tokens"] > 0 and usage["output_tokens"] > 0
    assert [
        each["type"] for event in events if event["type"] == "assistant" for each in event["message"]["content"]
    ] == [
        "tool_use",
        "text",
    ]
    assert calls == ["HEAD / 200", *["POST /v1/messages?beta=true 200"] * 2]


def test_claude_code_continues_after_an_image(long_server: str, folder: Path) -> None:
    """The server refuses the image; the program finds it by the place in the error, and removes it."""
    image = folder / "dot.png"
    image.write_bytes(base64.b64decode(PNG))
    with directed(long_server, direct_messages("Read", {"file_path": str(image)})) as (address, calls):
        result = run_claude(address, "Read", folder)[-1]
    assert (result["type"], result["is_error"], json.loads(result["result"])) == ("result", False, SENTENCE)
    assert [call.split()[-1] for call in calls] == ["200", "200", "400", "200"]


def test_codex_runs_a_command(long_server: str, folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "codex"
    home.mkdir()
    with directed(long_server, direct_responses("exec_command", {"cmd": COMMAND})) as (address, calls):
        (home / "config.toml").write_text(PROVIDER.format(address=address))
        events = run(
            CODEX,
            *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            "Make the file.",
            folder=folder,
            CODEX_HOME=str(home),
        )
    assert (folder / "made.txt").read_text() == "it ran\n"
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    ran, said = [item for item in items if item["type"] != "error"]  # it warns that it does not know the model
    assert (ran["type"], ran["exit_code"], ran["aggregated_output"]) == ("command_execution", 0, "it ran\n")
    assert (said["type"], json.loads(said["text"])) == ("agent_message", SENTENCE)
    assert events[-1]["type"] == "turn.completed"
    usage = events[-1]["usage"]
    assert usage["input_tokens"] > usage["cached_input_tokens"] > 0 and usage["output_tokens"] > 0
    assert calls == ["POST /v1/responses 200"] * 2
