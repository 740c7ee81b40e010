"""Which device computes: the real look at a machine and the real choice, where drivers answer what they are told to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from quire.compute.torch import device
from quire.compute.torch.device import (
    CONTEXT_BYTES,
    OLDEST_DRIVERS,
    QUERY,
    DeviceChoice,
    DeviceFacts,
    DeviceNeeds,
    choose_device,
    look,
    refusal,
)
from quire.core.errors import InvalidConfigError

GIB = 1 << 30
H200 = DeviceFacts(
    torch="2.11.0",
    torch_cuda="13.0",
    triton="3.6.0",
    gpu="NVIDIA H200",
    driver="580.159.03",
    capability=(9, 0),
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
)
NEEDS = DeviceNeeds(head_dims=(128, 128), most_head_dim=256, head_dim_step=8, num_bytes=20 * GIB)

REFUSED = {
    "no GPU": (
        replace(H200, gpu=None, silence="nvidia-smi, a part of the driver, is not installed"),
        "no NVIDIA GPU answers: nvidia-smi, a part of the driver, is not installed",
    ),
    "no torch": (replace(H200, torch=None), "torch is not installed: pip install 'quire[torch]'"),
    "no triton": (replace(H200, triton=None), "triton is not installed: pip install 'quire[torch]'"),
    "no CUDA in torch": (
        replace(H200, torch_cuda=None),
        "torch 2.11.0 is a build without CUDA: install a build with CUDA",
    ),
    "driver": (
        replace(H200, driver="570.86.15"),
        "driver 570.86.15 is too old for torch with CUDA 13.0: it needs 580 or newer",
    ),
    "capability": (
        replace(H200, gpu="Tesla T4", capability=(7, 5)),
        "Tesla T4 has compute capability 7.5, and the kernels need 8.0 (Ampere) or newer",
    ),
    "memory": (
        replace(H200, free_bytes=20 * GIB),
        "the engine needs 20.75 GiB of the GPU before any KV memory, and 20.00 GiB are free",
    ),
}


def test_a_gpu_that_has_everything_is_chosen():
    assert refusal(H200, NEEDS) == ""
    assert choose_device(H200, "cuda", NEEDS) == choose_device(H200, "auto", NEEDS) == DeviceChoice("cuda")


@pytest.mark.parametrize("lack", REFUSED)
def test_what_is_missing_is_named_in_one_line(lack):
    facts, told = REFUSED[lack]
    assert refusal(facts, NEEDS) == told
    with pytest.raises(InvalidConfigError) as caught:
        choose_device(facts, "cuda", NEEDS)
    assert str(caught.value) == f"device is 'cuda'; allowed: cpu or auto here; {told}"


@pytest.mark.parametrize("lack", REFUSED)
def test_auto_is_the_cpu_then_with_a_notice_where_a_gpu_is_there(lack):
    facts, told = REFUSED[lack]
    notice = "" if facts.gpu is None else f"the GPU is not used: {told}"
    assert choose_device(facts, "auto", NEEDS) == DeviceChoice("cpu", notice)


@pytest.mark.parametrize("head_dim", [4, 70, 264, 512])
def test_heads_that_no_kernel_knows_are_refused_by_their_size(head_dim):
    told = f"the model has heads of {head_dim} numbers, and the kernels support multiples of 8 up to 256"
    assert refusal(H200, replace(NEEDS, head_dims=(128, head_dim))) == told


def test_the_context_is_counted_to_the_byte():
    free = NEEDS.num_bytes + CONTEXT_BYTES
    assert refusal(replace(H200, free_bytes=free), NEEDS)
    assert not refusal(replace(H200, free_bytes=free + 1), NEEDS)


@pytest.mark.parametrize(("cuda", "oldest"), OLDEST_DRIVERS.items())
def test_each_cuda_has_its_oldest_driver(cuda, oldest):
    facts = replace(H200, torch_cuda=f"{cuda}.4")
    assert refusal(replace(facts, driver=f"{oldest - 1}.99.01"))
    assert not refusal(replace(facts, driver=f"{oldest}.01"))
    assert refusal(replace(H200, torch_cuda="14.0", driver="579.1"))


# ---- looking --------------------------------------------------------------------------------------------------------


def machine(
    folder: Path, answer: str, *, status: int = 0, environ: dict[str, str] | None = None, count: int = 1
) -> DeviceFacts:
    """What is found on a machine whose nvidia-smi answers so, and notes what it was asked."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {folder}/asked\ncat <<'END'\n{answer}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return look({"PATH": f"{folder}:{os.defpath}", **(environ or {})}, count)


def test_what_the_driver_answers_is_taken_in(tmp_path):
    facts = machine(tmp_path, "NVIDIA H200, 580.159.03, 9.0, 143771, 143158\nNVIDIA A100, 580.159.03, 8.0, 81920, 100")
    assert (facts.gpu, facts.driver, facts.capability) == ("NVIDIA H200", "580.159.03", (9, 0))
    assert (facts.total_bytes, facts.free_bytes) == (143771 << 20, 143158 << 20)
    assert str(facts) == "NVIDIA H200, capability 9.0, 139.80 GiB of 140.40 GiB free, driver 580.159.03"
    asked = (tmp_path / "asked").read_text()
    assert asked == f"--query-gpu={','.join(QUERY)} --format=csv,noheader,nounits\n"


def test_the_first_visible_gpu_is_asked_for(tmp_path):
    answer = "NVIDIA H200, 580.159.03, 9.0, 143771, 143158"
    machine(tmp_path, answer, environ={"CUDA_VISIBLE_DEVICES": "GPU-8f6d,0"})
    assert (tmp_path / "asked").read_text().split()[-1] == "--id=GPU-8f6d"


def test_of_several_gpus_the_fullest_counts(tmp_path):
    answer = "A, 580.1, 9.0, 900, 800\nB, 580.1, 9.0, 700, 600\nC, 580.1, 9.0, 1, 1"
    facts = machine(tmp_path, answer, count=2)
    assert (facts.gpu, facts.others, facts.total_bytes, facts.free_bytes) == ("A", ("B",), 700 << 20, 600 << 20)
    facts = machine(tmp_path, answer, count=2, environ={"CUDA_VISIBLE_DEVICES": "2, 0,1"})
    assert (facts.gpu, facts.others, facts.total_bytes) == ("C", ("A",), 1 << 20)
    facts = machine(tmp_path, answer, environ={"CUDA_VISIBLE_DEVICES": "3"})
    assert (facts.gpu, facts.silence) == (None, "CUDA_VISIBLE_DEVICES is 3, and there are 3")
    assert machine(tmp_path, "A, 580.1, 9.0, 900, 800\nno GPU", count=2).gpu is None


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_may_be_hidden(tmp_path, hidden):
    facts = machine(tmp_path, "NVIDIA H200, 580.1, 9.0, 1, 1", environ={"CUDA_VISIBLE_DEVICES": hidden})
    assert (facts.gpu, str(facts)) == (None, "CUDA_VISIBLE_DEVICES hides them all")


def test_a_driver_that_fails_is_quoted(tmp_path):
    failure = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    facts = machine(tmp_path, f"{failure}\nMake sure that the latest driver is installed.", status=9)
    assert (facts.gpu, facts.silence) == (None, f"nvidia-smi: {failure}")


@pytest.mark.parametrize("answer", ["", "No devices were found", "a, b", "[N/A], [N/A]"])
def test_an_answer_that_is_none_is_no_gpu(tmp_path, answer):
    assert machine(tmp_path, answer).gpu is None


def test_fields_that_the_driver_does_not_know_count_for_nothing(tmp_path):
    facts = machine(tmp_path, "NVIDIA GB10, 580.95.05, 12.1, [N/A], [N/A]")
    assert (facts.gpu, facts.total_bytes, facts.free_bytes) == ("NVIDIA GB10", 0, 0)


def test_a_machine_without_a_driver_starts_nothing(tmp_path):
    facts = look({"PATH": str(tmp_path)})
    assert (facts.gpu, facts.silence) == (None, "nvidia-smi, a part of the driver, is not installed")


L4 = """
from types import SimpleNamespace
def get_device_properties(index): return SimpleNamespace(name="NVIDIA L4", major=8, minor=9)
def mem_get_info(index): return 22 << 30, 23 << 30
"""


def machine_with_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, answer: str = "", **environ: str
) -> DeviceFacts:
    """What is found where a GPU answers torch: `cuda` is the text of the module of torch that is asked.

    `answer`: of nvidia-smi; empty: there is none.
    """
    package = folder / "torch"
    package.mkdir()
    (package / "version.py").write_text("cuda: str = '13.0'\n")
    (package / "__init__.py").write_text("from . import cuda\n")
    (package / "cuda.py").write_text(cuda)
    (folder / "nvidiactl").touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(device, "DEVICE_FILES", (folder / "nvidiactl",))
    if answer:
        return machine(folder, answer, environ={"PYTHONPATH": str(folder), **environ})
    return look({"PATH": str(folder), "PYTHONPATH": str(folder)})


def test_torch_is_asked_where_there_is_a_gpu_and_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_with_torch(tmp_path, monkeypatch, L4)
    assert str(facts) == "NVIDIA L4, capability 8.9, 22.00 GiB of 23.00 GiB free, driver unknown"
    assert not refusal(replace(facts, triton="3.6.0"))


@pytest.mark.parametrize(
    "memory", ["[N/A], [N/A]", "23034, [Insufficient Permissions]", "[Insufficient Permissions], 22528"]
)
def test_torch_is_asked_for_memory_that_nvidia_smi_does_not_know(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = machine_with_torch(tmp_path, monkeypatch, L4, f"NVIDIA L4, 580.95.05, 8.9, {memory}")
    assert str(facts) == "NVIDIA L4, capability 8.9, 22.00 GiB of 23.00 GiB free, driver 580.95.05"
    assert not refusal(replace(facts, triton="3.6.0"), NEEDS)


def test_torch_is_not_asked_for_what_nvidia_smi_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_with_torch(tmp_path, monkeypatch, "1 / 0", "NVIDIA L4, 580.95.05, 8.9, 23034, 22528")
    assert facts.free_bytes == 22 * GIB


MIXED = "NVIDIA GT 1030, 580.95.05, 6.1, 2048, 2000\nNVIDIA L4, 580.95.05, 8.9, 23034, 100"
"""By slot; CUDA puts the faster one first."""


@pytest.mark.parametrize(
    ("environ", "gpu", "free_bytes"),
    [
        ({}, "NVIDIA L4", 22 * GIB),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "NVIDIA L4", 22 * GIB),
        ({"CUDA_VISIBLE_DEVICES": "MIG-8f6d"}, "NVIDIA L4", 22 * GIB),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "NVIDIA GT 1030", 2000 << 20),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}, "NVIDIA L4", 100 << 20),
    ],
    ids=str,
)
def test_torch_is_asked_which_of_different_gpus_it_uses(
    environ: dict[str, str], gpu: str, free_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = machine_with_torch(tmp_path, monkeypatch, L4, MIXED, **environ)
    assert (facts.gpu, facts.free_bytes) == (gpu, free_bytes)


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (
            "def get_device_properties(index): raise RuntimeError('driver too old')",
            "torch: RuntimeError: driver too old",
        ),
        ("import sys; sys.exit(3)", "torch: no output"),
    ],
)
def test_torch_says_why_it_finds_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, why: str) -> None:
    assert machine_with_torch(tmp_path, monkeypatch, cuda).silence == why
