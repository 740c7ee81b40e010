"""Hostile model folders: a server that loads one must end with a one-line error, quickly and with little memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from quire.core.python_process import run_python
from quire.instruments.http.plain import Answer
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.stage import ServerSpec, Stage

MAX_SECONDS: Final = 20.0
MAX_BYTES: Final = 4 << 30  # address space, mostly for threads and libraries
Damage = Callable[[Path], None]


def hostile(name: str, damages: Mapping[str, Damage]) -> Callable[[Stage], str]:
    """Return a case that starts a server with each damaged folder; it must end with a one-line error."""

    def run(stage: Stage) -> str:
        slowest = 0.0
        with stage.serving():
            for index, (what, damage) in enumerate(damages.items()):
                folder = guide_copy(stage.folder / f"{name}-{index}")
                damage(folder)
                seconds, ended = _start(folder)
                slowest = max(slowest, seconds)
                lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "error:" in line]
                require(ended.returncode not in (0, None), f"{what}: the exit status is {ended.returncode}")
                require(ended.returncode > 0, f"{what}: it was killed by signal {-ended.returncode}")
                one_line = len(lines) == 1 and "Traceback" not in ended.stderr and "MemoryError" not in ended.stderr
                require(one_line, f"{what}: it printed {ended.stderr[-200:]!r}")
                shutil.rmtree(folder)
        require(slowest < MAX_SECONDS, f"the error took {slowest:.1f} s")
        return f"{len(damages)} folders, {slowest:.1f} s at most"

    return run


def templates(stage: Stage) -> str:
    """I28: chat templates that loop or grow: the chat is refused in one line, and the server keeps serving."""
    slowest = 0.0
    for index, (what, source) in enumerate(TEMPLATES.items()):
        folder = guide_copy(stage.folder / f"template-{index}")
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        with stage.serving(ServerSpec.of(model=str(folder))) as server:
            before = server.process.resident_bytes() or 0
            for _ in range(3):
                answer = _chat(server.complete)
                slowest = max(slowest, answer.seconds)
                require(answer.status == 400, f"{what}: a chat got {answer.status}")
                require("\n" not in str(answer.error.get("message")), f"{what}: the refusal has several lines")
            held = (server.process.resident_bytes() or 0) - before
            require(held < MAX_HELD_BYTES, f"{what}: {held / 1e6:.0f} MB are still held afterwards")
            require(server.complete().status == 200, f"{what}: the server does not serve afterwards")
    require(slowest < MAX_SECONDS, f"a refusal took {slowest:.1f} s")
    return f"{len(TEMPLATES)} templates, refused after {slowest:.1f} s at most"


def guide_copy(folder: Path) -> Path:
    """Return a folder with a copy of the built-in model."""
    from quire.guide import GUIDE_FOLDER

    shutil.copytree(GUIDE_FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def _start(folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Start a server with a memory limit, and wait for its end."""
    started = time.monotonic()
    command = ("-m", "quire", "serve", str(folder), "--port", "0", "--kv-memory", "8MiB")
    ended = run_python("-c", LIMITED, str(MAX_BYTES), *command, timeout_s=6 * MAX_SECONDS)
    return time.monotonic() - started, ended


def _chat(complete: Callable[..., Answer]) -> Answer:
    return complete(path="/v1/chat/completions", prompt=None, messages=[{"role": "user", "content": "Hi"}])


LIMITED: Final = (
    "import os, resource, sys; most = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_AS, (most, most)); "
    "os.execv(sys.executable, [sys.executable, '-P', *sys.argv[2:]])"
)
MAX_HELD_BYTES: Final = 500_000_000


# ---- damages of folders ---------------------------------------------------------------------------------------------


def _instead(name: str, make: Damage) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def _written(name: str, data: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 10**9)


def _changed(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")

    return damage


def _header(data: bytes) -> Damage:
    return _written("model.safetensors", len(data).to_bytes(8, "little") + data)


def _outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


LISTS: Final = b'{"a": [' + b"[]," * 5_000_000 + b"[]]}"
GROWING: Final = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60,
}

NO_FILES: dict[str, Damage] = {
    "a pipe for settings": _instead("config.json", os.mkfifo),
    "a pipe for defaults": _instead("generation_config.json", os.mkfifo),
    "a pipe for weights": _instead("model.safetensors", os.mkfifo),
    "a pipe for a tokenizer": _instead("tokenizer.json", os.mkfifo),
    "a pipe for a template": _instead("chat_template.jinja", os.mkfifo),
    "a device": _instead("tokenizer_config.json", lambda path: path.symlink_to("/dev/zero")),
    "a folder": _instead("tokenizer.json", Path.mkdir),
    "a link to itself": _instead("config.json", lambda path: path.symlink_to(path.name)),
    "10 GB of nothing": _instead("config.json", _sparse),
    "shards elsewhere": _outside,
}
SETTINGS: dict[str, Damage] = {
    "lists in settings": _written("config.json", LISTS),
    "lists in a header": _header(LISTS),
    "depth": _written("tokenizer_config.json", b"[" * 1_000_000),
    "heads of 2^31 numbers": _changed("config.json", head_dim=2**31 - 2),
    "2^31 layers": _changed("config.json", num_hidden_layers=2**31 - 1),
    "2^63 tokens": _changed("config.json", vocab_size=2**63),
    "a size that is no number": _changed("config.json", hidden_size=float("nan")),
    "sizes that are large together": _changed(
        "config.json", hidden_size=1 << 23, num_attention_heads=1 << 16, num_key_value_heads=1 << 16, head_dim=4096
    ),
}
TOKENIZERS: dict[str, Damage] = {
    "a normalizer that grows": _changed("tokenizer.json", normalizer=GROWING),
    "a decoder that grows": _changed("tokenizer.json", decoder={**GROWING, "decoders": GROWING["normalizers"]}),
    "a token of 20 MB": _changed("tokenizer.json", added_tokens=[{"id": 5, "content": "a" * 20_000_000}]),
    "lists in a tokenizer": _written("tokenizer.json", LISTS),
    "a template that is too long": _written("chat_template.jinja", b"{{ a }}" * 1_000_000),
}
_LOOP: Final = "{% for i in range(99999) %}"
TEMPLATES: dict[str, str] = {
    "loops": _LOOP * 4 + "{% endfor %}" * 4,
    "a text that grows": f"{{% set n = namespace(x='abcd') %}}{_LOOP}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}",
    "lists in lists": f"{{% set n = namespace(a=[1]) %}}{_LOOP}{{% set n.a = [n.a, n.a] %}}{{% endfor %}}{{{{ n.a }}}}",
    "an indentation": "{{ 'x\ny' | indent(1000000000) }}",
}

FOLDERS = (
    Case("I25", "folders with files that are none", hostile("files", NO_FILES)),
    Case("I26", "folders with settings out of proportion", hostile("settings", SETTINGS)),
    Case("I27", "folders with tokenizers that grow", hostile("tokenizers", TOKENIZERS)),
    Case("I28", "folders with templates that do not end", templates),
)
