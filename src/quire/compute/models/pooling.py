"""The pooling that a model's folder specifies, in the files of sentence-transformers."""

from __future__ import annotations

from typing import Final

from quire.core.errors import CheckpointError
from quire.core.model_files import ModelFiles

POOLING_FILE: Final = "1_Pooling/config.json"
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


def pooling_of(files: ModelFiles) -> str:
    """Return the pooling of a model; empty if its folder specifies none.

    Raises `CheckpointError` for a pooling, or a layer after it, that quire does not implement.
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
    if files.has("2_Dense/config.json"):
        raise CheckpointError(files.where("2_Dense"), "a layer after the pooling", "no layer but normalisation")
    return chosen[0]
