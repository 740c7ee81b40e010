"""The pooling that a model's folder specifies, and the layers after it, in the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.core.errors import CheckpointError
from quire.core.model_files import ModelFiles

POOLING_FILE: Final = "1_Pooling/config.json"
MODULES_FILE: Final = "modules.json"
MODULES: Final = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
"""The steps of sentence-transformers that quire knows, by the last part of their types."""

LIMIT_FILE: Final = "sentence_bert_config.json"
KINDS: Final = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
MODES: Final = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""The values of `pooling_mode`, which newer releases write instead of one boolean for each kind."""

OTHER_KINDS: Final = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
IDENTITY: Final = "torch.nn.modules.linear.Identity"
TANH: Final = "torch.nn.modules.activation.Tanh"
STEPS: Final = range(2, 10)


@dataclass(frozen=True, slots=True)
class DenseStep:
    """A dense layer after the pooling, with its weights in `folder`; `has_tanh`: after it."""

    folder: str
    num_inputs: int
    num_outputs: int
    bias: bool
    has_tanh: bool


def dense_steps(files: ModelFiles, size: int) -> Iterator[DenseStep]:
    """Yield the dense layers of a model for vectors of a size; raises `CheckpointError` if they do not fit."""
    for folder in _dense_folders(files):
        config = ConfigFile.read(files, f"{folder}/config.json")
        if config.size("in_features") != size:
            raise config.error("in_features", f"{size}, the size of the vectors before it")
        config.require("activation_function", IDENTITY, TANH)
        num_inputs, size = size, config.size("out_features")
        has_tanh = config.fields["activation_function"] == TANH
        yield DenseStep(folder, num_inputs, size, config.flag("bias", True), has_tanh)


def _dense_folders(files: ModelFiles) -> list[str]:
    """Return the folders of dense layers in their order; refuses other steps that would change a vector."""
    folders = [f"{number}_Dense" for number in STEPS]
    if not files.has(MODULES_FILE):
        return [folder for folder in folders if files.has(f"{folder}/config.json")]
    where = files.where(MODULES_FILE)
    try:
        steps = json.loads(files.text(MODULES_FILE))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, f"broken: {error}", "a list of steps, in JSON") from error
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise CheckpointError(where, steps, "a list of steps")
    found = []
    for step in steps:
        kind = str(step.get("type")).rpartition(".")[2]
        if kind not in MODULES:
            raise CheckpointError(f"{where}: type", step.get("type"), f"one of {', '.join(MODULES)}")
        if kind == "Dense":
            if step.get("path") not in folders:
                raise CheckpointError(f"{where}: path", step.get("path"), f"{folders[0]} to {folders[-1]}")
            found.append(step["path"])
    return found


def longest_text(files: ModelFiles) -> int | None:
    """Return the makers' limit of the tokens of a text; None if the folder specifies none."""
    if not files.has(LIMIT_FILE):
        return None
    config = ConfigFile.read(files, LIMIT_FILE)
    return config.size("max_seq_length") if config.is_set("max_seq_length") else None


def pooling_of(files: ModelFiles) -> str:
    """Return the pooling of a model; empty if its folder specifies none.

    Raises `CheckpointError` for a pooling that quire does not implement.
    """
    if not files.has(POOLING_FILE):
        return ""
    where, settings = files.where(POOLING_FILE), files.json_object(POOLING_FILE)
    if (mode := settings.get("pooling_mode")) is not None:
        if not isinstance(mode, str) or mode not in MODES:
            raise CheckpointError(f"{where}: pooling_mode", mode, f"one of {', '.join(MODES)}")
        settings = {name: kind == MODES[mode] for name, kind in KINDS.items()}
    for name in OTHER_KINDS:
        if settings.get(name):
            raise CheckpointError(
                f"{where}: {name}", True, "false: quire pools the first token, the last one or the mean"
            )
    chosen = [kind for name, kind in KINDS.items() if settings.get(name)]
    if len(chosen) != 1:
        raise CheckpointError(where, f"{len(chosen)} kinds of pooling", f"one of {', '.join(KINDS)}")
    return chosen[0]
