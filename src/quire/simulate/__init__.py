"""The simulator: the product's own scheduler and memory manager, on an executor that does not compute a model."""
