"""A text cut at every token goes on in another engine with the same tokens, log-probabilities and end, to the bit."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.grammar import Grammar
from quire.core.logprobs import TokenLogprobs
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.client import EngineClient
from quire.engine.commands import Add, Clear
from quire.engine.door import open_engine
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

END = 300
LONGEST = 26
SHORT = 130
Place = tuple[str, int]


@dataclass
class Text:
    """What an engine has said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishReason | None = None
    error: str = ""

    def behind(self, cut: int) -> Text:
        """The same without its first tokens."""
        return Text(self.tokens[cut:], self.logprobs[cut:], self.end, self.error)


WANTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "drawn": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "repeated": {"temperature": 0.8, "repetition_penalty": 1.4, "logprobs": 0},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.6, "logprobs": 2},
    "min_tokens": {"temperature": 1.5, "min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 2)), "logprobs": 1},
    "ends": {"temperature": 1.5, "stop_token_ids": tuple(range(0, 300, 9)), "logprobs": 1},
    "bad words": {"temperature": 1.0, "bad_words_ids": tuple((i, i + 1) for i in range(200)), "ignore_eos": True},
    "bias": {"temperature": 0.9, "logit_bias": ((3, 2.0), (40, -5.0), (41, 1.0)), "logprobs": 1},
    "regex": {"temperature": 1.3, "grammar": Grammar.regex("([a-e]{2,4} ){3,6}\\."), "logprobs": 2},
    "choice": {"temperature": 1.0, "grammar": Grammar.choice(["the block", "the blocks are", "a table"])},
    "schema": {
        "temperature": 1.1,
        "grammar": Grammar.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
        "frequency_penalty": 0.4,
    },
    "samples": {"temperature": 1.3, "n": 3, "logprobs": 1, "stop_token_ids": tuple(range(0, 300, 40))},
    "held samples": {"temperature": 1.3, "n": 2, "grammar": Grammar.regex("[a-z]{4,12}")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"vocab_size": 384, "eos_token_id": END, "max_position_embeddings": 600}
    return write_chatml(write_tiny_qwen3(tmp_path_factory.mktemp("model"), settings=settings))


def requests() -> list[Add]:
    return [
        Add(
            name,
            array("i", [(5 * i * i + 3 * i + index // 3) % 90 for i in range(3 + 7 * index)]),
            SamplingParams(**{"seed": 40 + index, "max_tokens": LONGEST, **wanted}),
        )
        for index, (name, wanted) in enumerate(WANTED.items())
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guesses and int8": {"speculation": "ngram", "dtype": "bfloat16", "kv_dtype": "int8"},
    "little memory": {"kv_memory": "256KiB", "max_model_len": SHORT, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=SETTINGS)
def engines(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[EngineClient, EngineClient]]:
    """Two engines of the same settings, each with everything of its own."""
    settings = {"kv_memory": "8MiB", "max_model_len": 300, "num_threads": 1, **SETTINGS[request.param]}
    opened = [open_engine(EngineConfig(model=str(folder), **settings), SystemClock()) for _ in range(2)]
    clients = [EngineClient(core) for _, core in opened]
    yield clients[0], clients[1]
    for client, (door, _) in zip(clients, opened, strict=True):
        client.close()
        door.close()


def run(client: EngineClient, wanted: Sequence[Add]) -> dict[Place, Text]:
    texts: dict[Place, Text] = defaultdict(Text)
    for add in wanted:
        client.send(add)
    while not client.is_idle:
        for update in client.receive():
            text = texts[update.request_id, update.branch]
            text.tokens += update.token_ids
            text.logprobs += update.logprobs
            text.end, text.error = update.finish_reason, update.error
    return dict(texts)


def continued(add: Add, branch: int, output: list[int]) -> Add:
    """The request of one sequence, with what it has said so far."""
    seed = (add.sampling.seed or 0) + branch
    sampling = replace(add.sampling, n=1, best_of=None, seed=seed)
    return replace(add, request_id=f"{add.request_id}.{branch}", sampling=sampling, output_token_ids=array("i", output))


def test_every_text_cut_at_every_token(engines: tuple[EngineClient, EngineClient]) -> None:
    first, second = engines
    wanted = requests()
    whole = run(first, wanted)
    assert {text.error for text in whole.values()} == {""}
    assert {text.end for text in whole.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    num_cuts = 0
    for cut in range(LONGEST):
        going_on = [
            (add, branch, whole[add.request_id, branch])
            for add in wanted
            for branch in range(add.sampling.n)
            if cut < len(whole[add.request_id, branch].tokens)
        ]
        texts = run(second, [continued(add, branch, text.tokens[:cut]) for add, branch, text in going_on])
        for add, branch, text in going_on:
            assert texts[f"{add.request_id}.{branch}", 0] == text.behind(cut), (add.request_id, branch, cut)
        num_cuts += len(going_on)
        if cut % 2:
            second.send(Clear())
    assert num_cuts == sum(len(text.tokens) for text in whole.values())
    assert second.stats().num_used_blocks == 0
    assert bool(second.stats().preemptions_total) == (second.limits.max_model_len == SHORT)


def test_what_a_grammar_refuses_cannot_go_on(engines: tuple[EngineClient, EngineClient]) -> None:
    _, second = engines
    sampling = SamplingParams(max_tokens=9, seed=1, grammar=Grammar.regex("[a-e]{3}"))
    ((_, text),) = run(second, [Add("r", array("i", [1, 2]), sampling, output_token_ids=array("i", [7]))]).items()
    assert text.end is FinishReason.ERROR
    assert "grammar" in text.error
