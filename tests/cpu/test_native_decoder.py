"""The compiled decoder: as the reference, and the same bits whatever happens around a row.

Bits are compared within one instruction set, for each one that this machine has.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import _native
from quire.compute.native import NativeSettings
from quire.compute.native.load import kernels_for
from quire.compute.worker.cache_engine import POISON
from quire.core.errors import InvalidConfigError
from quire.core.step import BlockCopy, BlockMove
from support.native_runs import FLOAT32, NativeRun
from support.pairs import left_out
from support.reference_runs import Logits, ReferenceRun
from support.spec_models import SPECS, WITHOUT_LATENTS, write_spec_model
from support.step_plans import Work, chunks_of, shuffled
from support.tiny_checkpoint import write_tiny_qwen3

LENGTH = 150  # three tiles of 64
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(LENGTH)]
ROWS = [
    [*[1] * 8, 54, *[1] * 7, 57, *[1] * 8],
    *(chunks_of(LENGTH, size) for size in (13, 16, 64, 100, LENGTH)),
    *([1], chunks_of(64, 7), chunks_of(65, 8), chunks_of(17, 3)),
]
"""The chunks of the rows of a batch. The first one decodes near the ends of tiles, at last alone."""
ALONE = 8
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MODELS = ["full", "windows", *SPECS]
ROUNDED = ["full", "windows", *WITHOUT_LATENTS]
KERNELS = _native.kernel_names()
NUMBERS: list[dict[str, Any]] = [
    *({"num_threads": 1, "dtype": "bfloat16"}, {"num_threads": 2, "dtype": "float32"}),
    *({"num_threads": 2, "dtype": "bfloat16"}, {"num_threads": 2, "weights": "int8"}),
    *({"num_threads": 2, "kv_dtype": kv_dtype} for kv_dtype in ("int8", "k8v4", "int4")),
]
MACHINES = [
    [NativeSettings(**numbers, max_num_batched_tokens=256, instruction_set=kernels) for numbers in NUMBERS]
    for kernels in KERNELS
]


def name_of(settings: NativeSettings) -> str:
    return f"{settings.instruction_set}-{settings.num_threads}-{settings.dtype}-{settings.weights}-{settings.kv_dtype}"


@pytest.fixture(params=chain(*MACHINES), ids=name_of)
def machine(request: pytest.FixtureRequest) -> NativeSettings:
    settings: NativeSettings = request.param
    return settings


class Models:
    """Folders of the models, and the bits of each computed alone, in one step, by one thread."""

    def __init__(self, folder: Path) -> None:
        for name in MODELS:
            (folder / name).mkdir()
            if name in SPECS:
                write_spec_model(folder / name, SPECS[name])
            else:
                write_tiny_qwen3(folder / name, settings=WINDOWS if name == "windows" else {})
        self._folder = folder
        self._bits: dict[tuple[str, NativeSettings], bytes] = {}
        self._logits: dict[tuple[str, str, str], Logits] = {}

    def reference(self, model: str, *, weights: str = "auto", kv_dtype: str = "float32") -> Logits:
        """The logits of the reference, once for all machines."""
        key = model, weights, kv_dtype
        if key not in self._logits:
            run = ReferenceRun(self._folder / model, spec=SPECS.get(model), weights=weights, kv_dtype=kv_dtype)
            self._logits[key] = self.logits(run)
        return self._logits[key]

    @staticmethod
    def logits(run: ReferenceRun | NativeRun) -> Logits:
        run.prefill(0, TOKENS, chunks=[30, 41])
        return np.stack([run.logits[0, position] for position in range(LENGTH)])

    def run(self, model: str, settings: NativeSettings, **options: object) -> NativeRun:
        spec = SPECS.get(model)
        return NativeRun(self._folder / model, spec=spec, settings=settings, **options)  # type: ignore[arg-type]

    def bits(self, model: str, settings: NativeSettings) -> bytes:
        key = model, replace(settings, num_threads=1)
        if key not in self._bits:
            run = self.run(*key)
            run.prefill(0, TOKENS)
            self._bits[key] = run.bits(0, LENGTH)
        return self._bits[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("instruction_set", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_reference(model: str, instruction_set: str, models: Models) -> None:
    theirs = models.reference(model)
    ours = models.logits(models.run(model, replace(FLOAT32, instruction_set=instruction_set)))
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize(
    ("model", "instruction_set", "weights"),
    [
        pytest.param(
            model, kernels, weights, marks=[pytest.mark.long] * ((row + column + place) % min(2, len(KERNELS)))
        )
        for column, model in enumerate(MODELS)
        for row, kernels in enumerate(KERNELS)
        for place, weights in enumerate(("int8", "int4"))
    ],
)
def test_logits_of_codes_are_those_of_the_reference(
    model: str, instruction_set: str, weights: str, models: Models
) -> None:
    right, theirs = models.reference(model), models.reference(model, weights=weights)
    ours = models.logits(models.run(model, replace(FLOAT32, weights=weights, instruction_set=instruction_set)))
    # A last bit that differs may tip the rounding of an input over, which a few logits show; most agree as floats do.
    differences = np.abs(ours - theirs) / max(1.0, np.abs(theirs).max())
    if model in ("experts", "latent") and weights == "int4":  # there it sends some tokens to other experts
        assert np.median(differences) <= 0.005
    else:
        assert np.median(differences) <= 1e-6
        assert differences.max() <= 0.03
    # These models have random weights and make much of small differences; rounding to int8 is one, and no larger.
    assert 0 < np.std(ours - right) <= (0.15 if weights == "int8" else 1) * np.std(right)


@pytest.mark.parametrize(
    ("model", "instruction_set", "kv_dtype", "most"),
    [
        pytest.param(
            model, kernels, *kind, marks=[pytest.mark.long] * bool((row + column + place) % min(3, len(KERNELS)))
        )
        for column, model in enumerate(ROUNDED)
        for row, kernels in enumerate(KERNELS)
        for place, kind in enumerate((("int8", 0.1), ("k8v4", 0.4), ("int4", 0.5)))
    ],
)
def test_logits_with_narrow_kv_are_those_of_the_reference(
    model: str, kv_dtype: str, most: float, instruction_set: str, models: Models
) -> None:
    right, theirs = models.reference(model), models.reference(model, kv_dtype=kv_dtype)
    ours = models.logits(models.run(model, replace(FLOAT32, kv_dtype=kv_dtype, instruction_set=instruction_set)))
    # Queries and weights are rounded to 1 / 16383, and a last bit may tip the rounding of a key over: both are little
    # compared with what rounding keys and values does, and that is little, too.
    assert np.std(ours - theirs) <= 0.2 * np.std(theirs - right)
    assert 0 < np.std(theirs - right) <= most * np.std(right)


@pytest.mark.parametrize(
    ("model", "machine", "block_size"),
    [
        pytest.param(
            *(model, machine, block_size),
            id=f"{name_of(machine)}-{model}-{block_size}",
            marks=left_out((row + place + column) % len(KERNELS)),
        )
        for row, machines in enumerate(MACHINES)
        for place, machine in enumerate(machines)
        for column, model in enumerate(MODELS if machine.kv_dtype == "auto" else ROUNDED)
        for block_size in [(16, 32, 64, 128)[(place + column // 4) % 4]]
    ],
)
def test_chunks_batches_threads_and_blocks_leave_the_bits_alone(
    model: str, machine: NativeSettings, block_size: int, models: Models
) -> None:
    num_blocks = 6 * sum(-(-sum(chunks) // block_size) for chunks in ROWS)  # no model has more groups of layers
    run = models.run(model, machine, block_size=block_size, blocks=shuffled(num_blocks), num_blocks=num_blocks)
    assert run.together(TOKENS, ROWS)[-ALONE:] == [1] * ALONE
    expected = models.bits(model, machine)
    for row, chunks in enumerate(ROWS):
        assert run.bits(row, sum(chunks)) == expected[: len(expected) // LENGTH * sum(chunks)], f"chunks {chunks[:2]}"


def test_blocks_that_were_copied_or_swapped_give_the_same_bits(machine: NativeSettings, models: Models) -> None:
    run = models.run("full", machine, blocks=[9, 4, 11, *range(40, 50)])
    run.driver.open(0, TOKENS)
    run.step(Work(0, 0, 40))
    moves = [BlockMove(9, 1), BlockMove(11, 0)]
    run.driver.set_block(0, 0, 0, 20)
    run.driver.set_block(0, 0, 2, 21)
    copies = [BlockCopy(4, 30)]
    run.driver.set_block(0, 0, 1, 30)
    back = [BlockMove(20, 1), BlockMove(21, 0)]
    run.driver.open(1, TOKENS[:5])
    run.step(Work(1, 0, 5), moves_out=moves, copies=copies, moves_in=[])
    run.step(Work(0, 40, LENGTH - 40), moves_in=back)
    assert run.bits(0, LENGTH) == models.bits("full", machine)


def test_blocks_behind_a_window_are_not_read(machine: NativeSettings, models: Models) -> None:
    run = models.run("windows", machine)
    assert [group.window for group in run.driver.spec.groups] == [None, 20, 20]
    run.prefill_behind_windows(0, TOKENS, (40, 1, 60, 30, 19))
    assert run.bits(0, LENGTH) == models.bits("windows", machine)


def test_memory_that_was_never_written_does_not_leak_into_logits(machine: NativeSettings, models: Models) -> None:
    run = models.run("full", machine, blocks=[3, 5], num_blocks=8)
    run.prefill(0, TOKENS[:20])
    assert all(np.isfinite(logits).all() for logits in run.logits.values())
    keys, values = run.worker.cache.places()[0]
    for array in (keys, values):
        unused = np.delete(array, [3, 5], axis=0)
        assert np.isnan(unused).all() if array.dtype == np.float32 else (unused == POISON[array.dtype.type]).all()


def test_a_machine_says_what_it_has() -> None:
    with pytest.raises(InvalidConfigError, match=r"^instruction set is 'mmx'; allowed: one of portable"):
        kernels_for("mmx")
