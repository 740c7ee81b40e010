"""How the work for a text grows with the text: measured in the time of the thread's own work, not on a wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable

NOISE_S = 0.002


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Return whether twice the size is far less than four times the work, the best of several tries."""
    least = {size: float("inf"), 2 * size: float("inf")}
    for _ in range(6):  # both sizes in turns: what else the machine does slows them alike
        for each in (size, 2 * size):
            began_s = time.thread_time()
            work(each)
            least[each] = min(least[each], time.thread_time() - began_s)
        if least[2 * size] < 3 * least[size] + NOISE_S:
            return True
    return False
