"""The simulator: the product's own scheduler and memory manager, on an executor that only pretends to compute."""
