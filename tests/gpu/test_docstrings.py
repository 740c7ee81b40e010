"""The examples in the docstrings of the engine for GPUs: where torch is not, nobody else runs them."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import walk_packages

from quire.compute import torch

MODULES = [found.name for found in walk_packages(torch.__path__, f"{torch.__name__}.")]


def test_examples_are_true():
    ran = [doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE) for name in MODULES]
    assert sum(each.attempted for each in ran) >= 8
    assert not sum(each.failed for each in ran)
