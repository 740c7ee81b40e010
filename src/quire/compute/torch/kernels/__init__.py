"""Triton kernels with thin launchers over tensors, independent of plans, specs and engines."""
