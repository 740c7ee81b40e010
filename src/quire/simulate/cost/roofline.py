"""RooflineCost: a step takes the least time that a machine needs to read, compute and move the plan's data.

`Roofline` has the formulas; this module counts a plan. Plain decodes, hundreds in every step, are counted by sums over
columns, so that the cost model takes only a few microseconds per simulated step.

    copies of blocks          read and written within the machine's memory
    moves to and from host    over the link, which starts at once, and the step waits for it

`efficiency` is the share of the roofline that an engine reaches; 1 is the machine's bound. It is a measured number or
1: it is never tuned to match a figure.
"""

from __future__ import annotations

from quire.core.setting_checks import require_int, require_number
from quire.core.step import StepPlan
from quire.simulate.model_shape import num_read
from quire.simulate.roofline import Roofline


class RooflineCost:
    """The time of steps by a roofline. Immutable."""

    def __init__(self, roofline: Roofline, *, bytes_per_block: int = 0, efficiency: float = 1.0) -> None:
        require_int("bytes_per_block", bytes_per_block, 0, 1 << 40)
        require_number("efficiency", efficiency, 1e-3, 1.0)
        hardware = roofline.hardware
        self._roofline = roofline
        self._efficiency = efficiency
        self._copy_s = 2 * bytes_per_block / hardware.read_bandwidth
        self._move_s = bytes_per_block / hardware.host_link_bandwidth

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate; O(rows), in C for plain decodes."""
        roofline = self._roofline
        num_logits = sum(plan.samples)
        computed_s = roofline.products_s(plan.num_tokens, num_logits) + self._attention_s(plan)
        computed_s += roofline.exchanges_s(plan.num_tokens, num_logits)
        copied_s = len(plan.copies) * self._copy_s + (len(plan.moves_in) + len(plan.moves_out)) * self._move_s
        return (computed_s + copied_s) / self._efficiency + roofline.hardware.step_overhead_s

    def _attention_s(self, plan: StepPlan) -> float:
        num_decodes = plan.num_decodes
        decodes = plan.starts[:num_decodes]
        chunks = list(zip(plan.starts[num_decodes:], plan.counts[num_decodes:], strict=True))
        read = pairs = 0.0
        for kind in self._roofline.kinds:
            if kind.window is None:
                seen = sum(decodes) + num_decodes
            else:
                seen = sum([num_read(start, 1, kind.window) for start in decodes])
            read += kind.count * kind.bytes_share * seen
            pairs += kind.count * kind.pair_share * seen
            for start, count in chunks:
                read += kind.read(start, count)
                pairs += kind.pairs(start, count)
        return self._roofline.seconds_of(read, pairs)
