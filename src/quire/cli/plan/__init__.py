"""`quire plan`: what fits, how fast, and with which settings, before you buy or load anything.

Only the settings of a model are read. Memory follows the engine's own memory plan (`sizing`), times are roofline bounds
(`quire.simulate.roofline`), and the best settings are found by search (`quire.simulate.planner`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from quire.cli.engine_options import NOT_STARTED, add_engine_options, engine_config, engine_settings
from quire.cli.options import DEFAULT, Setting
from quire.cli.terminal import detect
from quire.cli.text import line
from quire.core.byte_sizes import parse_bytes
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import USUAL_BLOCK_SIZE
from quire.simulate.estimate import Objective
from quire.simulate.hardware import Hardware, known_hardware
from quire.simulate.lengths import Length, RequestLengths, sample_pairs
from quire.simulate.model_shape import known_models
from quire.simulate.planner import Choices
from quire.simulate.workload.trace import REFUSE, SKIP, Trace

if TYPE_CHECKING:
    from quire.cli.plan.report import PlanReport
    from quire.cli.plan.study import Study
    from quire.core.config import EngineConfig

DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s)", re.ASCII)
PROMISES: Final = ("ttft", "tpot")
FIXED: Final = {"block_size": "block_sizes", "max_num_seqs": "sequences", "max_num_batched_tokens": "budgets"}
"""Settings that are searched for, unless the user gives them."""

DESCRIPTION: Final = (
    "Estimate whether MODEL fits into memory, how many requests run at once, how fast machines can serve them at "
    "most, and with which settings. MODEL is a folder, a config.json, a hub id, guide, or a known name: "
    f"{', '.join(known_models())}. Only its settings are read."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `plan`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "plan", help="estimate what fits, how fast, and the best settings", description=DESCRIPTION
    )
    group = parser.add_argument_group("what to plan")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each machine; default: all its memory, or for here the free memory",
    )
    group.add_argument(
        "--hardware",
        metavar="NAME",
        nargs="+",
        default=["here"],
        help=f"machines to compare: here (measured; default), a YAML file, {', '.join(known_hardware())}",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="take request lengths from a CSV or JSONL trace in the format of Azure or Mooncake",
    )
    group.add_argument(
        "--skip-malformed",
        action="store_true",
        help="skip and count lines of the trace that are not requests",
    )
    group.add_argument(
        "--prompt-tokens",
        metavar="N",
        help="tokens per prompt: 512 or 4K, mean and deviation (512+-200), or median and 95th percentile (400/4K); "
        "default: 512",
    )
    group.add_argument("--output-tokens", metavar="N", help="tokens per output, in the same forms; default: 128")
    group.add_argument(
        "--slo",
        metavar="TIMES",
        help="latency targets, such as ttft=500ms,tpot=50ms: time to first token (p95), time between tokens",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser, NOT_STARTED)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print. Returns the exit status."""
    report = make_report(arguments, os.environ)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        terminal = detect(sys.stdout, os.environ)
        for text in str(report).splitlines():
            print(terminal.render(line(text if terminal.unicode else text.replace("±", "+-"))))
    return 0


def make_report(arguments: argparse.Namespace, environ: Mapping[str, str]) -> PlanReport:
    """Return the report; raises an error that names the nearest possible values if no machine meets the request."""
    from quire.cli.model_shapes import find_settings, require_texts
    from quire.cli.plan.here import HERE
    from quire.cli.plan.report import PlanReport
    from quire.cli.plan.sizing import EngineSizer
    from quire.cli.plan.study import Planner
    from quire.compute.choice import usual_block_size
    from quire.core.memory_needs import KV_SHARE

    config, settings = engine_config(arguments, environ), engine_settings(arguments, environ)
    objective = parse_objective(arguments.slo or "")
    memory = None if arguments.memory is None else parse_bytes(arguments.memory, "memory")
    source = find_settings(config.model, config.mmproj)
    sizer = EngineSizer(config, source)
    require_texts(sizer.model, config.model, "quire plan")
    on_here = EngineSizer(config, source, KV_SHARE) if memory is None else sizer
    choices = _choices(settings, usual_block_size(sizer.model, config))
    requests, lengths = _requests(arguments, config.max_model_len or sizer.model.spec.context_length)
    machines = [_hardware(name, config) for name in dict.fromkeys(arguments.hardware)]
    studies = tuple(
        Planner(on_here if machine.name == HERE else sizer, lengths, choices, objective).study(
            machine, machine.memory_bytes if memory is None else memory * machine.num_ranks
        )
        for machine in machines
    )
    _require_one(studies, arguments.slo)
    return PlanReport(sizer, _given_flags(settings), requests, lengths, studies)


def _requests(arguments: argparse.Namespace, longest: int) -> tuple[str, RequestLengths]:
    """Return a description of the requests to plan for, and their lengths."""
    if arguments.trace is None:
        prompt = Length.parse(arguments.prompt_tokens or "512", "prompt-tokens")
        output = Length.parse(arguments.output_tokens or "128", "output-tokens")
        text = f"prompts of {prompt.text} tokens, outputs of {output.text}"
        return text, RequestLengths.of_lengths(prompt, output, longest)
    if arguments.prompt_tokens is not None or arguments.output_tokens is not None:
        raise InvalidConfigError("trace", arguments.trace, "lengths from a trace or from numbers, not from both")
    with open(arguments.trace, encoding="utf-8", errors="replace") as file:
        trace = Trace(file, name=arguments.trace, malformed=SKIP if arguments.skip_malformed else REFUSE)
        pairs = sample_pairs((len(request.prompt), request.num_output_tokens) for request in trace)
    skipped = f", lines skipped: {trace.num_skipped:,}" if trace.num_skipped else ""
    return f"{trace.num_read:,} of {arguments.trace}{skipped}", RequestLengths.of_pairs(pairs, longest)


def parse_objective(text: str) -> Objective:
    """Parse the value of --slo; raises `InvalidConfigError`.

    >>> parse_objective("ttft=0.5s,tpot=40ms")
    Objective(ttft_s=0.5, tpot_s=0.04)
    """
    targets: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        match = DURATION.fullmatch(value)
        if name not in PROMISES or name in targets or match is None or not float(match[1]):
            raise InvalidConfigError("slo", text, "times such as ttft=500ms,tpot=0.05s, one or both")
        targets[name] = float(match[1]) / (1000 if match[2] == "ms" else 1)
    return Objective(targets.get("ttft"), targets.get("tpot"))


def _hardware(name: str, config: EngineConfig) -> Hardware:
    from quire.cli.plan.here import HERE, find_machine

    if name == HERE and config.device != "cuda" and sys.stderr.isatty():
        print("measuring this machine …", file=sys.stderr)
    return find_machine(name, config).joined(config.tensor_parallel)


def _choices(settings: Mapping[str, Setting], block_size: int) -> Choices:
    """Return the choices to search; a setting that the user has given is the only choice.

    So is the usual block size of a model whose blocks hold states.
    """
    given = {choices: settings[name] for name, choices in FIXED.items() if settings[name].origin != DEFAULT}
    fixed = {choices: (setting.value,) for choices, setting in given.items() if setting.value is not None}
    return Choices(**({} if block_size == USUAL_BLOCK_SIZE else {"block_sizes": (block_size,)}) | fixed)


def _given_flags(settings: Mapping[str, Setting]) -> str:
    """Return the flags that the user has set, except the model and the flags that the plan recommends."""
    flags = []
    for name, setting in settings.items():
        if setting.origin == DEFAULT or name in (*FIXED, "model", "kv_memory"):
            continue
        flag, value = setting.option.flag, setting.value
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{flag} {shlex.quote(str(value).lower() if value is None else str(value))}")
    return " ".join(flags)


def _require_one(studies: tuple[Study, ...], slo: str | None) -> None:
    """Raise unless some machine meets the request; the error names the nearest possible values."""
    from quire.cli.plan.report import nearest_text

    if any(study.best is not None for study in studies):
        return
    problems = [study.problem for study in studies if study.problem is not None]
    if len(problems) == len(studies):
        raise max(zip(studies, problems, strict=True), key=lambda pair: pair[0].memory_bytes)[1]
    objective = parse_objective(slo or "")
    missed = [(study.hardware.name, study.nearest) for study in studies if study.nearest is not None]
    name, nearest = min(missed, key=lambda pair: objective.excess(pair[1].ttft_p95_s, pair[1].tpot_s))
    raise InvalidConfigError(
        "slo", slo, f"{nearest_text(nearest)} on {name} (the closest it can reach), or longer times"
    )
