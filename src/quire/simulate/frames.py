"""Frames: the state of every block at some moments of a run, in bounded memory.

    |··········|  full: every second frame is dropped, and the interval doubles  |· · · · · |

A frame is an actual state, never a mean of two: states of blocks have no mean. Simulated time alone decides which
frames are kept, so the same run has the same frames. In a large pool several blocks share a cell. Taking a frame takes
time for each block, so a run is watched only on request: `Simulation(..., watchers=[frames.watch])`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from quire.simulate.holders import CACHED, FREE
from quire.simulate.replica import SimulatedEngine

MAX_FRAMES = 96
MAX_CELLS = 2048
FIRST_INTERVAL_S = 0.25
ALL = 255


@dataclass(frozen=True, slots=True)
class Frame:
    """The blocks at one moment; `picture` has the format of a `Film`."""

    time_s: float
    num_running: int
    num_waiting: int
    num_held: int
    num_cached: int
    num_free: int
    picture: bytes

    @classmethod
    def of(cls, engine: SimulatedEngine) -> Frame:
        """Return the frame of an engine. Does not mutate the engine; O(blocks)."""
        holders, ledger = engine.holders(), engine.ledger()
        return cls(
            engine.clock.now(),
            engine.num_running,
            engine.num_waiting,
            ledger.used_blocks,
            ledger.cached_blocks,
            ledger.free_blocks,
            picture_of(holders, blocks_per_cell(len(holders))),
        )

    @property
    def num_blocks(self) -> int:
        """The number of blocks, held or not."""
        return self.num_held + self.num_cached + self.num_free


class Frames:
    """Takes frames of the first replica of a simulation."""

    def __init__(self, max_frames: int = MAX_FRAMES) -> None:
        self.frames: list[Frame] = []
        self.interval_s = FIRST_INTERVAL_S
        self._max_frames = max_frames
        self._next_s = 0.0

    def watch(self, replica: int, engine: SimulatedEngine) -> None:
        """Take a frame after a step of the first replica, if one is due. Mutates."""
        now_s = engine.clock.now()
        if replica or now_s < self._next_s:
            return
        if len(self.frames) >= self._max_frames:
            self.frames = self.frames[::2]
            self.interval_s *= 2
        self.frames.append(Frame.of(engine))
        self._next_s = (now_s // self.interval_s + 1) * self.interval_s


def blocks_per_cell(num_blocks: int) -> int:
    """Return the number of blocks that share a cell."""
    return -(-num_blocks // MAX_CELLS)


def picture_of(holders: array[int], size: int) -> bytes:
    """Return the picture of blocks, `size` in each cell; a cell shows the holder of its first held block.

    >>> picture_of(array("i", [0, 5, -1, -1]), 2).hex(" ", 4)
    '05000000 00000000 7f0000ff'
    """
    num_cells = -(-len(holders) // size)
    owners, held, cached = array("I", [FREE]) * num_cells, bytearray(num_cells), bytearray(num_cells)
    empty = array("i", [FREE]) * size
    for index in range(num_cells):
        cell = holders[index * size : (index + 1) * size]
        if cell == empty:
            continue
        num_cached = cell.count(CACHED)
        num_held = len(cell) - num_cached - cell.count(FREE)
        cached[index], held[index] = ALL * num_cached // len(cell), ALL * num_held // len(cell)
        if num_held:
            owners[index] = next(holder for holder in cell if holder > FREE)
    return owners.tobytes() + held + cached
