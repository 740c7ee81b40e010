"""Classifier: the rows that score the labels of a text, on the hidden state of its last token.

An encoder has them on the state of the first token, or on the mean of all, after another layer (`HeadSpec`). That
layer may also come before the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.compute.activations import ACTIVATIONS, Numbers
from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.heads import HeadSpec
from quire.compute.models.labels import SCORE_TENSOR, Labels, require_width
from quire.compute.models.parts import Part
from quire.compute.weights.weight_file import WeightFile
from quire.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ClassifierLayer:
    """The layer before the rows of an encoder."""

    spec: HeadSpec
    weight: Numbers  # [hidden_size, hidden_size]
    bias: Numbers | float = 0.0  # [hidden_size]
    norm_weight: Numbers | float = 1.0  # [hidden_size]
    norm_bias: Numbers | float = 0.0  # [hidden_size]

    def __call__(self, state: FloatArray | Numbers) -> Numbers:
        """Return the output for a hidden state."""
        activate = np.tanh if self.spec.activation is None else ACTIVATIONS[self.spec.activation]
        output: Numbers = activate(np.add.reduce(self.weight * state, axis=1) + self.bias)
        if self.spec.norm is None:
            return output
        centred = output - np.add.reduce(output) / len(output)
        variance = float(np.add.reduce(centred * centred)) / len(output)
        normed: Numbers = centred / math.sqrt(variance + self.spec.norm.epsilon) * self.norm_weight + self.norm_bias
        return normed


@dataclass(frozen=True, slots=True)
class Classifier:
    """A row for each label. Sums are in float64 and in a fixed order, so every engine gets the same bits for a text.

    `layer`: the layer before the rows of an encoder.
    """

    rows: Numbers  # [labels, hidden_size]
    is_one_of: bool
    bias: Numbers | None = None  # [labels]
    layer: ClassifierLayer | None = None

    @property
    def pooling(self) -> str:
        """The tokens whose states count."""
        return "last" if self.layer is None else self.layer.spec.pooling

    def before_pooling(self, states: FloatArray | Numbers) -> FloatArray | Numbers:
        """Return what is pooled for the hidden states of tokens, each computed alone."""
        if self.layer is None or not self.layer.spec.late:
            return states
        return np.stack([self.layer(state) for state in states])

    def shares(self, state: Numbers) -> Numbers:
        """Return the probability of each label for what was pooled.

        >>> Classifier(np.array([[1.0, 0.0], [0.0, 1.0]]), True).shares(np.array([2.0, 2.0])).tolist()
        [0.5, 0.5]
        >>> Classifier(np.array([[0.0]]), False).shares(np.array([7.0])).tolist()
        [0.5]
        """
        state = state if self.layer is None or self.layer.spec.late else self.layer(state)
        scores: Numbers = np.add.reduce(self.rows * state, axis=1)
        scores = scores if self.bias is None else scores + self.bias
        if not self.is_one_of:
            each: Numbers = 1 / (1 + np.exp(-scores))
            return each
        powers: Numbers = np.exp(scores - scores.max())
        total: np.float64 = np.add.reduce(powers)
        return powers / total


def read_classifier(labels: Labels, spec: DecoderSpec, checkpoint: WeightFile) -> Classifier:
    """Read the rows of a model's labels; raises `CheckpointError` if they do not match its settings."""
    if labels.head is not None:
        return _read_encoder(labels, labels.head, spec, checkpoint)
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


def _read_encoder(labels: Labels, head: HeadSpec, spec: DecoderSpec, checkpoint: WeightFile) -> Classifier:
    """Read the classifier of an encoder, with the layer before it."""
    stored = (stems for stems in head.stems if all(f"{stem}.weight" in checkpoint.entries for stem in stems))
    layer, rows = next(stored, head.stems[-1])
    hidden, count = spec.hidden_size, len(labels.names)
    shapes = {f"{layer}.weight": (hidden, hidden), f"{rows}.weight": (count, hidden), f"{rows}.bias": (count,)}
    shapes |= {f"{layer}.bias": (hidden,)} if head.bias else {}
    if head.norm is not None:
        shapes |= {f"{head.norm_stem}.{kind}": (hidden,) for kind in ("weight", "bias")[: 1 + head.norm.bias]}
    read = dict[str, Numbers]()
    for name, shape in shapes.items():
        found = list(checkpoint.entries[name].shape) if name in checkpoint.entries else "missing"
        if found != list(shape):
            where = f"{checkpoint.name}: {checkpoint.stored_name(name)}: shape"
            raise CheckpointError(where, found, f"{list(shape)}, for {count} label{'s' * (count != 1)}")
        checkpoint.require_floats(name)
        read[name] = _finite(checkpoint.tensor(name), checkpoint)
    before = ClassifierLayer(
        head,
        read[f"{layer}.weight"],
        read.get(f"{layer}.bias", 0.0),
        read.get(f"{head.norm_stem}.weight", 1.0),
        read.get(f"{head.norm_stem}.bias", 0.0),
    )
    return Classifier(read[f"{rows}.weight"], labels.is_one_of, bias=read[f"{rows}.bias"], layer=before)


def _finite(numbers: FloatArray, checkpoint: WeightFile) -> Numbers:
    if not np.isfinite(numbers).all():
        raise CheckpointError(f"{checkpoint.name}: rows of labels", "NaN or infinity", "finite numbers")
    return numbers.astype(np.float64)
