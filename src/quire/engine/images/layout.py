"""Layout: how the makers of a model resize an image, cut it into tiles, and write it in a prompt.

The chat template writes a *marker* for an image. A layout replaces it by text, with one *placeholder* for each tile.
The text is tokenized with the conversation, because what stands next to it can change tokens; then each placeholder
becomes the tokens of its tile.

    Look: <image>          ──►   Look: <row_1_col_1><image><row_1_col_2><image>      ──►   … 64 tokens for each <image>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Plan:
    """An image in a prompt: `text` in place of the marker, and the tokens of each tile, as their texts."""

    text: str
    tiles: tuple[tuple[str, ...], ...]

    @property
    def num_tokens(self) -> int:
        """The tokens of all tiles; the text adds a few."""
        return sum(map(len, self.tiles))


class Layout(Protocol):
    """One way of preparing images. Immutable."""

    @property
    def marker(self) -> str:
        """The text that the chat template writes for an image."""
        ...

    @property
    def placeholder(self) -> str:
        """The token whose embeddings the rows of the image encoder replace."""
        ...

    @property
    def tokens(self) -> tuple[str, ...]:
        """The special tokens that the vocabulary must have."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the tokens of a tile attend to one another."""
        ...

    def plan(self, height: int, width: int) -> Plan:
        """Return what an image of this size becomes in a prompt; raises `ValueError` for a size it does not take."""
        ...

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the tiles of an image in RGB, as many as `plan` has for its size. Does not mutate."""
        ...
