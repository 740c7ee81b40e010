"""Several models in one server: which are loaded, and which requests wait for a model."""
