"""A server of the built-in model, as a process of its own, for clients that know nothing of quire.

These tests run in an environment that has the clients and not quire (`make test-clients`): what they prove is that
programs made for the services of OpenAI and Anthropic and for Ollama work unchanged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

LISTENING = re.compile(r"listening on (http://\S+)")
GUIDE = Path(__file__).parents[2] / "src" / "quire" / "guide"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server of the guide, in float32, so that its numbers are those of other implementations."""
    with _served("--dtype", "float32") as address:
        yield address


@pytest.fixture
def short_server() -> Iterator[str]:
    """The address of a server whose texts are short, for calls that ask for as many tokens as fit."""
    with _served("--max-model-len", "256") as address:
        yield address


@pytest.fixture(scope="session")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with room for an agent's prompt: the guide with more positions than it has learnt."""
    folder = tmp_path_factory.mktemp("models") / "guide"
    shutil.copytree(GUIDE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    with _served(model=str(folder)) as address:
        yield address


@pytest.fixture(scope="session")
def image_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a small model with random weights that reads images, named "eye"."""
    folder = tmp_path_factory.mktemp("models") / "eye"
    tests = Path(__file__).parents[1]
    code = "import pathlib, sys, support.image_models as made; made.write_image_model(pathlib.Path(sys.argv[1]))"
    python = str(Path(os.environ["QUIRE_COMMAND"]).with_name("python"))
    subprocess.run([python, "-c", code, str(folder)], check=True, env=os.environ | {"PYTHONPATH": str(tests)})
    with _served(model=str(folder)) as address:
        yield address


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """What clients call the base URL."""
    return f"{server}/v1"


@pytest.fixture(scope="session")
def guide() -> str:
    """The folder of the model, for clients that want its tokenizer."""
    return str(GUIDE)


@contextmanager
def _served(*options: str, model: str = "guide") -> Iterator[str]:
    command = [os.environ["QUIRE_COMMAND"], "serve", model, "--port", "0", "--pooling", "mean", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        address = _address(process.stdout)
        # It writes a line for every call; a pipe that nobody empties would hold it up.
        reader = threading.Thread(target=process.stdout.read)
        reader.start()
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)
    reader.join()
    assert process.returncode == 0


def _address(output: IO[str]) -> str:
    said = []
    for line in output:
        said.append(line)
        if line.startswith("ready"):  # Ollama's clients do not ask again while a model is loaded
            return str(LISTENING.findall("".join(said))[0])
    raise AssertionError("the server has ended: " + "".join(said))
