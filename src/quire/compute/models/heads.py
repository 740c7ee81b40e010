"""The head of an encoder that classifies texts: a layer between its states and the rows of its labels.

BERT                    tanh(pooler.dense x) ─► classifier
RoBERTa, XLM-RoBERTa    tanh(classifier.dense x) ─► classifier.out_proj
DistilBERT              relu(pre_classifier x) ─► classifier
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.models.sublayers import Activation
from quire.core.pooling import FIRST

OF_ROBERTA: Final = ("classifier.dense", "classifier.out_proj")
OF_BERT: Final = (OF_ROBERTA, ("bert.pooler.dense", "classifier"), ("pooler.dense", "classifier"))
"""A GGUF file names the head of each as RoBERTa does."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A layer, its activation, and the rows of labels.

    `stems`: the tensors of the layer and those of the rows; of several pairs, the first that a checkpoint has.
    `activation` None: tanh. `pooling`: the tokens whose states count, "cls" or "mean".
    """

    stems: tuple[tuple[str, str], ...] = OF_BERT
    activation: Activation | None = None
    pooling: str = FIRST


def _distil_bert(config: ConfigFile) -> HeadSpec:
    return HeadSpec((("pre_classifier", "classifier"),), Activation.RELU)


OWN: Final[Mapping[str, Callable[[ConfigFile], HeadSpec]]] = MappingProxyType({"DistilBertModel": _distil_bert})
"""The families whose heads differ from those of BERT and RoBERTa."""


def head_of(family: str, config: ConfigFile) -> HeadSpec:
    """Return the head of a family of encoders; raises `CheckpointError` for settings that quire does not interpret."""
    own = OWN.get(family)
    return HeadSpec() if own is None else own(config)
