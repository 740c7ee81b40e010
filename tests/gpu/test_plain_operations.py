"""The plain operations of the torch decoder against float64, and the arrays of a step in one piece and in parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.gpu.counting_driver import inputs_of

from quire.compute.models.sublayers import Activation, RopeSpec
from quire.compute.torch.attention.base import MOST_SHORT, KVPair
from quire.compute.torch.operations import (
    Angles,
    Frequencies,
    HeadForm,
    Norm,
    PlainOperations,
    activated,
    are_finite,
    rotated,
    xielu,
)
from quire.compute.torch.products import Matrix, TiledProduct, product
from quire.compute.torch.step_upload import step_shape, uploaded
from quire.compute.torch.upload import ALIGNMENT, apart, joined, together
from quire.compute.worker.model_runner import StepInputs

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CPU = torch.device("cpu")


class Recorder:
    """Takes what is written to the KV memory."""

    def __init__(self) -> None:
        self.written: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.written.append((slots, keys, values))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, shape)).to(dtype)


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=DTYPES[dtype], atol=DTYPES[dtype])


OPERATIONS = PlainOperations(Recorder())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("centers", "biased"), [(False, False), (True, True), (True, False)])
def test_a_norm_is_its_definition_and_that_of_a_sum_is_of_the_rounded_sum(
    dtype: torch.dtype, centers: bool, biased: bool
) -> None:
    rows, update = drawn(5, 48, seed=1, dtype=dtype), drawn(5, 48, seed=2, dtype=dtype)
    norm = Norm(drawn(48, seed=3), drawn(48, seed=4) if biased else None, 0.01, centers)
    exact = rows.double()
    if centers:
        exact = exact - exact.mean(-1, keepdim=True)
    exact = norm.weight.double() * exact / (exact.square().mean(-1, keepdim=True) + 0.01).sqrt()
    if norm.bias is not None:
        exact = exact + norm.bias.double()
    near(OPERATIONS.norm(rows, norm), exact, dtype)
    total, normed = OPERATIONS.add_norm(rows, update, norm)
    assert torch.equal(total, rows + update)
    assert torch.equal(normed, OPERATIONS.norm(rows + update, norm))
    assert normed.dtype == dtype


EXACT = {
    Activation.RELU: lambda x: max(x, 0.0),
    Activation.RELU_SQUARED: lambda x: max(x, 0.0) ** 2,
    Activation.SILU: lambda x: x / (1 + math.exp(-x)),
    Activation.GELU: lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    Activation.GELU_TANH: lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.QUICK_GELU: lambda x: x / (1 + math.exp(-1.702 * x)),
    Activation.CLAMPED_SWIGLU: lambda x: min(x, 7.0) / (1 + math.exp(-1.702 * min(x, 7.0))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", EXACT)
def test_activations_are_their_definitions_and_gates_multiply_what_comes_up(
    activation: Activation, dtype: torch.dtype
) -> None:
    rows = drawn(3, 2 * 37, seed=5, dtype=dtype)
    rows[0, :2], rows[0, -2:] = torch.tensor([9.0, -9.0], dtype=dtype), torch.tensor([9.0, -9.0], dtype=dtype)
    exact = rows.double().clone().apply_(EXACT[activation])
    near(OPERATIONS.activate(rows, activation), exact, dtype)
    gate, up = exact[:, :37], rows.double()[:, 37:]
    if activation is Activation.CLAMPED_SWIGLU:
        up = up.clip(-7, 7) + 1
    near(OPERATIONS.gated(rows, activation), gate * up, dtype)


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 200])
def test_a_number_has_the_same_activation_wherever_it_lies(activation: Activation, size: int) -> None:
    numbers = drawn(300, seed=6)
    whole = activated(numbers, activation)
    for start in (0, 1, 33):
        assert torch.equal(activated(numbers[start : start + size], activation), whole[start : start + size])
    assert activated(numbers[:0], activation).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu_is_its_definition_wherever_a_number_lies(dtype: torch.dtype) -> None:
    positive, negative, slope, limit = 0.7, -0.4, 0.5, -1e-6
    layer = torch.tensor([positive, negative, slope, limit])

    def exact(x: float) -> float:
        if x > 0:
            return math.log1p(math.exp(positive)) * x * x + slope * x
        steep = slope + math.log1p(math.exp(negative))
        return steep * (math.expm1(min(x, limit)) - x) + slope * x

    rows = drawn(3, 67, seed=8, dtype=dtype)
    near(xielu(rows, layer), rows.double().clone().apply_(exact), dtype)
    assert torch.equal(xielu(rows[1:2, 5:], layer), xielu(rows, layer)[1:2, 5:])


@given(head_dim=st.sampled_from([2, 6, 16]), part=st.sampled_from([0.5, 1.0]), scale=st.sampled_from([1.0, 1.25]))
def test_pairs_are_turned_by_their_angles_and_the_rest_of_a_head_is_left(
    head_dim: int, part: float, scale: float
) -> None:
    half = max(1, int(head_dim * part) // 2)
    frequencies = tuple(float(np.float32(10.0 ** (-2 * pair / head_dim))) for pair in range(half))
    positions = [0, 1, 5, 4097]
    rope = RopeSpec(2 * half, frequencies, scale)
    angles = Angles.at(torch.tensor(positions), rope, Frequencies.of(rope, torch.device("cpu")))
    heads = drawn(4, 3, head_dim, seed=head_dim)
    exact = heads.double().clone()
    for token, position in enumerate(positions):
        for pair, frequency in enumerate(frequencies):
            angle = float(np.float32(position) * np.float32(frequency))
            turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
            exact[token, :, [pair, pair + half]] = scale * heads[token, :, [pair, pair + half]].double() @ turn.T
    torch.testing.assert_close(rotated(heads, angles).double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotates_first", [False, True])
@pytest.mark.parametrize(("normed", "turned"), [(False, False), (True, False), (False, True), (True, True)])
def test_queries_come_back_and_keys_and_values_are_written_before_they_are_rounded(
    normed: bool, turned: bool, rotates_first: bool, dtype: torch.dtype
) -> None:
    memory = Recorder()
    operations = PlainOperations(memory)  # type: ignore[arg-type]
    projected, slots = drawn(3, (4 + 2 * 2) * 8, seed=8, dtype=dtype), torch.tensor([5, -1, 2])
    norms = [Norm(drawn(8, seed=seed), None, 1e-6, False) if normed else None for seed in (1, 2)]
    rope = RopeSpec(8, (1.0, 0.25, 0.125, 0.5))
    table = Frequencies.of(rope, torch.device("cpu"))
    angles = Angles.at(torch.tensor([0, 3, 9]), rope, table) if turned else None
    pair = KVPair(torch.zeros(0), torch.zeros(0))
    form = HeadForm(4, 2, 8, *norms, rotates_first=rotates_first)
    queries = operations.rotate_and_write(projected, form, angles, pair, slots)
    heads = projected.float().view(3, 8, 8)
    expected = [heads[:, :4], heads[:, 4:6]]
    if angles is not None and rotates_first:
        expected = [rotated(part, angles) for part in expected]
    if norms[0] is not None and norms[1] is not None:
        expected = [OPERATIONS.norm(part, norm) for part, norm in zip(expected, norms, strict=True)]  # type: ignore[arg-type]
    if angles is not None and not rotates_first:
        expected = [rotated(part, angles) for part in expected]
    ((written_slots, keys, values),) = memory.written
    assert torch.equal(queries, expected[0].to(dtype))
    assert torch.equal(keys, expected[1])
    assert torch.equal(values, heads[:, 6:])
    assert torch.equal(written_slots, slots)
    assert (keys.dtype, queries.dtype) == (torch.float32, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_narrow_matrices_are_widened_exactly_and_scaled_at_the_end(dtype: torch.dtype, biased: bool) -> None:
    rows = drawn(5, 24, seed=9, dtype=dtype)
    weight = torch.randint(-128, 128, (7, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scales, bias = drawn(7, seed=10).abs() / 100, drawn(7, seed=11).to(dtype) if biased else None
    exact = rows.double() @ weight.double().T * scales.double() + (0 if bias is None else bias.double())
    found = product(rows, Matrix(weight, bias, scales))
    assert found.dtype == dtype
    size = (rows.double().abs() @ weight.double().abs().T * scales.double()).max()
    assert ((found.double() - exact).abs() <= DTYPES[dtype] * size).all()
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(Matrix(weight, None, scales).looked_up(ids), weight[ids].float() * scales[ids, None])
    assert torch.equal(Matrix(rows).looked_up(torch.tensor([4, 1])), rows[[4, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_codes_may_exceed_the_largest_number_of_rows(dtype: torch.dtype) -> None:
    rows, weight = torch.full((1, 64), 100.0, dtype=dtype), torch.full((2, 64), 127, dtype=torch.int8)
    found = product(rows, Matrix(weight, None, torch.tensor([1e-3, 1e-6])))
    torch.testing.assert_close(found.float(), torch.tensor([[812.8, 0.8128]]), rtol=4 * DTYPES[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_with_a_number_that_is_not_finite_are_flagged(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = torch.tensor([[0.0, largest, -largest, -1.0]] * 5, dtype=dtype)
    rows[1, 2], rows[2, 0], rows[3, 3], rows[4] = torch.inf, -torch.inf, torch.nan, -0.0
    assert are_finite(rows).tolist() == [True, False, False, False, True]


def test_an_expert_is_a_view_of_its_matrix_and_scales() -> None:
    weight, scales = drawn(3, 4, 5, seed=12), drawn(3, 4, seed=13)
    expert = Matrix(weight, None, scales).of(2)
    assert expert.weight.data_ptr() == weight[2].data_ptr()
    assert expert.scales is not None and torch.equal(expert.scales, scales[2])
    assert Matrix(weight).of(1).scales is None


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 9])
def test_tiles_give_as_many_rows_as_there_are(num_rows: int) -> None:
    rows, matrix = drawn(num_rows, 6, seed=14), Matrix(drawn(5, 6, seed=15))
    if num_rows:
        torch.testing.assert_close(TiledProduct(4)(rows, matrix), product(rows, matrix))
    assert TiledProduct(4)(drawn(4, 6), matrix).shape == (4, 5)


# ---- the arrays of a step -------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> StepInputs:
    """A step of decodes first and chunks after, over two KV groups."""
    decodes = draw(st.integers(0, 4))
    lengths = st.integers(1, 5) | st.integers(MOST_SHORT, MOST_SHORT + 1)
    counts = [1] * decodes + draw(st.lists(lengths, min_size=0 if decodes else 1, max_size=4))
    contexts = [draw(st.integers(0, 20)) for _ in counts]
    num_logits = [draw(st.integers(0, count)) for count in counts]
    starts = np.cumsum([0, *counts])
    num_tokens = int(starts[-1])
    indices = [
        end - wanted + place for end, wanted in zip(starts[1:], num_logits, strict=True) for place in range(wanted)
    ]
    return StepInputs(
        entries=tuple(range(100, 100 + len(counts))),
        query_starts=starts,
        token_ids=np.arange(num_tokens) + 1000,
        positions=np.concatenate(
            [np.arange(context, context + n) for context, n in zip(contexts, counts, strict=True)]
        ),
        slots=(np.arange(num_tokens) + 50, np.arange(num_tokens) + 70),
        block_tables=tuple(np.arange(len(counts) * 40).reshape(-1, 40) + group for group in (0, 500)),
        logit_starts=np.cumsum([0, *num_logits]),
        logit_indices=np.array(indices, np.int64),
        rows=np.arange(len(counts))[::-1] * 3,
    )


@given(inputs=steps(), data=st.data())
def test_the_parts_of_a_step_are_its_sequences_one_by_one(inputs: StepInputs, data: st.DataObject) -> None:
    count = len(inputs.entries)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    part = inputs.part(start, stop)
    assert part.entries == inputs.entries[start:stop]
    assert (part.query_starts[0], part.logit_starts[0]) == (0, 0)
    for mine, sequence in enumerate(range(start, stop)):
        for name in ("token_ids", "positions"):
            here, there = getattr(part, name)[part.tokens_of(mine)], getattr(inputs, name)[inputs.tokens_of(sequence)]
            assert here.tolist() == there.tolist()
        for group in (0, 1):
            assert (
                part.slots[group][part.tokens_of(mine)].tolist()
                == inputs.slots[group][inputs.tokens_of(sequence)].tolist()
            )
            assert part.block_tables[group][mine].tolist() == inputs.block_tables[group][sequence].tolist()
        here = part.token_ids[part.logit_indices[part.logits_of(mine)]]
        assert here.tolist() == inputs.token_ids[inputs.logit_indices[inputs.logits_of(sequence)]].tolist()
        assert part.rows[mine] == inputs.rows[sequence]


@given(inputs=steps(), block_size=st.integers(1, 8))
def test_the_shape_of_a_step_is_that_of_a_walk_through_its_sequences(inputs: StepInputs, block_size: int) -> None:
    shape = step_shape(inputs, block_size)
    counts = [len(range(*inputs.tokens_of(each).indices(10**6))) for each in range(len(inputs.entries))]
    lengths = [int(inputs.positions[inputs.tokens_of(each)][-1]) + 1 for each in range(len(counts))]
    num_decodes = next((place for place, count in enumerate(counts) if count != 1), len(counts))
    num_short = sum(count <= MOST_SHORT for count in counts)
    assert (shape.num_decodes, shape.num_short) == (num_decodes, num_short)
    assert shape.longest_query == max(counts)
    assert shape.lengths.tolist() == lengths
    width = -(-max(lengths) // block_size)
    for table, whole in zip(shape.block_tables, inputs.block_tables, strict=True):
        assert np.array_equal(table, whole[:, :width])
    starts = shape.table_starts(block_size)
    for ids, whole in zip(shape.needed_tables(block_size), inputs.block_tables, strict=True):
        found = np.split(ids, starts[1:])
        assert [each.tolist() for each in found] == [
            row[: -(-length // block_size)].tolist() for row, length in zip(whole, lengths, strict=True)
        ]


def test_one_long_context_makes_no_long_tables_of_the_others() -> None:
    inputs = inputs_of([(131_072, 1), *[(600, 1)] * 255], 1)
    batch = uploaded(inputs, 16, CPU)
    assert sum(table.numel() for table in batch.block_tables) == 131_072 // 16 + 255 * 38


@given(shapes=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6))
def test_arrays_that_travel_as_one_arrive_as_they_were_each_at_an_aligned_place(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.arange(math.prod(shape)).reshape(shape) + 10 * place for place, shape in enumerate(shapes)]
    for array, tensor in zip(arrays, together(arrays, CPU), strict=True):
        assert tensor.dtype == torch.int32
        assert tuple(tensor.shape) == array.shape
        assert tensor.tolist() == array.tolist()
        assert tensor.storage_offset() % ALIGNMENT == 0


def test_an_array_with_more_room_than_it_needs_is_filled_up_with_zeros() -> None:
    whole = torch.from_numpy(joined([np.array([7, 8]), np.array([9])], [(2, 3), (1,)]))
    first, second = apart(whole, [(2, 3), (1,)])
    assert (first.tolist(), second.tolist()) == ([[7, 8, 0], [0, 0, 0]], [9])
    assert len(whole) == 8 + 4
