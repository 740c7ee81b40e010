"""The memory of this process, as Linux reports it; None on other systems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes in memory now: total and of files; and the peak since the last reset."""

    resident: int
    of_files: int
    peak: int


def process_memory(status: Path = STATUS) -> ProcessMemory | None:
    """Return the memory of the process."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    try:
        resident, of_files, peak = (int(sizes[name][0]) * 1024 for name in ("VmRSS", "RssFile", "VmHWM"))
    except (KeyError, IndexError, ValueError):
        return None
    return ProcessMemory(resident, of_files, peak)


def reset_peak() -> bool:
    """Reset the peak to the present memory; return False if the system does not allow that."""
    try:
        CLEAR_REFERENCES.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True
