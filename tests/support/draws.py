"""Draws for tests of samplers: settings of every kind, and logits on which they make a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.compute.sampling.draws import Draws, TokenLists, TokenMasks, TokenRules, parameter_columns
from quire.core.parameters import Integer, Number
from quire.core.sampling_params import DRAW_PARAMETERS, PARAMETERS

VOCAB = 40
# Peaked, with ties, and with some tokens that are all but impossible.
LOGITS = np.concatenate([np.linspace(4, -4, 30), [2.0, 2.0, 1.0, 1.0, -30, -50, -80, -100, 3.5, 3.5]]).astype(
    np.float32
)

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_k_in_a_tie": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_p_of_little": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "top_n_sigma": {"top_n_sigma": 0.1},
    "top_n_sigma_off": {"top_n_sigma": -1.0},
    "top_n_sigma_of_the_masked": {"top_n_sigma": 1.0, "mask": [0, 3, 9, 15, 20, 28, 30, 31, 39]},
    "top_n_sigma_of_few": {"top_n_sigma": 0.9, "mask": [1, 15, 29]},
    "top_n_sigma_of_one": {"top_n_sigma": 0.5, "allowed": [17]},
    "top_n_sigma_of_equals": {"top_n_sigma": 0.5, "allowed": [38, 39]},
    "top_n_sigma_after_rules": {"top_n_sigma": 0.2, "banned": [0, 37], "biased": {36: -100.0, 5: 1.0}, "min_p": 0.01},
    "top_n_sigma_at_heat": {"top_n_sigma": 0.15, "temperature": 5.0, "top_k": 9, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "banned": {"banned": [0, 39, 31]},
    "banned_and_filtered": {"banned": [0, 1], "top_k": 5, "top_p": 0.7},
    "allowed": {"allowed": [2, 5, 11, 39]},
    "allowed_and_banned": {"allowed": [2, 5, 11, 39], "banned": [5]},
    "masked": {"mask": [1, 2, 31, 32, 39]},
    "masked_to_one_word": {"mask": range(32)},
    "masked_and_filtered": {"mask": range(3, 40), "banned": [4], "top_k": 5, "biased": {0: 50.0, 20: 3.0}},
    "biased": {"biased": {0: -3.0, 20: 2.5, 39: 0.1}},
    "repetition": {"seen": {0: 0, 1: 2, 15: 1, 29: 3}, "repetition": 1.7},
    "repetition_below_one": {"seen": {0: 0, 1: 2, 15: 1, 29: 3}, "repetition": 0.6},
    "presence": {"seen": {0: 0, 1: 2, 15: 1}, "presence": 1.5},
    "frequency": {"seen": {0: 0, 1: 2, 15: 1}, "frequency": 0.7},
    "less_than_nothing": {"seen": {0: 4, 29: 2}, "frequency": -0.9, "presence": -2.0},
    "all_rules": {
        "allowed": list(range(0, 40, 2)),
        "banned": [38],
        "biased": {4: 1.5, 6: -2.0},
        "seen": {4: 1, 6: 0, 30: 2},
        "repetition": 1.3,
        "presence": 0.5,
        "frequency": 0.25,
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}

COLUMNS = ("logit_rows", "parameters", "seeds", "positions")
# Penalties by the short names that the settings of draws have.
SHORT = {"repetition": "repetition_penalty", "presence": "presence_penalty", "frequency": "frequency_penalty"}


def make_draws(count: int, **settings: Any) -> Draws:
    """Return draws from row 0 with settings in common, at positions 0, 1, 2, …"""

    def integers(name: str, default: int) -> NDArray[np.int64]:
        return np.full(count, settings.get(name, default), np.int64)

    named = {SHORT.get(name, name): value for name, value in settings.items()}
    return Draws(
        logit_rows=integers("logit_row", 0),
        parameters=parameter_columns(count, **{name: named[name] for name in DRAW_PARAMETERS if name in named}),
        seeds=integers("seed", 1),
        positions=np.arange(count, dtype=np.int64),
        num_logprobs=integers("logprobs", -1),
        rules=make_rules(count, **settings),
    )


def random_parameters(count: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Return parameters of draws from all over their declared ranges, up to 100; many are neutral, or near the low end.

    At higher temperatures tokens have the same weight in the float32 of a compiled sampler, and not in the float64 of
    the reference.
    """
    columns = parameter_columns(count)
    for row, name in enumerate(DRAW_PARAMETERS):
        kind = PARAMETERS[name].kind
        assert isinstance(kind, Integer | Number)
        values = kind.low + (min(kind.high, 100) - kind.low) * 10 ** random.uniform(-3, 0, count)
        values = np.floor(values) if isinstance(kind, Integer) else values
        columns[row] = np.where(random.random(count) < 0.6, columns[row], values)
    return columns


def make_rules(count: int, **settings: Any) -> TokenRules:
    """Return rules that all draws have in common; `biased` and `seen` map tokens to biases and counts."""

    def lists(name: str) -> TokenLists:
        ids = np.array(sorted(settings.get(name, ())), np.int64)
        return TokenLists(np.arange(count + 1) * len(ids), np.tile(ids, count))

    def values(name: str, dtype: Any) -> NDArray[Any]:
        return np.tile(np.array([value for _, value in sorted(settings.get(name, {}).items())], dtype), count)

    return TokenRules(
        allowed=lists("allowed"),
        banned=lists("banned"),
        biased=lists("biased"),
        biases=values("biased", np.float32),
        seen=lists("seen"),
        counts=values("seen", np.int64),
        masks=make_masks(count, settings.get("mask")),
    )


def make_masks(count: int, allowed: Sequence[int] | None) -> TokenMasks:
    """Return one mask for all draws; None: none."""
    if allowed is None:
        return TokenMasks.none(count)
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return TokenMasks(np.zeros(count, np.int64), words[None])


def draws_of_their_own(kinds: Sequence[dict[str, Any]]) -> tuple[Draws, list[Draws]]:
    """Return draws together, one of each kind at positions 0, 1, 2, …, and each alone."""
    alone = [
        replace(make_draws(1, **settings), positions=np.array([position])) for position, settings in enumerate(kinds)
    ]
    rules = [draw.rules for draw in alone]
    columns = {
        name: TokenLists.of([getattr(one, name).ids for one in rules])
        for name in ("allowed", "banned", "biased", "seen")
    }
    numbers = {name: np.concatenate([getattr(one, name) for one in rules]) for name in ("biases", "counts")}
    words = [one.masks.words for one in rules if len(one.masks.words)]
    rows = np.array([len(one.masks.words) for one in rules])
    masks = TokenMasks(np.where(rows, np.cumsum(rows) - 1, -1), np.concatenate(words))
    together = {
        name: np.concatenate([getattr(draw, name) for draw in alone], axis=-1) for name in (*COLUMNS, "num_logprobs")
    }
    return Draws(**together, rules=TokenRules(**columns, **numbers, masks=masks)), alone
