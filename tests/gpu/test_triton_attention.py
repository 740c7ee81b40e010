"""Paged attention by Triton kernels, interpreted or on a GPU: what comes out, and that its bits are a row's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.gpu.counting_driver import inputs_of
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.attention.base import MOST_SHORT, StepBatch, StepShape
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.attention.triton import LONGEST_SHARE, StandingWork, TritonAttention
from quire.compute.torch.attention.work import MOST_PARTS
from quire.compute.torch.graphs import PROMPT_SIZES
from quire.compute.torch.kernels.merge import Results
from quire.compute.torch.kernels.paged_attention import VARIANTS, Cache, Queries, Weighting
from quire.compute.torch.kernels.tile_shape import SPLIT, Use
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.compute.torch.step_upload import uploaded
from support.paged_steps import WIDEST, WIDEST_NAME, Model, Step
from support.reference_runs import ReferenceRun
from support.spec_models import SPECS, write_spec_model
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import TorchRun

DECODES = ((1, 1), (15, 1), (16, 1), (17, 1), (64, 1), (200, 1))
CHUNKS = ((130, 3), (90, MOST_SHORT), (70, 70), (50, 5))
ACROSS_SPLITS = ((255, 1), (256, 1), (257, 1), (513, 1), (1100, 1), (530, 25))


def attention(model: Model, device: str, **options: object) -> TritonAttention:
    options = {"num_processors": 4, **options}
    return TritonAttention(model.spec, torch.device(device), num_heads=model.num_heads, **options)


def assert_near(found: list[torch.Tensor], step: Step) -> None:
    bound = 1e-5 if step.model.dtype is torch.float32 else 2e-3
    for sequence, (got, wanted) in enumerate(zip(found, step.oracle(), strict=True)):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < bound, (step.sequences[sequence], float(error))


@pytest.mark.parametrize(
    "model",
    (
        Model(),
        Model(dtype=torch.float16, kv_dtype="float16"),
        Model(group=1, num_kv_heads=3, head_dim=80, block_size=32),
        Model(group=7, num_kv_heads=1, head_dim=96, block_size=64),
        Model(group=8, num_kv_heads=1, head_dim=128, block_size=128),
        Model(group=20, num_kv_heads=1),
        Model(group=2, head_dim=256),
        Model(num_kv_heads=1, group=8, head_dim=512),
        Model(num_kv_heads=1, group=2, head_dim=512, kv_dtype="int4"),
        Model(window=40),
        Model(soft_cap=3.0),
        Model(window=100, soft_cap=2.0, group=2, head_dim=256),
        Model(sinks=True),
        Model(sinks=True, kv_dtype="k8v4", soft_cap=3.0, group=3),
        Model(sinks=True, kv_dtype="int4", window=40),
        Model(kv_dtype="int8"),
        Model(kv_dtype="fp8"),
        Model(kv_dtype="int8", dtype=torch.float16, window=20, group=2, head_dim=80),
        Model(kv_dtype="k8v4"),
        Model(kv_dtype="int4"),
        Model(kv_dtype="k8v4", head_dim=8),
        Model(kv_dtype="int4", group=7, num_kv_heads=1, head_dim=96, block_size=64),
        Model(kv_dtype="int4", soft_cap=3.0, group=2, head_dim=256),
        Model(kv_dtype="k8v4", dtype=torch.float16, window=20, group=2, head_dim=80),
        Model(kv_dtype="int4", dtype=torch.float16, window=20, group=2, head_dim=80),
    ),
    ids=repr,
)
def test_near_the_oracle(model, device):
    step = Step(model, (*DECODES, *CHUNKS), device=device)
    assert_near(step.run(attention(model, device)), step)


@pytest.mark.parametrize(
    "model",
    (
        Model(num_kv_heads=1, window=100, soft_cap=2.0, group=2, head_dim=256),
        Model(sinks=True, window=40),
        Model(kv_dtype="int8", dtype=torch.float16),
        Model(kv_dtype="k8v4", dtype=torch.float16),
        Model(kv_dtype="int4"),
    ),
    ids=repr,
)
def test_near_the_oracle_in_batch_invariant_mode(model, device):
    step = Step(model, ((17, 1), (200, 1), (70, 40)), device=device)
    assert_near(step.run(attention(model, device, batch_invariant=True)), step)


@pytest.mark.parametrize(
    ("window", "invariant", "sinks"), ((None, True, False), (600, False, False), (None, False, True))
)
def test_near_the_oracle_across_splits(window, invariant, sinks, device):
    model = Model(num_kv_heads=1, window=window, sinks=sinks)
    step = Step(model, ACROSS_SPLITS, device=device)
    assert_near(step.run(attention(model, device, batch_invariant=invariant)), step)


@pytest.mark.parametrize("kv_dtype", (WIDEST_NAME, "k8v4", "int4"))
def test_near_the_plain_backend(kv_dtype, device):
    model = Model(window=70, kv_dtype=kv_dtype)
    step = Step(model, (*DECODES, *CHUNKS), device=device)
    pair = step.pair()
    ours, plain = step.run(attention(model, device), pair), step.run(PlainAttention(torch.device(device)), pair)
    bound = 1e-5 if WIDEST is torch.float32 else 4e-3
    for got, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def test_what_is_launched_is_what_was_compiled(device):
    """Arguments have the types and the alignment that the compile gate took for granted."""
    model = Model(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, kv_dtype="bfloat16")
    step = Step(model, ((33, 1), (600, 1), (21, 3)), device=device)
    batch, pair = step.batch(), step.pair()
    launch = attention(model, device).plan(batch).launches[0][0]
    queries = torch.cat(step.queries).to(device)
    given = {
        "queries": Queries.of(queries, batch.positions),
        "cache": Cache.of(pair, batch.block_tables[0]),
        "work": launch.work,
        "results": Results.of(queries, launch.num_parts),
        "rule": Weighting.of(model.rule),
    }
    [variant] = [variant for variant in VARIANTS if variant.name == "decode bf16 128"]
    assert launch.shape == variant.constants["SHAPE"]
    for name, argument in given.items():
        kinds, marks = native_specialize_impl(CUDABackend, argument, False, True, True)
        for field, wanted, kind, mark in zip(argument._fields, variant.arguments[name], kinds, marks, strict=True):
            assert kind == ("constexpr" if wanted is None else wanted.partition(":")[0]), field
            assert mark == "D" or wanted is None or not wanted.endswith(":16"), field


# ---- bits -----------------------------------------------------------------------------------------------------------


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize(
    ("model", "invariant"),
    (
        (Model(num_kv_heads=1, window=600, kv_dtype="int8"), False),
        (Model(num_kv_heads=1, kv_dtype="int4"), False),
        (Model(num_kv_heads=1, sinks=True), False),
        (Model(num_kv_heads=1), True),
        (Model(num_kv_heads=1, kv_dtype="k8v4"), True),
    ),
    ids=repr,
)
def test_same_bits_alone_and_in_a_batch(model, invariant, device):
    sequences = ((700, 1), (1, 1), (513, 3), (540, 20))
    backend = attention(model, device, batch_invariant=invariant)
    together = bits(Step(model, sequences, device=device).run(backend))
    backwards = Step(model, sequences[::-1], range(3, -1, -1), order_seed=5, device=device)
    assert bits(backwards.run(backend)) == together[::-1]
    for seed, sequence in list(enumerate(sequences))[::3]:
        assert bits(Step(model, (sequence,), (seed,), order_seed=seed, device=device).run(backend)) == [together[seed]]


@pytest.mark.parametrize(
    ("kv_dtype", "invariant", "most_parts"),
    ((WIDEST_NAME, False, MOST_PARTS), (WIDEST_NAME, False, 40), (WIDEST_NAME, True, 40), ("int4", True, MOST_PARTS)),
)
def test_same_bits_however_the_work_is_cut(kv_dtype, invariant, most_parts, device, monkeypatch):
    monkeypatch.setattr("quire.compute.torch.attention.work.MOST_PARTS", most_parts)
    model = Model(num_kv_heads=1, kv_dtype=kv_dtype)
    step = Step(model, ((700, 1), (513, 1), (600, 1), (530, 40)), device=device)
    whole, cut = (
        attention(model, device, num_processors=processors, batch_invariant=invariant) for processors in (1, 1000)
    )
    assert not any(launch.num_parts for launch in whole.plan(step.batch()).launches[0])
    [launches] = cut.plan(step.batch()).launches
    assert all(launch.num_parts for launch in launches)
    assert len(launches) == 1 + (not invariant) + (most_parts == 40)
    assert bits(step.run(whole)) == bits(step.run(cut))


@pytest.mark.parametrize(
    ("kv_dtype", "block_size"), ((WIDEST_NAME, 32), (WIDEST_NAME, 64), (WIDEST_NAME, 128), ("k8v4", 128), ("int4", 64))
)
def test_same_bits_in_blocks_of_any_size(kv_dtype, block_size, device):
    model, sequences = Model(num_kv_heads=1, kv_dtype=kv_dtype), ((530, 1), (90, 40))
    small = Step(model, sequences, device=device).run(attention(model, device))
    model = replace(model, block_size=block_size)
    assert bits(Step(model, sequences, device=device).run(attention(model, device))) == bits(small)


@pytest.mark.parametrize(
    ("kv_dtype", "invariant", "chunks"),
    (
        (WIDEST_NAME, False, (110, 33, MOST_SHORT + 1)),
        (WIDEST_NAME, False, (MOST_SHORT, 5, 1)),
        ("int4", False, (9, 1)),
        (WIDEST_NAME, True, (70, 33, 1)),
        ("k8v4", True, (33, 1)),
        ("int4", True, (33, 1)),
    ),
)
def test_same_bits_whole_and_in_chunks(kv_dtype, invariant, chunks, device):
    """Without batch invariance, those of prompts, and those of decodes with guesses or without; with it, all."""
    model, length = Model(num_kv_heads=1, window=550, kv_dtype=kv_dtype), 620
    backend = attention(model, device, batch_invariant=invariant)
    [longest] = Step(model, ((length, max(chunks)),), device=device).run(backend)
    for count in chunks:
        [chunk] = Step(model, ((length, count),), device=device).run(backend)
        assert bits([chunk]) == bits([longest[-count:]])


@pytest.mark.parametrize(
    ("kv_dtype", "invariant"), ((WIDEST_NAME, False), (WIDEST_NAME, True), ("k8v4", True), ("int4", False))
)
def test_same_bits_with_a_shared_prefix(kv_dtype, invariant, device):
    model, sequences = (
        Model(num_kv_heads=1, group=2, kv_dtype=kv_dtype),
        ((600, 9), (600, 1), (513, 1), (512, 1), (530, 1), (1030, 1), (700, 2)),
    )
    backend = attention(model, device, batch_invariant=invariant)
    shared = Step(model, sequences, shared_tokens=512, device=device)
    apart = Step(model, sequences, shared_tokens=512, copied=True, device=device)
    tasks = [len(backend.plan(step.batch()).launches[0][0].work.tasks) for step in (shared, apart)]
    assert tasks[0] < tasks[1]
    assert bits(shared.run(backend)) == bits(apart.run(backend))


# One room, filled with one step after another: cut, shared, as many tokens as it has room for, and fewer; with guesses.
STANDING_STEPS = (
    {"sequences": ((1100, 1), (40, 1), (513, 1), (1, 1))},
    {"sequences": ((520, 1), (530, 1), (700, 1), (512, 1)), "shared_tokens": 512},
    {"sequences": ((17, 1),)},
    {"sequences": ((1025, 1), (600, 1))},
    {"sequences": ((514, 3), (1100, 2))},
)
# The same with prompts, whole and cut, before and behind decodes; and a step without any.
MIXED_STEPS = (
    {"sequences": ((100, 40), (600, 1), (530, 25))},
    {"sequences": ((1100, 1), (40, 3))},
    {"sequences": ((700, 60), (90, 17))},
)


def standing_batch(size: int, num_ids: int, device: str, longest_query: int = 1) -> StepBatch:
    places = torch.zeros(size, dtype=torch.int32, device=device)
    tables = torch.zeros(num_ids, dtype=torch.int32, device=device)
    empty = np.empty(0, np.int64)
    shape = StepShape(0, min(size, 5), longest_query, empty, empty, ())
    return StepBatch(places, places, places, places, (places,), (tables,), places, shape)


STANDING = (
    (Model(num_kv_heads=1), False),
    (Model(num_kv_heads=1, kv_dtype="int8"), True),
    (Model(num_kv_heads=1, window=600), False),
)


@pytest.mark.parametrize(
    ("model", "invariant", "size", "steps"),
    [
        *((*each, 5, STANDING_STEPS) for each in STANDING),
        *((*each, 80, MIXED_STEPS) for each in STANDING[:2]),
        pytest.param(*STANDING[2], 80, MIXED_STEPS, marks=pytest.mark.long),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else repr(value),
)
@pytest.mark.usefixtures("small_rooms")
def test_same_bits_in_a_plan_that_stands(model, invariant, size, steps, device, monkeypatch):
    monkeypatch.setattr("quire.compute.torch.attention.triton.SPARE_USUAL", 1)
    backend = attention(model, device, batch_invariant=invariant)
    standing = backend.reserve(standing_batch(size, 400, device, longest_query=size), model.dtype)
    places = []
    for number, given in enumerate(steps):
        if model.window and "shared_tokens" in given:
            continue
        step = Step(model, order_seed=number, device=device, **given)
        batch, pair = step.batch(), step.pair()
        count = batch.shape.num_tokens
        wanted = bits(step.run(backend, pair))
        place = standing.plan(batch.shape)
        places.append(place)
        standing.planned[place].batch.positions[:count].copy_(batch.positions)
        queries = torch.full((size, model.num_heads, model.head_dim), torch.nan, dtype=model.dtype, device=device)
        queries[:count] = torch.cat(step.queries)
        found = backend.run(queries, pair, standing.planned[place], model.rule)
        assert bits(list(found[:count].cpu().split([each for _, each in step.sequences]))) == wanted
        assert found.isfinite().all()  # and so are rows that count for nothing
    assert set(places) == ({0} if invariant and size == 80 else {0, 1})


def test_what_has_no_room_is_not_planned(device):
    model = Model(num_kv_heads=1)
    backend = attention(model, device, num_processors=1000)
    steps = [Step(model, sequences, device=device) for sequences in (((600, 1), (40, 1)), ((600, 1), (600, 1)))]
    standing = backend.reserve(standing_batch(2, 6000, device), model.dtype)
    assert standing.plan(steps[0].batch().shape) == 0
    kept = [planned.launches[0][0].work.tasks.clone() for planned in standing.planned]
    narrow, few = (backend.reserve(standing_batch(*sizes, device), model.dtype) for sizes in ((2, 40), (1, 400)))
    assert narrow.plan(steps[0].batch().shape) is None  # tables of 38 and 3 ids
    assert few.plan(steps[1].batch().shape) is None  # merges of two decodes
    far = replace(steps[0].batch().shape, lengths=np.array([80_000, 40]), block_tables=(np.zeros((2, 5000), int),))
    assert standing.plan(far) is None  # 157 tasks
    now = [planned.launches[0][0].work.tasks for planned in standing.planned]
    assert all(torch.equal(*pair) for pair in zip(kept, now, strict=True))
    farther = replace(steps[0].batch().shape, lengths=np.array([12_000, 40]), block_tables=(np.zeros((2, 750), int),))
    assert standing.plan(farther) == 1  # 25 tasks


@pytest.mark.parametrize("num_decodes", (1, 8, 31, 32, 100))
def test_usual_decodes_have_a_place_without_many_programs_that_do_nothing(num_decodes, device):
    backend = attention(Model(num_kv_heads=8), device, num_processors=132)
    room = standing_batch(num_decodes, 400_000, device)
    standing = backend.reserve(replace(room, shape=replace(room.shape, num_short=num_decodes)), torch.float32)
    for length in (100, 3_000):
        batch = host_step([(length, 1)] * num_decodes, device)
        assert standing.plan(batch.shape) == (num_decodes == 8 and length == 3_000)  # 8 × 6 tasks


WIDE = Model(num_kv_heads=8, group=2, head_dim=128, dtype=torch.bfloat16, kv_dtype="bfloat16")


def host_step(sequences: list[tuple[int, int]], device: str, shared_tokens: int = 0) -> StepBatch:
    """Return a step that is only planned: sequences in blocks of their own, but for a prefix that they share."""
    inputs = inputs_of(sequences, 1)
    [tables] = inputs.block_tables
    tables[:] = np.arange(tables.size).reshape(tables.shape)
    tables[:, : shared_tokens // 16] = tables[0, : shared_tokens // 16]
    return uploaded(inputs, 16, torch.device(device))


def recorded(attention: TritonAttention, size: int, device: str, num_short: int = 256) -> StandingWork:
    """Return the places of a recorded step with prompts of this many tokens."""
    room = standing_batch(size, 1 << 20, device, longest_query=size)
    room = replace(room, shape=replace(room.shape, num_short=min(size, num_short)))
    return attention.reserve(room, torch.bfloat16)


@pytest.mark.parametrize(
    ("num_decodes", "chunk", "wanted"),
    [
        *((0, 512, 0), (64, 256, 1), (64, 512, 1), (200, 512, 1), (0, 3000, 0), (16, 40, 0), (0, 17 * 30, 0)),
        *((1, 1000, 2), (1, 2000, 2), (200, 1024, 2)),
    ],
)
def test_recorded_prompts_launch_few_programs_that_do_nothing(num_decodes, chunk, wanted, device):
    backend = attention(WIDE, device, num_processors=132)
    prompts = [(17, 17)] * 30 if chunk == 17 * 30 else [(chunk, chunk)]
    batch = host_step([(600, 1)] * num_decodes + prompts, device)
    standing = recorded(backend, next(size for size in PROMPT_SIZES if size >= num_decodes + chunk), device)
    place = standing.plan(batch.shape)
    assert place == wanted
    [launches] = standing.planned[place].launches
    tasks, heads = torch.cat([launch.work.tasks for launch in launches]), (WIDE.num_kv_heads, WIDE.num_heads)
    merges = torch.cat([launch.merges for launch in launches if launch.num_parts] or [launches[0].merges[:0]])
    num_real = int((tasks[:, 1] > 0).sum()) * heads[0] + int((merges[:, 2] > 0).sum()) * heads[1]
    if place < 2:  # nothing of the prompts is cut
        assert len(tasks) * heads[0] + len(merges) * heads[1] <= 4 * num_real + 1024
        assert launches[1].num_parts == 0


@pytest.mark.parametrize("invariant", (False, True))
@pytest.mark.parametrize(("count", "shared"), ((4, 15_872), (8, 7_680), (5, 20_992)))
def test_parts_of_a_recorded_step_are_in_its_scratch(count, shared, invariant, device):
    """Prompts whose last tokens share a cached prefix, next to tiles that are cut because they are long."""
    backend = attention(WIDE, device, num_processors=132, batch_invariant=invariant)
    batch = host_step([(shared + 65, 65)] * count, device, shared)
    works = [work for _, work in backend.work(batch.shape)[0]]
    assert works[0].num_parts > MOST_PARTS or len(works) > 1 or invariant
    standing = recorded(backend, 128 * -(-65 * count // 128), device)
    place = standing.plan(batch.shape)
    assert (place is None) == (len(works) > 1)
    for launch in [] if place is None else standing.planned[place].launches[0]:
        assert launch.work.parts.max() < max(1, launch.num_parts)


@pytest.mark.parametrize("group", (2, 4))
@pytest.mark.parametrize("context", (30_000, 100_000))
@pytest.mark.parametrize("count", (50, 150, 256, 512))
def test_tokens_behind_a_long_prefix_are_cut(count, context, group, device):
    backend = attention(replace(WIDE, group=group), device, num_processors=132)
    batch = host_step([(context + count, count)], device)
    works = [work for _, work in backend.work(batch.shape)[0]]
    each = backend.shapes[0][Use.PROMPT].tokens_per_task
    stops = np.minimum(np.arange(context, context + count, each) + each, context + count)
    longest_task = int(LONGEST_SHARE * stops.sum() * WIDE.num_kv_heads / 132)
    assert max((work.tasks[:, 4] - work.tasks[:, 3]).max() for work in works) <= max(SPLIT, longest_task)
    assert all(work.num_parts <= max(MOST_PARTS, each * -(-stops[-1] // SPLIT)) for work in works)
    assert sum(len(work.tokens) for work in works) == sum(work.num_parts for work in works) or longest_task > SPLIT
    is_recorded = len(works) == 1 and works[0].num_parts <= 512 + MOST_PARTS
    assert (recorded(backend, 512, device).plan(batch.shape) is not None) == is_recorded


def test_twice_the_same(device):
    model = Model()
    step = Step(model, (*DECODES, *CHUNKS), device=device)
    pair, backend = step.pair(), attention(model, device)
    assert bits(step.run(backend, pair)) == bits(step.run(backend, pair))


# ---- a whole decoder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ("windows", "mixed-layers"))
@pytest.mark.parametrize("kv_dtype", ("float32", "k8v4", "int4"))
def test_a_decoder_over_it_is_near_the_reference(kv_dtype, model, tmp_path, device):
    if model == "windows":
        write_tiny_qwen3(tmp_path, settings={"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1})
        spec = read_model(ModelFolder(tmp_path)).spec
    else:
        spec = SPECS[model]
        write_spec_model(tmp_path, spec)
    settings = TorchSettings(device=device, dtype="float32", kv_dtype=kv_dtype)
    triton = TritonAttention(kv_cache_spec(spec, settings), torch.device(device), num_heads=spec.attention.num_heads)
    ours = TorchRun(tmp_path, spec=spec, settings=settings, attention=triton)
    reference = ReferenceRun(tmp_path, spec=spec, kv_dtype=kv_dtype)
    for run in (ours, reference):
        run.prefill(0, [(7 * i * i + 3 * i + 5) % 64 for i in range(70)], chunks=[40, 1])
    right, found = (np.stack([run.logits[place] for place in reference.logits]) for run in (reference, ours))
    # A last bit that differs may tip the rounding to 4 bits over; most of the logits agree as floats do.
    worst = np.max if kv_dtype == "float32" else np.median
    assert worst(np.abs(found - right)) <= 1e-3 * np.std(right)
    assert np.std(found - right) <= 0.02 * np.std(right)
