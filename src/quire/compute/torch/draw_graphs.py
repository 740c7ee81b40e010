"""DrawGraphs: records the head and the draws of a step once and replays them, for 1, 2, 4, 8, … draws.

    rows before the head ─► where the recording reads them ─┐
    settings of the draws, their rows of the batch ─────────┴─► replay: head ─► draws ─► tokens, last tokens of the rows

Steps with 5 draws replay the graph of 8, whose other draws are greedy and forgotten. These graphs follow any step,
recorded (`graphs.py`) or not: with the head in the graphs of steps, each of these would keep memory for its logits.
Here the logits of one size are freed before the next size is recorded, so all sizes share the memory of the largest.

Draws with rules and penalties are launched one by one: the number of their tokens differs from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.sampling.draws import Draws
from quire.compute.torch.decoder import TorchDecoder
from quire.compute.torch.graphs import SIZES, Recorder, Replay, up_to
from quire.compute.torch.kernels import sampling as kernels
from quire.compute.torch.last_tokens import LastTokens
from quire.compute.torch.sampling import draw_settings, has_rules
from quire.compute.torch.upload import fill

NUM_SETTINGS: Final = kernels.NUM_SETTINGS.value


class _Tokens(NamedTuple):
    """The tokens of recorded draws, int32."""

    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DrawGraph:
    """The recorded draws of one size. `numbers`: the settings of all draws, then the row of each."""

    hidden: torch.Tensor
    numbers: torch.Tensor
    drawn: _Tokens
    replay: Replay


class DrawGraphs:
    """The recorded draws of a decoder with TorchSampler's kernels. Valid as long as the last tokens exist."""

    def __init__(self, decoder: TorchDecoder, recorder: Recorder, most_draws: int) -> None:
        self._decoder = decoder
        self._recorder = recorder
        self._sizes = up_to(most_draws, SIZES)
        self._graphs: dict[int, _DrawGraph] = {}
        self._forgotten = 0

    def record(self, last_tokens: LastTokens, device: torch.device) -> None:
        """Record all sizes, the largest first, whose memory the others reuse. Mutates."""
        self._forgotten = last_tokens.num_rows
        spec, most = self._decoder.spec, self._sizes[-1]
        all_hidden = torch.zeros((most, spec.hidden_size), dtype=self._decoder.dtype, device=device)
        all_numbers = torch.zeros(most * (NUM_SETTINGS + 1), dtype=torch.float64, device=device)
        with torch.inference_mode():
            for size in reversed(self._sizes):
                hidden, numbers = all_hidden[:size], all_numbers[: size * (NUM_SETTINGS + 1)]
                work = partial(self._draw, hidden, numbers, last_tokens)
                work()
                self._graphs[size] = _DrawGraph(hidden, numbers, *self._recorder.record(work))

    def takes(self, draws: Draws) -> bool:
        """Return whether draws can be replayed. Does not mutate."""
        return bool(self._graphs) and 0 < len(draws) <= self._sizes[-1] and not has_rules(draws)

    def run(self, hidden: torch.Tensor, draws: Draws, rows: IntArray) -> torch.Tensor:
        """Return the tokens of draws, one from each row of the head's input. They stay valid until the next replay.

        `rows`: the rows of the batch, whose last tokens the draws become. Mutates those; does not wait.
        """
        count = len(draws)
        graph = self._graphs[next(size for size in self._sizes if size >= count)]
        size = len(graph.hidden)
        numbers = np.zeros(size * (NUM_SETTINGS + 1), np.float64)
        numbers[: count * NUM_SETTINGS] = draw_settings(draws, np.arange(count)).ravel()
        places = numbers[size * NUM_SETTINGS :]
        places[:count], places[count:] = rows, self._forgotten
        with torch.inference_mode():
            fill(graph.numbers, numbers)
            graph.hidden[:count].copy_(hidden)
            graph.replay()
        return graph.drawn.tokens[:count]

    def _draw(self, hidden: torch.Tensor, numbers: torch.Tensor, last_tokens: LastTokens) -> _Tokens:
        """Compute logits and draw a token from each. Mutates the last tokens."""
        end = len(hidden) * NUM_SETTINGS
        settings, rows = numbers[:end].view(len(hidden), NUM_SETTINGS), numbers[end:].to(torch.int64)
        logits = self._decoder.logits(hidden)[:, : self._decoder.spec.vocab_size]
        tokens = kernels.choose_tokens(logits, settings)
        last_tokens.store(rows, tokens)
        return _Tokens(tokens.to(torch.int32))
