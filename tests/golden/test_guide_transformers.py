"""The guide model against transformers: the same prompts from the chat template, the same greedy answers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.guide import GUIDE_FOLDER
from support.native_runs import FLOAT32, NativeRun

SYSTEM = {"role": "system", "content": "You are the guide of quire. Answer briefly and exactly."}
QUESTIONS = [
    "What is a block table?",
    "why do you share blocks between sequences",
    "What happens when memory runs out?",
    "How does copy-on-write work?",
    "Who are you?",
    "What is the capital of France?",
]
CONVERSATIONS = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
MAX_TOKENS = 96


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    import transformers

    from support import transformers_models

    return transformers.AutoTokenizer.from_pretrained(GUIDE_FOLDER), transformers_models.load(GUIDE_FOLDER)


def their_prompt(tokenizer: Any, conversation: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


@pytest.mark.transformers
@pytest.mark.parametrize(("dtype", "weights"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_greedy_answers_are_those_of_transformers(theirs: tuple[Any, Any], dtype: str, weights: str) -> None:
    import torch

    tokenizer, model = theirs
    eos = json.loads((GUIDE_FOLDER / "generation_config.json").read_text())["eos_token_id"]
    with LLM("guide", dtype=dtype, weights=weights, kv_memory="32MiB") as llm:
        outputs = llm.chat(CONVERSATIONS, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    for conversation, output in zip(CONVERSATIONS, outputs, strict=True):
        prompt = their_prompt(tokenizer, conversation)
        assert output.prompt_token_ids == prompt
        answer = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=eos, pad_token_id=0
        )[0, len(prompt) :]
        assert output.outputs[0].text == tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.transformers
def test_greedy_tokens_are_equal_wherever_the_margin_allows(theirs: tuple[Any, Any]) -> None:
    from support import transformers_models

    tokenizer, model = theirs
    for conversation in CONVERSATIONS:
        tokens = their_prompt(tokenizer, conversation)
        run = NativeRun(GUIDE_FOLDER, settings=FLOAT32)
        run.prefill(0, tokens)
        ours = np.stack([run.logits[0, position] for position in range(len(tokens))])
        exact: NDArray[np.float32] = transformers_models.all_logits(model, tokens)
        error = float(np.abs(ours - exact).max())
        assert error <= 1e-4 * max(1.0, float(np.abs(exact).max()))
        best = np.sort(exact, axis=1)
        clear = best[:, -1] - best[:, -2] > 2 * error
        assert clear.mean() > 0.9
        assert np.array_equal(ours.argmax(1)[clear], exact.argmax(1)[clear])


@pytest.mark.transformers
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(theirs: tuple[Any, Any], pooling: str, backend: str) -> None:
    import torch

    tokenizer, model = theirs
    prompts = [their_prompt(tokenizer, conversation) for conversation in CONVERSATIONS]
    with LLM("guide", dtype="float32", backend=backend, kv_memory="32MiB", pooling=pooling) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = (states[-1] if pooling == "last" else states.mean(dim=0)).double()
        assert output.embedding == pytest.approx((pooled / pooled.norm()).tolist(), abs=2e-6)
