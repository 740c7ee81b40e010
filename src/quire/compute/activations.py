"""The activations of layers, in float64: one formula each, for the reference engine and for classifiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.models.sublayers import Activation

Numbers = NDArray[np.float64]
ERF: Final = np.vectorize(math.erf, otypes=[np.float64])
ACTIVATIONS: Final[Mapping[Activation, Callable[[Numbers], Numbers]]] = MappingProxyType(
    {
        Activation.RELU: lambda numbers: np.maximum(numbers, 0.0),
        Activation.RELU_SQUARED: lambda numbers: np.maximum(numbers, 0.0) ** 2,
        Activation.SILU: lambda numbers: numbers / (1 + np.exp(-numbers)),
        Activation.QUICK_GELU: lambda numbers: numbers / (1 + np.exp(-1.702 * numbers)),
        Activation.GELU: lambda numbers: 0.5 * numbers * (1 + ERF(numbers * math.sqrt(0.5))),
        Activation.GELU_TANH: lambda numbers: (
            0.5 * numbers * (1 + np.tanh(math.sqrt(2 / math.pi) * (numbers + 0.044715 * numbers**3)))
        ),
    }
)
"""Those of one input; `Activation.CLAMPED_SWIGLU` has two."""
