"""The cores, the memory and the GPUs that a process may use; in a container, less than the machine has.

Cores: the affinity mask, and the quota of the process's control groups. Memory: the machine's, and the limit of those
groups. A group is limited by its parents too, so the smallest limit counts. Missing files mean no limit.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def granted_cores() -> int:
    """Return the number of cores that the system may run this process on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def usable_cores() -> int:
    """Return how many threads can compute at once: the granted cores, or the quota of processor time if it is less."""
    quota = core_quota()
    return granted_cores() if quota is None else max(1, min(granted_cores(), math.floor(quota)))


def with_gpus(environ: Mapping[str, str], first: int, count: int = 1) -> dict[str, str]:
    """Return an environment that sees `count` of the GPUs that `environ` sees, from index `first` on. Pure.

    >>> with_gpus({"CUDA_VISIBLE_DEVICES": "4,6"}, 1)
    {'CUDA_VISIBLE_DEVICES': '6'}
    """
    visible = [name.strip() for name in environ.get(VISIBLE_GPUS, "").split(",") if name.strip()]
    own = visible[first : first + count] if visible else map(str, range(first, first + count))
    return {**environ, VISIBLE_GPUS: ",".join(own)}


def core_quota(root: Path = ROOT) -> float | None:
    """Return the processor time that the control groups grant, in cores; None: no limit."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return how many bytes the control groups grant; None: no limit."""
    limits = []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a larger number for "no limit"
                limits.append(int(text))
    return min(limits, default=None)


def memory_bytes(field: str, root: Path = ROOT) -> int | None:
    """Return a field of /proc/meminfo in bytes; None if it is missing."""
    for text in _read(root / "proc/meminfo").splitlines():
        name, _, value = text.partition(":")
        words = value.split()
        if name == field and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def free_memory(root: Path = ROOT) -> int | None:
    """Return how many bytes this process may still take; None if the system does not report it.

    That is the machine's available memory, but no more than each control group has left. Files that the system keeps in
    memory and can drop count as free.
    """
    free = [available] if (available := memory_bytes("MemAvailable", root)) is not None else []
    for folder in _groups(root, "memory"):
        for limit_file, used_file, cache_field in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if limit.isdigit() and used.isdigit():
                taken = int(used) - _field(folder / "memory.stat", cache_field)
                free.append(max(0, int(limit) - max(0, taken)))
    return min(free, default=None)


def resident_bytes(root: Path = ROOT) -> int | None:
    """Return how many bytes this process has in memory now; None if the system does not report it."""
    words = _read(root / "proc/self/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 and words[1].isdigit() else None


def _field(path: Path, name: str) -> int:
    """Return a number from a file of names and numbers; 0 if it is missing."""
    for text in _read(path).splitlines():
        words = text.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, versions 1 and 2, innermost first."""
    mount = root / "sys/fs/cgroup"
    for text in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = text.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        folder = top / path.lstrip("/")
        while folder != top and top in folder.parents:
            yield folder
            folder = folder.parent
        yield top


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
