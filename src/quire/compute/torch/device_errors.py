"""Classifies an error of torch or Triton within a step: out of memory, a failed device, or neither.

A failed device computes nothing more, so its error must not look like the error of one request. A call can report the
failure of an earlier kernel, and some libraries do not say so. If the text of an error is unclear, synchronising with
the device shows whether it still works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from quire.core.errors import ExecutorLostError

TRITON_ERROR: Final = "Triton Error [CUDA]: "
DEVICE_ERRORS: Final = (TRITON_ERROR, "CUDA error: ", "CUDA driver error: ", "cuDNN error: ")
NO_MEMORY: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def lost_if_it_fails() -> Iterator[None]:
    """Raise `ExecutorLostError` if a call shows that the device has failed, torch's error if it lacks memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = str(error)
        is_of_device = isinstance(error, torch.AcceleratorError) or text.startswith(DEVICE_ERRORS)
        if is_of_device and any(each in text for each in NO_MEMORY):
            raise torch.OutOfMemoryError(text) from error
        if is_of_device or not _answers():
            why = next(iter(text.removeprefix(TRITON_ERROR).splitlines()), "it gives no reason")
            raise ExecutorLostError(f"the device has failed: {why}") from error
        raise


@contextmanager
def device_call() -> Iterator[None]:
    """Raise `ExecutorLostError` if a call shows that the device has failed, `MemoryError` if it lacks memory."""
    try:
        with lost_if_it_fails():
            yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def _answers() -> bool:
    """Return whether the device still computes, or was never used. Waits for it."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
