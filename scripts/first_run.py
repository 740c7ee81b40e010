"""Steps that try quire on a new kind of hardware, one after another: see first-gpu-run and first-amx-run.

Every step is harder than the one before it, and the most valuable come first. Each has a time limit, after which it is
ended; if one fails, the others still run, and the summary names where to look. Without the hardware, the steps that
need it are skipped. Steps that --within leaves no time for are listed at the end, with the command that runs them. With
--dry-run, steps run on the processor with small inputs, to find their mistakes before they take time on the hardware.

    FOLDER/log.txt          all output, and the result of each step
    FOLDER/results.md       the reports of the benchmarks, updated after every result
    FOLDER/samples.jsonl    their samples, a line for each benchmark

The exit status is 0 if no step has failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
LAST_LINES = 16
LEAST_DRY_S = 300.0
"""The least time limit of a step in a dry run: the processor can be busy, and its time is cheap."""
GRACE_S = 20.0
"""Seconds that a step gets to report its results after the signal to end."""


@dataclass(frozen=True)
class Step:
    """A command to try, and its time limit in seconds.

    `fix`: where to look if it fails. `dry`: the command for a dry run, with small inputs and without the hardware;
    empty: the same command.
    """

    name: str
    limit_s: float
    command: str
    needs_device: bool = True
    fix: str = ""
    dry: str = ""

    def words(self, out: Path, title: str = "") -> list[str]:
        """Return the command, with this Python, and for a benchmark with its output files."""
        words = [sys.executable if word == "python" else word for word in self.command.split()]
        if "bench" in words:
            words += ["--title", f"{title}: {self.name}", "--markdown", str(out / "results.md")]
            words += ["--json", str(out / f"{self.name}.json")]
        return words

    def rehearsed(self) -> Step:
        """Return the step for a dry run."""
        return replace(
            self, command=self.dry or self.command, needs_device=False, limit_s=max(self.limit_s, LEAST_DRY_S)
        )


@dataclass(frozen=True)
class Outcome:
    """The result of a step: ok, failed, skipped or not reached, and the reason."""

    name: str
    result: str
    why: str


@dataclass(frozen=True)
class FirstRun:
    """A kind of hardware and the steps to try on it. `missing`: why it cannot be used on this machine; empty if it can.

    `prepare`: called before the first step; it returns environment variables to add. `keep`: called after each step,
    with the folder of results.
    """

    program: str
    device: str
    steps: Sequence[Step]
    missing: str = ""
    prepare: Callable[[], Mapping[str, str]] = dict
    keep: Callable[[Path], None] = lambda out: None

    def run_all(self, chosen: Sequence[Step], out: Path, within_s: float) -> list[Outcome]:
        """Run steps one after another, and print the result of each."""
        ends = time.monotonic() + within_s
        added = self.prepare()
        outcomes = []
        for step in chosen:
            words, left_s = step.words(out, f"The first {self.device}"), ends - time.monotonic()
            if step.needs_device and self.missing:
                outcome = Outcome(step.name, "skipped", f"needs {self.device}")
            elif shutil.which(_program(words)) is None:
                outcome = Outcome(step.name, "skipped", f"{_program(words)} is not installed")
            elif left_s < min(step.limit_s, within_s) / 2:
                outcome = Outcome(step.name, "not reached", f"{max(left_s, 0):.0f} s were left")
            else:
                outcome = _run(step, words, out, min(step.limit_s, left_s), added)
                _join_samples(step, out)
                self.keep(out)
            outcomes.append(outcome)
        return outcomes

    def summary(self, outcomes: Sequence[Outcome], options: str) -> str:
        """Return a line for each step, where to look after failures, and the command that continues."""
        lines = [f"{each.name:<12}{each.result:<13}{each.why}" for each in outcomes]
        fixes = {step.name: step.fix for step in self.steps if step.fix}
        lines += [f"look at: {each.name}: {fixes[each.name]}" for each in outcomes if _is_to_fix(each, fixes)]
        rest = [each.name for each in outcomes if each.result == "not reached"]
        return "\n".join([*lines, f"continue with: {self.program} {' '.join(rest)} {options}"] if rest else lines)

    def main(self, description: str, arguments: Sequence[str] | None = None) -> int:
        """Run the requested steps. Return the exit status."""
        names, folder = [step.name for step in self.steps], f"build/{Path(self.program).name}"
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("steps", metavar="STEP", nargs="*", help=f"default: all steps ({', '.join(names)})")
        parser.add_argument("--out", metavar="FOLDER", default=folder, help="default: %(default)s")
        parser.add_argument(
            "--within", metavar="SECONDS", type=float, default=570, help="total time limit; default: %(default)s"
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="run the steps without the hardware, with small inputs",
        )
        options = parser.parse_args(arguments)
        unknown = [name for name in options.steps if name not in names]
        if unknown:
            parser.error(f"{unknown[0]} is not a step; allowed: {', '.join(names)}")
        out = Path(options.out).resolve()
        out.mkdir(parents=True, exist_ok=True)
        chosen = [step for step in self.steps if step.name in (options.steps or names)]
        if options.dry_run:
            chosen = [step.rehearsed() for step in chosen]
        elif self.missing:
            print(f"no {self.device.removeprefix('a ')} is used: {self.missing}\n", flush=True)
        outcomes = self.run_all(chosen, out, options.within)
        summary = self.summary(outcomes, f"--out {options.out} --within {options.within:g}")
        print(summary)
        with (out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"\n{summary}\n")
        return int(any(each.result == "failed" for each in outcomes))


def _is_to_fix(outcome: Outcome, fixes: dict[str, str]) -> bool:
    return outcome.result == "failed" and outcome.name in fixes


def _program(words: Sequence[str]) -> str:
    """Return the program that a command runs, after `env` and its variables."""
    return next(word for word in words if word != "env" and "=" not in word)


def _join_samples(step: Step, out: Path) -> None:
    """Move the samples of a step, if it has any, into one file: few files can come back from a borrowed machine."""
    own = out / f"{step.name}.json"
    if own.exists():
        with (out / "samples.jsonl").open("a", encoding="utf-8") as joined:
            joined.write(own.read_text(encoding="utf-8"))
        own.unlink()


def _run(step: Step, words: list[str], out: Path, limit_s: float, added: Mapping[str, str]) -> Outcome:
    """Run a step, with its output in the log; print the last lines."""
    paths = [str(ROOT / "src"), added.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | added | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    print(f"== {step.name}: {' '.join(words)}", flush=True)
    with (out / "log.txt").open("a+b") as log:
        log.write(f"\n== {step.name}: {' '.join(words)}\n".encode())
        log.flush()
        began, started = log.tell(), time.monotonic()
        # Its own process group, so that all its processes can be killed; the same session, so that it ends with ours.
        process = subprocess.Popen(
            words, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )
        result, why = "failed", f"ended after {limit_s:.0f} s"
        try:
            status = process.wait(limit_s)
            result, why = "failed" if status else "ok", f"exit status {status}, {time.monotonic() - started:.0f} s"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then reports the failures so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(_last_lines(log, began))
    print(f"== {step.name}: {result}, {why}\n", flush=True)
    return Outcome(step.name, result, why)


def _last_lines(log: BinaryIO, began: int) -> str:
    log.seek(began)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-LAST_LINES:])
