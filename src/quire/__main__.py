"""`python -m quire` runs the command `quire`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # `-m` adds the current folder; files in a model folder must not be imported

    from quire.cli import main

    sys.exit(main())
