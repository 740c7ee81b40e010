"""The report at the start of an engine: the model, its device, and the use of memory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.byte_sizes import format_bytes
from quire.engine.memory_plan import MemoryPlan

LABEL_COLUMNS = 12


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The facts of the start-up table; `str` returns the table.

    The table leaves out the format and type of the model's file (such as Q4_K_M or BF16), the number of parameters, and
    whether the model recommends sampling parameters. `labels`: those of a model that classifies texts.
    """

    model: str
    architecture: str
    num_layers: int
    backend: str
    dtype: str
    weights: str
    kv_dtype: str
    instruction_set: str
    num_threads: int
    block_size: int
    context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    plan: MemoryPlan
    itl_slo_ms: float | None = None
    speculation: str = "off"
    notices: tuple[str, ...] = ()
    file_format: str = ""
    weight_type: str = ""
    num_parameters: int = 0
    recommends_sampling: bool = False
    disk_cache: str = ""
    has_host_cache: bool = False
    labels: tuple[str, ...] = ()
    reads_images: bool = False
    replicas: str = "1"  # the number or range, for display
    num_replicas: int = 1  # the maximum, if the number follows the load

    def facts(self) -> list[tuple[str, str]]:
        """Return the rows of the table as label and text, without the memory. Does not mutate."""
        plan, images = self.plan, ", reads images" if self.reads_images else ""
        threads = f", {self.num_threads} thread{'s' * (self.num_threads > 1)}" if self.num_threads else ""
        others = [
            (name, dtype) for name, dtype in (("weights", self.weights), ("KV", self.kv_dtype)) if dtype != "auto"
        ]
        numbers = ", ".join([self.dtype, *(f"{name} {dtype}" for name, dtype in others)])
        count = plan.num_full_sequences
        at_once = f"{count:,} sequence{'s' * (count != 1)} of {plan.max_model_len:,} tokens at once"
        rows = f"{self.max_num_seqs} sequence{'s' * (self.max_num_seqs != 1)}"
        pace = "" if self.itl_slo_ms is None else f"; {self.itl_slo_ms:g} ms while others generate"
        guesses = "" if self.speculation == "off" else f"; guesses tokens ahead ({self.speculation})"
        cut = f" of the model's {self.context_length:,}" if plan.max_model_len < self.context_length else ""
        kept = f"{plan.num_host_blocks:,} blocks, for copies of cached ones and for swap"
        host = [("host cache", kept)] if self.has_host_cache else []
        disk = [("disk cache", f"{plan.num_disk_slots:,} blocks in {self.disk_cache}")] if self.disk_cache else []
        return [
            ("model", f"{self.model}: {self.architecture}, {self.num_layers} layers, {numbers}{images}"),
            *([("replicas", f"{self.replicas}, each as follows")] if self.replicas != "1" else ()),
            ("runs on", f"{self.backend} backend, {self.instruction_set}{threads}"),
            ("context", f"{plan.max_model_len:,} tokens{cut}"),
            ("KV memory", f"{plan.num_blocks:,} blocks of {self.block_size} tokens, {at_once}"),
            *host,
            *disk,
            (
                "a step",
                f"at most {rows} and {self.max_num_batched_tokens:,} tokens{pace}{guesses}",
            ),
        ]

    def __str__(self) -> str:
        """Return the table."""
        lines = [f"{label:<{LABEL_COLUMNS}}{text}" for label, text in self.facts()]
        parts = [*self.plan.parts, ("total", self.plan.total_bytes)]
        for index, (name, size) in enumerate(parts):
            label = "" if index else "memory"
            lines.append(f"{label:<{LABEL_COLUMNS}}{name:<20}{format_bytes(size):>12}")
        free = self.plan.needs.free_bytes
        if free is not None:
            left = free - (self.plan.total_bytes - self.plan.needs.rest_bytes)
            lines.append(f"{'':<{LABEL_COLUMNS}}{'left free':<20}{format_bytes(left):>12}")
        return "\n".join([*lines, *(f"{'note':<{LABEL_COLUMNS}}{notice}" for notice in self.notices)])
