"""BITS: the version of our engines' arithmetic.

An engine reads only blocks on disk of its own version. Raise it with every change that may alter a bit of keys or
values; the tests that compare logits with stored ones detect such changes.
"""

from __future__ import annotations

from typing import Final

BITS: Final = 1
