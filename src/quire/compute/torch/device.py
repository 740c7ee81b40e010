"""Chooses the device: facts about the GPU of this machine, and whether an engine can run on it.

    nvidia-smi, files of torch and Triton ──► DeviceFacts ──► refusal ──► choose_device ──► cuda, or cpu and why

This neither imports torch nor opens CUDA. A server plans in one process and computes in another: a second CUDA context
would take half a gigabyte of the memory that is being planned, and importing torch would cost a CPU engine seconds for
nothing. So the facts come from the driver, before anything is loaded. Another process asks torch if a container has a
GPU but no nvidia-smi, if nvidia-smi does not report the memory of a GPU, and if a machine has different GPUs: CUDA and
nvidia-smi number these differently. The free memory that it reports excludes its own context, which is freed when it
ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.core.byte_sizes import format_bytes
from quire.core.errors import InvalidConfigError
from quire.core.python_process import run_python

OLDEST_CAPABILITY: Final = (8, 0)
OLDEST_DRIVERS: Final = MappingProxyType({11: 450, 12: 525, 13: 580})
"""The oldest driver for each version of CUDA that torch was built with."""

CONTEXT_BYTES: Final = 768 << 20
"""Device memory of CUDA, its libraries and compiled kernels, in addition to all allocations."""

QUERY: Final = ("name", "driver_version", "compute_cap", "memory.total", "memory.free")
ORDER: Final = "CUDA_DEVICE_ORDER"
BY_SLOT: Final = "PCI_BUS_ID"
"""The order of nvidia-smi, and of CUDA if this variable has this value: otherwise, the fastest GPU has number 0."""
PART: Final = "MIG-"
"""Names of parts of a GPU begin with this; nvidia-smi does not find them by name."""
ANSWERS_WITHIN_S: Final = 30.0
DEVICE_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of these files exists if the machine has a GPU, natively or under Windows."""
ASK_TORCH: Final = """
import sys, torch
for number in range(int(sys.argv[1])):
    gpu = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    print(gpu.name, "", f"{gpu.major}.{gpu.minor}", total >> 20, free >> 20, sep=", ")
"""
"""A program that prints the fields of QUERY of the first GPUs; it fails if the driver is too old for torch."""
INSTALL: Final = "pip install 'quire[torch]'"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts about this machine's GPU. `gpu` None: no GPU answers, and `silence` is the reason.

    `torch_cuda` is the version of CUDA that torch was built with; None: built for CPUs. `driver` empty: torch found it
    new enough. `others`: the other GPUs, if several were requested; bytes are then the least of all.
    """

    torch: str | None = None
    torch_cuda: str | None = None
    triton: str | None = None
    gpu: str | None = None
    silence: str = ""
    driver: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the GPU in one line."""
        if self.gpu is None:
            return self.silence
        memory = f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} free"
        return f"{self.gpu}, capability {self.dotted_capability}, {memory}, driver {self.driver or 'unknown'}"

    @property
    def dotted_capability(self) -> str:
        """The capability as NVIDIA writes it."""
        return _dotted(self.capability)


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """The requirements of an engine: for its heads and its memory without KV blocks. Empty: any engine."""

    head_dims: tuple[int, ...] = ()
    most_head_dim: int = 0
    head_dim_step: int = 1
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The chosen device. `notice`: why it is not this machine's GPU."""

    device: str
    notice: str = ""


def refusal(facts: DeviceFacts, needs: DeviceNeeds = DeviceNeeds()) -> str:
    """Return why an engine cannot run on the GPU, and what to do; empty if it can. Pure.

    >>> refusal(DeviceFacts(torch="2.13.0", torch_cuda="13.0", triton="3.6.0", gpu="an old one", driver="580.1",
    ...                     capability=(7, 5), free_bytes=8 << 30))
    'an old one has compute capability 7.5, and the kernels need 8.0 (Ampere) or newer'
    """
    if facts.gpu is None:
        return f"no NVIDIA GPU answers: {facts.silence}"
    if facts.torch is None or facts.triton is None:
        missing = "torch" if facts.torch is None else "triton"
        return f"{missing} is not installed: {INSTALL}"
    if facts.torch_cuda is None:
        return f"torch {facts.torch} is a build without CUDA: install a build with CUDA"
    cuda = int(facts.torch_cuda.partition(".")[0])
    oldest = OLDEST_DRIVERS.get(cuda, max(OLDEST_DRIVERS.values()))
    if facts.driver and _number(facts.driver) < oldest:
        return f"driver {facts.driver} is too old for torch with CUDA {facts.torch_cuda}: it needs {oldest} or newer"
    if facts.capability < OLDEST_CAPABILITY:
        has, needed = facts.dotted_capability, _dotted(OLDEST_CAPABILITY)
        return f"{facts.gpu} has compute capability {has}, and the kernels need {needed} (Ampere) or newer"
    unknown = [size for size in needs.head_dims if size > needs.most_head_dim or size % needs.head_dim_step]
    if unknown:
        known = f"multiples of {needs.head_dim_step} up to {needs.most_head_dim}"
        return f"the model has heads of {unknown[0]} numbers, and the kernels support {known}"
    if needs.num_bytes + CONTEXT_BYTES >= facts.free_bytes:
        needed, free = format_bytes(needs.num_bytes + CONTEXT_BYTES), format_bytes(facts.free_bytes)
        return f"the engine needs {needed} of the GPU before any KV memory, and {free} are free"
    return ""


def choose_device(facts: DeviceFacts, wanted: str, needs: DeviceNeeds = DeviceNeeds()) -> DeviceChoice:
    """Return the device for `wanted`, cuda or auto; raises `InvalidConfigError` if cuda cannot be used. Pure.

    Without a GPU, auto is the CPU without a notice; with a GPU that cannot be used, the CPU with a notice.
    """
    why = refusal(facts, needs)
    if not why:
        return DeviceChoice("cuda")
    if wanted == "cuda":
        raise InvalidConfigError("device", "cuda", f"cpu or auto here; {why}")
    return DeviceChoice("cpu", "" if facts.gpu is None else f"the GPU is not used: {why}")


# ---- looking --------------------------------------------------------------------------------------------------------


def look(environ: Mapping[str, str], count: int = 1) -> DeviceFacts:
    """Return the facts about the first GPUs that CUDA_VISIBLE_DEVICES allows. Runs nvidia-smi, if installed."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")][:count]
    torch_cuda = _torch_cuda()
    facts = DeviceFacts(_version("torch"), torch_cuda, _version("triton"))
    if names is not None and names[0] in ("", "-1"):
        return _silent(facts, "CUDA_VISIBLE_DEVICES hides them all")
    ask = partial(run_python, "-c", ASK_TORCH, str(count), environment=environ, timeout_s=ANSWERS_WITHIN_S)
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is not None and (torch_cuda is None or not any(name.startswith(PART) for name in names or ())):
        reported, is_certain = _reported(facts, program, names, count, by_slot=environ.get(ORDER) == BY_SLOT)
        if reported.gpu is None or torch_cuda is None or (is_certain and reported.total_bytes and reported.free_bytes):
            return reported
        # nvidia-smi prints [N/A] for the memory of a GPU that shares the machine's memory, or is split (MIG).
        return replace(_together(_query(facts, "torch", ask)[:count]), driver=reported.driver)
    if torch_cuda is not None and any(path.exists() for path in DEVICE_FILES):
        return _together(_query(facts, "torch", ask)[:count])
    return _silent(facts, "nvidia-smi, a part of the driver, is not installed")


def _reported(
    facts: DeviceFacts, program: str, names: Sequence[str] | None, count: int, *, by_slot: bool
) -> tuple[DeviceFacts, bool]:
    """Return what nvidia-smi reports of some GPUs, and whether they are those to which CUDA gives these names.

    `by_slot`: CUDA numbers GPUs as nvidia-smi does, not by their speed.
    """
    are_numbers = names is None or all(name.isdigit() for name in names)
    chosen = [] if are_numbers else [f"--id={','.join(names or ())}"]
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", *chosen]
    found = _query(facts, "nvidia-smi", lambda: _run(command))
    if found[0].gpu is None or not are_numbers:
        return _together(found[:count]), True
    numbers = range(count) if names is None else map(int, names)
    wanted = [found[number] for number in numbers if number < len(found)]
    if not wanted:
        return _silent(facts, f"CUDA_VISIBLE_DEVICES is {','.join(names or ())}, and there are {len(found)}"), True
    return _together(wanted), by_slot or len({each.gpu for each in found}) == 1


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=False)


def _query(facts: DeviceFacts, program: str, ask: Callable[[], subprocess.CompletedProcess[str]]) -> list[DeviceFacts]:
    """Return the facts with those about each GPU that a program prints."""
    try:
        run = ask()
    except (OSError, subprocess.TimeoutExpired) as error:
        return [_silent(facts, f"{program}: {type(error).__name__}")]
    # A Python traceback ends with the error.
    lines = run.stdout.strip().splitlines() or run.stderr.strip().splitlines()[-1:] or ["no output"]
    if run.returncode:
        return [_silent(facts, f"{program}: {lines[0]}")]
    return [_read(facts, program, line) for line in lines]


def _together(facts: Sequence[DeviceFacts]) -> DeviceFacts:
    """Return the facts about several GPUs; if one is silent, its facts."""
    for each in facts:
        if each.gpu is None:
            return each
    return replace(
        facts[0],
        total_bytes=min(each.total_bytes for each in facts),
        free_bytes=min(each.free_bytes for each in facts),
        others=tuple(str(each.gpu) for each in facts[1:]),
    )


def _read(facts: DeviceFacts, program: str, line: str) -> DeviceFacts:
    """Return the facts, completed from a program's line: the fields of QUERY, sizes in MiB."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(QUERY):
        return _silent(facts, f"{program}: {line}")
    name, driver, capability, total, free = fields
    major, _, minor = capability.partition(".")
    return replace(
        facts,
        gpu=name,
        driver=driver,
        capability=(_number(major), _number(minor)),
        total_bytes=_number(total) << 20,
        free_bytes=_number(free) << 20,
    )


def _silent(facts: DeviceFacts, why: str) -> DeviceFacts:
    return replace(facts, silence=" ".join(why.split()))


def _version(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    from importlib import metadata  # late: most machines have no torch

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built with, from one of torch's files."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *'(\d+(?:\.\d+)*)'", text, re.MULTILINE)
    return None if found is None else found[1]


def _number(text: str) -> int:
    """Return the number at the start of a text, or 0."""
    found = re.match(r"\d+", text)
    return 0 if found is None else int(found[0])


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
