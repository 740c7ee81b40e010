"""What a worker keeps of the images in its rows, and for how long."""

from __future__ import annotations

from array import array

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.worker.image_queue import EncodedImages
from quire.compute.worker.image_rows import ImageRows
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


class Work:
    def advance(self, budget_s: float) -> FloatArray:
        return np.arange(8, dtype=np.float32).reshape(4, 2)


def given(images: ImageRows, start: int, tokens: list[int]) -> list[int]:
    """Return the index of the given row of each token of a step, and note that it was computed."""
    count = len(tokens)
    plan = StepPlan(0, *(array("i", [each]) for each in (ROW, start, count, 0)))
    inputs = StepInputs(
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
    found = images.with_images(plan, inputs).given.tolist()
    images.note_computed(plan)
    return found


def started() -> ImageRows:
    images = ImageRows(Encoder(), EncodedImages(100))
    image = Image.of(1, 4, 1, 1, bytes(3))
    images.start(RowStart(ROW, "r", array("i", PROMPT), len(PROMPT), 9, SamplingParams(), images=(image,)))
    return images


def test_the_last_token_of_a_prompt_takes_its_row_each_time_that_it_is_computed() -> None:
    """A mask can come late; then the token before it is computed again."""
    images = started()
    assert given(images, 0, PROMPT) == [-1, 0, 1, 2, 3]
    assert given(images, 4, [PLACEHOLDER]) == [3]
    assert given(images, 5, [7]) == []
    assert not images._pending


def test_pixels_are_kept_no_longer_than_needed() -> None:
    images = started()
    given(images, 0, PROMPT)
    given(images, 5, [7])
    assert [image.pixels for image in images._images[ROW]] == [b""]
