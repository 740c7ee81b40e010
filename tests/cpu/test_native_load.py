"""Loading takes the memory of the weights, and little besides for a moment."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native import NativeSettings, kv_cache_spec
from quire.compute.native.load import load_parts
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.errors import InvalidConfigError
from support.spec_models import PLAIN
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3

LOAD = """
import sys
from pathlib import Path
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.load import NativeSettings, kv_cache_spec, load_parts
from quire.compute.weights.codes import in_groups
from quire.compute.weights.decoder_weights import weight_bytes

def in_memory(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

model = read_model(ModelFolder(Path(sys.argv[1])))
dtype, weights = sys.argv[2:]
settings = NativeSettings(dtype=dtype, weights=weights, max_num_seqs=1, max_num_batched_tokens=8, num_threads=1)
before = in_memory("VmRSS")
parts = load_parts(model, settings, num_blocks=1)
print(weight_bytes(model.spec, dtype, in_groups(weights), compact=True), parts.runner.weight_bytes)
print(in_memory("VmHWM") - before, in_memory("VmRSS") - before)
"""


START = """
import sys, time
from pathlib import Path
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.load import NativeSettings, kv_cache_spec, load_parts
from quire.compute.worker.worker import Worker

def in_memory():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

model = read_model(ModelFolder(Path(sys.argv[1])))
settings = NativeSettings(max_num_seqs=1, max_num_batched_tokens=8, touch_kv_memory=sys.argv[2])
num_blocks = (64 << 20) // kv_cache_spec(model.spec, settings.block_size, settings.stored_kv_dtype).bytes_per_block
worker = Worker(parts := load_parts(model, settings, num_blocks))
before = in_memory()
worker.start()
print(in_memory() - before)
while parts.runner.num_unprepared:
    time.sleep(0.01)
print(in_memory() - before)
worker.shutdown()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes memory that nothing has written")
@pytest.mark.parametrize(("touch", "at_start", "later"), [("use", 0, 0), ("idle", 0, 64), ("start", 64, 64)])
def test_kv_memory_is_taken_at_the_start_while_idle_or_as_it_is_used(
    touch: str, at_start: int, later: int, tmp_path: Path
) -> None:
    write_tiny_qwen3(tmp_path)
    command = [sys.executable, "-c", START, tmp_path, touch]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = [int(line) / (1 << 20) for line in done.stdout.split()]
    for taken, expected in zip(found, (at_start, later), strict=True):
        assert expected - 4 <= taken <= expected + 12


@pytest.fixture(scope="module")
def larger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a larger model, whose weights are stored in one way or another; written once for each way.

    All layers have the same numbers, which take time to draw.
    """
    folder = tmp_path_factory.getbasetemp() / f"larger-{request.param}"
    if folder.exists():
        return folder
    folder.mkdir()
    config = tiny_qwen3_config() | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    tensors = tiny_qwen3_tensors(config, seed=0)
    for layer, name in product(range(1, 24), [name for name in tensors if ".layers.0." in name]):
        tensors[name.replace(".0.", f".{layer}.")] = tensors[name]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 24}))
    write_model_weights(folder, tensors, dtype=request.param, num_shards=2)
    return folder


@pytest.mark.parametrize(
    ("larger", "dtype", "weights"),
    [
        ("BF16", "bfloat16", "auto"),
        ("BF16", "bfloat16", "int8"),
        ("F32", "bfloat16", "auto"),
        ("F32", "float32", "auto"),
        ("F32", "float32", "int8"),
        ("F16", "bfloat16", "int8"),
    ],
    indirect=["larger"],
)
def test_what_was_packed_is_let_go(larger: Path, dtype: str, weights: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, larger, dtype, weights], capture_output=True, text=True, check=True, timeout=300
    )
    planned, packed, peak, held = map(int, done.stdout.split())
    assert planned > (38 if weights == "int8" else 56 if dtype == "bfloat16" else 75) << 20
    assert planned <= packed < 1.01 * planned
    assert peak < planned + (48 << 20)
    assert held < planned + (24 << 20)


def test_how_far_the_weights_are_grows_to_all_of_them(tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_tiny_qwen3(tmp_path, tie=False)))
    settings = NativeSettings(dtype="bfloat16", max_num_seqs=1, max_num_batched_tokens=8)
    noted: list[tuple[int, int, str]] = []
    load_parts(model, settings, num_blocks=1, note_loaded=lambda *found: noted.append(found))
    done, totals, whats = zip(*noted, strict=True)
    assert set(whats) == {"weights"}
    assert list(done) == sorted(done)
    assert (done[0], done[-1], set(totals)) == (0, totals[0], {weight_bytes(model.spec, "bfloat16")})
    assert len(set(done)) == 2 + len(model.spec.layers)  # nothing, what stands once, and then layer after layer


def test_heads_too_wide_for_sums_of_int8_are_refused() -> None:
    attention = replace(PLAIN.attention, head_dim=1040)
    spec = replace(PLAIN, attention=attention)
    assert kv_cache_spec(spec, 16, "bfloat16").head_dim == 1040
    with pytest.raises(InvalidConfigError, match=r"^kv_dtype is 'int8'; .* heads of at most 1024 numbers, not 1040"):
        kv_cache_spec(spec, 16, "int8")
