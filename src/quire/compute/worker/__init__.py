"""The worker: turns step plans into arrays, runs a model over them, owns the KV memory."""
