"""Other engines, as the paper describes them, with the same executor, ledger and measures as the product."""

SYSTEMS = ("quire", "vllm", "orca_oracle", "orca_pow2", "orca_max", "static")
