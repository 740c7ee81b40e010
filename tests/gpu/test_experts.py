"""Experts in kernels: routing and grouping against their definitions, products against float64, bits of a row alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from quire.compute.models.parts import Part
from quire.compute.models.sublayers import Activation, ExpertsSpec
from quire.compute.torch.adapters import AdaptedStep, Add, LowRankMatrices, LowRankSums
from quire.compute.torch.experts import MLPs, PlainExperts, SparseInputs
from quire.compute.torch.fused_experts import FusedExperts
from quire.compute.torch.kernels import expert_groups
from quire.compute.torch.kernels.expert_groups import combine, group, route
from quire.compute.torch.kernels.grouped_product import FEW, MANY, ProductShape, grouped_product
from quire.compute.torch.operations import PlainOperations
from quire.compute.torch.products import Matrix, TiledProduct, product
from quire.compute.torch.quantize import quantized, restored
from quire.compute.torch.weights import MLP, Experts
from support.torch_runs import poisoned

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
if torch.cuda.is_available():  # the interpreter's products of bfloat16 are garbage
    TOLERANCE[torch.bfloat16] = 1e-2
SPEC = ExpertsSpec(num_experts=6, experts_per_token=2, intermediate_size=20, normalize_weights=True)
CHOICES = {
    "mixed": [[0, 4], [4, 5], [1, 4], [0, 5], [4, 5]] * 5,  # nobody goes to 2 and 3
    "one expert has all": [[3]] * 70,
    "an expert by itself": [[2, 5]],
    "all experts": [[0, 1, 2, 3, 4, 5]] * 3,
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- who goes where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "choices"), [(128, 8), (6, 2), (5, 5), (1, 1)])
def test_rows_go_where_the_definition_says(num_experts: int, choices: int, normalize: bool, device: str) -> None:
    scores = random(6, num_experts).to(device)
    scores[3] = scores[3].round()  # many are equal
    scores[4] = 0.0
    spec = ExpertsSpec(num_experts, choices, 1, normalize)
    slots = torch.arange(6, dtype=torch.int32, device=device)
    ids, shares = PlainExperts(product).route(scores, slots, spec, None)
    with poisoned():
        own_ids, own_shares = route(scores, slots, choices, normalize=normalize)
    assert torch.equal(own_ids, ids.to(torch.int32))
    torch.testing.assert_close(own_shares, shares, rtol=1e-5, atol=1e-7)
    assert torch.equal(route(scores[5:6], slots[5:6], choices, normalize=normalize)[1], own_shares[5:6])


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_what_is_not_finite_goes_to_experts_that_there_are_and_is_seen(device: str) -> None:
    scores = random(4, 6).to(device)
    scores[0], scores[1, 2], scores[2, 5] = torch.nan, torch.nan, torch.inf
    ids, shares = route(scores, torch.arange(4, device=device), 3, normalize=True)
    assert all(0 <= first < second < third < 6 for first, second, third in ids.tolist())
    assert shares.isfinite().all(dim=1).tolist() == [False, False, False, True]


@pytest.mark.parametrize("tile_rows", [4, 16])
@pytest.mark.parametrize("choices", [*CHOICES, "random"])
def test_tiles_hold_each_pair_once_and_pairs_of_one_expert(
    choices: str, tile_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_groups, "CHUNK", 32)
    drawn = random(30, 6).argsort(dim=1)[:, :3].sort(dim=1).values
    ids = (drawn if choices == "random" else torch.tensor(CHOICES[choices])).to(device, torch.int32)
    with poisoned():
        order, tiles = group(ids, 6, tile_rows)
    assert torch.equal(order, ids.flatten().argsort(stable=True).to(torch.int32))
    experts = ids.flatten()[order].tolist()
    expected = 0
    for expert, first, count in tiles.tolist():
        assert 0 <= count <= tile_rows
        if count:
            assert first == expected and experts[first : first + count] == [expert] * count
            # Only the last tile of an expert is not full.
            assert count == tile_rows or expert not in experts[first + count :]
            expected += count
    assert expected == len(experts)


def test_rows_that_count_for_nothing_go_where_the_first_one_goes(device: str) -> None:
    scores, slots = random(5, 6).to(device), torch.tensor([3, -1, 0, -1, 8], device=device)
    ids, _ = route(scores, slots, 2, normalize=True)
    all_ids, _ = route(scores, slots.abs(), 2, normalize=True)
    assert torch.equal(ids, all_ids[[0, 0, 2, 0, 4]]) and not torch.equal(ids, all_ids)


# --- products --------------------------------------------------------------------------------------------------------


def between_nans(tensor: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return the numbers of a tensor, with what is no number before and behind them in memory."""
    room = torch.full((len(tensor) + 2, *tensor.shape[1:]), torch.nan, dtype=dtype, device=device)
    room[1:-1] = tensor
    return room[1:-1]


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(
    ("choices", "sizes", "biased"), [("mixed", (70, 37), True), ("one expert has all", (16, 160), False)]
)
def test_pairs_are_multiplied_with_the_matrix_of_their_expert(
    choices: str,
    sizes: tuple[int, int],
    biased: bool,
    is_int8: bool,
    dtype: torch.dtype,
    shape: ProductShape,
    device: str,
) -> None:
    ids = torch.tensor(CHOICES[choices], dtype=torch.int32)
    numbers, scales, (out_size, in_size) = random(6, *sizes), None, sizes
    absent = [expert for expert in range(6) if expert not in ids]
    if is_int8:
        weights, scales = (tensor.to(device) for tensor in quantized(numbers, torch.int8))
        exact, scales[absent] = restored(weights, scales).double(), torch.nan
    else:
        numbers[absent] = torch.nan
        weights = between_nans(numbers, dtype, device)
        exact = weights.double()
    rows = between_nans(random(len(ids), in_size), dtype, device)
    biases = random(6, out_size).to(device, dtype) if biased else None
    groups = group(ids.to(device), 6, shape.rows)
    with poisoned():
        found = grouped_product(rows, Matrix(weights, biases, scales), groups, shape)
        again = grouped_product(found, Matrix(random(6, 8, out_size).to(device, dtype)), groups, shape)
    pairs, experts = rows.repeat_interleave(ids.shape[1], dim=0).double(), ids.flatten().tolist()
    added = torch.zeros(6, out_size, device=device).double() if biases is None else biases.double()
    expected = torch.stack([exact[each] @ pair + added[each] for each, pair in zip(experts, pairs, strict=True)])
    near = TOLERANCE[dtype] * in_size**0.5
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=4 * near)
    assert again.shape == (len(pairs), 8) and again.isfinite().all()  # and of a row for each pair


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_are_added_in_the_order_of_ids(dtype: torch.dtype, device: str) -> None:
    outputs, shares = random(4 * 3, 1100).to(device, dtype), random(4, 3).to(device)
    with poisoned():
        found = combine(outputs, shares)
    expected = (outputs.double().unflatten(0, (4, 3)) * shares.double()[..., None]).sum(dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert torch.equal(combine(outputs[3:6], shares[1:2]), found[1:2])


# --- layers ----------------------------------------------------------------------------------------------------------


def slots_of(device: str) -> Mapping[Part, LowRankMatrices]:
    """Return two slots for adapters of rank 16, for all matrices of `sparse`."""
    sizes = {Part.EXPERT_GATE: (20, 24), Part.EXPERT_UP: (20, 24), Part.EXPERT_DOWN: (24, 20)}
    found = {}
    for seed, (part, (outputs, inputs)) in enumerate(sizes.items()):
        a, b = random(12, 16, inputs), random(12, outputs, 16).roll(seed)
        scales = (torch.arange(1, 13, dtype=torch.float32) / 48)[:, None].expand(12, 16).contiguous()
        found[part] = LowRankMatrices(Matrix(a.to(device), scales=scales.to(device)), Matrix(b.to(device)))
    return found


def sparse(
    experts: FusedExperts | PlainExperts,
    rows: torch.Tensor,
    *,
    is_int8: bool = False,
    step: AdaptedStep | None = None,
    merged: int | None = None,
) -> torch.Tensor:
    """Return what a layer of experts makes of rows of 24 numbers; its router takes them one by one.

    `merged`: a slot whose matrices are added to those of the layer.
    """

    def matrices(*sizes: int) -> Matrix:
        numbers = random(6, *sizes).to(rows.device) / 4
        return Matrix(quantized(numbers, torch.int8)[0], None, quantized(numbers, torch.int8)[1])

    def exact(matrix: Matrix) -> Matrix:
        return matrix if is_int8 or matrix.scales is None else Matrix(restored(matrix.weight, matrix.scales))

    operations = PlainOperations(SimpleNamespace())  # type: ignore[arg-type]
    mlps = MLPs(operations, TiledProduct(1), experts, Activation.SILU, gated=True)
    router, slots = Matrix(random(6, 24).to(rows.device)), torch.arange(len(rows), device=rows.device)
    sizes = {Part.EXPERT_GATE: 20, Part.EXPERT_UP: 20, Part.EXPERT_DOWN: 24}
    add = Add.to(step, LowRankSums(experts, [sizes]))
    up, down = exact(matrices(40, 24)), exact(matrices(24, 20))
    if merged is not None:
        mine = slice(6 * merged, 6 * merged + 6)
        gate_change, up_change, down_change = (
            each.b.weight[mine] @ (each.a.scales[mine, :, None] * each.a.weight[mine])  # type: ignore[index]
            for each in slots_of(str(rows.device)).values()
        )
        up = Matrix(up.weight + torch.cat([gate_change, up_change], dim=1))
        down = Matrix(down.weight + down_change)
    return mlps.sparse(SparseInputs(rows, rows, rows), slots, Experts(router, MLP(up, down)), SPEC, add)


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("num_rows", [0, 1, 60])
def test_a_layer_computes_what_the_plain_one_does(num_rows: int, is_int8: bool, device: str) -> None:
    rows = random(num_rows, 24).to(device)
    plain = sparse(PlainExperts(product), rows, is_int8=is_int8)
    for batch_invariant in (False, True):
        found = sparse(FusedExperts(batch_invariant=batch_invariant), rows, is_int8=is_int8)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "fused", "invariant"])
def test_rows_of_an_adapter_have_what_merged_experts_give(kind: str, device: str) -> None:
    fused = FusedExperts(batch_invariant=kind == "invariant")
    experts: FusedExperts | PlainExperts = PlainExperts(TiledProduct(1)) if kind == "plain" else fused
    rows, slots = random(30, 24).to(device), [slots_of(device)]
    ids = [0] * 3 + [-1] * 7 + [1] * 15 + [-1] * 5
    found = sparse(experts, rows, step=AdaptedStep(slots, 2, torch.tensor(ids, dtype=torch.int32, device=device)))
    base = sparse(experts, rows)
    for slot in (0, 1):
        mask, merged = torch.tensor([each == slot for each in ids], device=device), sparse(experts, rows, merged=slot)
        torch.testing.assert_close(found[mask], merged[mask], rtol=1e-4, atol=1e-4)
        assert (merged - base)[mask].abs().max() > 0.1
    others = torch.tensor([each < 0 for each in ids], device=device)
    assert torch.equal(found[others], base[others]), "the others keep their bits"


@pytest.mark.parametrize(("batch_invariant", "num_rows"), [(True, 60), (False, 40)])
def test_a_row_has_the_same_bits_in_any_company(batch_invariant: bool, num_rows: int, device: str) -> None:
    # Without the mode it does as long as the shape is the same: up to 16 pairs for each expert.
    experts, rows = FusedExperts(batch_invariant=batch_invariant), random(num_rows, 24).to(device)
    together = sparse(experts, rows)
    for some in ([0], [7, 3, 39], list(range(num_rows))[::-1]):
        assert torch.equal(sparse(experts, rows[some]), together[some])
