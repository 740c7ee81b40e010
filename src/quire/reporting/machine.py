"""The machine of a measurement: processor, memory, load, versions. Missing facts are left out, never guessed."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import quire

MAX_IDLE_LOAD = 0.5
"""Above this load average other programs are running, and the numbers are not claimed."""

MAX_OTHERS = 0.1
"""The most processors that other processes may use during a measurement."""


def load_average() -> float | None:
    """Return the load average of the last minute; None if the system does not report it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


class OthersMeter:
    """Measures the processors that other processes have used since its creation; needs `/proc/stat`."""

    def __init__(self) -> None:
        self._start = self._read()

    def num_busy(self) -> float | None:
        """Return the mean number of processors that other processes kept busy; None if not known."""
        now = self._read()
        if self._start is None or now is None or self._start[0] == now[0]:  # a tick takes 10 ms
            return None
        wall, others = (after - before for after, before in zip(now, self._start, strict=True))
        return max(0.0, others / wall)

    @staticmethod
    def _read() -> tuple[float, float] | None:
        """Return the time, and the seconds of all processors for processes other than this one and its children."""
        try:
            fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(int, fields)
        ticks = user + nice + system + interrupts + soft_interrupts + stolen
        own = os.times()
        return own.elapsed, ticks / os.sysconf("SC_CLK_TCK") - sum(own[:4])


def describe_machine() -> dict[str, str]:
    """Return the processor, memory and system."""
    facts = {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "processors": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    family, model = _field("/proc/cpuinfo", "cpu family"), _field("/proc/cpuinfo", "model")
    if family and model:
        facts["processor_family_model"] = f"{family}/{model}"
    memory = _field("/proc/meminfo", "MemTotal")
    if memory:
        facts["memory"] = f"{int(memory.split()[0]) / 2**20:.1f} GiB"
    return facts


def describe_versions() -> dict[str, str]:
    """Return the versions of quire and Python, and the commit if the source is a git checkout."""
    versions = {"quire": quire.__version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    try:
        describe = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        versions["commit"] = describe.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return versions


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
