"""The compute plane: arrays and kernels.

It exchanges only two types of values with the control plane, `quire.core.step.StepPlan` and `StepResult`, and
imports only `quire.core` from it.
"""
