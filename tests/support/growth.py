"""Measures how work grows with the size of a text, in the processor time of the thread, not on a wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable

NOISE_S = 0.002


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Return whether four times the size is far less than sixteen times the work, in the best of several tries."""
    least = {size: float("inf"), 4 * size: float("inf")}
    for attempt in range(20):  # both sizes in turns: other work on the machine slows both, often for a second or more
        time.sleep(0.02 * attempt)
        for each in (size, 4 * size):
            began_s = time.thread_time()
            work(each)
            least[each] = min(least[each], time.thread_time() - began_s)
        if least[4 * size] < 9 * least[size] + NOISE_S:
            return True
    return False
