"""Products with codes in a kernel: the weights of the definition, in products against float64, and in whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.compute.backend import WorkerParts
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.block_types import CODINGS, codings, kept_blocks
from quire.compute.torch.blocks import coded
from quire.compute.torch.decoder import Implementations, TorchDecoder
from quire.compute.torch.experts import PlainExperts
from quire.compute.torch.fused_products import MOST_ROWS, FusedProduct
from quire.compute.torch.kernels.expert_groups import group
from quire.compute.torch.kernels.grouped_product import (
    CODED_FEW,
    CODED_MANY,
    MANY,
    ProductShape,
    coded_product,
    grouped_product,
)
from quire.compute.torch.operations import PlainOperations
from quire.compute.torch.products import InputScales, Matrix, product, widened
from quire.compute.torch.quantize import quantized, restored
from quire.compute.torch.runner import TorchRunner
from quire.compute.torch.sampling import TorchSampler
from quire.compute.torch.settings import TorchSettings
from quire.compute.torch.weights import TorchWeights
from quire.compute.weights.decoder_weights import WeightReader, weight_bytes
from quire.compute.worker.worker import Worker
from support.quantized_models import write_quantized
from support.random_blocks import blocks_of
from support.reference_runs import ReferenceRun
from support.torch_runs import FLOAT32, EveryLogit, TorchRun, poisoned

GPU = TorchSettings(device="cuda", dtype="float32")
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(20)]
NEAR = {torch.float32: 1e-5, torch.float16: 2e-2}


def matrix_of(kind: str, num_outputs: int, device: str, *, biased: bool = False) -> tuple[Matrix, torch.Tensor]:
    """Return a random matrix of codes, and the float32 weights that they stand for by definition."""
    bias = torch.linspace(-1, 1, num_outputs, device=device) if biased else None
    if kind == "int8":
        numbers = torch.randn((num_outputs, 160), generator=torch.Generator().manual_seed(3)) / 8
        codes, scales = (each.to(device) for each in quantized(numbers, torch.int8))
        return Matrix(codes, bias, scales), restored(codes, scales)
    rows, numbers = blocks_of(kind, num_outputs)
    codes, inputs = coded(kind, torch.from_numpy(rows).to(device))
    return Matrix(codes, bias, inputs=inputs), torch.from_numpy(numbers).to(device)


def rows_for(matrix: Matrix, count: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn((count, matrix.num_inputs), generator=torch.Generator().manual_seed(count))
    return rows.to(matrix.weight.device, dtype)


@pytest.mark.parametrize("at_once", [16, 1 << 14])
@pytest.mark.parametrize("kind", CODINGS)
def test_codes_stand_for_the_weights_of_the_definition(
    kind: str, at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.compute.torch.blocks.ROWS_AT_ONCE", at_once)
    matrix, numbers = matrix_of(kind, 40, device)
    assert matrix.inputs is not None
    assert torch.equal(widened(matrix.weight, matrix.inputs), numbers)
    some = torch.tensor([3, 39, 3], device=device)
    assert torch.equal(matrix.looked_up(some), numbers[some])
    rows = rows_for(matrix, 3, torch.float32)
    assert torch.equal(product(rows, matrix), product(rows, Matrix(numbers)))


@pytest.mark.parametrize(
    ("shape", "dtype"), [(CODED_FEW, torch.float16), (CODED_MANY, torch.float32)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K", "E4M3", "int8"])  # Q5_0 becomes what Q8_0 is
def test_a_kernel_multiplies_rows_with_the_weights_of_the_definition(
    kind: str, dtype: torch.dtype, shape: ProductShape, device: str
) -> None:
    matrix, numbers = matrix_of(kind, 40, device, biased=True)
    assert matrix.bias is not None
    # int8 is scaled after the sum; other weights are rounded to the dtype of rows, as they are when they are widened.
    weights = numbers.double() if kind == "int8" else numbers.to(dtype).double()
    rows = rows_for(matrix, 17, dtype)
    with poisoned():
        found = coded_product(rows, matrix, shape)
    expected = rows.double() @ weights.T + matrix.bias
    assert (found - expected).abs().max() <= NEAR[dtype] * expected.std()
    assert found.dtype is dtype
    for some in ([5], [16, 2]):
        assert torch.equal(coded_product(rows[some], matrix, shape), found[some])


def test_a_weight_that_is_no_number_shows(device: str) -> None:
    matrix, _ = matrix_of("E4M3", 40, device)
    matrix.weight.view(torch.uint8)[7, 9] = 0xFF
    found = coded_product(rows_for(matrix, 3, torch.float32), matrix, CODED_FEW)
    assert torch.isnan(found).nonzero()[:, 1].tolist() == [7, 7, 7]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "E4M3"])
def test_experts_of_codes_compute_what_each_computes_alone(kind: str, device: str) -> None:
    each = [matrix_of(kind, 24, device)[0] for _ in range(3)]
    for expert, matrix in enumerate(each):
        assert matrix.inputs is not None
        each[expert] = matrix.changed(lambda tensor, by=expert: tensor.roll(by, dims=0))  # type: ignore[misc]
    stacked = [torch.stack(tensors) for tensors in zip(*(list(matrix.tensors()) for matrix in each), strict=True)]
    scales = iter(stacked[1:])
    assert each[0].inputs is not None
    inputs = InputScales(*(None if one is None else next(scales) for one in each[0].inputs))
    ids = torch.tensor([[0], [2], [0], [1]], dtype=torch.int32, device=device)
    rows = rows_for(each[0], 4, torch.float32)
    found = grouped_product(rows, Matrix(stacked[0], inputs=inputs), group(ids, 3, MANY.rows), MANY)
    for row, (expert,) in enumerate(ids.tolist()):
        assert torch.equal(found[row : row + 1], coded_product(rows[row : row + 1], each[expert], MANY))


def test_products_choose_by_the_matrix_and_the_rows(device: str) -> None:
    calls = []

    def other(rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        calls.append(len(rows))
        return product(rows, matrix)

    usual, invariant = (FusedProduct(other, batch_invariant=flag) for flag in (False, True))
    whole, packed = matrix_of("int8", 3, device)[0], matrix_of("Q4_0", 3, device)[0]
    many = rows_for(whole, MOST_ROWS + 1, torch.float32)
    usual(many, whole), usual(many[:20], whole), usual(many[:20], Matrix(many[:3]))
    assert calls == [MOST_ROWS + 1, 20]
    few = invariant(many[:1], whole)
    assert torch.equal(few, invariant(many, whole)[:1]) and calls == [MOST_ROWS + 1, 20]
    assert usual(rows_for(packed, 2, torch.float32)[:0], packed).shape == (0, 3)


# --- whole models ----------------------------------------------------------------------------------------------------


class CodedRun(TorchRun):
    """A worker whose matrices are the blocks of a folder, as on a GPU, multiplied by kernels."""

    def __init__(self, folder: Path, device: str) -> None:
        source = ModelFolder(folder)
        spec, tensors = read_model(source).spec, source.tensors()
        super().__init__(
            folder.with_name(f"{folder.name}-plain"), spec=spec, settings=TorchSettings(device=device, dtype="float32")
        )
        cache, where = self.worker.cache, torch.device(device)
        self.kept = kept_blocks(spec, tensors.block_types, GPU)
        reader = WeightReader(spec, tensors, "float32", block_types=self.kept)
        self.weights = TorchWeights.load(spec, reader, torch.float32, where)
        attention = PlainAttention(where)
        chosen = FusedProduct.of(self.weights.matrices(), torch.float32, batch_invariant=False)
        engines = Implementations(attention, PlainOperations(attention), chosen, PlainExperts(chosen))
        sampler = TorchSampler(spec.vocab_size)
        self.runner = EveryLogit(TorchRunner(TorchDecoder(spec, self.weights, engines), sampler))  # type: ignore[assignment]
        self.worker = Worker(WorkerParts(self.runner, cache, sampler))
        self.worker.start()


@pytest.mark.parametrize(
    ("form", "kind"), [("packed", "Q4_0"), ("awq", "Q5_0"), ("gptq-8", "Q8_0"), ("fp8-128", "E4M3"), ("float8", "E4M3")]
)
def test_a_quantised_folder_computes_what_its_widened_weights_compute(
    form: str, kind: str, device: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32} if kind == "E4M3" else {}
    folder = write_quantized(tmp_path / "model", form, num_hidden_layers=2, **sizes)
    run, plain = CodedRun(folder, device), ReferenceRun(tmp_path / "model-plain")
    assert set(run.kept.values()) == {kind}
    for each in (run, plain):
        each.prefill(0, TOKENS, chunks=[17])
    ours, theirs = (np.stack([each.logits[0, i] for i in range(20)]) for each in (run, plain))
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())
    layer = run.weights.layers[0]
    assert layer.mlp is not None
    matrices = (layer.projection, layer.output, layer.mlp.up, layer.mlp.down)
    assert all(matrix.is_coded for matrix in matrices)
    spec = read_model(ModelFolder(folder)).spec
    planned = weight_bytes(spec, "float32", "auto", codings(run.kept)) - weight_bytes(spec, "float32", "auto")
    held = sum(
        tensor.numel() * tensor.element_size()
        for layer in run.weights.layers
        for matrix in (layer.projection, layer.output, layer.mlp.up, layer.mlp.down)  # type: ignore[union-attr]
        for tensor in matrix.tensors()
    )
    widened_bytes = sum(4 * matrix.weight.shape[0] * matrix.num_inputs for matrix in matrices) * len(run.weights.layers)
    assert held - widened_bytes == planned


def test_parts_of_one_matrix_stay_blocks_only_together(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "packed", parts={"v_proj": None}, num_hidden_layers=1)
    source = ModelFolder(folder)
    spec, types = read_model(source).spec, source.block_types()
    kept = kept_blocks(spec, types, GPU)
    prefix = "model.layers.0"
    gone = {f"{prefix}.self_attn.q_proj.weight", f"{prefix}.self_attn.k_proj.weight"}
    assert types.keys() - kept.keys() == gone
    assert kept_blocks(spec, dict.fromkeys(types, "Q2_K"), GPU) == {}
    # A layer with the keys of another has a matrix of queries alone.
    [layer], query = spec.layers, "model.layers.1.self_attn.q_proj.weight"
    sharing = replace(spec, layers=(layer, replace(layer, keys_of=0)))
    assert query in kept_blocks(sharing, {**types, query: types[query.replace("1", "0")]}, GPU)
    for settings in (FLOAT32, TorchSettings(weights="widened"), TorchSettings(tensor_parallel=2)):
        assert kept_blocks(spec, types, settings) == {}
