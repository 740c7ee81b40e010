"""The services of a server whose model knows its limits and computes nothing: for tests of what is translated."""

from __future__ import annotations

from typing import Any

from quire.core.clock import ManualClock
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.config import ServerConfig
from quire.serve.services import Services
from support.bare_server import FakeModel
from support.only_model import make_services

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.95)
LIMITS = RequestLimits(vocab_size=300, max_model_len=100, max_sequence_tokens=100, max_num_seqs=64)


class Model(FakeModel):
    """A model that knows its limits and how its makers want it sampled."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.tokenizer = tokenizer  # type: ignore[assignment]

    @property
    def limits(self) -> RequestLimits:
        return LIMITS

    def get_default_sampling_params(self) -> SamplingParams:
        return DEFAULTS


def services(tokenizer: Tokenizer | None = None, **config: Any) -> Services:
    return make_services(Model(tokenizer), ServerConfig(**config), ManualClock())
