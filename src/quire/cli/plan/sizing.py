"""The memory of an engine on another machine, by the engine's own plan.

`plan_engine` measures the free memory of this machine. Here the free memory is an argument, so the plan can be for
another machine. Everything else is the same code, so the parts agree to the byte. Without `kv_memory`, an engine takes
a share of the remaining memory, because other processes may need the rest. A plan for this machine does the same; a
plan for another machine, or with --memory, takes all that remains. For a machine with a GPU, and with device cuda, this
is the plan of the GPU engine, even if this machine has no GPU.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from quire.cli.model_shapes import find_settings
from quire.cli.plan.here import HERE
from quire.compute.backend import BackendFacts
from quire.compute.choice import backend_on, missing_on_gpus, resolved_for
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.draft import with_auto_layer, with_draft, with_own_layer
from quire.compute.models.source import ModelSource
from quire.core.byte_sizes import format_bytes
from quire.core.config import MTP, EngineConfig, ResolvedConfig
from quire.core.errors import DoesNotFitError, InvalidConfigError
from quire.core.memory_needs import MemoryNeeds
from quire.engine.memory_plan import USEFUL_TOKENS, MemoryPlan, plan_memory, require_host
from quire.simulate.hardware import Hardware
from quire.simulate.planner import Pool

MIB: Final = 1 << 20
UNLIMITED_BYTES: Final = 1 << 50
MAX_RANKS: Final = 64
ANY_SIZE: Final = 16
"""A block size that every backend supports."""


@dataclass(frozen=True, slots=True)
class SizedEngine:
    """An engine that fits. `config` has the size of its KV memory."""

    config: ResolvedConfig
    facts: BackendFacts
    plan: MemoryPlan

    @property
    def pool(self) -> Pool:
        """The KV memory, in the planner's terms."""
        return Pool(self.facts.kv_spec, self.plan.num_blocks, self.plan.max_model_len)


class TooSmallError(DoesNotFitError):
    """A memory is too small for an engine of these settings. `needed_bytes` would suffice; `why`: what takes them."""

    def __init__(self, memory_bytes: int, needed_bytes: int, why: str, flags: str = "") -> None:
        super().__init__("memory", format_bytes(memory_bytes), f"{whole_mebibytes(needed_bytes)} or more{why}", flags)
        self.needed_bytes = needed_bytes
        self.why = why


class EngineSizer:
    """Sizes engines of one model for given amounts of memory. Reads the model's settings once, and no weights.

    `kv_share`: the share of the remaining memory that becomes KV memory, unless `kv_memory` is given.
    """

    def __init__(self, config: EngineConfig, source: ModelSource, kv_share: float = 1.0) -> None:
        self._kv_share = kv_share
        model = read_model(source, config.max_model_len)
        self.model: ModelDescription = model.with_image_limit(config.max_image_patches)
        self.config = with_auto_layer(config, model, source)
        self._sized: dict[tuple[ResolvedConfig, int], SizedEngine] = {}
        self._pairs: dict[str, ModelDescription] = {}

    def size(self, config: ResolvedConfig, memory_bytes: int) -> SizedEngine:
        """Return the engine; raises an `InvalidConfigError` that names the least memory that would suffice."""
        key = (config, memory_bytes)
        if key not in self._sized:
            self._sized[key] = self._size(config, memory_bytes)
        return self._sized[key]

    def _size(self, config: ResolvedConfig, memory_bytes: int) -> SizedEngine:
        facts = self._facts(config)
        host_bytes = UNLIMITED_BYTES if config.device == "cuda" else None  # a GPU engine swaps to another memory
        needs = MemoryNeeds(facts.weight_bytes, facts.activation_bytes, 0, memory_bytes, host_bytes=host_bytes)
        require_host(config, facts.name)
        self._require(config, facts, needs)
        if config.kv_memory is None:
            block = facts.kv_spec.bytes_per_block
            left = needs.left_beside(int(config.swap_space) // block * block)
            config = replace(config, kv_memory=max(int(left * self._kv_share) // block, 1) * block)
        plan = plan_memory(config, facts.kv_spec, self.model.spec.context_length, needs)
        return SizedEngine(config, facts, plan)

    def _facts(self, config: ResolvedConfig) -> BackendFacts:
        device = "cuda" if config.device == "cuda" else "cpu"
        return backend_on(device, config, self.model_of(config)).facts

    def model_of(self, config: EngineConfig) -> ModelDescription:
        """Return the model, with the draft model if the settings name one. Reads settings, but no tokenizer."""
        name = config.speculation
        if not config.guesses_by_model:
            model = replace(self.model, spec=self.model.spec.with_guesses(config.max_drafts))
            return with_own_layer(model) if name == MTP else model
        if name not in self._pairs:
            self._pairs[name] = with_draft(self.model, read_model(find_settings(name)), name)
        return self._pairs[name]

    def _require(self, config: ResolvedConfig, facts: BackendFacts, needs: MemoryNeeds) -> None:
        """Raise if not even one sequence fits. The error has the memory needed and the number of GPUs that suffice."""
        length = config.max_model_len or min(self.model.spec.context_length, USEFUL_TOKENS)
        chunk = 1 + config.max_steps_under_way
        spec, memory = facts.kv_spec, needs.free_bytes or 0
        kv_bytes = spec.num_blocks_for(length, longest_chunk=chunk) * spec.bytes_per_block
        kv_bytes += 0 if config.device == "cuda" else int(config.swap_space)
        needed = needs.weight_bytes + needs.activation_bytes + kv_bytes
        if memory >= needed:
            return
        why = f": weights take {format_bytes(needs.weight_bytes)}, activations {format_bytes(needs.activation_bytes)}, "
        why += f"a sequence of {length:,} tokens {format_bytes(kv_bytes)}"
        count = self._num_ranks(config, needs.weight_bytes + kv_bytes, memory - needs.activation_bytes)
        if count is not None:
            why += f"; with --tensor-parallel {count} it would fit on {count} GPUs"
        raise TooSmallError(memory, needed, why)

    def _num_ranks(self, config: ResolvedConfig, shared_bytes: int, room_bytes: int) -> int | None:
        """Return how many GPUs would hold weights and KV memory; None if the engine cannot be split that way."""
        if config.device != "cuda" or self.config.tensor_parallel > 1 or room_bytes <= 0:
            return None
        for count in range(-(-shared_bytes // room_bytes), MAX_RANKS + 1):
            with suppress(InvalidConfigError):
                self._facts(replace(config, backend="torch", tensor_parallel=count))
                return count
        return None


class AnyBlockSizer(EngineSizer):
    """Sizes engines that are only simulated: no kernel reads their blocks, so any block size is allowed."""

    def _facts(self, config: ResolvedConfig) -> BackendFacts:
        facts = super()._facts(replace(config, block_size=ANY_SIZE))
        return replace(facts, kv_spec=facts.kv_spec.with_block_size(config.block_size))


def resolved_on(hardware: Hardware, config: EngineConfig, model: ModelDescription) -> ResolvedConfig:
    """Return the settings of an engine on a machine. As at start-up, device auto means the GPU if there is one.

    A machine of several ranks counts as one machine; sizes that are given per rank are multiplied. Raises
    `InvalidConfigError` for a GPU and a model that only CPUs run, unless the settings name the backend.
    """
    num_ranks, config = config.tensor_parallel, replace(config, tensor_parallel=1)
    if config.device == "auto" and config.backend in ("auto", "torch"):
        lacks = missing_on_gpus(model) if hardware.device == "cuda" and config.backend == "auto" else ""
        if lacks:
            allowed = f"{HERE}, or another machine without a GPU: quire does not run {lacks} on GPUs yet"
            raise InvalidConfigError("hardware", hardware.name, allowed)
        config = replace(config, device=hardware.device)
    resolved = resolved_for(model, config, hardware.memory_bytes if config.device == "cuda" else None)
    sizes = {name: getattr(resolved, name) for name in ("kv_memory", "swap_space", "host_cache")}
    of_all: dict[str, Any] = {name: num_ranks * int(size) for name, size in sizes.items() if size}
    return replace(resolved, **of_all)


def whole_mebibytes(size: int) -> str:
    """Return a size rounded up, so that it is always enough.

    >>> whole_mebibytes((5 << 20) + 1)
    '6MiB'
    """
    return f"{-(-size // MIB)}MiB"
