"""The engine: control plane and compute plane, assembled. This package imports nothing; import from its modules."""
