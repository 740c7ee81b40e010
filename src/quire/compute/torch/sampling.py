"""TorchSampler: the definition in `quire.compute.sampling.draws`, on logits that stay on the device.

    logits ─┬─► rules: torch operations, each rounded separately, on copies of rows ─┐    if any draw has rules
            │   counts on the device ─► `penalize`: a kernel, in these copies ───────┤    while a text's end is unknown
            ├────────────────────────────────────────────────────────────────────────┴─► `choose_tokens`: three kernels
            └─► reports: log-probabilities and the likeliest, in slabs of rows               if any draw asks for them

The kernels also see whether the logits of a draw are finite, because they read all of them.

Rules and reports are torch operations: only draws that use them pay for them, and torch rounds each sum and product as
the definition requires, while a compiler would fuse them. The host makes the keys of random numbers from seeds and
positions, which it knows before the step has run. So `choose` does not wait; only `sample` and `report` wait for the
device.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.sampling.draws import NO_MASK, Choices, Draws, TokenLists, TokenMasks, TokenRules
from quire.compute.sampling.reference import STEPS
from quire.compute.sampling.token_numbers import draw_keys
from quire.compute.torch.count_table import NEUTRAL, Counted
from quire.compute.torch.device_errors import device_call
from quire.compute.torch.kernels.penalties import penalize
from quire.compute.torch.kernels.sampling import MAX_VOCABULARY, choose_tokens
from quire.compute.torch.operations import are_finite
from quire.compute.torch.upload import on_device
from quire.core.errors import InvalidConfigError

SLAB: Final = 16
"""Rows of logits to report at a time, to limit the memory for float64 numbers and keys of all their tokens."""

WORD_BITS: Final = 32


class TorchSampler:
    """Chooses tokens; implements `Sampler` for logits that are tensors. Immutable."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size > MAX_VOCABULARY:
            raise InvalidConfigError("vocabulary of the model", vocab_size, f"at most {MAX_VOCABULARY} on a GPU")
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, draws: Draws) -> Choices:
        """Return a choice per draw; rows of logits may be padded. Waits for the device. Does not mutate the logits."""
        with device_call():
            chosen = self.choose(logits, draws).clamp(min=0)
            choices = Choices.of(chosen.cpu().numpy(), draws.num_logprobs)
            entries = np.flatnonzero(draws.num_logprobs >= 0)
            self._report(logits, draws.logit_rows[entries], entries, draws.num_logprobs, choices)
        return choices

    def choose(self, logits: torch.Tensor, draws: Draws, counted: Counted | None = None) -> torch.Tensor:
        """Return the token of each draw, int64, on the device, -1 if its logits are not finite. Does not wait.

        Does not mutate the logits.
        """
        with torch.inference_mode():
            rows, device = logits[:, : self._vocab_size], logits.device
            if counted is None and not has_rules(draws):
                return choose_tokens(rows, on_device(draw_settings(draws, draws.logit_rows), device))
            rows = rows[on_device(draws.logit_rows, device)].to(torch.float32)
            finite = are_finite(rows)
            rows = changed(rows, draws)
            if counted is not None:
                penalize(rows, counted.table, on_device(penalty_settings(draws, counted), device))
            _cut(rows, draws.parameter("top_n_sigma"))
            settings = on_device(draw_settings(draws, np.arange(len(draws))), device)
            return torch.where(finite, choose_tokens(rows, settings, least=-math.inf), -1)

    def report(self, logits: torch.Tensor, logit_rows: IntArray, tokens: IntArray, num_logprobs: IntArray) -> Choices:
        """Return the log-probabilities of given tokens. Waits for the device. Does not mutate the logits."""
        choices = Choices.of(tokens, num_logprobs)
        with device_call():
            self._report(logits, logit_rows, np.arange(len(tokens)), num_logprobs, choices)
        return choices

    def _report(
        self, logits: torch.Tensor, rows: IntArray, entries: IntArray, num_logprobs: IntArray, choices: Choices
    ) -> None:
        """Fill in entries of the choices, each from its row of logits. Mutates them."""
        for start in range(0, len(entries), SLAB):
            own = entries[start : start + SLAB]
            numbers = logits[on_device(rows[start : start + SLAB], logits.device), : self._vocab_size].to(torch.float32)
            tokens = on_device(choices.tokens[own], logits.device)
            logprobs = _log_softmax(numbers)
            choices.logprobs[own] = logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()
            choices.ranks[own] = _ranks(numbers, tokens).cpu().numpy()
            counts = num_logprobs[own]
            most = int(counts.max())
            if most:
                best = _likeliest(numbers, most)
                is_requested = np.arange(most) < counts[:, None]
                choices.top_ids[own, :most] = np.where(is_requested, best.cpu().numpy(), 0)
                choices.top_logprobs[own, :most] = np.where(is_requested, logprobs.gather(1, best).cpu().numpy(), 0.0)


def has_rules(draws: Draws) -> bool:
    """Return whether a draw changes its logits before it chooses: by rules, penalties apart, or by top_n_sigma."""
    return _has_any(draws.rules) or bool((draws.parameter("top_n_sigma") > 0).any())


def draw_settings(draws: Draws, logit_rows: IntArray) -> NDArray[np.float64]:
    """Return the settings of each draw for `choose_tokens`, its row of logits first."""
    parameters = [draws.parameter(name) for name in ("temperature", "top_k", "top_p", "min_p")]
    keys = draw_keys(draws.seeds, draws.positions)
    return np.column_stack([logit_rows, *parameters, keys]).astype(np.float64)


def penalty_settings(draws: Draws, counted: Counted) -> NDArray[np.float64]:
    """Return the settings of the counted draws for `penalize`. The row of logits of a draw is the draw's own index."""
    penalties = [draws.parameter(name)[counted.draws] for name in NEUTRAL]
    return np.stack([counted.draws, counted.places, *penalties], axis=1).astype(np.float64)


def changed(rows: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Return float32 rows, one per draw, after their rules. Mutates them."""
    rules = draws.rules
    given = rows.clone() if len(rules.allowed.ids) else rows
    if len(rules.allowed.ids):
        limited = np.flatnonzero(np.diff(rules.allowed.starts))
        rows[on_device(limited, rows.device)] = -torch.inf
        places = _places(rules.allowed, rows.device)
        rows[places] = given[places]
    _forbid(rows, rules.masks)
    rows[_places(rules.banned, rows.device)] = -torch.inf
    if len(rules.biased.ids):
        rows[_places(rules.biased, rows.device)] += on_device(rules.biases, rows.device)
    if len(rules.seen.ids):
        _penalize(rows, draws)
    return rows


def _cut(rows: torch.Tensor, num_deviations: FloatArray) -> None:
    """Remove the tokens that top_n_sigma does not keep, in slabs. Each line rounds once, as in the definition."""
    entries = np.flatnonzero(num_deviations > 0)
    for start in range(0, len(entries), SLAB):
        own = on_device(entries[start : start + SLAB], rows.device)
        limits = on_device(num_deviations[entries[start : start + SLAB], None].astype(np.float64), rows.device)
        exact = rows[own].to(torch.float64)
        finite = exact.isfinite()
        highest = exact.amax(dim=1, keepdim=True)
        spread = highest - torch.where(finite, exact, highest).amin(dim=1, keepdim=True)
        scaled = (highest - exact) * (STEPS / spread)
        steps = torch.where(finite & (spread > 0), scaled + 0.5, 0.0).to(torch.int64)
        count = finite.sum(dim=1, keepdim=True)
        mean = steps.sum(dim=1, keepdim=True).to(torch.float64) / count
        squares = (steps * steps).sum(dim=1, keepdim=True).to(torch.float64) / count
        variance = (squares - mean * mean).clamp_min(0.0)
        least = highest - limits * (variance.sqrt() * (spread / STEPS))
        rows[own] = torch.where((exact < least) & (spread > 0), -torch.inf, exact).to(torch.float32)


def _penalize(rows: torch.Tensor, draws: Draws) -> None:
    """Apply the penalties of seen tokens. Each line rounds once, as in the definition."""
    seen = draws.rules.seen
    places = _places(seen, rows.device)
    entries = np.repeat(np.arange(len(draws)), np.diff(seen.starts))
    penalties = np.stack([draws.parameter(name)[entries] for name in NEUTRAL])
    repetition, frequency, presence = on_device(penalties, rows.device)
    counts = on_device(draws.rules.counts.astype(np.float32), rows.device)
    logits = rows[places]
    logits = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = logits - frequency * counts
    rows[places] = torch.where(counts > 0, logits - presence, logits)


def _forbid(rows: torch.Tensor, masks: TokenMasks) -> None:
    """Remove the tokens whose bit is not set."""
    held = np.flatnonzero(masks.rows != NO_MASK)
    if len(held):
        words = on_device(masks.words[masks.rows[held]].view(np.int32), rows.device)
        bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=rows.device) & 1
        is_allowed = bits.flatten(1)[:, : rows.shape[1]].bool()
        own = on_device(held, rows.device)
        rows[own] = torch.where(is_allowed, rows[own], -torch.inf)


def _places(lists: TokenLists, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of each id in the lists of draws."""
    rows = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
    return on_device(rows, device), on_device(lists.ids, device)


def _has_any(rules: TokenRules) -> bool:
    lists = rules.allowed, rules.banned, rules.biased, rules.seen
    return any(len(one.ids) for one in lists) or bool((rules.masks.rows != NO_MASK).any())


def _log_softmax(rows: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of all tokens, float64."""
    exact = rows.to(torch.float64)
    exact = exact - exact.amax(dim=1, keepdim=True)
    return exact - exact.exp().sum(dim=1, keepdim=True).log()


def _ranks(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rank of each row's token, 1 for the likeliest; among equal ones, lower ids come first."""
    own = rows.gather(1, tokens[:, None])
    is_lower = torch.arange(rows.shape[1], device=rows.device) < tokens[:, None]
    return 1 + ((rows > own) | ((rows == own) & is_lower)).sum(dim=1)


def _likeliest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the highest numbers of float32 rows, best first; among equal ones, lower ids come first."""
    # Bits of floats compare like the floats if negative ones are inverted; the id makes all keys distinct.
    bits = (rows + 0.0).view(torch.int32).to(torch.int64)  # -0 is 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(rows.shape[1], device=rows.device)
    best = ((order << WORD_BITS) - ids).topk(min(count, rows.shape[1]), dim=1, sorted=True).values
    return -best & 0xFFFFFFFF
