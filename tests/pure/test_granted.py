"""What a system grants a process: the least of the machine and of every control group that binds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import granted
from quire.core.granted import (
    core_quota,
    free_memory,
    granted_cores,
    memory_bytes,
    memory_limit,
    resident_bytes,
    usable_cores,
)

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_free_memory_is_the_least_of_the_machine_and_of_every_group(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write(tmp_path / "proc/meminfo", "MemAvailable:   4096 kB\n")
    assert free_memory(tmp_path) == 4 * MIB
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "outer/memory.max", str(3 * MIB))
    write(groups / "outer/memory.current", str(2 * MIB))
    assert free_memory(tmp_path) == MIB
    write(groups / "outer/memory.stat", f"anon 5\ninactive_file {MIB}\n")  # files that can be dropped
    assert free_memory(tmp_path) == 2 * MIB
    write(groups / "outer/inner/memory.max", "max")
    write(groups / "outer/inner/memory.current", str(MIB))
    assert free_memory(tmp_path) == 2 * MIB


def test_free_memory_in_groups_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "3:memory:/job\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    write(folder / "memory.limit_in_bytes", str(8 * MIB))
    write(folder / "memory.usage_in_bytes", str(9 * MIB))
    assert free_memory(tmp_path) == 0
    write(folder / "memory.stat", f"total_inactive_file {4 * MIB}\n")
    assert free_memory(tmp_path) == 3 * MIB


def test_files_that_can_be_dropped_make_no_more_free_than_the_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", str(MIB))
    write(tmp_path / "sys/fs/cgroup/memory.current", str(MIB))
    write(tmp_path / "sys/fs/cgroup/memory.stat", f"inactive_file {2 * MIB}\n")
    assert free_memory(tmp_path) == MIB


@pytest.mark.parametrize("text", ["inactive_file", "inactive_file x", "inactive_file 1 2", "active_file 5", ""])
def test_a_line_that_is_no_number_of_files_says_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    for name, size in (("max", 4 * MIB), ("current", 3 * MIB)):
        write(tmp_path / f"sys/fs/cgroup/memory.{name}", str(size))
    write(tmp_path / "sys/fs/cgroup/memory.stat", f"{text}\n")
    assert free_memory(tmp_path) == MIB


@given(st.lists(st.tuples(st.none() | st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), max_size=3))
def test_free_memory_is_that_of_a_walk_through_all_groups(
    tmp_path_factory: pytest.TempPathFactory, groups: list[tuple[int | None, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    write(root / "proc/meminfo", "MemAvailable: 20 kB\n")
    write(root / "proc/self/cgroup", "0::/" + "/".join(["group"] * len(groups)) + "\n")
    folder, expected, limits = root / "sys/fs/cgroup", [20 * 1024], []
    for limit, used, droppable in groups:
        folder = folder / "group"
        write(folder / "memory.max", "max" if limit is None else str(limit))
        write(folder / "memory.current", str(used))
        write(folder / "memory.stat", f"inactive_file {droppable}\n")
        if limit is not None:
            limits.append(limit)
            expected.append(max(0, limit - max(0, used - droppable)))
    assert free_memory(root) == min(expected)
    assert memory_limit(root) == min(limits, default=None)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max", None), ("", None), ("-1", None), ("0", 0), (str((1 << 60) - 1), (1 << 60) - 1), (str(1 << 60), None)],
)
def test_a_limit_that_is_larger_than_any_machine_is_none(tmp_path: Path, text: str, limit: int | None) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n4:memory:/old\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.max", text)
    assert memory_limit(tmp_path) == limit
    write(tmp_path / "sys/fs/cgroup/memory/old/memory.limit_in_bytes", text)
    assert memory_limit(tmp_path) == limit
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "5")
    assert memory_limit(tmp_path) == (0 if limit == 0 else 5), "the folder above binds as well"


@pytest.mark.parametrize(
    ("line", "found"),
    [("MemTotal: 3 kB", 3072), ("MemTotal: x kB", None), ("MemTotal:", None), ("MemFree: 3 kB", None)],
)
def test_a_field_of_the_machines_memory(tmp_path: Path, line: str, found: int | None) -> None:
    write(tmp_path / "proc/meminfo", f"Other: 9 kB\n{line}\nMemTotalOfSwap: 7 kB\n")
    assert memory_bytes("MemTotal", tmp_path) == found


@pytest.mark.parametrize(("text", "pages"), [("90 5 3", 5), ("90 0", 0), ("90", None), ("", None), ("90 x", None)])
def test_what_a_process_holds_is_the_second_number_in_pages(tmp_path: Path, text: str, pages: int | None) -> None:
    write(tmp_path / "proc/self/statm", text)
    assert resident_bytes(tmp_path) == (None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"))


def test_a_file_that_is_no_text_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_bytes(b"MemTotal: 3 kB\xff")
    assert memory_bytes("MemTotal", tmp_path) is None


# ---- cores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("150000", None),
        ("150000 0", None),
        ("150000 100000 7", None),
        ("0 100000", 0.0),
        ("", None),
    ],
)
def test_a_quota_of_version_2_is_time_over_period(tmp_path: Path, text: str, quota: float | None) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner\n")
    write(tmp_path / "sys/fs/cgroup/outer/inner/cpu.max", text)
    assert core_quota(tmp_path) == quota
    write(tmp_path / "sys/fs/cgroup/outer/cpu.max", "100000 100000")
    assert core_quota(tmp_path) == min(1.0, 9.0 if quota is None else quota), "the least of all groups counts"


@pytest.mark.parametrize(
    ("time_us", "period_us", "quota"), [("50000", "100000", 0.5), ("-1", "100000", None), ("50000", "0", None)]
)
@pytest.mark.parametrize(("controllers", "is_bound"), [("cpu,cpuacct", True), ("cpuset", False), ("memory", False)])
def test_a_quota_of_version_1_stands_in_two_files(
    tmp_path: Path, time_us: str, period_us: str, quota: float | None, controllers: str, is_bound: bool
) -> None:
    write(tmp_path / "proc/self/cgroup", f"5:{controllers}:/job\n")
    folder = tmp_path / "sys/fs/cgroup/cpu/job"
    write(folder / "cpu.cfs_quota_us", time_us + "\n")
    assert core_quota(tmp_path) is None
    write(folder / "cpu.cfs_period_us", period_us + "\n")
    assert core_quota(tmp_path) == (quota if is_bound else None)


@pytest.mark.parametrize("text", ["0::/", "0::", "no colon", "0::/gone/long/ago"])
def test_the_outermost_group_binds_wherever_the_process_is(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc/self/cgroup", text + "\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000")
    assert core_quota(tmp_path) == 2.0


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [(8, None, 8), (8, 3.9, 3), (8, 9.0, 8), (8, 0.2, 1), (1, None, 1), (2, 2.0, 2)]
)
def test_as_many_threads_as_can_compute_at_once_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(granted, "granted_cores", lambda: cores)
    monkeypatch.setattr(granted, "core_quota", lambda: quota)
    assert usable_cores() == threads


def test_where_there_is_no_affinity_all_cores_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert granted_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(granted.sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert granted_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert granted_cores() == 1


def test_this_process_has_cores_and_memory() -> None:
    assert usable_cores() >= 1
    assert (resident_bytes() or MIB) >= MIB
