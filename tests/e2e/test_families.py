"""`quire generate` on a folder of every family as transformers saves it: the text is that of transformers.

Greedy, in float32. Prompts are longer than the windows of these models; the short one is run with a limit on the
length, so that Phi-3 turns by its short factors, the long one by its long factors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from support.tiny_tokenizer import byte_level, write_tokenizer

pytestmark = pytest.mark.transformers

VOCABULARY = {"vocab_size": 301, "bos_token_id": 297, "eos_token_id": 299, "pad_token_id": 297}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3", "opt", "phi3", "gpt2"),
    *("smollm3", "olmo2", "olmo3", "granite", "glm4", "cohere", "cohere2", "starcoder2", "stablelm", "falcon"),
    *("gpt-neox", "phi"),
    *("gemma", "glm4-moe", "granite-moe", "mixtral", "olmoe", "qwen2-moe"),
    *("cohere2-moe", "ernie4-5", "ministral", "ministral3", "seed-oss"),
    *("qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2", "lfm2-moe", "lfm3", "granite4-h", "nemotron-h"),
    *("arcee", "ernie4-5-moe", "exaone", "exaone4", "granite-hybrid", "granite-moe-shared", "hunyuan", "phimoe"),
    *("gemma3n", "gemma4", "gemma4-keys", "gemma4-moe", "gemma4-unified"),
    *("afmoe", "cwm", "dots1", "exaone-moe", "helium", "hunyuan-moe", "mellum", "minimax-m2", "nemotron", "solar-open"),
    *("apertus", "falcon-h1", "granite-swa", "llama4", "mamba2", "olmo", "olmo-hybrid", "vaultgemma", "youtu"),
    *("granite-moe-swa", "hyperclovax", "jais2"),
)
OTHERS = (
    *("gemma3-eye", "ministral3-eye", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3-5-eye", "opt-350m"),
    "llama-3",
)
NUM_TOKENS = 24
PROMPTS = {
    "short": ("hello, the user and the ing system 12", ["--max-model-len", "64"]),
    "long": ("the user: hello and the tion of é 你\n\n" * 4 + "assistant", []),
}
QUIET = ["--raw", "--kv-memory", "2MiB", "--num-threads", "2", "--dtype", "float32", "--temperature", "0"]


def make_model(name: str) -> Any:
    from support import transformers_models as made

    if name == "qwen3":
        return made.model_of("Qwen3", {**made.SIZES, "head_dim": 16, **VOCABULARY})
    changes: dict[str, Any] = dict(VOCABULARY)
    if name in ("gemma3n", "gemma4"):
        changes["vocab_size_per_layer_input"] = VOCABULARY["vocab_size"]
    if name == "phi3":
        factors = {"short_factor": [1.0 + 0.05 * i for i in range(6)]}
        changes["rope_parameters"] = made.FORMS[name][1]["rope_parameters"] | factors
    if name == "phimoe":  # in longer texts transformers has other factors
        short = {"original_max_position_embeddings": 256, "factor": 1.0}
        changes["rope_parameters"] = made.FORMS[name][1]["rope_parameters"] | short
    return made.small_model(name, **changes)


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHERS])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and its folder of several shards with a tokenizer."""
    folder, model = tmp_path_factory.mktemp(request.param), make_model(request.param)
    model.save_pretrained(folder, max_shard_size="60KB")
    write_tokenizer(folder, byte_level(), {"eos_token": "<|im_end|>"})
    return model, folder


@pytest.mark.parametrize("length", PROMPTS)
def test_generate_writes_the_text_of_transformers(
    saved: tuple[Any, Path], length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    from support import transformers_models

    (model, folder), (prompt, options) = saved, PROMPTS[length]
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = tokenizer(prompt)["input_ids"]
    assert (len(tokens) + NUM_TOKENS <= 64) == (length == "short")
    command = ["generate", str(folder), *QUIET, *options, "--max-tokens", str(NUM_TOKENS), "-p", prompt]
    capsys.readouterr()
    assert cli.main([*command, "--json", "-q"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["prompt_token_ids"] == tokens
    ours = output["outputs"][0]["token_ids"]
    assert len(ours) == NUM_TOKENS or ours[-1] == 299
    # Each token is the likeliest after those before it, so transformers would have written the same text.
    logits = transformers_models.all_logits(model, tokens + ours[:-1])[len(tokens) - 1 :]
    assert ours == logits.argmax(axis=1).tolist() and 299 not in ours[:-1]
    text = tokenizer.decode(ours, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert output["outputs"][0]["text"] == text
    if length == "short":
        assert cli.main([*command, "-q"]) == 0
        assert capsys.readouterr().out == text + ("" if text.endswith("\n") else "\n")
