"""The scripts that try what has never run on some hardware: they outlast whatever their steps do."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from quire.cli import doctor, generate
from quire.instruments import bench
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def load(name: str) -> ModuleType:
    """Load a script as a module."""
    spec = spec_from_loader(name, SourceFileLoader(name, str(SCRIPTS / name)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their types
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path[:])  # scripts put folders in front
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("first_run.py")


def run_of(script: ModuleType, steps: Sequence[Any], missing: str = "") -> Any:
    """A run of some steps."""
    return script.FirstRun("scripts/first-unit-run", "a unit", steps, missing)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file for what a step runs."""
    return tmp_path / "program.py"


def test_a_step_that_fails_keeps_no_other_from_running(
    script: ModuleType, program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program.write_text("import sys; print('said', sys.argv[1]); sys.exit(int(sys.argv[1]))")
    steps = [script.Step(name, 60, f"python {program} {number}", False) for name, number in (("one", 3), ("two", 0))]
    outcomes = run_of(script, steps).run_all(steps, tmp_path, 600)
    assert [(each.name, each.result) for each in outcomes] == [("one", "failed"), ("two", "ok")]
    assert outcomes[0].why.startswith("exit status 3, ")
    log, shown = (tmp_path / "log.txt").read_text(), capfd.readouterr().out
    assert re.findall("^said .*$", log, re.MULTILINE) == re.findall("^said .*$", shown, re.MULTILINE)
    assert log.index("said 3") < log.index("== two: ") < log.index("said 0")


def test_a_step_is_ended_with_all_that_it_has_started(
    script: ModuleType, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True))\n"
        "print('child', subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
        "while True: time.sleep(600)\n"
    )
    log = tmp_path / "log.txt"

    class Clockless(subprocess.Popen[bytes]):
        """A process whose waits are over when it has printed what is awaited, however long a busy machine takes."""

        awaited: ClassVar = [r"child \d+\n", "asked\n"]

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            awaited = self.awaited.pop(0)
            wait_until(lambda: re.search(awaited, log.read_text()))
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Clockless)
    steps = [script.Step("slow", 2, f"python {program}", False)]
    (outcome,) = run_of(script, steps).run_all(steps, tmp_path, 600)
    assert (outcome.result, outcome.why) == ("failed", "ended after 2 s")
    found = re.search(r"child (\d+)\nasked\n", log.read_text())
    assert found is not None, log.read_text()
    state = Path(f"/proc/{found[1]}/stat")
    wait_until(lambda: not state.exists() or " Z " in state.read_text())


def test_what_cannot_be_run_is_named(script: ModuleType, tmp_path: Path) -> None:
    needing = script.Step("needing", 60, "python -V")
    lacking = script.Step("lacking", 60, "no-such-program", needs_device=False)
    late = script.Step("late", 60, "python -V", needs_device=False)
    run = run_of(script, [needing, lacking, late], missing="none is here")
    outcomes = run.run_all([needing, lacking], tmp_path, 600)
    outcomes += run_of(script, run.steps).run_all([late, needing], tmp_path, -1)
    assert [(each.result, each.why) for each in outcomes] == [
        ("skipped", "needs a unit"),
        ("skipped", "no-such-program is not installed"),
        ("not reached", "0 s were left"),
        ("not reached", "0 s were left"),
    ]
    assert run.summary(outcomes, "--out here").splitlines()[-1] == (
        "continue with: scripts/first-unit-run late needing --out here"
    )
    assert "go on" not in run.summary(outcomes[:2], "")
    assert not (tmp_path / "log.txt").exists()


def test_where_to_look_is_said_of_what_failed_alone(script: ModuleType) -> None:
    steps = [script.Step(name, 60, "python -V", fix=f"{name}.h") for name in ("one", "two")]
    outcomes = [script.Outcome("one", "failed", "exit status 1"), script.Outcome("two", "ok", "exit status 0")]
    assert run_of(script, steps).summary(outcomes, "").splitlines()[2:] == ["look at: one: one.h"]


@pytest.mark.parametrize("name", ["first-gpu-run", "first-amx-run"])
def test_commands_of_the_steps_are_those_of_this_tree(name: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    subparsers = parser.add_subparsers()
    for command in (bench, doctor, generate):
        command.add_parser(subparsers)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    steps = load(name).STEPS
    for step in [*steps, *(step.rehearsed() for step in steps)]:
        words = step.words(Path("out"))
        assert words[0] in (sys.executable, "make", "env")
        paths = [word.removeprefix("--ignore=") for word in words if "tests/" in word or "scripts/" in word]
        paths += re.findall(r"(?:native|docs)/[\w/.-]+\.(?:h|cpp|md)", step.fix)
        for path, _, test in (path.partition("::") for path in paths):
            assert f"def {test}" in (ROOT / path).read_text(encoding="utf-8") if test else (ROOT / path).exists()
        if "quire" in words:
            parser.parse_args(words[words.index("quire") + 1 :])  # raises for what it does not know
        elif paths and paths[0].startswith("scripts/"):
            program = (ROOT / paths[0]).read_text(encoding="utf-8")
            assert all(f'"{word}"' in program for word in words if word.startswith("--"))
        elif words[0] == "make":
            assert words[1] in targets
        else:
            assert paths or words[1:] == ["-m", "torch.utils.collect_env"]


def test_steps_on_a_gpu_fit_into_three_calls_and_can_be_tried_without_one() -> None:
    steps = load("first-gpu-run").STEPS
    assert sum(step.limit_s for step in steps) <= 3 * 570
    assert [step.name for step in steps[:7]] == [
        "environment",
        "doctor",
        "kernel",
        "text",
        "kernels",
        "profile",
        "engine",
    ]
    assert steps[-1].name == "tests"
    for step in steps:
        command = step.rehearsed().command
        assert not step.needs_device or ("device cuda" not in command and "sanitizer" not in command), step.name
        assert not step.rehearsed().needs_device


def test_samples_of_steps_are_joined_and_what_is_to_be_kept_is_kept(
    script: ModuleType, program: Path, tmp_path: Path
) -> None:
    program.write_text(
        "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2] + os.environ['FROM'] + chr(10))"
    )
    steps = [
        script.Step(name, 60, f"python {program} {tmp_path / name}.json {number}", False)
        for name, number in (("one", 1), ("two", 2))
    ]
    kept: list[set[str]] = []
    run = script.FirstRun(
        "x", "a unit", steps, prepare=lambda: {"FROM": "prepare"}, keep=lambda out: kept.append(set(os.listdir(out)))
    )
    assert [each.result for each in run.run_all(steps, tmp_path, 600)] == ["ok", "ok"]
    assert (tmp_path / "samples.jsonl").read_text() == "1prepare\n2prepare\n"
    assert kept == [{"log.txt", "samples.jsonl", "program.py"}] * 2


def test_compiled_kernels_go_on_in_another_place(tmp_path: Path) -> None:
    carried = load("carried.py")
    first, second = (carried.Carried(tmp_path / name, tmp_path / "carried") for name in ("first", "second"))
    kernel = first.cache / "HASH"
    kernel.mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.ttir", "k.ptx"):
        (kernel / name).write_text(name)
    paths = {name: str(kernel / name) for name in ("k.cubin", "k.json", "k.ttir")}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    (tmp_path / "carried").mkdir()
    first.keep(tmp_path / "carried")
    assert second.prepare() == {"TRITON_CACHE_DIR": str(second.cache)}
    found = second.cache / "HASH"
    assert sorted(path.name for path in found.iterdir()) == ["__grp__k.json", "k.cubin", "k.json"]
    moved = json.loads((found / "__grp__k.json").read_text())["child_paths"]
    assert moved["k.cubin"] == str(found / "k.cubin") and (found / "k.cubin").read_text() == "k.cubin"


def test_the_script_as_it_is_called(tmp_path: Path) -> None:
    gpu_run = str(SCRIPTS / "first-gpu-run")
    command = [sys.executable, gpu_run, "doctor", "large", "--out", str(tmp_path)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    first, *_, middle, last = done.stdout.splitlines()
    assert first == "no GPU is used: no NVIDIA GPU answers: CUDA_VISIBLE_DEVICES hides them all"
    assert re.match(r"doctor +(ok|failed) +exit status [01], ", middle) and re.fullmatch(
        "large +skipped +needs.*", last
    )
    assert done.returncode == int("failed" in middle), done.stderr
    assert (tmp_path / "log.txt").read_text().endswith(f"\n{middle}\n{last}\n")
    done = subprocess.run([sys.executable, gpu_run, "all"], capture_output=True, text=True, timeout=300, check=False)
    assert (
        done.returncode == 2
        and "all is not a step; allowed: environment, doctor, kernel, text, kernels, " in done.stderr
    )


def test_a_machine_without_the_matrix_unit_is_told_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "first-amx-run"), "text", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    if re.fullmatch("text +skipped +needs a matrix unit", last):
        assert first.startswith("no matrix unit is used: ") and "amx" in first
    else:
        assert re.match("text +ok ", last)
