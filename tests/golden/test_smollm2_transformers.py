"""SmolLM2 from its GGUF file against transformers over the widened weights: prompts, and 12 greedy texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, RequestOutput, SamplingParams
from support.smollm2 import smollm2_path

MAX_TOKENS = 64
CONTROL = 3  # the type of a token that stands for no text
SUBJECTS = ("the sea", "bread", "winter", "a lost key", "the moon", "an old map")
KINDS = (
    "What is {}?",
    "Tell a short story about {}.",
    "Why do people write about {}? Name 3 reasons.",
    "def describe():  # prints a line about {}",
    "Translate into French: I like {} — very much!",
)
# Each subject with two kinds.
QUESTIONS = [
    (2 * KINDS)[kind].format(subject) for number, subject in enumerate(SUBJECTS) for kind in (number, number + 1)
]


PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ONCE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    """Return a tokenizer and a model of transformers, from the file as the package of its authors reads it."""
    import gguf
    import torch
    import transformers

    torch.set_num_threads(1)
    reader = gguf.GGUFReader(smollm2_path())
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=setting(reader, "llama.embedding_length"),
        intermediate_size=setting(reader, "llama.feed_forward_length"),
        num_hidden_layers=setting(reader, "llama.block_count"),
        num_attention_heads=setting(reader, "llama.attention.head_count"),
        num_key_value_heads=setting(reader, "llama.attention.head_count_kv"),
        rms_norm_eps=setting(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": setting(reader, "llama.rope.freq_base")},
        max_position_embeddings=setting(reader, "llama.context_length"),
        tie_word_embeddings=True,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {their_name(tensor.name): torch.from_numpy(numbers(tensor, heads)) for tensor in reader.tensors}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.set_attn_implementation("eager")
    return their_tokenizer(reader), model.eval().requires_grad_(False)


def setting(reader: Any, name: str) -> Any:
    return reader.get_field(name).contents()


def their_name(name: str) -> str:
    if not name.startswith("blk."):
        return ONCE[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def numbers(tensor: Any, heads: dict[str, int]) -> NDArray[np.float32]:
    """Return a tensor as float32, its rows in the order of Hugging Face: GGUF interleaves the halves of a head."""
    import gguf

    found: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if part in heads:
        rows, columns = found.shape
        found = found.reshape(heads[part], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return np.array(found, np.float32)


def their_tokenizer(reader: Any) -> Any:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = setting(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in setting(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    kinds = setting(reader, "tokenizer.ggml.token_type")
    made.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    template = setting(reader, "tokenizer.chat_template")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def outputs() -> list[RequestOutput]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(smollm2_path(), dtype="float32", weights="widened", kv_memory="256MiB", max_model_len=512) as llm:
        return llm.chat(conversations, sampling, use_tqdm=False)


@pytest.mark.transformers
def test_prompts_and_greedy_texts_are_those_of_transformers(
    theirs: tuple[Any, Any], outputs: list[RequestOutput]
) -> None:
    """Each token is the likeliest after those before it, so transformers would have written the same text."""
    import torch

    tokenizer, model = theirs
    for question, output in zip(QUESTIONS, outputs, strict=True):
        conversation = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert prompt == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(answer) == MAX_TOKENS or answer[-1] in (0, 2)
        logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1].numpy()
        assert np.argmax(logits, axis=1).tolist() == answer
        assert output.outputs[0].text == tokenizer.decode(answer, skip_special_tokens=True)
