"""The systems that the paper compares, with the same memory, model and cost as an engine of the product.

vllm           paging as published: no prefix cache, preemption by recompute, one percent of the blocks kept free
orca_*         one run of memory for each sequence, of the size that the name stands for
static         FasterTransformer or transformers: batches of as many sequences of maximum length as fit
"""

from __future__ import annotations

from dataclasses import replace

from quire.simulate.baselines.contiguous import ITERATION, MAX, ORACLE, POW2, STATIC, ContiguousSetup
from quire.simulate.replica import EngineSetup

RESERVES = {"orca_oracle": ORACLE, "orca_pow2": POW2, "orca_max": MAX, "static": MAX}
PUBLISHED_HEADROOM = 0.01


def vllm_setup(setup: EngineSetup) -> EngineSetup:
    """Return the setup with the published features only: sharing within a request, and no swap."""
    return replace(
        setup,
        memory=replace(setup.memory, prefix_index="none", num_host_blocks=0),
        scheduler=replace(setup.scheduler, policy="fcfs", preemption="recompute", headroom=PUBLISHED_HEADROOM),
    )


def contiguous_setup(setup: EngineSetup, system: str) -> ContiguousSetup:
    """Return a system without paging, with the same number of slots as the setup."""
    slots = setup.memory.num_blocks * setup.spec.block_size
    return ContiguousSetup(
        slots,
        setup.spec.bytes_per_token,
        min(setup.scheduler.max_model_len, slots),
        RESERVES[system],
        STATIC if system == "static" else ITERATION,
        setup.scheduler.max_num_seqs,
        setup.cost,
    )
