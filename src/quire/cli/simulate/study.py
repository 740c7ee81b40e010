"""Study: the arguments of `quire simulate` as engines and sources of requests.

A variant is one combination of the `--what-if` values; each variant has its own engines and serves the same requests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from quire.cli.engine_options import NOT_STARTED, engine_config
from quire.cli.model_shapes import find_settings, require_texts, shape_of
from quire.cli.options import options_of
from quire.cli.plan.here import find_machine
from quire.cli.plan.sizing import AnyBlockSizer, SizedEngine, resolved_on
from quire.cli.simulate.files import named_after, remark_torn
from quire.cli.simulate.progress import ProgressLine
from quire.cli.simulate.report import show_blocks
from quire.core.byte_sizes import format_bytes, parse_bytes
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.core.setting_checks import require_int, require_number
from quire.engine.records.step_log import MAGIC, replayed
from quire.routing.router import Router
from quire.simulate.baselines import SYSTEMS
from quire.simulate.baselines.contiguous import ContiguousEngine, ContiguousSetup
from quire.simulate.baselines.published import contiguous_setup, vllm_setup
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.fitted import FittedCost, read_steps
from quire.simulate.cost.roofline import RooflineCost
from quire.simulate.cost.unsteady import UnsteadyCost
from quire.simulate.faults import FaultPlan, ReplicaFault
from quire.simulate.front import Reports
from quire.simulate.hardware import Hardware
from quire.simulate.lengths import Length
from quire.simulate.replica import EngineSetup, PagedEngine, SimulatedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.roofline import Numbers, Roofline
from quire.simulate.scaled import ScalingPlan
from quire.simulate.simulation import Simulation, Watcher
from quire.simulate.split import ReceivedCost, Split
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.conversations import Conversations, Turns
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes, drawn_requests
from quire.simulate.workload.lengths import ALPACA, SHAREGPT, Lengths, SaidLengths
from quire.simulate.workload.offered import OpenLoop, RequestSource
from quire.simulate.workload.step_log import logged_requests, up_to_tear
from quire.simulate.workload.trace import REFUSE, SKIP, Trace

OWN = ("system", "router", "replicas", "prompt_replicas", "least_replicas")
MAX_VARIANTS = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of settings. `name` lists the chosen values."""

    name: str
    config: EngineConfig
    system: str
    router: str
    num_replicas: int
    num_prompt_replicas: int
    least_replicas: int


class Study:
    """The variants and requests of a command line. The constructor reads the model's settings. Reports progress."""

    def __init__(self, arguments: argparse.Namespace, environ: Mapping[str, str], progress: ProgressLine) -> None:
        self._arguments = arguments
        self._progress = progress
        _require(arguments)
        config = engine_config(arguments, environ)
        self._sizer = AnyBlockSizer(config, find_settings(config.model, config.mmproj))
        require_texts(self._sizer.model, config.model, "quire simulate")
        self._hardware = find_machine(arguments.hardware, config)
        if arguments.link_bandwidth is not None:
            self._hardware = replace(self._hardware, link_bandwidth=arguments.link_bandwidth * 1e9)
        memory = arguments.memory
        self._memory_bytes = self._hardware.memory_bytes if memory is None else parse_bytes(memory, "memory")
        self.variants = list(_variants(arguments, config))
        alone = len(self.variants) == 1
        is_one = alone and self.variants[0].num_replicas == 1 and not arguments.fault
        if arguments.log is not None and not is_one:
            allowed = "one run of one replica, without --what-if, --replicas and --fault"
            raise InvalidConfigError("log", arguments.log, allowed)
        if arguments.trace == "-" and not alone:
            raise InvalidConfigError("trace", arguments.trace, "a file, which each variant can read again")
        self._steps = None if arguments.steps is None else _fit(arguments.steps, arguments.seed)
        self._faults = tuple(map(ReplicaFault.parse, arguments.fault))
        self._trace: Trace | None = None
        self._is_torn = False

    @property
    def title(self) -> str:
        """A description of the study, with the seed, so that it can be repeated."""
        model, machine, memory, asked, seed = (value for _, value in self.facts)
        return f"{model} on {machine} ({memory}); {asked}; seed {seed}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """The same description as pairs of label and value."""
        arguments = self._arguments
        machines = dict.fromkeys(self._machine(variant.config).name for variant in self.variants)
        where = "steps as recorded in " + arguments.steps if arguments.steps else " or ".join(machines)
        plans = (self._size(variant.config).plan for variant in self.variants)
        blocks = dict.fromkeys(show_blocks(plan.num_blocks, plan.bytes_per_block) for plan in plans)
        return (
            ("model", str(self._sizer.config.model)),
            ("machine", where),
            ("memory", f"{format_bytes(self._memory_bytes)}, {' or '.join(blocks)}"),
            ("requests", self._asked()),
            ("seed", str(arguments.seed)),
        )

    def _asked(self) -> str:
        arguments = self._arguments
        if arguments.trace is not None:
            skipped = f", lines skipped: {self._trace.num_skipped:,}" if self._trace and self._trace.num_skipped else ""
            return f"trace {arguments.trace}{skipped}{', its end is missing' if self._is_torn else ''}"
        rate = f"{arguments.rate:g} a second, {arguments.arrivals}"
        source = f"{arguments.users:,} users" if arguments.users is not None else rate
        given = arguments.prompt_tokens, arguments.output_tokens
        lengths = arguments.lengths if given == (None, None) else f"{given[0] or '512'} + {given[1] or '128'} tokens"
        return f"{source}, for {arguments.duration:g} s, {lengths}"

    def simulate(self, variant: Variant, watchers: Sequence[Watcher] = ()) -> SimulationResult:
        """Run a variant. Writes the step log if --log is given."""
        self._progress.begin(f"simulating {variant.name}")
        if self._arguments.trace is None:
            watchers = (*watchers, self._progress.until(self._arguments.duration))
        sized = self._size(variant.config)
        router = Router(sized.config.block_size, b"", variant.router)
        split = self._split(variant, sized)
        reports = Reports(self._arguments.report_delay, self._arguments.report_loss, self._arguments.seed)
        with contextlib.ExitStack() as files:
            log = None if self._arguments.log is None else files.enter_context(open(self._arguments.log, "wb"))
            make = self._engine_maker(variant, sized)
            engines = [
                make(log, split is not None and index >= split.num_prompt_replicas)
                for index in range(variant.num_replicas)
            ]
            source = self._source(sized.plan.max_model_len, files)
            plan = split or self._plan(variant, lambda: make(None, False))
            result = Simulation(engines, source, router=router, watchers=watchers, reports=reports, plan=plan).run()
        if self._arguments.trace is not None and not result.num_requests:
            raise InvalidConfigError("trace", self._arguments.trace, "a file with one request or more")
        return result

    def _size(self, config: EngineConfig) -> SizedEngine:
        machine, model = self._machine(config), self._sizer.model_of(config)
        return self._sizer.size(resolved_on(machine, config, model), self._memory_bytes * machine.num_ranks)

    def _machine(self, config: EngineConfig) -> Hardware:
        return self._hardware.joined(config.tensor_parallel)

    def _plan(self, variant: Variant, make: Callable[[], SimulatedEngine]) -> FaultPlan | ScalingPlan:
        if not variant.least_replicas:
            return FaultPlan(self._faults, make)
        if self._faults:
            raise InvalidConfigError("least-replicas", variant.least_replicas, "0 with --fault")
        return ScalingPlan(variant.least_replicas, make)

    def _split(self, variant: Variant, sized: SizedEngine) -> Split | None:
        if not variant.num_prompt_replicas:
            return None
        if self._faults:
            raise InvalidConfigError("prompt-replicas", variant.num_prompt_replicas, "0 with --fault")
        if variant.least_replicas:
            raise InvalidConfigError("prompt-replicas", variant.num_prompt_replicas, "0 with --least-replicas")
        spec = sized.facts.kv_spec
        link = self._hardware.link_bandwidth * self._machine(variant.config).num_ranks  # each rank has one
        return Split(variant.num_prompt_replicas, spec.bytes_per_block / spec.block_size / link)

    def _engine_maker(self, variant: Variant, sized: SizedEngine) -> Callable[[Any, bool], SimulatedEngine]:
        """Return a function that makes an engine from a log file, and whether other engines compute its prompts."""
        cost, plan, config = self._cost(sized, self._machine(variant.config)), sized.plan, sized.config
        setup = EngineSetup(
            sized.facts.kv_spec,
            config.memory_config(plan.num_blocks, plan.num_host_blocks, b"", plan.num_disk_slots),
            config.scheduler_config(plan.max_model_len),
            cost,
            self._arguments.acceptance,
            self._draft_cost(sized),
            self._arguments.disk_bandwidth * 1e9,
        )
        if variant.system in ("quire", "vllm"):
            paged = setup if variant.system == "quire" else vllm_setup(setup)
            return lambda log, receives: PagedEngine(
                replace(paged, cost=ReceivedCost(cost)) if receives else paged, log=log
            )
        if variant.num_prompt_replicas:
            raise InvalidConfigError("system", variant.system, "quire or vllm with --prompt-replicas")
        if self._arguments.log is not None:
            raise InvalidConfigError("log", self._arguments.log, "a run of quire's scheduler: --system quire or vllm")
        contiguous: ContiguousSetup = contiguous_setup(setup, variant.system)
        return lambda log, receives: ContiguousEngine(contiguous)

    def _cost(self, sized: SizedEngine, machine: Hardware) -> StepCost:
        if self._steps is not None:
            return self._steps
        spec, sums = sized.facts.kv_spec, sized.config.tensor_parallel_sums
        shape = shape_of(sized.config.model, self._sizer.model, sized.facts)
        numbers = Numbers(sized.facts.dtype, sized.facts.weights, spec.dtype, sums)
        return RooflineCost(Roofline(machine, shape, numbers), bytes_per_block=spec.bytes_per_block)

    def _draft_cost(self, sized: SizedEngine) -> StepCost | None:
        """Return the time of a pass of the draft model, or of the model's own layer with its head; None without one."""
        draft, spec = self._sizer.model_of(sized.config).draft, sized.facts.kv_spec
        if draft is None:
            return None
        if draft.spec.joins_states:
            draft = replace(draft, spec=replace(self._sizer.model.spec, layers=draft.spec.layers))
        numbers = Numbers(sized.facts.dtype, sized.facts.weights, spec.dtype)
        shape = shape_of(sized.config.speculation, draft, replace(sized.facts, kv_spec=spec.draft or spec))
        return RooflineCost(Roofline(self._hardware, shape, numbers))

    def _source(self, longest: int, files: contextlib.ExitStack) -> RequestSource:
        arguments, seed = self._arguments, self._arguments.seed
        if arguments.trace is not None:
            if _is_step_log(arguments.trace):
                files.enter_context(named_after(arguments.trace))
                log = files.enter_context(self._progress.follow(arguments.trace))
                records = up_to_tear(replayed(log), self._note_torn)
                return OpenLoop(itertools.islice(logged_requests(records), arguments.limit))
            malformed = SKIP if arguments.skip_malformed else REFUSE
            lines = files.enter_context(self._open_text(arguments.trace))
            self._trace = Trace(lines, name=arguments.trace, malformed=malformed, speed=arguments.speed, seed=seed)
            return OpenLoop(itertools.islice(self._trace, arguments.limit))
        prompts = DrawnPrompts(
            self._lengths(),
            longest,
            SharedPrefixes(arguments.prefixes, arguments.shared_tokens),
            max(arguments.samples, arguments.beams),
            arguments.beams > 1,
        )
        duration_s = arguments.duration
        if arguments.users is not None:
            return ClosedLoop(arguments.users, prompts, duration_s=duration_s, seed=seed)
        arrivals = Arrivals(arguments.rate, arguments.arrivals, arguments.variation)
        if arguments.turns > 1:
            turns = Turns(arguments.turns, arguments.thinking)
            return Conversations(arrivals, prompts, turns, duration_s=duration_s, seed=seed)
        return OpenLoop(drawn_requests(arrivals, prompts, duration_s=duration_s, seed=seed, limit=arguments.limit))

    def _note_torn(self, why: str) -> None:
        if not self._is_torn:  # each variant reads the log
            remark_torn(self._arguments.trace, why, self._progress)
        self._is_torn = True

    def _open_text(self, path: str) -> contextlib.AbstractContextManager[TextIO]:
        if path == "-":
            return contextlib.nullcontext(sys.stdin)
        return io.TextIOWrapper(self._progress.follow(path), encoding="utf-8", errors="replace")

    def _lengths(self) -> Lengths:
        arguments = self._arguments
        if arguments.prompt_tokens is None and arguments.output_tokens is None:
            return SHAREGPT if arguments.lengths == "sharegpt" else ALPACA
        prompt = Length.parse(arguments.prompt_tokens or "512", "prompt-tokens")
        return SaidLengths(prompt, Length.parse(arguments.output_tokens or "128", "output-tokens"))


def _require(arguments: argparse.Namespace) -> None:
    """Raise `InvalidConfigError` for values that nothing else checks, and for options that exclude each other."""
    for name in ("turns", "samples", "beams"):
        require_int(name, getattr(arguments, name), 1, 1 << 20)
    if arguments.limit is not None:
        require_int("limit", arguments.limit, 1, 1 << 40)
    require_number("duration", arguments.duration, 1e-3, 1e9)
    require_number("disk-bandwidth", arguments.disk_bandwidth, 1e-3, 1e3)
    if arguments.users is not None and arguments.turns > 1:
        raise InvalidConfigError("turns", arguments.turns, "1 with --users: chats start at a --rate")
    if arguments.link_bandwidth is not None:
        require_number("link-bandwidth", arguments.link_bandwidth, 1e-3, 1e5)
    if arguments.fault and max(arguments.samples, arguments.beams) > 1:
        raise InvalidConfigError("fault", arguments.fault[0], "none with --samples or --beams")
    if arguments.beams > 1 and arguments.samples > 1:
        raise InvalidConfigError("beams", arguments.beams, "1 with --samples: leave out --samples for beam search")


def _fit(path: str, seed: int) -> UnsteadyCost:
    with open(path, encoding="utf-8", errors="replace") as file:
        steps = list(read_steps(file, path))
    cost = FittedCost.fit(steps)
    return UnsteadyCost(cost, cost.ratios(steps), seed)


def _is_step_log(path: str) -> bool:
    if path == "-":
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _variants(arguments: argparse.Namespace, config: EngineConfig) -> Iterator[Variant]:
    """Yield every combination of the `--what-if` values; without --what-if, one variant named after the system."""
    choices = [_choices(text) for text in arguments.what_if]
    require_int("variants of --what-if", math.prod(map(len, choices)), 1, MAX_VARIANTS)
    for chosen in itertools.product(*choices):
        values: dict[str, Any] = dict(chosen)
        own = {name: values.pop(name, getattr(arguments, name)) for name in OWN}
        require_int("replicas", own["replicas"], 1, 1024)
        require_int("least-replicas", own["least_replicas"], 0, own["replicas"])
        require_int("prompt-replicas", own["prompt_replicas"], 0, own["replicas"] - 1)
        if own["system"] not in SYSTEMS:
            raise InvalidConfigError("system", own["system"], f"one of {', '.join(SYSTEMS)}")
        name = " ".join(f"{name}={value}" for name, value in chosen) or own["system"]
        yield Variant(name, replace(config, **values), *(own[each] for each in OWN))


def _choices(text: str) -> list[tuple[str, Any]]:
    """Return the choices of one setting; raises `InvalidConfigError` for an unknown setting or value."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    options = options_of(EngineConfig)
    if not values or name not in (options.keys() - NOT_STARTED) | set(OWN):
        raise InvalidConfigError(
            "what-if", text, "a setting and its values, as block_size=8,32 or system=quire,orca_max"
        )
    try:
        if name in options:
            return [(name, options[name].read(value)) for value in values.split(",")]
        return [(name, int(value) if name.endswith("replicas") else value) for value in values.split(",")]
    except ValueError as error:
        raise InvalidConfigError("what-if", text, str(error)) from None
