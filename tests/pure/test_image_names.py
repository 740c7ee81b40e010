"""The names of the tokens of images: equal for equal images behind equal tokens, and found in one pass."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

from quire.core.images import Image, names_of

SIZE = 4


class CountedImages(list[Image]):
    num_passes = 0

    def __iter__(self) -> Iterator[Image]:
        self.num_passes += 1
        return super().__iter__()


def images_of(chance: random.Random, shades: list[int]) -> list[Image]:
    """Return images at random distances, the first ones of a prompt of the same chance in the same places."""
    images, end = [], 0
    for shade in shades:
        start, count = end + chance.choice([0, 0, 1, 6]), chance.choice([4, 5, 11])
        images.append(Image.of(start, count, 1, 1, bytes([shade] * 3)))
        end = start + count
    return images


def test_prompts_with_many_images_are_named_in_one_pass() -> None:
    images = CountedImages(images_of(random.Random(1), [3] * 50))
    names_of(array("i", [7] * 800), images, SIZE)
    assert images.num_passes == 1


def test_names_tell_images_apart_from_their_first_block_on() -> None:
    for seed in range(50):
        shades = [random.Random(seed).randrange(3) for _ in range(9)]
        changed = seed % 9
        others = [shade + 3 * (index == changed) for index, shade in enumerate(shades)]
        images, again = (images_of(random.Random(seed), each) for each in (shades, others))
        prompt = array("i", [7] * 150)
        names, other = (names_of(prompt, each, SIZE) for each in (images, again))
        first = images[changed].start // SIZE * SIZE
        assert names[:first] == other[:first]
        assert all(one != two for one, two in zip(names[first:], other[first : images[changed].end], strict=False))
        assert len(names) == 150 and all((name < 0) == (name != 7) for name in names)
