"""Triton kernels with thin launchers over tensors; they know nothing of plans, specs or engines."""
