"""The memory plan, decided before any memory is allocated.

    free, or less: max_memory
           ├── weights           known from the settings of the model
           ├── adapters          those that the settings name
           ├── activations       scratch memory of the largest step
           ├── graphs            on a GPU: recorded steps, once measured
           ├── swap              the requested number of blocks on the host; not part of a GPU's memory.
           │                     With host_cache, copies of cached blocks share them
           └── the rest ──────── KV blocks: kv_memory, or a share of the rest, and at most as many as can be used

All this is memory of the device that computes: the machine or its GPU. There is one budget and no hidden pool.
Settings that do not fit are refused here, before weights are read. If the model's context is longer than the blocks can
hold, it is cut to their size; if the user set that length, it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.byte_sizes import format_bytes
from quire.core.config import EngineConfig, ResolvedConfig
from quire.core.errors import DoesNotFitError, InvalidConfigError
from quire.core.kept_block import num_slots_within, record_bytes, slot_bytes
from quire.core.kv_spec import KVCacheSpec
from quire.core.memory_needs import MemoryNeeds
from quire.memory.sizing import max_sequence_tokens, size_pool

MIB = 1 << 20
USEFUL_TOKENS = 64
"""If KV memory allows only a shorter context than this, the settings are a mistake."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The number of blocks, and the maximum length of a sequence."""

    needs: MemoryNeeds
    bytes_per_block: int
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    num_full_sequences: int
    num_groups: int = 1
    num_disk_slots: int = 0

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The memory of the process by purpose; except for swap on another device, it adds up to `total_bytes`."""
        return (
            ("weights", self.needs.weight_bytes),
            *([("adapters", self.needs.adapter_bytes)] if self.needs.adapter_bytes else ()),
            ("KV blocks", self.num_blocks * self.bytes_per_block),
            ("swap" if self.needs.host_bytes is None else "swap, on the host", self.swap_bytes),
            ("activations", self.needs.activation_bytes),
            *([("graphs", self.needs.graph_bytes)] if self.needs.graph_bytes else ()),
            ("rest of the process", self.needs.rest_bytes),
        )

    @property
    def swap_bytes(self) -> int:
        """The bytes of swapped blocks."""
        return self.num_host_blocks * self.bytes_per_block

    @property
    def total_bytes(self) -> int:
        """The bytes of this memory that the process uses when every part is full."""
        return sum(size for _, size in self.parts) - (0 if self.needs.host_bytes is None else self.swap_bytes)

    @property
    def engine_bytes(self) -> int:
        """The bytes that the engine adds to its process."""
        return self.total_bytes - self.needs.rest_bytes


def plan_memory(config: ResolvedConfig, spec: KVCacheSpec, context_length: int, needs: MemoryNeeds) -> MemoryPlan:
    """Return the plan; raises `InvalidConfigError` for settings that do not fit. Pure.

    >>> spec = KVCacheSpec.from_layers([None], block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> config = EngineConfig(kv_memory="16KiB").resolved()
    >>> plan = plan_memory(config, spec, 4096, MemoryNeeds(1000, 24, 0, 1 << 20))
    >>> plan.num_blocks, plan.max_model_len, plan.total_bytes
    (16, 257, 17408)
    """
    needs = needs.within(None if config.max_memory is None else int(config.max_memory))
    if needs.left_bytes <= 0:
        size = format_bytes(needs.weight_bytes + needs.activation_bytes + needs.graph_bytes)
        free = format_bytes(needs.free_bytes or 0)
        raise DoesNotFitError("memory of weights and activations", size, f"less than the {free} of free memory")
    if config.max_model_len is not None and config.max_model_len > context_length:
        raise InvalidConfigError("max_model_len", config.max_model_len, f"at most {context_length}, the model's")
    longest_chunk = 1 + config.max_steps_under_way
    num_host_blocks = _num_host_blocks(config, spec)
    wanted = config.max_model_len or context_length
    per_sequence = spec.num_blocks_for(wanted, longest_chunk=longest_chunk)
    most_blocks = per_sequence * config.max_num_seqs
    if config.one_step:  # texts hold blocks only during their step, each at most one that is not full
        in_a_step = config.max_num_batched_tokens // spec.block_size + config.max_num_seqs
        most_blocks = min(most_blocks, len(spec.groups) * in_a_step * config.max_steps_under_way)
    budget = _kv_budget(config, spec, needs, most_blocks)
    num_blocks = min(size_pool(budget, spec), (1 << 31) - 1)
    stored = max_sequence_tokens(num_blocks, spec, longest_chunk=longest_chunk)
    fits = min(wanted, stored + 1)
    if fits < (config.max_model_len or min(context_length, USEFUL_TOKENS)):
        needed = spec.num_blocks_for(config.max_model_len or USEFUL_TOKENS, longest_chunk=longest_chunk)
        allowed = f"{format_bytes(needed * spec.bytes_per_block)} or more, for one sequence of "
        allowed += f"{config.max_model_len or USEFUL_TOKENS} tokens"
        flags = f"--max-model-len {fits}" if fits >= USEFUL_TOKENS else ""
        raise DoesNotFitError("kv_memory", format_bytes(budget), allowed, flags)
    return MemoryPlan(
        needs=needs,
        bytes_per_block=spec.bytes_per_block,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=fits,
        num_full_sequences=num_blocks // spec.num_blocks_for(max(1, fits - 1), longest_chunk=longest_chunk),
        num_groups=len(spec.groups),
        num_disk_slots=_num_disk_slots(config, spec),
    )


def require_host(config: EngineConfig, backend: str) -> None:
    """Raise `InvalidConfigError` for a host cache if the engine's own memory is that of the host."""
    if config.host_cache and backend != "torch":
        allowed = f"0 with backend {backend}, whose KV blocks are in the host's memory: raise kv_memory instead"
        raise InvalidConfigError("host_cache", format_bytes(int(config.host_cache)), allowed)


def _num_host_blocks(config: EngineConfig, spec: KVCacheSpec) -> int:
    num_blocks = 0
    for name in ("swap_space", "host_cache"):
        size = int(getattr(config, name))
        if 0 < size < spec.bytes_per_block:
            raise InvalidConfigError(name, size, f"0, or {spec.bytes_per_block} (one block) or more")
        num_blocks += size // spec.bytes_per_block
    return num_blocks


def _num_disk_slots(config: EngineConfig, spec: KVCacheSpec) -> int:
    if config.disk_cache is None:
        return 0
    num_slots = num_slots_within(int(config.disk_cache_size), spec.bytes_per_block, spec.block_size)
    if num_slots < len(spec.groups):
        least = len(spec.groups) * (slot_bytes(spec.bytes_per_block) + record_bytes(spec.block_size))
        raise InvalidConfigError("disk_cache_size", config.disk_cache_size, f"{least} (one block) or more")
    return num_slots


def _kv_budget(config: EngineConfig, spec: KVCacheSpec, needs: MemoryNeeds, most_blocks: int) -> int:
    """Return the bytes for KV blocks: those requested, or a share of the remaining memory."""
    on_host = int(config.swap_space) + int(config.host_cache)
    field = "host_cache" if config.host_cache else "swap_space"
    if needs.host_bytes is not None and on_host > needs.host_bytes:
        allowed = f"at most {format_bytes(needs.host_bytes)}, the free memory of the host"
        raise InvalidConfigError(field, format_bytes(on_host), allowed)
    left = needs.left_beside(_num_host_blocks(config, spec) * spec.bytes_per_block)
    if left < spec.bytes_per_block:
        most = format_bytes(max(needs.left_bytes - spec.bytes_per_block, 0))
        allowed = f"at most {most}, to leave room for the KV memory"
        raise InvalidConfigError(field, format_bytes(on_host), allowed)
    if config.kv_memory is None:
        share = max(int(left * needs.kv_share), spec.bytes_per_block)
        return min(share, most_blocks * spec.bytes_per_block)
    asked = int(config.kv_memory)
    if asked > left and needs.free_bytes is not None:
        allowed = f"at most {format_bytes(left)}, which is free after weights, activations and swap"
        raise DoesNotFitError("kv_memory", format_bytes(asked), allowed, f"--kv-memory {left // MIB}MiB")
    return asked
