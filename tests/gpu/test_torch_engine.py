"""What stands around the torch decoder: goldens, memory that is short, settings that are refused, whole requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import LayerInputsSpec
from quire.compute.torch import products
from quire.compute.torch.attention.base import KVPair, StepBatch
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import DecoderOutputs, TorchDecoder
from quire.compute.torch.load import load_model
from quire.compute.torch.products import Matrix, TiledProduct, choose_tile, keep_sums_whole, product
from quire.compute.torch.quantize import quantized
from quire.compute.torch.rehearsal import largest_steps
from quire.compute.torch.runner import TorchRunner
from quire.compute.torch.settings import TorchSettings, activation_bytes, kv_cache_spec
from quire.compute.torch.upload import together
from quire.compute.weights.quantize import quantized as quantized_on_the_host
from quire.compute.worker.worker import Worker
from quire.core.errors import ExecutionError, ExecutorLostError, InvalidConfigError, OutOfMemoryError
from quire.core.kv_spec import SHARED, KVCacheSpec, KVGroup, KVHeads
from quire.core.step import BlockCopy, BlockMove, StepPlan, column
from support.spec_models import FULL, SPECS
from support.step_plans import Work
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import FLOAT32, TorchRun

INVARIANT = replace(FLOAT32, batch_invariant=True)
PROMPT = [(5 * i * i + 3 * i + 1) % 126 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


# --- memory that is short --------------------------------------------------------------------------------------------


class NarrowDecoder:
    """A decoder on a device that has no room for the activations of more than so many tokens."""

    error: Exception = torch.OutOfMemoryError("no more")

    def __init__(self, decoder: TorchDecoder, max_tokens: int) -> None:
        self.spec = decoder.spec
        self.num_tokens: list[int] = []
        self._decoder = decoder
        self._max_tokens = max_tokens

    def run(self, batch: StepBatch, pairs: Sequence[KVPair]) -> DecoderOutputs:
        self.num_tokens.append(batch.shape.num_tokens)
        if batch.shape.num_tokens > self._max_tokens:
            raise self.error
        return self._decoder.run(batch, pairs)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(rows)


def narrowed(run: TorchRun, max_tokens: int) -> NarrowDecoder:
    """Let a run's device have little memory; return what stands before its decoder."""
    runner: TorchRunner = run.runner._runner  # type: ignore[attr-defined]
    runner._decoder = decoder = NarrowDecoder(runner._decoder, max_tokens)  # type: ignore[assignment]
    return decoder


def test_a_step_that_does_not_fit_is_halved_and_nothing_changes(folder: Path, device: str) -> None:
    settings = replace(INVARIANT, device=device)
    wide, narrow = (TorchRun(folder, settings=settings) for _ in range(2))
    decoder = narrowed(narrow, 60)
    results = []
    for run in (wide, narrow):
        for row in range(4):
            run.driver.open(row, PROMPT[row:])
        results.append(run.step(*(Work(row, 0, 40 - row, 1) for row in range(4))))
        results.append(run.step(*(Work(row, 40 - row, 1, 1) for row in range(4))))
    assert decoder.num_tokens == [154, 79, 40, 39, 75, 38, 37, 4]
    assert results[:2] == results[2:]
    assert wide.logits.keys() == narrow.logits.keys()
    assert all(np.array_equal(wide.logits[place], narrow.logits[place]) for place in wide.logits)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("no more"), OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: an illegal address"), ExecutorLostError),
    ],
    ids=str,
)
def test_an_error_between_the_halves_of_a_step_says_what_has_become_of_the_device(
    error: Exception, kind: type[Exception], folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emptying() -> None:
        raise error

    run = TorchRun(folder, settings=replace(FLOAT32, device=device))
    narrowed(run, 60)
    for row in range(2):
        run.driver.open(row, PROMPT)
    monkeypatch.setattr(torch.cuda, "empty_cache", emptying)
    with pytest.raises(kind) as found:
        run.step(*(Work(row, 0, 40, 1) for row in range(2)))
    assert type(found.value) is kind


def test_a_sequence_that_does_not_fit_alone_makes_the_step_fail(folder: Path, device: str) -> None:
    run = TorchRun(folder, settings=replace(FLOAT32, device=device))
    narrowed(run, 30)
    run.driver.open(0, PROMPT)
    with pytest.raises(OutOfMemoryError, match="no more"):
        run.step(Work(0, 0, 40, 1))
    run.step(Work(0, 0, 25))
    assert run.step(Work(0, 25, 15, 1)).num_tokens == column(1)


def test_blocks_that_cannot_be_had_are_a_setting_that_is_not_allowed(folder: Path, device: str) -> None:
    settings = replace(FLOAT32, device=device)
    worker = Worker(load_model(read_model(ModelFolder(folder)), settings).parts(1 << 40))
    with pytest.raises(InvalidConfigError, match="num_blocks is"):
        worker.start()


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8", "k8v4", "int4"])
def test_moves_and_copies_are_carried_out_in_the_order_of_the_contract(dtype: str, device: str) -> None:
    spec = KVCacheSpec(16, 2, 8, dtype, (KVGroup((0, 2)), KVGroup((1,), window=4)))
    where = torch.device(device)
    cache = TorchCache(spec, PlainAttention(where), where, num_blocks=4, num_host_blocks=2)
    cache.allocate()
    content = cache._tiers[0].pool.content  # type: ignore[index]
    assert content.numel() == 4 * spec.bytes_per_block
    for block in range(4):
        content[:, block] = block + 1
    # Block 0 goes out before 1 is copied over it; what went out comes back over 2, which nobody copied before.
    cache.apply(plan_of(moves_out=(BlockMove(0, 1),), copies=(BlockCopy(1, 0),)))
    cache.apply(plan_of(moves_in=(BlockMove(2, 1),), copies=(BlockCopy(3, 1),)))
    pairs = cache.pairs().values()
    assert len(pairs) == 3 and [pair.group for pair in pairs] == [0, 1, 0]
    for pair in pairs:
        assert sum(piece.numel() * piece.itemsize for piece in pieces_of(pair)) == content[0].numel()
        for piece in pieces_of(pair):
            found = piece.contiguous().view(torch.uint8).flatten(1)
            assert found.unique(dim=1).tolist() == [[2], [4], [1], [4]]
    cache.release()
    cache.release()
    with pytest.raises(ExecutionError, match="not allocated"):
        cache.apply(plan_of(copies=(BlockCopy(1, 0),)))


def pieces_of(pair: KVPair) -> list[torch.Tensor]:
    return [piece for piece in (pair.keys, pair.values, pair.key_scales, pair.value_scales) if piece is not None]


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp8", "k8v4", "int4"])
def test_narrow_layers_of_a_group_share_a_place_and_no_byte(dtype: str, device: str) -> None:
    layers = [(20, None), (20, None), (None, KVHeads(1, 32)), (SHARED, None), (20, None), (None, KVHeads(1, 32))]
    spec = KVCacheSpec.from_mixed_layers(layers, KVHeads(2, 8), block_size=16, dtype=dtype)
    assert [(group.layers, spec.layers_per_place(group)) for group in spec.groups] == [((2, 5), 1), ((0, 1, 4), 2)]
    where = torch.device(device)
    cache = TorchCache(spec, PlainAttention(where), where, num_blocks=4)
    cache.allocate()
    content, pairs = cache._tiers[0].pool.content, cache.pairs()  # type: ignore[index]
    assert content.numel() == 4 * spec.bytes_per_block and list(pairs) == [0, 1, 2, 4, 5]
    assert [pairs[layer].keys.shape for layer in (1, 5)] == [
        (4, heads, 16, size // (2 if dtype == "int4" else 1)) for heads, size in ((2, 8), (1, 32))
    ]
    left = 250  # of requests before; it must not be in the buffer, which can go to disk
    content.fill_(left)
    for group in spec.groups:
        for layer in group.layers:
            for piece in pieces_of(pairs[layer]):
                piece.view(torch.uint8).zero_()
        for number, layer in enumerate(group.layers, start=1):
            for piece in pieces_of(pairs[layer]):
                as_bytes = piece.view(torch.uint8)
                assert not as_bytes.any()
                as_bytes.fill_(number)
        buffer = memoryview(bytearray(spec.bytes_per_block))
        cache.read_block(3, spec.groups.index(group), buffer)()
        for number in range(1, len(group.layers) + 1):
            assert bytes(buffer).count(number) == sum(spec.layer_bytes(group))
        assert bytes(buffer).count(left) == 0
        content.fill_(left)


def plan_of(**moves: Any) -> StepPlan:
    return StepPlan(1, column(), column(), column(), column(), **moves)


@pytest.mark.parametrize(
    ("moves", "named"),
    [
        ({"copies": (BlockCopy(0, 4),)}, "block 4; num_blocks is 4"),
        ({"moves_out": (BlockMove(0, 2),)}, "block 2; num_host_blocks is 2"),
        ({"moves_in": (BlockMove(-1, 0),)}, "block -1; num_blocks is 4"),
    ],
)
def test_a_block_that_is_not_there_is_not_moved(moves: dict[str, Any], named: str) -> None:
    cpu = torch.device("cpu")
    spec = KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,)),))
    cache = TorchCache(spec, PlainAttention(cpu), cpu, num_blocks=4, num_host_blocks=2)
    cache.allocate()
    with pytest.raises(ExecutionError, match=named):
        cache.apply(plan_of(**moves))


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_int8_is_that_of_the_host_to_the_bit(device: str) -> None:
    random = np.random.default_rng(0)
    rows = (random.standard_normal((500, 33)) * 10 ** random.uniform(-35, 30, (500, 1))).astype(np.float32)
    rows[3], rows[4, 5], rows[5, 6], rows[6] = 0, np.nan, np.inf, 1e-31
    # Halves of a step: ties go to the even number.
    rows[7] = np.arange(33, dtype=np.float32) - 16.5
    rows[7, 0] = 127
    numbers, scales = quantized(torch.from_numpy(rows).to(device), torch.int8)
    expected_numbers, expected_scales = quantized_on_the_host(rows)
    assert np.array_equal(numbers.cpu().numpy(), expected_numbers)
    assert np.array_equal(scales.cpu().numpy(), expected_scales, equal_nan=True)


def test_fp8_is_nearest_and_what_is_not_finite_is_seen(device: str) -> None:
    rows = torch.randn((100, 64), generator=torch.Generator().manual_seed(0)).to(device)
    rows[1, 2] = torch.inf
    numbers, scales = quantized(rows, torch.float8_e4m3fn)
    assert numbers.to(torch.float32)[0].abs().max() == 448
    restored = numbers.to(torch.float32) * scales[:, None]
    assert restored[1].isnan().all()
    largest = rows[2:].abs().amax(dim=-1, keepdim=True)
    assert ((restored[2:] - rows[2:]).abs() <= rows[2:].abs() / 16 + largest / 448 * 2**-9).all()


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 50])
def test_tiles_change_no_product(num_rows: int, device: str) -> None:
    random = torch.Generator().manual_seed(num_rows)
    rows, weight, bias = (torch.randn(size, generator=random).to(device) for size in ((num_rows, 40), (24, 40), (24,)))
    for matrix in (
        Matrix(weight, bias),
        Matrix(*quantized(weight, torch.int8)[:1], None, quantized(weight, torch.int8)[1]),
    ):
        tiled = TiledProduct(16)(rows, matrix)
        assert torch.allclose(tiled, product(rows, matrix), atol=1e-4)
        assert torch.equal(tiled[-1:], TiledProduct(16)(rows[-1:], matrix))


def test_products_in_which_a_place_matters_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = Matrix(torch.randn((8, 8)))

    def unfair(rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        found = product(rows, matrix)
        if len(rows) > 4:  # the last row goes through another kernel
            found[-1] += 1e-6
        return found

    assert choose_tile([matrix], torch.float32).num_rows == 16
    monkeypatch.setattr(products, "product", unfair)
    assert choose_tile([matrix], torch.float32).num_rows == 1


@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch as it is built for GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_that_computes_can_keep_sums_whole(dtype: torch.dtype, device: str) -> None:
    keep_sums_whole()
    assert torch.backends.cuda.preferred_blas_library().name == "Cublaslt"  # of the other, torch refuses to ask it
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k
    matrix = Matrix(torch.ones((24, 40), dtype=dtype, device=device))
    assert product(torch.ones((3, 40), dtype=dtype, device=device), matrix).eq(40).all()


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (TorchSettings(device="cpu", block_size=24), "block_size is 24"),
        (TorchSettings(device="cpu", kv_dtype="int2"), "kv_dtype is 'int2'"),
        (TorchSettings(device="cpu", dtype="float64"), "dtype is 'float64'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: TorchSettings, named: str, folder: Path) -> None:
    with pytest.raises(InvalidConfigError, match=named):
        load_model(read_model(ModelFolder(folder)), settings)


def test_what_a_block_and_a_step_take_is_known_before(folder: Path) -> None:
    spec = read_model(ModelFolder(folder)).spec
    settings = TorchSettings(device="cpu", kv_dtype="fp8")
    # 3 layers of 2 heads, keys and values, each of 32 bytes and a scale of 4.
    assert kv_cache_spec(spec, settings).bytes_per_block == 16 * 3 * 2 * 2 * 36
    assert activation_bytes(spec, settings) > activation_bytes(spec, replace(settings, max_num_batched_tokens=16))
    sparse = SPECS["experts"]  # a token goes through 3 experts of 16 numbers, which is more than one MLP of 48
    assert activation_bytes(sparse, settings) > activation_bytes(SPECS["plain"], settings)
    wide = replace(SPECS["plain"], layers=(FULL, replace(FULL, heads=KVHeads(1, 1024))))
    assert activation_bytes(wide, settings) > activation_bytes(SPECS["plain"], settings)
    for other in (replace(FULL, intermediate_size=200), FULL):
        inputs = replace(SPECS["plain"], layers=(FULL, other), layer_inputs=LayerInputsSpec(256, 1.0, 1.0, 1.0))
        assert activation_bytes(inputs, settings) > activation_bytes(replace(inputs, layer_inputs=None), settings)


def test_arrays_of_a_step_arrive_whole_and_aligned(device: str) -> None:
    arrays = [np.arange(count, dtype=np.int64).reshape(shape) for count, shape in ((3, (3,)), (10, (2, 5)), (0, (0,)))]
    arrays += [np.array([-1, (1 << 31) - 1], np.int64), np.zeros((4, 0), np.int64)]
    moved = together(arrays, torch.device(device))
    for array, tensor in zip(arrays, moved, strict=True):
        assert tensor.dtype is torch.int32 and np.array_equal(tensor.cpu().numpy(), array)
        assert not tensor.numel() or tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("error", [NarrowDecoder.error, RuntimeError("Triton Error [CUDA]: out of memory")], ids=str)
def test_steps_that_do_not_fit_beside_the_blocks_are_refused_at_the_start(
    error: Exception, folder: Path, device: str
) -> None:
    run = TorchRun(folder, settings=replace(FLOAT32, device=device))
    narrowed(run, 30).error = error
    runner: TorchRunner = run.runner._runner  # type: ignore[attr-defined]
    settings = replace(FLOAT32, max_num_batched_tokens=31, max_num_seqs=8)
    runner._rehearsals = largest_steps(run.worker.cache.spec, settings, context_length=4096)
    with pytest.raises(InvalidConfigError, match="max_num_batched_tokens is 31; allowed: less, or less kv_memory"):
        runner.prepare(run.worker.cache)  # type: ignore[arg-type]
