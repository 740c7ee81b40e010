"""The paper's figures: what must hold of them whatever the lengths are, on fewer requests than they are made of."""

from __future__ import annotations

import functools
import itertools

import pytest

from quire.simulate.baselines import SYSTEMS
from quire.simulate.hardware import find_hardware
from quire.simulate.model_shape import ModelShape, WeightCount
from quire.simulate.paper import FIGURES
from quire.simulate.paper.figure import PAPER_FILE, Comparison, Figure, make_figure, published_numbers
from quire.simulate.paper.runs import OPT_13B, Laboratory, paper_sites
from quire.simulate.paper.siblings import NUM_SEQUENCES


def shape(name: str) -> ModelShape:
    """The real shape of OPT-13B, whatever is asked for: reading a config takes the compute plane."""
    return ModelShape(
        name,
        "float16",
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        vocab_size=50272,
        context_length=2048,
        windows=(None,) * 40,
        layers=WeightCount(matrices=12_582_912_000, rows=1_843_200, tables=10_496_000, floats=3_000_000),
        head=WeightCount(matrices=257_392_640, rows=50272),
    )


def laboratory(num_requests: int = 60, seed: int = 0) -> Laboratory:
    return Laboratory(paper_sites(shape, find_hardware("nvidia-a100-40gb")), seed=seed, num_requests=num_requests)


shared_laboratory = functools.cache(laboratory)  # several figures need the same runs


def figure(name: str, num_requests: int = 60, seed: int = 0) -> Figure:
    return FIGURES[name](shared_laboratory(num_requests, seed))


def numbers(made: Figure, column: int, table: int = 0) -> dict[str, float]:
    cells = {row[0]: row[column] for row in made.tables[table].rows}
    return {name: float(cell.strip(" %×").replace(",", "")) for name, cell in cells.items()}


def test_the_memory_is_that_of_the_papers_first_table() -> None:
    setup = laboratory().sites[OPT_13B].setup()
    assert setup.spec.bytes_per_token == 819_200
    assert setup.memory.num_blocks == (12 << 30) // 819_200 // 16 == 983
    found = {row.what: row.found for row in figure("setup").comparisons}
    assert found["OPT-13B: slots, thousands"] == pytest.approx(15.73, abs=0.005)
    assert found["OPT-175B: slots, thousands"] == pytest.approx(60.07, abs=0.005)


def test_paging_holds_more_tokens_than_any_reservation() -> None:
    made = figure("memory")
    stored = numbers(made, 1)
    assert stored["vllm"] > 85
    assert 50 > stored["orca_oracle"] > stored["orca_pow2"] > stored["orca_max"]
    for name in SYSTEMS:
        assert sum(numbers(made, column)[name] for column in (1, 2, 3, 4)) == pytest.approx(100, abs=0.3)


def test_more_run_at_once_the_less_is_reserved() -> None:
    made = figure("batches", 60)
    running = numbers(made, 2)
    assert running["vllm"] > 1.5 * running["orca_oracle"] > 1.5 * running["orca_pow2"]
    assert running["orca_pow2"] > running["orca_max"] > running["static"]
    assert running["orca_max"] <= 7
    assert numbers(made, 1, table=1)["0.7"] == running["vllm"]


def test_more_sequences_of_a_prompt_share_more_and_beams_more_than_samples() -> None:
    made = figure("sharing", 16)
    shares = {row[0]: [float(cell.strip(" %")) for cell in row[1:]] for row in made.tables[0].rows}
    for lengths in ("Alpaca", "ShareGPT"):
        samples, beams = shares[f"{lengths}, samples"], shares[f"{lengths}, beams"]
        assert all(other > one for one, other in itertools.pairwise(beams))
        assert all(beam > sample for beam, sample in zip(beams, samples, strict=True))
        most = [100 * (1 - 1 / count) for count in NUM_SEQUENCES]
        assert all(0 < beam < limit for beam, limit in zip(beams, most, strict=True))


def test_in_chats_all_reservations_are_one() -> None:
    made = figure("chat", 40)
    rows = {row[0]: row[1:] for row in made.tables[0].rows}
    assert rows["orca_oracle"] == rows["orca_pow2"] == rows["orca_max"]
    assert all(row.found > 1 for row in made.comparisons)


def test_the_larger_a_block_the_less_of_it_is_filled() -> None:
    made = figure("blocks", 16)
    for table in range(2):
        assert list(numbers(made, 1, table).values()) == sorted(numbers(made, 1, table).values(), reverse=True)
    assert [series.name for series in made.charts[0].series] == ["ShareGPT", "Alpaca"]


def test_swap_moves_what_recompute_computes_again() -> None:
    for size, *_, tokens, _, moved in figure("swap", 80).tables[0].rows:
        num_tokens, num_moved = (int(each.replace(",", "")) for each in (tokens, moved))
        assert num_tokens > 0
        assert num_moved > 0
        if size == "1":
            assert num_moved == 2 * num_tokens


def test_the_same_seed_makes_the_same_figure_alone_or_beside_others() -> None:
    room = laboratory(10)
    together = [FIGURES[name](room) for name in ("prefix", "chat")]
    assert together == [FIGURES[name](laboratory(10)) for name in ("prefix", "chat")]
    assert together[0] != FIGURES["prefix"](laboratory(10, seed=1))


def test_what_the_paper_says_belongs_to_the_figures() -> None:
    with pytest.raises(KeyError, match="waste"):
        published_numbers("waste")
    said = [line.rstrip(":\n") for line in PAPER_FILE.read_text(encoding="utf-8").splitlines() if line[:1].isalpha()]
    assert said == list(FIGURES)
    with pytest.raises(KeyError, match="orca_oracle"):
        make_figure("chat", [], {}, more=1.0)


def test_each_run_is_run_once() -> None:
    counts: list[int] = []
    room = Laboratory(laboratory().sites, num_requests=10, watch=counts.append)
    for name in ("memory", "chat", "memory"):
        FIGURES[name](room)
    assert counts == list(range(1, 11))


@pytest.mark.parametrize(
    ("found", "published", "said"),
    [
        (2.0, (1.7, 2.7), ("2×", "1.7–2.7×", "within")),
        (1.53, (1.7, 2.7), ("1.53×", "1.7–2.7×", "-10 %")),
        (7.203, (0, 22), ("7.2×", "up to 22×", "within")),
        (96.3, (96.3,), ("96.3×", "96.3×", "0 %")),
        (1234.5, (411.5,), ("1,234×", "411.5×", "3×")),
        (0.0, (0,), ("0×", "0×", "0 %")),
    ],
)
def test_a_number_stands_beside_the_published_one(
    found: float, published: tuple[float, ...], said: tuple[str, ...]
) -> None:
    row = Comparison("ratio", found, published, "×", "section 1")
    assert (row.found_text, row.published_text, row.difference) == said
