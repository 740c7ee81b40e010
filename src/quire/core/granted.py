"""What the system grants to this process, which in a container is less than what the machine has.

Cores: the affinity mask, and the quota of the control groups that the process stands in. Memory: the machine's, and
the limit of those groups. A group is bound by its parents, so the least of all counts. Files that are not there say
nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def granted_cores() -> int:
    """Return how many cores the scheduler of the system may put this process on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def core_quota(root: Path = ROOT) -> float | None:
    """Return how many cores' worth of time the control groups grant; None: as much as there is."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return how many bytes the control groups grant; None: as much as there is."""
    limits = []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a number of that size for "no limit"
                limits.append(int(text))
    return min(limits, default=None)


def memory_bytes(field: str, root: Path = ROOT) -> int | None:
    """Return a field of /proc/meminfo in bytes; None where there is none."""
    for text in _read(root / "proc/meminfo").splitlines():
        name, _, value = text.partition(":")
        words = value.split()
        if name == field and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that bind this process, versions 1 and 2, innermost first."""
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
