"""The last minutes of a server: a row for each second, for five minutes, of what was noted and of nothing else."""

from __future__ import annotations

from dataclasses import replace

from quire.core.clock import ManualClock
from quire.engine.records.stats import EngineStats
from quire.serve.live_history import MOST_SAMPLES, SECONDS, LiveHistory


class Server:
    """A history with a clock and stats that a test sets."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.stats = EngineStats()
        self.history = LiveHistory(self.clock, lambda: self.stats)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


def test_a_second_has_what_was_noted_in_it() -> None:
    server = Server()
    server.stats = replace(server.stats, num_used_blocks=3, num_cached_blocks=2, queried_tokens_total=10)
    server.history.note_tokens(7, 1)
    server.history.note_first_token(0.25)
    server.pass_time(0.5)
    server.history.note_tokens(0, 2)
    for gap in (0.01, 0.02, 0.03, 0.04):
        server.history.note_gap(gap)
    server.stats = replace(server.stats, queried_tokens_total=30, hit_tokens_total=5, num_used_blocks=4)
    server.pass_time(1.0)
    server.history.note_tokens(0, 4)
    assert server.history.rows() == [
        [1.5, 4, 2, 3, 7, 0.25, 250.0, 250.0, 30.0, 40.0],
        [0.5, 4, 2, 4, 0, None, None, None, None, None],
    ]


def test_a_row_has_the_blocks_at_the_end_of_its_second() -> None:
    server = Server()
    server.stats = replace(server.stats, num_used_blocks=5)
    server.history.note_tokens(1, 1)
    server.stats = replace(server.stats, num_used_blocks=0, num_cached_blocks=5)
    server.pass_time(9)
    assert server.history.rows()[-1][1:3] == [0, 5]


def test_nothing_is_told_of_seconds_without_tokens_nor_of_what_is_long_ago() -> None:
    server = Server()
    assert server.history.rows() == []
    server.history.note_tokens(1, 1)
    server.pass_time(10)
    server.history.note_tokens(1, 1)
    assert [row[0] for row in server.history.rows()] == [10, 0]
    server.pass_time(SECONDS - 5)
    assert [row[0] for row in server.history.rows()] == [SECONDS - 5]
    server.pass_time(SECONDS)
    assert server.history.rows() == []


def test_what_is_kept_is_bounded() -> None:
    server = Server()
    for second in range(SECONDS + 50):
        for _ in range(MOST_SAMPLES + 9):
            server.history.note_gap(float(second))
        server.pass_time(1.0)
    rows = server.history.rows()
    assert len(rows) == SECONDS
    assert rows[-1][-1] == 1000.0 * (SECONDS + 49)
    assert len(server.history._seconds[-1].gaps_s) == MOST_SAMPLES
