"""Norm, rotation and the write to the KV memory in one launch, against the same said one after another in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from quire.compute.torch.attention.base import KVPair, KVPool
from quire.compute.torch.attention.plain import PlainAttention, as_floats
from quire.compute.torch.int4 import turned
from quire.compute.torch.kernels.int4 import turn
from quire.compute.torch.kernels.rope_cache import rotate_and_write
from quire.compute.torch.operations import Angles, HeadForm, Norm
from quire.compute.torch.quantize import quantized, restored
from quire.compute.weights import quantize
from quire.core.kv_spec import KVCacheSpec

NUM_BLOCKS, BLOCK_SIZE = 5, 8
STORED = {"plain": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
INT4_HEADS = ((8, 8), (16, 6), (64, 64), (80, 80), (96, 72), (128, 0), (256, 256), (512, 512))


SUMMED_APART = (16, 256, 512)
"""Sizes of heads that a GPU sums in another order when the kernel is compiled for other numbers to store."""


@dataclass(frozen=True)
class Case:
    """One call: heads, how many dimensions turn, whether heads are normed, whether queries grow.

    Without key-value heads, the layer attends to the keys and values of another one.
    """

    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    norms: bool = True
    grows: bool = False
    rotates_first: bool = False
    norms_values: bool = False
    keys_are_values: bool = False
    num_tokens: int = 5
    dtype: torch.dtype = torch.float32

    def with_same_sums(self, device: str) -> Case:
        """The case in which all forms of the kernel compute the same bits: on a GPU some heads are not normed."""
        return replace(self, norms=self.norms and not (device == "cuda" and self.head_dim in SUMMED_APART))

    def form(self, device: str) -> HeadForm:
        def norm(low: float, epsilon: float) -> Norm | None:
            weight = torch.linspace(low, 2, self.head_dim, device=device)
            return Norm(weight, None, epsilon, centers=False) if self.norms else None

        key_norm = norm(0.5, 1e-3) if self.num_kv_heads else None
        form = HeadForm(self.num_heads, self.num_kv_heads, self.head_dim, norm(-1, 1e-6), key_norm)
        if self.norms_values and key_norm is not None:
            form = replace(form, value_norm=replace(key_norm, weight=torch.ones_like(key_norm.weight)))
        return replace(form, rotates_first=self.rotates_first, keys_are_values=self.keys_are_values)

    def angles(self, device: str) -> Angles | None:
        if not self.rotary_dim:
            return None
        turns = torch.arange(self.num_tokens)[:, None] * torch.linspace(1, 0.01, self.rotary_dim // 2)
        factors = torch.linspace(1, 3, self.num_tokens, device=device) if self.grows else None
        return Angles(turns.cos().to(device), turns.sin().to(device), factors)

    def projected(self, device: str) -> torch.Tensor:
        """Random rows that lie apart by numbers that nobody may read."""
        width = (self.num_heads + (1 if self.keys_are_values else 2) * self.num_kv_heads) * self.head_dim
        rows = torch.full((self.num_tokens, width + 8), torch.nan)
        rows[:, :width] = torch.randn((self.num_tokens, width), generator=torch.Generator().manual_seed(3))
        return rows.to(self.dtype).to(device)[:, :width]

    def slots(self, device: str) -> torch.Tensor:
        """Distinct slots in no order; every third token has none."""
        places = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(5))
        slots = places[: self.num_tokens].to(torch.int32)
        slots[1::3] = -1
        return slots.to(device)


CASES = (
    Case(),
    Case(norms=False, num_heads=4),
    Case(rotary_dim=0),
    Case(rotary_dim=0, norms=False),
    Case(rotary_dim=6),
    Case(rotary_dim=6, grows=True, num_heads=4),
    Case(norms=False, grows=True),
    Case(rotary_dim=6, rotates_first=True),
    Case(head_dim=128, rotary_dim=128, rotates_first=True),
    Case(rotary_dim=0, rotates_first=True),
    Case(head_dim=24, rotary_dim=20),
    Case(head_dim=80, rotary_dim=80),
    Case(head_dim=96, rotary_dim=72, num_heads=7, num_kv_heads=1),
    Case(head_dim=128, rotary_dim=128, num_heads=2, num_kv_heads=2),
    Case(head_dim=256, rotary_dim=256, num_heads=1, num_kv_heads=1, num_tokens=3),
    Case(dtype=torch.float16),
    Case(num_tokens=1),
    *([Case(dtype=torch.bfloat16)] if torch.cuda.is_available() else []),
    Case(head_dim=15, rotary_dim=8, norms=False),
    Case(norms_values=True),
    Case(norms_values=True, rotates_first=True, num_kv_heads=3),
    Case(keys_are_values=True, num_heads=3),
    Case(keys_are_values=True, norms_values=True, rotary_dim=6, num_kv_heads=5),
    Case(keys_are_values=True, norms=False, rotates_first=True),
    Case(num_kv_heads=0, num_heads=5),
    Case(num_kv_heads=0, rotary_dim=0, norms=False),
    Case(head_dim=512, rotary_dim=512, num_heads=2, num_kv_heads=1, num_tokens=3, norms_values=True),
)


def poisoned_pair(case: Case, stored: str, device: str, *, transposed: bool = False) -> KVPair:
    """Return a pair whose every number and scale a write must replace; `transposed`: tokens stand before heads."""
    shape = (NUM_BLOCKS, max(1, case.num_kv_heads), BLOCK_SIZE, case.head_dim)

    def numbers() -> torch.Tensor:
        if transposed:
            return numbers_of((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)
        return numbers_of(shape)

    def numbers_of(size: tuple[int, ...]) -> torch.Tensor:
        return torch.full(size, -99.0, device=device).to(case.dtype if stored == "plain" else STORED[stored])

    if stored == "plain":
        return KVPair(numbers(), numbers())
    scales = [torch.full(shape[:3], -99.0, device=device) for _ in range(2)]
    return KVPair(numbers(), numbers(), *scales)


def expected(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as they should be, in float64."""
    form, angles = case.form(device), case.angles(device)
    heads = case.projected(device).double().unflatten(-1, (-1, case.head_dim))
    queries, keys, values = heads.tensor_split((case.num_heads, case.num_heads + case.num_kv_heads), dim=1)
    values = keys if case.keys_are_values else values

    def brought(part: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if form.rotates_first:
            return normed(turned(part), norm)
        return turned(normed(part, norm))

    def normed(part: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return part
        return norm.weight.double() * part / (part.square().mean(dim=-1, keepdim=True) + norm.epsilon).sqrt()

    def turned(part: torch.Tensor) -> torch.Tensor:
        if angles is None:
            return part
        half = angles.cosines.shape[1]
        cosines, sines = angles.cosines.double()[:, None], angles.sines.double()[:, None]
        first, second, rest = part[..., :half], part[..., half : 2 * half], part[..., 2 * half :]
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), dim=-1)

    queries = brought(queries, form.query_norm)
    if angles is not None and angles.query_factors is not None:
        queries = queries * angles.query_factors.double()[:, None, None]
    return queries, brought(keys, form.key_norm), normed(values, form.value_norm)


def at_slots(stored: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what stands in slots: `[num_slots, num_kv_heads, …]`."""
    slots = slots.long()
    if stored.dtype is torch.float8_e4m3fn:  # which not every device can look up
        return at_slots(stored.view(torch.uint8), slots).view(torch.float8_e4m3fn)
    return stored.transpose(1, 2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_and_values_come_to_their_slots(device: str, case: Case, transposed: bool) -> None:
    pair, slots = poisoned_pair(case, "plain", device, transposed=transposed), case.slots(device)
    untouched = poisoned_pair(case, "plain", device)
    found = rotate_and_write(case.projected(device), case.form(device), case.angles(device), pair, slots)
    queries, keys, values = expected(case, device)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.dtype]
    torch.testing.assert_close(found.double(), queries, rtol=tolerance, atol=tolerance)
    stores = (slots >= 0) & (case.num_kv_heads > 0)
    kept, tolerance_of_values = slots[stores], tolerance if case.norms_values else 0
    written_keys, written_values = (at_slots(each, kept).double() for each in (pair.keys, pair.values))
    keys, values = keys[stores].reshape(written_keys.shape), values[stores].reshape(written_keys.shape)
    torch.testing.assert_close(written_keys, keys, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(written_values, values, rtol=tolerance_of_values, atol=tolerance_of_values)
    others = torch.tensor(sorted(set(range(NUM_BLOCKS * BLOCK_SIZE)) - set(kept.tolist())), device=device)
    for written, poison in ((pair.keys, untouched.keys), (pair.values, untouched.values)):
        assert torch.equal(at_slots(written, others), at_slots(poison, others))


@pytest.mark.parametrize("stored", ["int8", "fp8"])
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype is torch.float32], ids=str)
def test_what_is_quantised_is_what_the_definition_makes_of_the_same_numbers(
    device: str, case: Case, stored: str
) -> None:
    """To the bit: the numbers before are read from a pair that is not quantised."""
    case = case.with_same_sums(device)
    pair, plain, slots = poisoned_pair(case, stored, device), poisoned_pair(case, "plain", device), case.slots(device)
    arguments = case.projected(device), case.form(device), case.angles(device)
    assert torch.equal(rotate_and_write(*arguments, pair, slots), rotate_and_write(*arguments, plain, slots))
    kept = slots[(slots >= 0) & (case.num_kv_heads > 0)]
    for numbers, scales, exact in (
        (pair.keys, pair.key_scales, plain.keys),
        (pair.values, pair.value_scales, plain.values),
    ):
        q, scale = quantized(at_slots(exact, kept), STORED[stored])
        assert scales is not None
        assert torch.equal(at_slots(scales, kept), scale)
        assert torch.equal(at_slots(numbers, kept).float(), q.float())
        assert (scales == -99).sum() == scales.numel() - len(kept) * case.num_kv_heads


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_rows_at_the_edges_are_quantised_as_the_definition_says(device: str, stored: str) -> None:
    """Ties, rows of nothing, rows with what is not finite, numbers that fp8 holds with fewer bits."""
    case = Case(num_heads=1, num_kv_heads=1, head_dim=64, rotary_dim=0, norms=False, num_tokens=9)
    values = torch.zeros((9, 64))
    values[1] = torch.arange(64) - 31.5  # ties of int8, once scaled
    values[1, 0] = 127.0
    values[2] = torch.linspace(-1e-31, 1e-31, 64)
    values[3, 7], values[4, 9], values[5, 60] = torch.nan, torch.inf, -torch.inf
    values[6] = 448 * torch.exp2(-torch.arange(64) / 4)
    values[7] = torch.arange(64) * 2.0**-10  # ties between the smallest numbers of e4m3
    values[7, 0] = 448.0
    values[8] = torch.arange(64) * 7.0 + 0.5
    rows = torch.cat((torch.zeros((9, 128)), values), dim=1).to(device)
    pair = poisoned_pair(case, stored, device)
    rotate_and_write(rows, case.form(device), None, pair, torch.arange(9, dtype=torch.int32, device=device))
    assert pair.value_scales is not None
    numbers, scales = at_slots(pair.values, torch.arange(9))[:, 0], at_slots(pair.value_scales, torch.arange(9))[:, 0]
    q, scale = quantized(values.to(device), STORED[stored])
    assert torch.equal(numbers.float(), q.float())
    assert torch.equal(scales.nan_to_num(-1), scale.nan_to_num(-1))
    assert restored(numbers, scales).isfinite().all(dim=1).tolist() == [True] * 3 + [False] * 3 + [True] * 3


def int4_pool(case: Case, kv_dtype: str, device: str) -> KVPool:
    spec = KVCacheSpec.from_layers(
        [None], block_size=16, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, dtype=kv_dtype
    )
    pool = KVPool.allocate(spec, NUM_BLOCKS, torch.device(device))
    pool.content.fill_(0xEE)
    return pool


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), INT4_HEADS)
def test_4_bits_are_what_the_definition_makes_of_the_same_numbers(
    device: str, head_dim: int, rotary_dim: int, kv_dtype: str
) -> None:
    """To the bit, in the slots of the tokens and nowhere else; the centre of the keys is taken off."""
    case = Case(num_heads=3, num_kv_heads=9, head_dim=head_dim, rotary_dim=rotary_dim).with_same_sums(device)
    pool, right, plain = (int4_pool(case, dtype, device) for dtype in (kv_dtype, kv_dtype, "float32"))
    slots, form = case.slots(device), case.form(device)
    if kv_dtype == "int4":
        centre = torch.randn((9, head_dim), generator=torch.Generator().manual_seed(8)).to(device)
        form = replace(form, key_centre=centre)
    arguments = case.projected(device), form, case.angles(device)
    exact = plain.pair(0, 0)
    queries = rotate_and_write(*arguments, exact, slots)
    assert torch.equal(rotate_and_write(*arguments, pool.pair(0, 0), slots), queries)
    kept = slots[slots >= 0].long()
    keys, values = (rows.transpose(1, 2)[kept // 16, kept % 16] for rows in (exact.keys, exact.values))
    if form.key_centre is not None:
        keys = keys - form.key_centre
    PlainAttention(torch.device(device)).write_kv(right.pair(0, 0), slots[slots >= 0], keys, values)
    assert torch.equal(pool.content, right.content)


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_edges_of_4_bits_are_as_the_definition_says(device: str, kv_dtype: str) -> None:
    """Equal numbers, nearly none, numbers that are not finite, a range that is no float."""
    case = Case(num_heads=1, num_kv_heads=1, head_dim=64, rotary_dim=0, norms=False, num_tokens=7)
    rows = torch.randn((7, 192), generator=torch.Generator().manual_seed(2))
    rows[0, 64:], rows[1, 64:] = 3.0, 1e-31
    for token, number in enumerate((torch.nan, torch.inf, -torch.inf)):
        rows[2 + token, [70, 140]] = number
    rows[5, 64:], rows[5, [64, 128]] = -3e38, 3e38
    pool, right = int4_pool(case, kv_dtype, device), int4_pool(case, kv_dtype, device)
    slots = torch.arange(7, dtype=torch.int32, device=device)
    rotate_and_write(rows.to(device), case.form(device), None, pool.pair(0, 0), slots)
    heads = rows.to(device).unflatten(1, (3, 1, 64))
    PlainAttention(torch.device(device)).write_kv(right.pair(0, 0), slots, heads[:, 1], heads[:, 2])
    for ours, definition in zip(*(stored_rows(each.pair(0, 0), slots) for each in (pool, right)), strict=True):
        assert torch.equal(ours.nan_to_num(-1, -2, -3), definition.nan_to_num(-1, -2, -3))
        assert ours[[0, 1, 6]].isfinite().all() and not ours[2:5].isfinite().any()


def stored_rows(pair: KVPair, slots: torch.Tensor) -> list[torch.Tensor]:
    """Return the keys and values of slots as floats, `[num_slots, num_kv_heads, head_dim]`."""
    where = slots.long() // 16, slice(None), slots.long() % 16
    assert pair.key_scales is not None and pair.value_scales is not None
    pieces = (pair.keys, pair.key_scales), (pair.values, pair.value_scales)
    return [as_floats(numbers[where], scales[where]) for numbers, scales in pieces]


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_turned_as_the_definition_says(device: str, head_dim: int, dtype: torch.dtype) -> None:
    heads = torch.randn((7, 5, head_dim), generator=torch.Generator().manual_seed(4)).to(device, dtype)
    before = heads.clone()
    assert torch.equal(turn(heads), turned(heads).to(dtype))
    assert torch.equal(heads, before)
    assert turn(heads[:0]).shape == (0, 5, head_dim)


def test_torch_makes_the_int8_that_numpy_makes() -> None:
    """Of so many rows that a factor which is off by one bit shows."""
    rows = torch.randn((100_000, 64), generator=torch.Generator().manual_seed(1))
    q, scales = quantized(rows, torch.int8)
    expected, of_numpy = quantize.quantized(rows.numpy())
    assert np.array_equal(q.numpy(), expected)
    assert np.array_equal(scales.numpy(), of_numpy)


def test_a_token_does_not_depend_on_the_tokens_beside_it(device: str) -> None:
    case = Case(head_dim=96, rotary_dim=72)
    angles, projected, slots = case.angles(device), case.projected(device), case.slots(device)
    assert angles is not None
    together = poisoned_pair(case, "int8", device)
    queries = rotate_and_write(projected, case.form(device), angles, together, slots)
    one_by_one = poisoned_pair(case, "int8", device)
    for index in reversed(range(case.num_tokens)):
        own = slice(index, index + 1)
        factors = None if angles.query_factors is None else angles.query_factors[own]
        turned = Angles(angles.cosines[own], angles.sines[own], factors)
        alone = rotate_and_write(projected[own], case.form(device), turned, one_by_one, slots[own])
        assert torch.equal(alone[0], queries[index])
    assert torch.equal(together.keys, one_by_one.keys)
    assert torch.equal(together.values, one_by_one.values)
