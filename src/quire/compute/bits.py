"""BITS: the number of the arithmetic of our engines.

Blocks on disk are read only by an engine with the same number. Raise it with every change that may alter a bit of keys
or values: the tests that compare logits with stored ones tell.
"""

from __future__ import annotations

from typing import Final

BITS: Final = 1
