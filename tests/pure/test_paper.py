"""The paper's figures: what must hold of them whatever the lengths are, on fewer requests than they are made of."""

from __future__ import annotations

import itertools

import pytest

from quire.core.errors import InvalidConfigError
from quire.simulate.hardware import find_hardware
from quire.simulate.model_shape import ModelShape, WeightCount
from quire.simulate.paper import FIGURES, KV_BYTES, NUM_SEQUENCES, SYSTEMS, Figure, Paper

OPT_13B = ModelShape(
    "opt-13b",
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


def paper(num_requests: int = 60) -> Paper:
    return Paper(OPT_13B, find_hardware("nvidia-a100-40gb"), num_requests=num_requests)


def numbers(figure: Figure, column: int) -> dict[str, float]:
    cells = {row[0]: row[column] for row in figure.rows}
    return {name: float(cell.strip(" %×").replace(",", "")) for name, cell in cells.items() if name in SYSTEMS}


def test_the_memory_is_that_of_the_papers_first_table() -> None:
    setup = paper().setup()
    assert setup.spec.bytes_per_token == 819_200
    assert setup.memory.num_blocks == KV_BYTES // 819_200 // 16 == 983


def test_paging_holds_more_tokens_than_any_reservation() -> None:
    figure = paper().memory()
    stored = numbers(figure, 1)
    assert stored["vllm"] > 85
    assert 50 > stored["orca_oracle"] > stored["orca_pow2"] > stored["orca_max"]
    for name in SYSTEMS:
        assert sum(numbers(figure, column)[name] for column in (1, 2, 3, 4)) == pytest.approx(100, abs=0.3)


def test_more_run_at_once_the_less_is_reserved() -> None:
    running = numbers(paper().batches(), 2)
    assert running["vllm"] > 1.5 * running["orca_oracle"] > 1.5 * running["orca_pow2"]
    assert running["orca_pow2"] > running["orca_max"] > running["static"]
    assert running["orca_max"] <= 7


def test_more_sequences_of_a_prompt_share_more_and_beams_more_than_samples() -> None:
    figure = paper(48).sharing()
    shares = {row[0]: [float(cell.strip(" %")) for cell in row[1 : 1 + len(NUM_SEQUENCES)]] for row in figure.rows}
    for lengths in ("Alpaca", "ShareGPT"):
        samples, beams = shares[f"{lengths}, samples"], shares[f"{lengths}, beams"]
        assert all(other > one for one, other in itertools.pairwise(beams))
        assert all(beam > sample for beam, sample in zip(beams, samples, strict=True))
        most = [100 * (1 - 1 / count) for count in NUM_SEQUENCES]
        assert all(0 < beam < limit for beam, limit in zip(beams, most, strict=True))


def test_the_same_seed_makes_the_same_figure() -> None:
    assert paper(20).prefix() == paper(20).prefix()


def test_a_figure_is_made_by_its_name() -> None:
    for name in FIGURES:
        assert callable(getattr(Paper, name))
    with pytest.raises(InvalidConfigError, match="figure is 'waste'"):
        paper().figure("waste")
