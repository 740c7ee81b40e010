"""Every family on the compiled core: the same bits whatever happens around a row, and what Gemma 3 keeps in memory.

The models are those of the goldens (`tests/golden/data`), so that what is right to the bit here is right there.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, Request, SamplingParams, _native
from quire.compute.models import FAMILIES, read_model
from quire.compute.models.source import ModelFolder
from support.native_runs import FLOAT32, NativeRun
from support.pairs import left_out
from support.reference_runs import ReferenceRun
from support.spec_models import write_model_of
from support.step_plans import Work

DATA = Path(__file__).parents[1] / "golden" / "data"
LENGTH = 100
FORMS = {  # of those that the goldens have, two of OPT
    *(
        "llama",
        "mistral",
        "qwen2",
        "untied-windows",
        "qwen3-moe",
        "gemma2",
        "gemma3",
        "phi3",
        "gpt2",
        "opt",
        "opt-350m",
    ),
    *("smollm3", "olmo2", "olmo3", "granite", "glm", "glm4", "cohere", "cohere2", "starcoder2", "stablelm", "falcon"),
    *("gemma", "glm4-moe", "granite-moe", "mixtral", "olmoe", "qwen2-moe"),
    *("cohere2-moe", "ernie4-5", "ministral", "ministral3", "seed-oss"),
    *("qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2", "lfm2-moe", "lfm3", "bamba", "granite4-h", "nemotron-h"),
    *("arcee", "ernie4-5-moe", "exaone", "exaone4", "granite-hybrid", "granite-moe-shared", "hunyuan", "phimoe"),
    *("gemma3n", "gemma4", "gemma4-keys", "gemma4-moe", "gemma4-unified"),
    *("afmoe", "cwm", "dots1", "exaone-moe", "helium", "hunyuan-moe", "mellum", "minimax-m2", "nemotron", "solar-open"),
    *("apertus", "falcon-h1", "granite-swa", "llama4", "mamba2", "olmo", "olmo-hybrid", "vaultgemma", "youtu"),
    *("granite-moe-swa", "hyperclovax", "jais2"),
    *("gpt-neox", "gpt-oss", "phi", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "minicpm3", "glm4-moe-lite"),
}


def golden_models() -> dict[str, tuple[dict[str, Any], Path]]:
    """Return name → config and weights of the golden models, one a family, of OPT two."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}
    for file in sorted(DATA.glob("*/cases.json")):
        for name, form in json.loads(file.read_text())["forms"].items():
            if "config" in form and name in FORMS:
                weights = file.parent / form.get("weights", "model.safetensors")
                found[name] = form["config"], weights
    return found


MODELS = golden_models()
KERNELS = _native.kernel_names()
NUMBERS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"))


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, weights = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(weights, folder / "model.safetensors")
    return folder


def tokens_of(folder: Path) -> list[int]:
    vocab_size = read_model(ModelFolder(folder)).spec.vocab_size
    return [(7 * i * i + 3 * i + 5) % vocab_size for i in range(LENGTH)]


def test_every_family_is_here() -> None:
    with_eyes = {name for name in FAMILIES if name.endswith("ForConditionalGeneration")}  # around another family
    published = {"PhiMoEForCausalLM", "ExaoneForCausalLM"}  # other names
    one_step = {  # test_encoders.py
        *("BertModel", "DistilBertModel", "EuroBertModel", "Gemma3TextModel", "JinaEmbeddingsV3Model"),
        *("ModernBertModel", "MPNetModel", "NomicBertModel", "RobertaModel", "XLMRobertaModel"),
    }
    assert {config["architectures"][0] for config, _ in MODELS.values()} == set(
        FAMILIES
    ) - with_eyes - published - one_step


# Each family has each kind of numbers once, on the instruction sets in turn; the others are left to `make test-long`.
# `test_native_decoder.py` has all options of families on each machine.
@pytest.mark.parametrize(
    ("folder", "kernels", "dtype", "weights"),
    [
        pytest.param(model, name, *numbers, marks=left_out((row + column + place) % len(KERNELS)))
        for row, model in enumerate(MODELS)
        for column, name in enumerate(KERNELS)
        for place, numbers in enumerate(NUMBERS)
    ],
    indirect=["folder"],
)
def test_chunks_batches_blocks_and_threads_leave_the_bits_alone(
    folder: Path, kernels: str, dtype: str, weights: str
) -> None:
    tokens = tokens_of(folder)
    settings = replace(FLOAT32, dtype=dtype, weights=weights, instruction_set=kernels, num_threads=1)
    whole = NativeRun(folder, settings=settings)
    whole.prefill(0, tokens)
    expected = whole.bits(0, LENGTH)
    cut = NativeRun(folder, settings=replace(settings, num_threads=2), block_size=64)
    cut.prefill(0, tokens, chunks=[1, 16, 40])
    assert cut.bits(0, LENGTH) == expected
    for row in (1, 2):
        cut.driver.open(row, tokens)
    cut.step(Work(1, 0, LENGTH - 1), Work(2, 0, 30))
    cut.step(Work(1, LENGTH - 1, 1), Work(2, 30, LENGTH - 30))
    assert cut.bits(1, LENGTH) == cut.bits(2, LENGTH) == expected


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_the_reference_gives_the_same_text(folder: Path, weights: str) -> None:
    texts = []
    for run in (ReferenceRun(folder, weights=weights), NativeRun(folder, settings=replace(FLOAT32, weights=weights))):
        first = run.prefill(0, tokens_of(folder)[:70], chunks=[30])
        texts.append([first, *run.decode(0, 70, 3)])
    assert texts[0] == texts[1]


# --- the memory of Gemma 3 ------------------------------------------------------------------------

WINDOW, BLOCK = 24, 16
LAYERS = 12  # by the published pattern: ten with a window, two without


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3-deep")
    config = MODELS["gemma3"][0] | {"num_hidden_layers": LAYERS, "layer_types": None, "max_position_embeddings": 512}
    return write_model_of(folder, config)


def bytes_for(num_tokens: int) -> int:
    """Return the bytes of a text of so many tokens: all of it in two layers, the blocks of a window in the ten others.

    A block is given back when the next one is taken, so a window lies in as many blocks as it can ever touch.
    """
    num_kv_heads, head_dim = 2, 16
    row = BLOCK * 2 * num_kv_heads * head_dim * 4  # a block of one layer: keys and values in float32
    every = -(-num_tokens // BLOCK)
    near = min(every, 1 + -(-(WINDOW - 1) // BLOCK))
    return (2 * every + 10 * near) * row


def test_window_layers_of_gemma_3_hold_the_blocks_of_the_window(gemma3: Path) -> None:
    model = read_model(ModelFolder(gemma3)).spec
    spec, tokens = model.kv_cache_spec(BLOCK), [(7 * i * i + 3 * i + 5) % model.vocab_size for i in range(150)]
    measured: dict[int, int] = {}
    settings: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "max_num_batched_tokens": 32}
    with LLM(gemma3, skip_tokenizer_init=True, kv_memory="4MiB", max_num_seqs=4, **settings) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        memory, request = llm.engine.scheduler.memory, Request("r", tokens, sampling)
        llm.engine.add_request(request)
        while llm.engine.step() is not None and not request.is_finished:
            measured[request.num_computed] = memory.ledger().used_bytes
        llm.engine.scheduler.check()
        allocated = sum(keys.nbytes + values.nbytes for keys, values in llm.engine._executor.cache.places())  # type: ignore[attr-defined]
        assert allocated == memory.ledger().num_blocks * spec.bytes_per_block
    whole = {length: spec.bytes_per_token * -(-length // BLOCK) * BLOCK for length in measured}
    for length, size in measured.items():
        if (
            length <= 160
        ):  # a chunk is written before what it leaves behind is given back; 160 is the end of its last block
            assert size <= spec.num_blocks_for(length, longest_chunk=32) * spec.bytes_per_block
        else:
            assert size == bytes_for(length) == spec.num_blocks_for(length) * spec.bytes_per_block
    lengths = sorted(measured)
    assert lengths[:5] == [32, 64, 96, 128, 150]
    assert lengths[-1] > 340
    assert measured[lengths[-1]] < 0.4 * whole[lengths[-1]]
