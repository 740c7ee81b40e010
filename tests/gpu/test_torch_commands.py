"""The commands of quire over torch, as a user types them: a server asked over HTTP, and benchmarks.

No compiled core is here. What a GPU machine lacks of quire's own dependencies is taken away from benchmarks, which do
without; a server names it.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, ExecutionError, InvalidConfigError, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.limits import TorchLimits
from quire.compute.torch.load import load_model
from quire.compute.torch.settings import TorchSettings
from quire.guide import GUIDE_FOLDER

LISTENING = re.compile(r"listening on http://[^:]+:(\d+)")
SERVER_PACKAGES = ("httptools", "msgspec", "starlette", "uvicorn")
LACKING = (*SERVER_PACKAGES, "llguidance")
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from quire.cli import main
sys.exit(main(sys.argv[1:]))
"""
GREEDY = {"temperature": 0.0, "max_tokens": 12}
PROMPTS = ("The memory", "A block table", "Who runs next?", "The memory")


def quire_without(absent: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command where some packages are not installed."""
    command = [sys.executable, "-c", WITHOUT.format(absent=absent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_there_is_no_compiled_core() -> None:
    assert find_spec("quire._native") is None


# ---- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where a server of the guide listens, its numbers float32, as soon as it is ready."""
    for package in SERVER_PACKAGES:
        pytest.importorskip(package)
    command = [sys.executable, "-m", "quire", "serve", "guide", "--backend", "torch", "--device", device]
    command += ["--dtype", "float32", "--kv-memory", "8MiB", "--port", "0"]
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield _port(process, log)
        finally:
            process.terminate()
            process.communicate(timeout=300)
    assert process.returncode == 0, log.read_text()


def _port(process: subprocess.Popen[str], log: Path) -> int:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("ready "):
            assert "torch backend, " in said
            found = LISTENING.search(said)
            assert found is not None
            return int(found[1])
    raise AssertionError(said + log.read_text())


def post(port: int, path: str, fields: dict[str, Any]) -> Any:
    """Ask the server."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("POST", path, json.dumps(fields), {"content-type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status == 200, body
    return json.loads(body)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What the reference decoder says, in numpy."""
    with LLM("guide", backend="reference", device="cpu", kv_memory="8MiB") as llm:
        outputs = llm.generate(list(PROMPTS), SamplingParams(**GREEDY), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_completions_side_by_side_say_what_the_reference_says(port: int, texts: list[str]) -> None:
    def complete(prompt: str) -> Any:
        return post(port, "/v1/completions", {"model": "guide", "prompt": prompt, **GREEDY})

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(complete, PROMPTS))
    assert [answer["choices"][0]["text"] for answer in answers] == texts


def test_sampling_by_a_seed_is_repeated(port: int) -> None:
    fields = {"model": "guide", "prompt": "The memory", "max_tokens": 16, "temperature": 1.0, "seed": 7, "n": 3}
    first, second = (post(port, "/v1/completions", fields) for _ in range(2))
    assert [each["text"] for each in first["choices"]] == [each["text"] for each in second["choices"]]
    assert len({each["text"] for each in first["choices"]}) == 3


def test_a_chat_with_log_probabilities(port: int) -> None:
    messages = [{"role": "user", "content": "What is a block?"}]
    fields = {"model": "guide", "messages": messages, "logprobs": True, "top_logprobs": 2, **GREEDY}
    (choice,) = post(port, "/v1/chat/completions", fields)["choices"]
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == GREEDY["max_tokens"] and all(each["logprob"] <= 0 for each in tokens)
    assert [each["top_logprobs"][0]["token"] for each in tokens] == [each["token"] for each in tokens]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can open a GPU here")
def test_a_gpu_that_torch_cannot_open_is_named_in_a_line() -> None:
    with pytest.raises(ExecutionError, match=r"^torch cannot open the device cuda: .+\Z"):
        load_model(read_model(ModelFolder(GUIDE_FOLDER)), TorchSettings(device="cuda"))
    with pytest.raises(ExecutionError, match=r"^torch cannot open the device cuda: .+\Z"):
        TorchLimits("cuda", "bfloat16", 1 << 20)
    with pytest.raises(
        InvalidConfigError, match=r"^device is 'cuda'; allowed: cpu or auto here; no NVIDIA GPU answers: "
    ):
        LLM("guide", device="cuda")


# ---- where packages are missing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", SERVER_PACKAGES)
def test_a_server_names_the_package_that_it_misses(package: str) -> None:
    for other in SERVER_PACKAGES:  # where several are missing it names the first
        pytest.importorskip(other)
    done = quire_without((package,), "serve", "guide", "--backend", "torch", "--device", "cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"quire: error: this needs the package {package}: pip install {package}\n"


def test_benchmarks_do_without_what_a_gpu_machine_lacks(tmp_path: Path, device: str) -> None:
    workload = tmp_path / "workload.jsonl"
    workload.write_text(
        '{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}\n{"prompt_token_ids": [4], "max_tokens": 3}\n'
    )
    engine = ("--shape", "tiny", "--backend", "torch", "--device", device, "--kv-memory", "4MiB", "--repeat", "2")
    latency = "latency --contexts 32 --sequences 1 2 --prompts 32 --chats 2 --steps 2 --read-size 8MiB"
    for arguments in (f"throughput --workload {workload}", latency):
        done = quire_without(LACKING, "bench", *arguments.split(), *engine)
        assert done.returncode == 0, done.stderr
        assert "torch backend" in done.stdout


def test_prompts_are_answered_without_them_too(device: str) -> None:
    program = "from quire import LLM\nwith LLM('guide', backend='torch', device=DEVICE, kv_memory='4MiB') as llm:\n"
    program += "    print(len(llm.generate('The memory', temperature=0, max_tokens=5)[0].outputs[0].token_ids))"
    head = WITHOUT.format(absent=LACKING).partition("from quire.cli")[0]
    command = [sys.executable, "-c", f"{head}DEVICE = {device!r}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "5"), done.stderr
