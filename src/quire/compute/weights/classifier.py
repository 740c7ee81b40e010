"""Classifier: the rows that score the labels of a text, on the hidden state of its last token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.labels import SCORE_TENSOR, Labels, require_width
from quire.compute.models.parts import Part
from quire.compute.weights.weight_file import WeightFile
from quire.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Classifier:
    """A row for each label. Sums are in float64 and in a fixed order, so every engine gets the same bits for a text."""

    rows: NDArray[np.float64]  # [labels, hidden_size]
    is_one_of: bool

    def shares(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of each label for a hidden state.

        >>> Classifier(np.array([[1.0, 0.0], [0.0, 1.0]]), True).shares(np.array([2.0, 2.0])).tolist()
        [0.5, 0.5]
        >>> Classifier(np.array([[0.0]]), False).shares(np.array([7.0])).tolist()
        [0.5]
        """
        scores: NDArray[np.float64] = np.add.reduce(self.rows * state, axis=1)
        if not self.is_one_of:
            each: NDArray[np.float64] = 1 / (1 + np.exp(-scores))
            return each
        powers: NDArray[np.float64] = np.exp(scores - scores.max())
        total: np.float64 = np.add.reduce(powers)
        return powers / total


def read_classifier(labels: Labels, spec: DecoderSpec, checkpoint: WeightFile) -> Classifier:
    """Read the rows of a model's labels; raises `CheckpointError` if they do not match its settings."""
    if not labels.token_ids:
        stored = checkpoint.stored_name(SCORE_TENSOR)
        if SCORE_TENSOR not in checkpoint.entries:
            raise CheckpointError(checkpoint.name, f"no {stored}", "a row for each label")
        rows: FloatArray = checkpoint.tensor(SCORE_TENSOR)
        if rows.ndim != 2 or len(rows) != len(labels.names):
            found, allowed = list(rows.shape), f"{len(labels.names)} rows, one for each label"
            raise CheckpointError(f"{checkpoint.name}: {stored}: shape", found, allowed)
        scale = 1.0
    else:
        stem = spec.sources[Part.EMBEDDING if spec.tied_head else Part.HEAD].stem_of()
        names = [f"{stem}.weight", f"{stem}.weight".removeprefix(spec.optional_prefix)]
        name = next((each for each in names if each in checkpoint.entries), names[0])
        rows = np.concatenate([checkpoint.tensor(name, slice(each, each + 1)) for each in labels.token_ids])
        scale = spec.logit_scale
    require_width(checkpoint.name, rows.shape[1], spec.hidden_size)
    if not np.isfinite(rows).all():
        raise CheckpointError(f"{checkpoint.name}: rows of labels", "NaN or infinity", "finite numbers")
    return Classifier(rows.astype(np.float64) * scale, labels.is_one_of)
