"""What requests to fill in need from the model: its tokens for a gap, and those that end what fills it."""

from __future__ import annotations

from dataclasses import replace

from quire.core.sampling_params import SamplingParams
from quire.engine.text.infill import InfillFormat, infill_format
from quire.serve.errors import unsupported
from quire.serve.services import Services


def required_infill(services: Services, field: str) -> InfillFormat:
    """Return how the model fills in; raises `ApiError` about a field if it cannot."""
    tokenizer = services.model.tokenizer
    found = None if tokenizer is None else infill_format(tokenizer)
    if found is None:
        raise unsupported(field, "this model has no tokens for text between a prefix and a suffix")
    return found


def ended_by(sampling: SamplingParams, infill: InfillFormat) -> SamplingParams:
    """Return sampling parameters that end a middle where the model begins something else."""
    return replace(sampling, stop_token_ids=tuple({*sampling.stop_token_ids, *infill.end_token_ids}))
