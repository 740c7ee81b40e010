"""Norms and activations against float64, and every row against the same row alone, bit for bit."""

from __future__ import annotations

import pytest
import torch

from quire.compute.models.sublayers import Activation
from quire.compute.torch.kernels.activations import activate
from quire.compute.torch.kernels.norms import add_norm, norm

SIZES = (1, 2, 63, 64, 100, 128, 1000)
KERNELS = [activation for activation in Activation if activation is not Activation.XIELU]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
if torch.cuda.is_available():  # the interpreter truncates where it makes bfloat16
    TOLERANCE[torch.bfloat16] = 1e-2
EPSILON = 1e-5


def rows_of(count: int, size: int, dtype: torch.dtype, device: str, *, apart: int = 0) -> torch.Tensor:
    """Return random rows that lie apart by so many numbers that nobody may read."""
    generator = torch.Generator().manual_seed(size + 7 * count)
    rows = torch.full((count, size + apart), torch.nan, dtype=dtype)
    rows[:, :size] = torch.randn((count, size), generator=generator) * 3
    return rows.to(device)[:, :size]


def normed(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, centers: bool) -> torch.Tensor:
    """The definition, in float64."""
    exact = rows.double()
    if centers:
        exact = exact - exact.mean(dim=-1, keepdim=True)
    exact = weight.double() * exact / (exact.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()
    return exact if bias is None else exact + bias.double()


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("centers", [False, True])
def test_rows_are_normed(device: str, size: int, dtype: torch.dtype, centers: bool) -> None:
    weight = torch.linspace(-1, 2, size, device=device)
    bias = torch.linspace(1, -1, size, device=device) if centers else None
    rows, update = (rows_of(count, size, dtype, device, apart=3)[:4] for count in (4, 5))
    found = norm(rows, weight, bias, epsilon=EPSILON, centers=centers)
    assert_near(found, normed(rows, weight, bias, centers=centers))

    total, of_sum = add_norm(rows, update, weight, bias, epsilon=EPSILON, centers=centers)
    assert torch.equal(total, rows + update)
    assert torch.equal(of_sum, norm(total, weight, bias, epsilon=EPSILON, centers=centers))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_rows_beside_it(device: str, dtype: torch.dtype) -> None:
    rows = rows_of(9, 1000, dtype, device, apart=24)
    weight = torch.linspace(-1, 2, 1000, device=device)
    together = norm(rows, weight, None, epsilon=EPSILON, centers=False)
    active = activate(rows, activation="silu", gated=True)
    for index in range(9):
        alone = rows[index : index + 1]
        assert torch.equal(norm(alone, weight, None, epsilon=EPSILON, centers=False)[0], together[index])
        assert torch.equal(activate(alone, activation="silu", gated=True)[0], active[index])


def test_what_is_not_finite_is_seen_in_its_own_row_only(device: str) -> None:
    rows = rows_of(3, 64, torch.float32, device)
    rows[1, 5] = torch.nan
    weight = torch.ones(64, device=device)
    found = norm(rows, weight, None, epsilon=EPSILON, centers=False)
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]
    for activation in KERNELS:
        active = activate(rows, activation=activation.value, gated=False)
        assert active.isfinite().all(dim=1).tolist() == [True, False, True]


def test_no_rows_are_no_work(device: str) -> None:
    rows = torch.zeros((0, 64), device=device)
    assert norm(rows, torch.ones(64, device=device), None, epsilon=EPSILON, centers=False).shape == (0, 64)
    assert activate(rows, activation="relu", gated=True).shape == (0, 32)


def activated(numbers: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The definition, in float64."""
    exact = numbers.double()
    if activation is Activation.RELU:
        return exact.clamp(min=0)
    if activation is Activation.RELU_SQUARED:
        return exact.clamp(min=0).square()
    if activation is Activation.SILU:
        return exact / (1 + torch.exp(-exact))
    if activation is Activation.GELU:
        return exact * torch.special.ndtr(exact)
    if activation is Activation.QUICK_GELU:
        return exact * torch.sigmoid(1.702 * exact)
    if activation is Activation.CLAMPED_SWIGLU:
        return exact.clamp(max=7) * torch.sigmoid(1.702 * exact.clamp(max=7))
    cubic = exact + 0.044715 * exact**3
    return 0.5 * exact * (1 + torch.tanh((2 / torch.pi) ** 0.5 * cubic))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of numpy, in the interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", KERNELS)
@pytest.mark.parametrize("size", [1, 100, 1500])
def test_numbers_are_activated(device: str, activation: Activation, dtype: torch.dtype, size: int) -> None:
    rows = rows_of(3, 2 * size, dtype, device, apart=5)
    rows[0, 0], rows[1, 0] = 60.0, -60.0
    assert_near(activate(rows, activation=activation.value, gated=False), activated(rows, activation))
    gate, up = rows.chunk(2, dim=1)
    up[0, 0], up[2, 0] = 11.0, -11.0
    factor = up.double().clamp(-7, 7) + 1 if activation is Activation.CLAMPED_SWIGLU else up.double()
    assert_near(activate(rows, activation=activation.value, gated=True), activated(gate, activation) * factor)
