"""Adapters in GGUF files: the same as the folder of PEFT that they were converted from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM
from quire.compute.adapters.folder import read_adapter
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.core.errors import CheckpointError
from support.adapters import PEFT, Tensors, adapter_tensors, write_adapter
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3
from support.tiny_gemma3n import write_tiny_gemma3n
from support.tiny_gemma4 import write_tiny_gemma4
from support.tiny_lfm2 import write_tiny_lfm2

MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
RANK, ALPHA = 5, 10.0
CASES = Path(__file__).parents[1] / "golden" / "data" / "families" / "cases.json"


def turned(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return the rows of queries or keys as llama.cpp has them: the halves of each head in turn."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf_adapter(
    path: Path, tensors: Tensors, spec: DecoderSpec, architecture: str, settings: dict[str, Any] | None = None
) -> Path:
    """Write an adapter as llama.cpp converts it."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | (settings or {})).items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", ALPHA)
    experts: dict[str, list[NDArray[np.float32]]] = {}
    for name, numbers in tensors.items():
        layer, _, rest = name.removeprefix(f"{PEFT}model.layers.").partition(".")
        module, _, which = rest.removesuffix(".weight").rpartition(".lora_")
        if module.startswith("mlp.experts."):
            stack = f"blk.{layer}.{MATRICES['mlp.' + module.rpartition('.')[2]]}_exps.weight.lora_{which.lower()}"
            experts.setdefault(stack, []).append(numbers)
            continue
        rows = numbers
        if architecture == "llama" and which == "B" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = spec.attention.num_heads if "q_proj" in module else spec.attention.num_kv_heads
            rows = turned(numbers, heads)
        writer.add_tensor(f"blk.{layer}.{MATRICES[module]}.weight.lora_{which.lower()}", rows)
    for name, each in experts.items():
        writer.add_tensor(name, np.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3n", "gemma4", "lfm2"])
def test_it_is_the_adapter_that_it_was_converted_from(tmp_path: Path, architecture: str) -> None:
    writers: Any = {"llama": write_tiny_llama, "qwen3": write_tiny_qwen3}
    writers |= {"gemma3n": write_tiny_gemma3n, "gemma4": write_tiny_gemma4, "lfm2": write_tiny_lfm2}
    model = writers[architecture](tmp_path / "model")
    spec = read_model(ModelFolder(model)).spec
    tensors = adapter_tensors(spec, rank=RANK)
    folder = write_adapter(tmp_path / "tune", tensors, {"lora_alpha": ALPHA})
    file = write_gguf_adapter(tmp_path / "tune.gguf", tensors, spec, architecture)
    ones, others = (
        {(each.layer, each.part): each for each in read_adapter(path, spec, 16).read()} for path in (folder, file)
    )
    assert ones.keys() == others.keys()
    for place, one in ones.items():
        assert np.array_equal(one.a, others[place].a) and np.array_equal(one.b, others[place].b), place
        assert one.scale == others[place].scale == ALPHA / RANK
    texts = []
    for path in (folder, file):
        with LLM(model, kv_memory="1MiB", skip_tokenizer_init=True, adapter={"tune": path}) as llm:
            (output,) = llm.generate([[5, 6, 7]], adapter="tune", max_tokens=8, temperature=0, use_tqdm=False)
            texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_experts_are_those_that_were_stacked(tmp_path: Path) -> None:
    case = json.loads(CASES.read_text())["forms"]["qwen3-moe"]
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    spec = read_model(ModelFolder(tmp_path)).spec
    tensors = adapter_tensors(spec, rank=RANK)
    folder = write_adapter(tmp_path / "tune", tensors, {"lora_alpha": ALPHA})
    file = write_gguf_adapter(tmp_path / "tune.gguf", tensors, spec, "qwen3moe")
    ones, others = (
        {(each.layer, each.part, each.expert): each for each in read_adapter(path, spec, 16).read()}
        for path in (folder, file)
    )
    assert ones.keys() == others.keys() and len(ones) > 2 * 3 * 6
    for place, one in ones.items():
        assert np.array_equal(one.a, others[place].a) and np.array_equal(one.b, others[place].b), place
    for which in "AB":
        half = {name: each for name, each in tensors.items() if not name.endswith(f"up_proj.lora_{which}.weight")}
        path = write_gguf_adapter(tmp_path / f"{which}.gguf", half, spec, "qwen3moe")
        with pytest.raises(CheckpointError, match="alone"):
            read_adapter(path, spec, 16)


def test_files_that_are_no_adapter_of_the_model_are_refused(tmp_path: Path) -> None:
    spec = read_model(ModelFolder(write_tiny_llama(tmp_path / "model"))).spec
    tensors = adapter_tensors(spec, rank=RANK)

    def refusal(name: str, architecture: str = "llama", only: Tensors | None = None, **settings: str) -> str:
        kept = tensors if only is None else only
        named = {key.replace("_", ".", 1): value for key, value in settings.items()}
        path = write_gguf_adapter(tmp_path / f"{name}.gguf", kept, spec, architecture, named)
        with pytest.raises(CheckpointError) as caught:
            list(read_adapter(path, spec, 16).read())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "general.type is 'model'" in refusal("type", general_type="model")
    assert "adapter.type is 'control'" in refusal("kind", adapter_type="control")
    assert "another, or the folder of PEFT" in refusal("gpt2", "gpt2")
    first = dict(list(tensors.items())[:1])
    assert "alone" in refusal("half", only=first)
    (tmp_path / "torn.gguf").write_bytes((tmp_path / "type.gguf").read_bytes()[:200])
    with pytest.raises(CheckpointError):
        read_adapter(tmp_path / "torn.gguf", spec, 16)
