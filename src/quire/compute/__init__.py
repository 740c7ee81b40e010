"""The compute plane: arrays and kernels.

It meets the control plane in two values only, `quire.core.step.StepPlan` and `StepResult`, and
imports nothing of it but `quire.core`.
"""
