"""The command `quire`, also as `python -m quire`."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    """Run the command line; return the exit status. Ctrl-C ends it quietly, also while its modules are imported."""
    gc.set_threshold(100_000)  # imports make many objects that stay: with 700, a seventh of a start is spent on them
    try:
        from quire.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # `-m` adds the current folder; files in a model folder must not be imported
    sys.exit(main())
