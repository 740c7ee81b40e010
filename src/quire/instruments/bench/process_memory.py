"""What this process holds in memory, as Linux counts it; None where the system does not say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes in memory now, of them those of files and those of nobody else, and the most since the last reset."""

    resident: int
    of_files: int
    anonymous: int
    peak: int


def process_memory(status: Path = STATUS) -> ProcessMemory | None:
    """Return what the process holds."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    try:
        resident, of_files, anonymous, peak = (
            int(sizes[name][0]) * 1024 for name in ("VmRSS", "RssFile", "RssAnon", "VmHWM")
        )
    except (KeyError, IndexError, ValueError):
        return None
    return ProcessMemory(resident, of_files, anonymous, peak)


def reset_peak() -> bool:
    """Let the peak begin anew at what is held now; False where the system does not let us."""
    try:
        CLEAR_REFERENCES.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True
