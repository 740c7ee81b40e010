"""The store: KV blocks in a file, which outlive the process."""
