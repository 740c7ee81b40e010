"""Runs in a separate process: loads an engine once, and prints the time and the memory of the load.

    python -m quire.instruments.bench.load_probe '{"model": "guide", "kv_memory": "8MiB"}'

In a process that has loaded before, the next load would look faster and smaller than for a user who starts quire.
"""

from __future__ import annotations

import json
import sys

from quire.core.config import EngineConfig
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.process_memory import process_memory, reset_peak


def main(settings: str) -> None:
    """Load an engine, print one line of JSON, and close the engine."""
    reset_peak()
    with MeasuredEngine(EngineConfig(**json.loads(settings))) as engine:
        memory = process_memory()
        found = {
            "load_s": engine.load_s,
            "weight_bytes": engine.blueprint.backend.facts.weight_bytes,
            "peak_bytes": None if memory is None else memory.peak,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
