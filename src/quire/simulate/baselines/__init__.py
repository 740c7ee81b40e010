"""Engines of others, as the paper describes them, behind the same executor, ledger and measures as the product."""

SYSTEMS = ("quire", "vllm", "orca_oracle", "orca_pow2", "orca_max", "static")
