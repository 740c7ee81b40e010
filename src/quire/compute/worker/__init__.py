"""The worker: turns step plans into arrays, runs a model on them, and owns the KV memory."""
