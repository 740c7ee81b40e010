"""`quire doctor`: checks what works on this machine, on one screen.

Every check reports its findings; a failed one also says what to do. With a model, the command shows what an engine
would load and how it would divide the memory, and checks the model's files with the functions that loading uses. It
reads no weights. The exit status is 1 if something that quire or the model needs is missing or broken, 2 if the model
or its settings cannot be read at all, else 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import quire
from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.terminal import Terminal, add_color_option, detect
from quire.cli.text import BOLD, FAINT, Colour, Line, Style, line, paragraph, span
from quire.compute.torch.device import INSTALL, look, refusal
from quire.core.errors import CheckpointError
from quire.core.granted import core_quota, granted_cores, memory_bytes, memory_limit

GOOD = Style(Colour(34, 2), bold=True)
BAD = Style(Colour(160, 1), bold=True)
NAME_COLUMNS = 15
UNBROKEN = 1 << 20
BYTES_PER_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `works` None: the part is missing, and not needed."""

    name: str
    works: bool | None
    text: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `doctor`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what works on this machine",
        description="Check what works on this machine and, if you name a model, whether it can be loaded and how it "
        "would run. Loads nothing.",
    )
    add_engine_options(parser)
    add_color_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print the findings. Returns the exit status."""
    terminal = detect(sys.stdout, os.environ, arguments.color)
    findings = examine()
    for drawn in draw(findings, terminal):
        print(terminal.render(drawn))
    if "model" in arguments:
        report, parts = _examine_model(arguments)
        print(f"\n{report}\n")
        for drawn in _draw_findings(parts, UNBROKEN):  # findings about files contain commands to copy
            print(terminal.render(drawn))
        findings += parts
    return int(any(finding.works is False for finding in findings))


def _examine_model(arguments: argparse.Namespace) -> tuple[str, list[Finding]]:
    """Return the start-up table of a model, and whether its files can be loaded. Loads nothing."""
    config = engine_config(arguments, os.environ)
    from quire.engine.factory import plan_engine
    from quire.engine.text.tokenizer import Tokenizer

    blueprint = plan_engine(config)

    def look_at_weights() -> str:
        return f"{blueprint.check_weights():,} tensors, all with the shapes that the model's settings imply"

    def look_at_tokenizer() -> str:
        tokenizer = Tokenizer.open(blueprint.tokenizer_files, vocab_size=blueprint.vocab_size, images=blueprint.images)
        template = f"{'with' if tokenizer.has_chat_template else 'without'} a chat template"
        images = "" if tokenizer.images is None else f"; images become {tokenizer.images.placeholder}"
        return f"{tokenizer.vocab_size:,} tokens, {template}{images}"

    parts = [_found_by("weights", look_at_weights), _found_by("tokenizer", look_at_tokenizer)]
    return str(blueprint.report), parts


def _found_by(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except CheckpointError as error:
        return Finding(name, False, str(error))


def examine() -> list[Finding]:
    """Run all checks that need no model. Does not mutate."""
    core, gpu = _compiled_core(), _gpu()
    if gpu[-1].works and not core.works:
        core = replace(core, works=None, text=f"{core.text}; GPUs compute without it")
    return [_python(), _numpy(), core, _cores(), _memory(), *gpu]


def draw(findings: list[Finding], terminal: Terminal) -> list[Line]:
    """Return the screen. Does not mutate."""
    lines = [line(span(f"quire {quire.__version__}", BOLD), span(f"  {Path(quire.__file__).parent}", FAINT)), ()]
    lines += _draw_findings(findings, terminal.columns)
    failed = [finding.name for finding in findings if finding.works is False]
    verdict = span(f"needs attention: {', '.join(failed)}", BAD) if failed else span("everything needed is here", GOOD)
    return [*lines, (), line(" ", verdict)]


def _draw_findings(findings: list[Finding], columns: int) -> list[Line]:
    marks = {True: span("✓", GOOD), False: span("×", BAD), None: span("−", FAINT)}
    lines: list[Line] = []
    for finding in findings:
        first, *rest = paragraph(finding.text, max(columns - NAME_COLUMNS - 3, 20)) or [()]
        lines.append(line(" ", marks[finding.works], f" {finding.name:<{NAME_COLUMNS}}", first))
        lines.extend(line(" " * (NAME_COLUMNS + 3), more) for more in rest)
    return lines


def _python() -> Finding:
    return Finding(
        "python",
        True,
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{sys.executable}",
    )


def _numpy() -> Finding:
    try:
        return Finding("numpy", True, str(import_module("numpy").__version__))
    except ImportError as error:
        return Finding("numpy", False, f"cannot be imported ({error}); pip install numpy")


def _compiled_core() -> Finding:
    try:
        from quire._native import cpu_features, instruction_set
    except ImportError as error:
        text = f"cannot be imported ({error}); in a clone of quire: pip install --force-reinstall ."
        return Finding("compiled core", False, text)
    features = ", ".join(name for name, is_there in cpu_features().items() if is_there)
    return Finding("compiled core", True, f"uses {instruction_set()}; the processor has {features or 'no extension'}")


def _cores() -> Finding:
    granted, quota, present = granted_cores(), core_quota(), os.cpu_count() or 1
    text = f"{granted} of {present} granted"
    if quota is not None:
        text += f", with a CPU quota of {quota:g}"
    return Finding("cores", True, text)


def _memory() -> Finding:
    total, available, limit = memory_bytes("MemTotal"), memory_bytes("MemAvailable"), memory_limit()
    if total is None or available is None:
        return Finding("memory", None, "unknown (the system does not report it)")
    text = f"{available / BYTES_PER_GIB:.1f} GiB available of {total / BYTES_PER_GIB:.1f} GiB"
    if limit is not None and limit < total:
        text += f"; this process may use {limit / BYTES_PER_GIB:.1f} GiB"
    return Finding("memory", True, text)


def _gpu() -> list[Finding]:
    """Check the GPU and the packages that it needs. Finds torch without importing it, which would take seconds."""
    facts = look(os.environ)
    if facts.torch is None:
        torch = Finding("torch", None, f"not installed; only a GPU needs it: {INSTALL}")
    else:
        built = "for CPUs" if facts.torch_cuda is None else f"for CUDA {facts.torch_cuda}"
        torch = Finding("torch", True, f"{facts.torch} {built}, triton {facts.triton or 'not installed'}")
    why = refusal(facts)
    text = why if facts.gpu is None else f"{facts}; not used: {why}" if why else str(facts)
    return [torch, Finding("GPU", None if why else True, text)]
