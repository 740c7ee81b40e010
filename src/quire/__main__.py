"""The command `quire`, also as `python -m quire`."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

GC_THRESHOLD: Final = 100_000
"""New objects before Python looks for garbage among them. Imports make many, which all stay: with 700, as Python has
it, a seventh of the start of a server goes into looking."""


def main() -> int:
    """Run the command line; return the exit status. Ctrl-C ends it quietly, also while its modules are imported."""
    gc.set_threshold(GC_THRESHOLD)
    try:
        from quire.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # `-m` adds the current folder; files in a model folder must not be imported
    sys.exit(main())
