"""FlashInfer as attention: the pages that it is given, what is refused, and on a GPU what comes out."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.attention.flashinfer import FlashInferAttention, load_package
from quire.compute.torch.attention.pages import Pages
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.load import create_attention
from quire.compute.torch.settings import FLASHINFER_SCRATCH_BYTES, TorchSettings, activation_bytes, kv_cache_spec
from quire.core.errors import ExecutionError, InvalidConfigError
from support import documented_flashinfer
from support.paged_steps import Model, Step
from support.tiny_checkpoint import write_tiny_qwen3


def has_flashinfer() -> bool:
    try:
        version("flashinfer-python")
    except PackageNotFoundError:
        return False
    return True


needs_flashinfer = pytest.mark.skipif(not has_flashinfer(), reason="needs a GPU, and the extra quire[flashinfer]")

# ---- pages ----------------------------------------------------------------------------------------------------------

SEQUENCES = st.integers(1, 90).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


@given(
    st.lists(SEQUENCES, min_size=1, max_size=6),
    st.sampled_from((1, 4, 16)),
    st.one_of(st.none(), st.integers(1, 100)),
    st.data(),
)
def test_pages_lead_to_every_token_that_is_seen_and_to_none_else(sequences, block_size, window, data):
    step = Step(Model(num_kv_heads=1, group=1, head_dim=1, block_size=block_size, window=window), sequences)
    shape = step.batch().shape
    first = data.draw(st.integers(0, len(sequences)))
    last = data.draw(st.integers(first, len(sequences)))
    pages = Pages.of(shape, slice(first, last), 0, window, block_size)
    assert len(pages.query_starts) == len(pages.indptr) == len(pages.last_lengths) + 1 == last - first + 1
    assert len(pages.indices) == pages.indptr[-1]
    for row, (length, count) in enumerate(sequences[first:last]):
        assert pages.query_starts[row + 1] - pages.query_starts[row] == count
        assert 1 <= pages.last_lengths[row] <= block_size
        ids = pages.indices[pages.indptr[row] : pages.indptr[row + 1]]
        num_tokens = (len(ids) - 1) * block_size + pages.last_lengths[row]
        # Token t of the list stands at position length - num_tokens + t.
        positions = np.arange(length - num_tokens, length)
        wanted = shape.block_tables[0][first + row, positions // block_size]
        assert np.repeat(ids, block_size)[:num_tokens].tolist() == wanted.tolist()
        assert (ids >= 0).all()
        oldest = 0 if window is None else max(0, length - count - window + 1)
        assert positions[0] <= oldest < positions[0] + block_size


# ---- what is refused ------------------------------------------------------------------------------------------------

FITTING = TorchSettings(dtype="float16", attention="flashinfer")


def spec_of(folder, head_dim=64):
    write_tiny_qwen3(folder, settings={"head_dim": head_dim})
    return read_model(ModelFolder(folder)).spec


@pytest.mark.parametrize(
    ("head_dim", "settings", "reason"),
    (
        (80, FITTING, "FlashInfer supports heads of 64, 128, 256 numbers, and the model's have 80"),
        (64, replace(FITTING, dtype="float32"), "FlashInfer does not compute in float32"),
        *(
            (64, replace(FITTING, kv_dtype=kv_dtype), f"FlashInfer supports no scale .* which {kv_dtype} has")
            for kv_dtype in ("int8", "k8v4", "int4")
        ),
        (64, replace(FITTING, kv_dtype="fp8"), "FlashInfer supports no scale .* which fp8 has"),
        (64, replace(FITTING, kv_dtype="bfloat16"), "FlashInfer is not used with bfloat16 KV memory and float16"),
        (64, replace(FITTING, batch_invariant=True), "FlashInfer splits contexts .* batch_invariant is on"),
        (64, replace(FITTING, device="cpu"), "the others need a GPU"),
        (64, TorchSettings(device="cpu", attention="triton"), "the others need a GPU"),
    ),
)
def test_what_it_cannot_do_is_refused_before_anything_is_read(tmp_path, head_dim, settings, reason):
    with pytest.raises(InvalidConfigError, match=f"attention_backend .*{reason}"):
        kv_cache_spec(spec_of(tmp_path, head_dim), settings)


def test_sinks_are_refused_before_anything_is_read(tmp_path):
    spec = spec_of(tmp_path)
    with pytest.raises(InvalidConfigError, match="FlashInfer is not used with attention sinks"):
        kv_cache_spec(replace(spec, attention=replace(spec.attention, sinks=True)), FITTING)


def test_what_it_can_do_is_planned_with_its_scratch(tmp_path):
    spec = spec_of(tmp_path)
    assert kv_cache_spec(spec, FITTING).head_dim == 64
    without = activation_bytes(spec, replace(FITTING, attention="auto"))
    assert activation_bytes(spec, FITTING) - without == FLASHINFER_SCRATCH_BYTES


def test_plain_attention_can_be_asked_for(tmp_path, device):
    settings = TorchSettings(device=device, attention="plain")
    assert isinstance(create_attention(spec_of(tmp_path), settings), PlainAttention)


@pytest.mark.skipif(has_flashinfer(), reason="FlashInfer is installed")
def test_one_that_is_missing_is_named_with_its_extra(tmp_path):
    with pytest.raises(ExecutionError, match=r"needs flashinfer-python 0.6 or 0.7: pip install 'quire\[flashinfer\]'"):
        create_attention(spec_of(tmp_path), FITTING)


# ---- the library ----------------------------------------------------------------------------------------------------


@needs_flashinfer
def test_the_wrappers_take_what_they_are_planned_with():
    """Without a GPU nothing can be planned; names of arguments can be looked at."""
    package = load_package()
    decode, prefill = package.BatchDecodeWithPagedKVCacheWrapper, package.BatchPrefillWithPagedKVCacheWrapper
    common = {"window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type"}
    planning = inspect.signature(getattr(decode, "_plan_impl", decode.plan)).parameters
    assert common <= set(planning)
    assert list(planning)[1:4] == ["indptr", "indices", "last_page_len"]
    assert common | {"causal"} <= set(inspect.signature(prefill.plan).parameters)
    first = ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]
    assert list(inspect.signature(prefill.plan).parameters)[1:5] == first
    assert "use_tensor_cores" in inspect.signature(decode.__init__).parameters
    for kind in (decode, prefill):
        assert "backend" in inspect.signature(kind.__init__).parameters
        assert {"q", "paged_kv_cache", "out"} <= set(inspect.signature(kind.run).parameters)


# ---- what comes out -------------------------------------------------------------------------------------------------

MODELS = (
    Model(),
    Model(group=1, num_kv_heads=3),
    Model(group=7, num_kv_heads=1, head_dim=128, block_size=64),
    Model(group=2, head_dim=256),
    Model(window=40),
    Model(soft_cap=3.0),
    Model(window=100, soft_cap=2.0, group=2, head_dim=128, block_size=32),
)
DECODES = ((1, 1), (15, 1), (16, 1), (17, 1), (64, 1), (1200, 1))
CHUNKS = ((70, 70), (130, 3))


def assert_near_the_oracle_and_the_plain_backend(package, model, device):
    model = replace(model, kv_dtype=str(model.dtype).removeprefix("torch."))
    attention = FlashInferAttention(package, model.spec, torch.device(device), num_heads=model.num_heads)
    bound = 1e-2 if model.dtype is torch.bfloat16 else 2e-3
    for sequences in (DECODES, CHUNKS, DECODES + CHUNKS):  # wrappers are planned again, for other steps
        step = Step(model, sequences, device=device)
        pair = step.pair()
        _clean_before_windows(model, pair)
        found, plain = (step.run(each, pair) for each in (attention, PlainAttention(torch.device(device))))
        for got, wanted, exact in zip(found, plain, step.oracle(), strict=True):
            assert (got.double() - exact).norm() / exact.norm() < bound
            assert (got.double() - wanted.double()).norm() / exact.norm() < 2 * bound


def _clean_before_windows(model, pair):
    """Of the oldest block that is seen it multiplies by 0 what lies before the window: finite numbers, and no NaN."""
    if model.window is not None:
        pair.keys.nan_to_num_()
        pair.values.nan_to_num_()


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_what_it_is_told_means_what_it_should(model):
    assert_near_the_oracle_and_the_plain_backend(documented_flashinfer, replace(model, dtype=torch.float16), "cpu")


def test_a_step_keeps_its_plan_while_the_next_one_is_planned_and_run():
    model = Model(dtype=torch.float16, kv_dtype="float16")
    attention = FlashInferAttention(documented_flashinfer, model.spec, torch.device("cpu"), num_heads=model.num_heads)
    for sequences in ((DECODES, CHUNKS), (DECODES + CHUNKS, DECODES[::-1])):
        steps = [Step(model, each) for each in sequences]
        pairs, planned = [step.pair() for step in steps], [attention.plan(step.batch()) for step in steps]

        def layer(index, steps=steps, pairs=pairs, planned=planned):
            return attention.run(torch.cat(steps[index].queries), pairs[index], planned[index], model.rule)

        first, other, again = layer(0), layer(1), layer(0)
        assert torch.equal(first, again)
        for step, found in zip(steps, (first, other), strict=True):
            for got, exact in zip(found.split([count for _, count in step.sequences]), step.oracle(), strict=True):
                assert (got.double() - exact).norm() / exact.norm() < 2e-3


@pytest.mark.parametrize(
    ("raised", "told", "message"),
    (
        (
            RuntimeError("Could not find nvcc\nand so on"),
            ExecutionError,
            "FlashInfer cannot attend: Could not find nvcc$",
        ),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    ),
)
def test_what_keeps_its_kernels_from_being_compiled_is_said_in_a_line(raised, told, message):
    class Failing(documented_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *arguments, **told):
            raise raised

    model, package = Model(), SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Failing)
    attention = FlashInferAttention(package, model.spec, torch.device("cpu"), num_heads=model.num_heads)
    with pytest.raises(told, match=message):
        Step(model, DECODES).run(attention)


@needs_flashinfer
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_near_the_oracle_on_a_gpu(model, dtype, device):
    assert_near_the_oracle_and_the_plain_backend(load_package(), replace(model, dtype=dtype), device)
