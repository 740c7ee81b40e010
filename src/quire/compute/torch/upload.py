"""Uploads arrays to the device in one copy.

    arrays (numpy, int64) ─► one array (int32) ─► page-locked ─► one copy ─► a tensor, with views for the arrays

The host does not wait for the copy: torch keeps the page-locked memory until the copy is done, and then reuses it. Each
view begins at a multiple of 16 bytes: Triton compiles kernels for such addresses, and would compile again for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quire.compute.arrays import IntArray

Shape: TypeAlias = tuple[int, ...]

ALIGNMENT: Final = 4
"""The alignment of a view, in 4-byte numbers."""


def for_copy(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor of the host that is copied to a device without waiting: for a GPU, page-locked."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; on the CPU, a view of the array. Does not wait."""
    return for_copy(array, device).to(device, non_blocking=True)


def fill(place: torch.Tensor, array: NDArray[Any]) -> None:
    """Copy an array to an address that recorded work reads. Mutates the place; does not wait."""
    place.copy_(for_copy(array, place.device), non_blocking=True)


def together(arrays: Sequence[IntArray], device: torch.device) -> list[torch.Tensor]:
    """Return arrays on a device as int32, with one copy. Does not wait."""
    shapes = [array.shape for array in arrays]
    return apart(on_device(joined(arrays, shapes), device), shapes)


def joined(arrays: Sequence[IntArray], shapes: Sequence[Shape]) -> NDArray[np.int32]:
    """Return arrays joined into one, each padded with zeros to its shape."""
    sizes = [_room(shape) for shape in shapes]
    whole = np.zeros(num_joined(shapes), np.int32)
    for array, end, size in zip(arrays, np.cumsum(sizes).tolist(), sizes, strict=True):
        whole[end - size : end - size + array.size] = array.ravel()
    return whole


def apart(whole: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Return the joined arrays, as views."""
    pieces = whole.split([_room(shape) for shape in shapes])
    return [piece[: math.prod(shape)].view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def num_joined(shapes: Sequence[Shape]) -> int:
    """Return the length of arrays of these shapes when they are joined."""
    return sum(_room(shape) for shape in shapes)


def _room(shape: Shape) -> int:
    return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
