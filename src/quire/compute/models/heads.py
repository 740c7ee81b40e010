"""The head of an encoder that classifies texts: a layer between its states and the rows of its labels.

    BERT                    tanh(pooler.dense x) ─► classifier
    RoBERTa, XLM-, MPNet    tanh(classifier.dense x) ─► classifier.out_proj
    DistilBERT              relu(pre_classifier x) ─► classifier
    EuroBERT                gelu(dense x) ─► classifier
    ModernBERT              norm(gelu(head.dense x)) ─► classifier

x is the state of the first token, or in some models of EuroBERT and ModernBERT the mean of all. Most models of EuroBERT
compute the layer for each token, and the rows of labels multiply the mean of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.compute.models.common import activation
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.modern_bert import norm_spec
from quire.compute.models.parts import NormSpec
from quire.compute.models.sublayers import Activation
from quire.core.pooling import FIRST

OF_ROBERTA: Final = ("classifier.dense", "classifier.out_proj")
OF_BERT: Final = (OF_ROBERTA, ("bert.pooler.dense", "classifier"), ("pooler.dense", "classifier"))
"""A GGUF file names the head of each as RoBERTa does."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A layer, its activation, and the rows of labels.

    `stems`: the tensors of the layer and those of the rows; of several pairs, the first that a checkpoint has.
    `activation` None: tanh. `bias`: whether the layer has one. `norm`: after its activation, with the tensor
    `norm_stem`. `pooling`: the tokens whose states count, "cls" or "mean". `late`: whether the layer comes before that
    mean, not after it.
    """

    stems: tuple[tuple[str, str], ...] = OF_BERT
    activation: Activation | None = None
    pooling: str = FIRST
    bias: bool = True
    norm: NormSpec | None = None
    norm_stem: str = ""
    late: bool = False


def _distil_bert(config: ConfigFile) -> HeadSpec:
    return HeadSpec((("pre_classifier", "classifier"),), Activation.RELU)


def _euro_bert(config: ConfigFile) -> HeadSpec:
    """Return the head of EuroBERT. In a "late" one, transformers takes the mean of scores, which is the same."""
    config = config.over({"classifier_pooling": "late"})
    config.require("classifier_pooling", "bos", "late", "mean")
    kind = config.fields["classifier_pooling"]
    pooling = FIRST if kind == "bos" else "mean"
    return HeadSpec((("dense", "classifier"),), Activation.GELU, pooling, late=kind == "late")


def _modern_bert(config: ConfigFile) -> HeadSpec:
    config.require("classifier_pooling", FIRST, "mean", None)
    return HeadSpec(
        (("head.dense", "classifier"),),
        activation(config, "classifier_activation", "gelu"),
        str(config.fields.get("classifier_pooling") or FIRST),
        config.flag("classifier_bias", False),
        norm_spec(config),
        "head.norm",
    )


OWN: Final[Mapping[str, Callable[[ConfigFile], HeadSpec]]] = MappingProxyType(
    {"DistilBertModel": _distil_bert, "EuroBertModel": _euro_bert, "ModernBertModel": _modern_bert}
)
"""The families whose heads differ from those of BERT and RoBERTa."""


def head_of(family: str, config: ConfigFile) -> HeadSpec:
    """Return the head of a family of encoders; raises `CheckpointError` for settings that quire does not interpret."""
    own = OWN.get(family)
    return HeadSpec() if own is None else own(config)
