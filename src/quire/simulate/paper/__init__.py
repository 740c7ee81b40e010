"""The figures of the PagedAttention paper (Kwon et al. 2023), reproduced, each next to the published one.

    OPT-13B on an A100 of 40 GB, with 12 GiB for keys and values (table 1): 15,728 slots of one token
    quire · vllm · orca_oracle · orca_pow2 · orca_max · static        the same requests, cost model and measures

Policies are simulated, not kernels: concurrency, memory and sharing follow from the holders of the memory, and are
comparable; seconds follow from a roofline and are not those of a real engine. Lengths are log-normal with the paper's
means and a spread that the paper does not give (workload/lengths.py). Nothing is tuned; if a figure differs, its note
explains the difference.

    FIGURES[name](laboratory) ──► Figure ──► terminal, JSON, document
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from quire.simulate.paper.block_sizes import blocks, swap
from quire.simulate.paper.expected import expectations
from quire.simulate.paper.figure import Figure
from quire.simulate.paper.occupancy import batches, memory, setup
from quire.simulate.paper.rates import ample, chat, latency, prefix
from quire.simulate.paper.runs import Laboratory
from quire.simulate.paper.siblings import gain, sharing

_ALL = (setup, memory, batches, latency, ample, sharing, gain, prefix, chat, blocks, swap, expectations)
FIGURES: Final[Mapping[str, Callable[[Laboratory], Figure]]] = MappingProxyType({make.__name__: make for make in _ALL})
"""The functions that make the figures, by name, in the order of the paper; each takes seconds to a minute."""
