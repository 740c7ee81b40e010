"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after the padding token's row of their table."""

from __future__ import annotations

from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.bert import bert_like
from quire.compute.models.config_file import ConfigFile

PREFIX: Final = "roberta."
PADDING: Final = 1


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an XLM-RoBERTa model; refuses settings that quire does not interpret."""
    return bert_like(config, PREFIX, config.size("pad_token_id", PADDING, low=0) + 1)
