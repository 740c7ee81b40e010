"""What a worker keeps of the images in its rows, and for how long."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from functools import partial
from types import FrameType

import numpy as np
import pytest

from quire.compute.arrays import FloatArray
from quire.compute.worker.image_queue import EncodedImages
from quire.compute.worker.image_rows import ImageGrids, ImageRows
from quire.compute.worker.model_runner import NO_INDICES, StepInputs
from quire.core.images import Image
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart, StepPlan

PLACEHOLDER = 9
PROMPT = [3, *[PLACEHOLDER] * 4]
ROW = 2


class Encoder:
    placeholder, cell = PLACEHOLDER, None

    def begin(self, image: Image) -> Work:
        return Work()


class GridEncoder(Encoder):
    cell = 1


class Work:
    def advance(self, budget_s: float) -> FloatArray:
        return np.arange(8, dtype=np.float32).reshape(4, 2)


def step(start: int, tokens: list[int]) -> tuple[StepPlan, StepInputs]:
    count = len(tokens)
    plan = StepPlan(0, *(array("i", [each]) for each in (ROW, start, count, 0)))
    return plan, StepInputs(
        entries=(0,),
        query_starts=np.array([0, count]),
        token_ids=np.array(tokens),
        positions=np.arange(start, start + count),
        slots=(),
        block_tables=(),
        logit_starts=np.zeros(2, np.int64),
        logit_indices=NO_INDICES,
        rows=np.array([ROW]),
    )


def given(images: ImageRows, start: int, tokens: list[int]) -> list[int]:
    """Return the index of the given row of each token of a step, and note that it was computed."""
    plan, inputs = step(start, tokens)
    found = images.with_images(plan, inputs).given.tolist()
    images.note_computed(plan)
    return found


def started_row(prompt: list[int], *images: Image) -> RowStart:
    return RowStart(ROW, "r", array("i", prompt), len(prompt), SamplingParams(), 9, images=images)


def started() -> ImageRows:
    images = ImageRows(Encoder(), EncodedImages(100))
    image = Image.of(1, 4, 1, 1, bytes(3))
    images.start(started_row(PROMPT, image))
    return images


def test_the_last_token_of_a_prompt_takes_its_row_each_time_that_it_is_computed() -> None:
    """A mask can come late; then the token before it is computed again."""
    images = started()
    assert given(images, 0, PROMPT) == [-1, 0, 1, 2, 3]
    assert given(images, 4, [PLACEHOLDER]) == [3]
    assert given(images, 5, [7]) == []
    assert not images._pending


def images_of(sizes: list[tuple[int, int]], gap: int) -> list[Image]:
    """Return images of these heights and widths, with this many tokens of text before each."""
    images: list[Image] = []
    for height, width in sizes:
        start = gap + (images[-1].end if images else 0)
        images.append(Image.of(start, height * width, height, width, bytes(3 * height * width)))
    return images


def moved(images: list[Image], length: int) -> list[list[int]]:
    """Return time, height and width of each position, counted token by token."""
    found: list[list[int]] = []
    now, position = 0, 0
    for image in images:
        found += [[now + i] * 3 for i in range(image.start - position)]
        now += image.start - position
        found += [[now, now + row, now + column] for row in range(image.height) for column in range(image.width)]
        now, position = now + max(image.height, image.width), image.end
    found += [[now + i] * 3 for i in range(length - position)]
    return [[each[axis] for each in found] for axis in range(3)]


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("sizes", [[(2, 3)], [(1, 1), (4, 1), (1, 5), (3, 3)]])
def test_coordinates_of_images_count_rows_and_columns(sizes: list[tuple[int, int]], gap: int) -> None:
    images = images_of(sizes, gap)
    grids, length = ImageGrids.of(images, cell=1), images[-1].end + 4
    expected = moved(images, length)
    assert grids.coordinates(np.arange(length)).tolist() == expected
    for position in range(length):
        assert grids.coordinates(np.array([position]))[:, 0].tolist() == [axis[position] for axis in expected]


def test_a_step_calls_as_much_for_many_images_as_for_one() -> None:
    found = []
    for count in (1, 100):
        placed = images_of([(2, 2)] * count, gap=1)
        prompt = [3, *[PLACEHOLDER] * 4] * count
        images = ImageRows(GridEncoder(), EncodedImages(1000))
        images.start(started_row(prompt, *placed))
        given(images, 0, prompt)
        given(images, len(prompt), [7])
        found.append(num_calls(partial(images.with_images, *step(len(prompt) + 1, [7]))))
    assert found[0] == found[1]


def num_calls(work: Callable[[], object]) -> int:
    """Return how many functions are called, of Python and of C."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
