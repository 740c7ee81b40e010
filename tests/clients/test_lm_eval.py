"""lm-eval over `local-completions`: log-likelihoods of texts, compared with those that transformers gave once.

It sends batches of token ids with echo and cuts the log-probabilities of the continuation out of the answer by count,
so a begin-of-text token too many or a last token too few shows at once. `loglikelihoods.json` is made by
`scripts/make_loglikelihoods.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

EXPECTED = json.loads(Path(__file__).with_name("loglikelihoods.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_log_likelihoods_are_those_of_transformers(batch_size: int, base_url: str, guide: str) -> None:
    model = LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model="guide",
        tokenizer=guide,
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        batch_size=batch_size,
        num_concurrent=2,
        max_length=2048,
    )
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(case["context"], case["continuation"]), idx=index)
        for index, case in enumerate(EXPECTED)
    ]
    found = model.loglikelihood(requests)
    assert [greedy for _, greedy in found] == [case["is_greedy"] for case in EXPECTED]
    for (value, _), case in zip(found, EXPECTED, strict=True):
        assert value == pytest.approx(case["loglikelihood"], rel=1e-4)
