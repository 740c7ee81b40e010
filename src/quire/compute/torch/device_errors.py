"""What an error of torch or Triton within a step says: a lack of memory, a device that has failed, or neither.

A device that has failed computes nothing any more, so the error must not read as that of one request. A call may find
out what an earlier kernel has done, and not every library says so: if the text does not tell, the device is asked.
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
    """Raise `ExecutorLostError` if a call shows that the device has failed; for a lack of memory, torch's error."""
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
            why = next(iter(text.removeprefix(TRITON_ERROR).splitlines()), "it does not say why")
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
    """Return whether the device still computes; waits for it. True where no device was used."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
