"""Classifier: the rows that score the labels of a text, on the hidden state of its last token.

An encoder has them on the state of the first token, after another layer:

    BERT                    tanh(pooler.dense x + bias) ─► classifier
    RoBERTa, XLM-RoBERTa    tanh(classifier.dense x + bias) ─► classifier.out_proj
"""

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
    """A row for each label. Sums are in float64 and in a fixed order, so every engine gets the same bits for a text.

    `dense`: the layer before the rows, if there is one; then the state is that of the first token.
    """

    rows: NDArray[np.float64]  # [labels, hidden_size]
    is_one_of: bool
    bias: NDArray[np.float64] | None = None  # [labels]
    dense: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # [hidden_size, hidden_size], [hidden_size]

    @property
    def reads_first(self) -> bool:
        """Whether the state is that of the first token."""
        return self.dense is not None

    def shares(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of each label for a hidden state.

        >>> Classifier(np.array([[1.0, 0.0], [0.0, 1.0]]), True).shares(np.array([2.0, 2.0])).tolist()
        [0.5, 0.5]
        >>> Classifier(np.array([[0.0]]), False).shares(np.array([7.0])).tolist()
        [0.5]
        """
        if self.dense is not None:
            state = np.tanh(np.add.reduce(self.dense[0] * state, axis=1) + self.dense[1])
        scores: NDArray[np.float64] = np.add.reduce(self.rows * state, axis=1)
        scores = scores if self.bias is None else scores + self.bias
        if not self.is_one_of:
            each: NDArray[np.float64] = 1 / (1 + np.exp(-scores))
            return each
        powers: NDArray[np.float64] = np.exp(scores - scores.max())
        total: np.float64 = np.add.reduce(powers)
        return powers / total


def read_classifier(labels: Labels, spec: DecoderSpec, checkpoint: WeightFile) -> Classifier:
    """Read the rows of a model's labels; raises `CheckpointError` if they do not match its settings."""
    if spec.attention.bidirectional and not labels.token_ids:
        return _read_encoder(labels, spec, checkpoint)
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
    return Classifier(_finite(rows, checkpoint) * scale, labels.is_one_of)


def _read_encoder(labels: Labels, spec: DecoderSpec, checkpoint: WeightFile) -> Classifier:
    """Read the classifier of an encoder, with the layer before it."""
    stems = ("classifier.dense", "classifier.out_proj")
    if f"{stems[1]}.weight" not in checkpoint.entries:
        name = f"{spec.optional_prefix}pooler.dense"
        stems = (name if f"{name}.weight" in checkpoint.entries else "pooler.dense", "classifier")
    hidden, count = spec.hidden_size, len(labels.names)
    shapes = {(stems[0], "weight"): (hidden, hidden), (stems[0], "bias"): (hidden,)}
    shapes |= {(stems[1], "weight"): (count, hidden), (stems[1], "bias"): (count,)}
    read = list[NDArray[np.float64]]()
    for (stem, kind), shape in shapes.items():
        name = f"{stem}.{kind}"
        found = list(checkpoint.entries[name].shape) if name in checkpoint.entries else "missing"
        if found != list(shape):
            where = f"{checkpoint.name}: {checkpoint.stored_name(name)}: shape"
            raise CheckpointError(where, found, f"{list(shape)}, for {count} label{'s' * (count != 1)}")
        checkpoint.require_floats(name)
        read.append(_finite(checkpoint.tensor(name), checkpoint))
    return Classifier(read[2], labels.is_one_of, bias=read[3], dense=(read[0], read[1]))


def _finite(numbers: FloatArray, checkpoint: WeightFile) -> NDArray[np.float64]:
    if not np.isfinite(numbers).all():
        raise CheckpointError(f"{checkpoint.name}: rows of labels", "NaN or infinity", "finite numbers")
    return numbers.astype(np.float64)
