"""Images are encoded between steps: one after another, tenants in turn, while texts go on being generated."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from quire.compute.arrays import FloatArray
from quire.compute.worker.image_queue import EncodedImages, ImageQueue, key_of
from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidRequestError
from quire.core.images import Image
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import DEFAULT_SCOPE, CacheScope, FinishReason, Request
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import Abort, Clear
from quire.engine.core import EngineCore, EngineExtras
from quire.engine.records.step_log import StepLogWriter, replay
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from support.shadow import ShadowExecutor, expected_tokens, seen

PLACEHOLDER = 9
ROOM = 1000
ADA, BOB = CacheScope("ada"), CacheScope("bob")


def image(shade: int, start: int = 1) -> Image:
    return Image.of(start, 4, 1, 1, bytes([shade] * 3))


class SlowEncoder:
    """Takes `slices` calls for each image; pixels of the shade 13 cannot be encoded."""

    placeholder, cell = PLACEHOLDER, None

    def __init__(self, slices: int = 3) -> None:
        self.slices = slices
        self.begun: list[int] = []

    def begin(self, image: Image) -> SlowWork:
        self.begun.append(image.pixels[0])
        return SlowWork(image.pixels[0], self.slices)


class SlowWork:
    def __init__(self, shade: int, slices: int) -> None:
        self.shade, self.left = shade, slices

    def advance(self, budget_s: float) -> FloatArray | None:
        if self.shade == 13:
            raise ValueError("an unlucky shade")
        self.left -= 1
        return None if self.left else np.full((4, 8), self.shade, np.float32)


def test_images_of_tenants_take_turns() -> None:
    encoder = SlowEncoder(slices=1)
    queue = ImageQueue(encoder, EncodedImages(ROOM))
    assert queue.add("a", [image(1), image(2)], ADA)
    assert queue.add("b", [image(3)], ADA)
    assert queue.add("c", [image(4)], BOB)
    ready = [queue.advance(0.0) for _ in range(5)]
    assert encoder.begun == [1, 4, 2, 3]
    assert ready == [[], ["c"], ["a"], ["b"], []]
    assert not queue.add("d", [image(1), image(3)], ADA), "its images are encoded"
    assert queue.add("e", [image(1)], BOB), "another tenant's image tells nothing"


def test_a_request_that_is_dropped_leaves_nothing_behind() -> None:
    encoder = SlowEncoder()
    queue = ImageQueue(encoder, EncodedImages(ROOM))
    queue.add("a", [image(1)], ADA)
    queue.add("b", [image(2)], ADA)
    queue.advance(0.0)
    queue.drop("a")
    queue.drop("a")
    assert [queue.advance(0.0) for _ in range(3)] == [[], [], ["b"]]
    assert encoder.begun == [1, 2]


def test_an_image_that_fails_is_left_to_its_step() -> None:
    queue = ImageQueue(SlowEncoder(), EncodedImages(ROOM))
    queue.add("a", [image(13), image(1)], ADA)
    assert queue.advance(0.0) == ["a"]
    assert queue.advance(0.0) == []


def test_rows_are_dropped_when_others_need_the_room() -> None:
    rows, encoded = np.zeros((4, 8), np.float32), EncodedImages(max_rows=8)
    keys = [key_of(image(shade), DEFAULT_SCOPE) for shade in range(4)]
    encoded.put(keys[0], rows), encoded.put(keys[1], rows)
    assert encoded.get(keys[0]) is rows
    encoded.put(keys[2], rows)
    assert [key in encoded for key in keys] == [True, False, True, False]
    for _ in range(3):
        encoded.put(keys[2], rows)
    assert [key in encoded for key in keys] == [True, False, True, False], "one image takes its room once"
    encoded.hold(image(0), keys[0])
    encoded.put(keys[3], rows)
    assert [key in encoded for key in keys] == [True, False, False, True], "those that nobody holds go first"


def test_an_image_of_two_requests_is_encoded_once() -> None:
    encoder = SlowEncoder(slices=2)
    queue = ImageQueue(encoder, EncodedImages(ROOM))
    queue.add("a", [image(1), image(1, 5)], ADA)
    queue.add("b", [image(1)], ADA)
    assert [queue.advance(0.0) for _ in range(4)] == [[], ["a"], ["b"], []]
    assert encoder.begun == [1]


def test_work_on_an_image_that_a_step_has_encoded_is_not_taken_for_the_next_image() -> None:
    encoded = EncodedImages(ROOM)
    queue = ImageQueue(SlowEncoder(slices=2), encoded)
    queue.add("a", [image(1), image(2)], ADA)
    queue.advance(0.0)
    encoded.put(key_of(image(1), ADA), np.full((4, 8), 1, np.float32))
    assert [queue.advance(0.0) for _ in range(2)] == [[], ["a"]]
    rows = encoded.get(key_of(image(2), ADA))
    assert rows is not None and (rows == 2).all()


def test_images_without_room_wait_until_others_are_computed() -> None:
    encoder = SlowEncoder(slices=1)
    queue = ImageQueue(encoder, EncodedImages(max_rows=12))
    queue.add("a", [image(1), image(2)], ADA)
    queue.add("b", [image(3), image(4)], BOB)
    queue.add("c", [image(5)], CacheScope("eve"))
    assert [queue.advance(0.0) for _ in range(3)] == [[], ["a"], []]
    assert encoder.begun == [1, 2], "b has no room, and c does not overtake it"
    queue.drop("a")
    assert [queue.advance(0.0) for _ in range(4)] == [[], ["c"], ["b"], []]
    assert queue.add("d", [image(index) for index in range(20, 40)], ADA)
    for name in ("b", "c"):
        assert queue.advance(0.0) == []
        queue.drop(name)
    assert [queue.advance(0.0) for _ in range(20)] == [[]] * 19 + [["d"]], "alone, a request may have any images"


def test_images_that_are_encoded_already_do_not_keep_others_waiting() -> None:
    queue = ImageQueue(SlowEncoder(slices=1), EncodedImages(max_rows=12))
    queue.add("0", [image(1)], ADA)
    assert queue.advance(0.0) == ["0"]
    queue.add("large", [image(2), image(3), image(4)], BOB)
    for number in range(1, 4):
        assert queue.advance(0.0) == []
        assert not queue.add(str(number), [image(1)], ADA)
    queue.drop("0")
    assert [queue.advance(0.0) for _ in range(3)] == [[], [], ["large"]]
    for number in range(1, 4):
        queue.drop(str(number))


def test_a_request_that_was_aborted_can_come_back() -> None:
    queue = ImageQueue(SlowEncoder(slices=2), EncodedImages(ROOM))
    queue.add("a", [image(1)], ADA)
    queue.advance(0.0)
    queue.add("a", [image(2)], ADA)
    assert [queue.advance(0.0) for _ in range(3)] == [[], ["a"], []]


class Engine:
    """An engine over a shadow executor, whose images a slow encoder encodes."""

    def __init__(self, encoder: SlowEncoder, max_rows: int = ROOM, **settings: Any) -> None:
        spec = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))
        memory = KVCacheManager(spec, MemoryConfig(num_blocks=64))
        scheduler = Scheduler(SchedulerConfig(**settings), memory, RequestLimits(50, 200, 200, 16, max_images=4))
        self.log = io.BytesIO()
        self.encoded = EncodedImages(max_rows)
        self.queue = ImageQueue(encoder, self.encoded)
        self.clock = ManualClock()
        self.core = EngineCore(
            scheduler,
            ShadowExecutor(spec, 50),
            self.clock,
            log=StepLogWriter(self.log, ManualClock()),
            extras=EngineExtras(images=self.queue),
        )

    def add(self, name: str, *images: Image, scope: CacheScope = DEFAULT_SCOPE, max_tokens: int = 5) -> Request:
        prompt = [3, *[PLACEHOLDER] * 4 * len(images), 5, 6]
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), scope=scope)
        request.images = images
        self.core.add_request(request)
        return request

    def check(self, request: Request) -> None:
        prompt = seen(request.tokens[: request.num_prompt_tokens], request.images)
        assert request.output_token_ids == expected_tokens(prompt, request.num_output_tokens, 50)


def test_a_request_waits_for_its_images_and_others_do_not() -> None:
    engine = Engine(SlowEncoder(slices=3))
    with_image, plain = engine.add("image", image(1)), engine.add("plain")
    for _ in range(2):
        engine.core.step()
    assert (with_image.num_output_tokens, plain.num_output_tokens) == (0, 2)
    engine.core.run()
    assert [with_image.num_output_tokens, plain.num_output_tokens] == [5, 5]
    engine.check(with_image), engine.check(plain)
    other, again = engine.add("other", image(2)), engine.add("again", image(1))
    engine.core.run()
    assert engine.queue.advance(0.0) == []
    engine.check(other), engine.check(again)
    engine.log.seek(0)
    assert replay(engine.log) > 0


def test_many_requests_that_wait_for_images_let_a_text_pass() -> None:
    engine = Engine(SlowEncoder(slices=50), max_num_seqs=1)
    for shade in range(5):
        engine.add(str(shade), image(shade))
    plain = engine.add("plain")
    for _ in range(5):
        engine.core.step()
    assert plain.num_output_tokens == 5


def test_an_image_in_the_cached_prefix_is_not_encoded_again() -> None:
    encoder = SlowEncoder()
    engine = Engine(encoder)
    for _ in range(2):
        engine.add("one", image(1), image(2, 5))
        engine.core.run()
    assert encoder.begun == [1, 2]
    engine.queue._encoded._rows.clear()
    engine.add("two", image(1), image(2, 5))
    engine.core.run()
    assert encoder.begun == [1, 2, 2], "the last block is not in the cache, and the second image ends in it"


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_request_can_be_aborted_while_it_waits(step: int) -> None:
    engine = Engine(SlowEncoder())
    gone, kept = engine.add("gone", image(1)), engine.add("kept", image(2))
    for _ in range(step):
        engine.core.step()
    engine.core.scheduler.abort("gone")
    engine.core.run()
    assert gone.finish_reason is FinishReason.ABORT
    assert kept.num_output_tokens == 5
    engine.check(kept)


def test_an_idle_engine_keeps_nothing_of_an_aborted_request() -> None:
    engine = Engine(SlowEncoder())
    engine.add("gone", image(1))
    engine.core.step()
    engine.core.send(Abort("gone"))
    assert engine.core.step() is None
    assert not engine.queue._requests and engine.queue._work is None and not engine.encoded.num_held


def test_images_are_encoded_ahead_only_as_far_as_there_is_room() -> None:
    encoder = SlowEncoder(slices=1)
    engine = Engine(encoder, max_rows=12, max_num_seqs=1)
    requests = [engine.add(str(shade), image(shade), image(20 + shade, 5), max_tokens=30) for shade in range(4)]
    for _ in range(20):
        engine.core.step()
    assert encoder.begun == [0, 20, 1, 21], "the second one's are ready, the third one's have no room"
    engine.core.run()
    assert [each.num_output_tokens for each in requests] == [30] * 4
    assert encoder.begun == [0, 20, 1, 21, 2, 22, 3, 23] and not engine.encoded.num_held


def test_images_of_a_preempted_request_are_encoded_between_steps_too() -> None:
    encoder = SlowEncoder(slices=2)
    engine = Engine(encoder)
    shown = engine.add("shown", image(1), max_tokens=9)
    while shown.num_output_tokens < 3:
        engine.core.step()
    engine.core._images.tend(engine.core.send)
    assert not engine.encoded.num_held
    engine.core.scheduler._preemption.preempt(shown)
    engine.encoded._rows.clear()
    engine.core.send(Clear())
    engine.core.step()
    assert encoder.begun == [1, 1] and shown.num_output_tokens == 3
    engine.core.run()
    engine.check(shown)
    assert shown.num_output_tokens == 9 and not engine.encoded.num_held


def test_many_preempted_requests_are_tended_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SlowEncoder(slices=1))
    requests = [engine.add(str(shade), image(shade), max_tokens=9) for shade in range(4)]
    while not all(each.num_output_tokens for each in requests):
        engine.core.step()
    engine.core._images.tend(engine.core.send)
    engine.core.scheduler._preemption.set_back(requests)
    engine.encoded._rows.clear()
    encode, under_way, depths = engine.core._images._encode, list[str](), list[int]()

    def noted(request: Request, send: Any) -> None:
        under_way.append(request.request_id)
        depths.append(len(under_way))
        encode(request, send)
        under_way.pop()

    monkeypatch.setattr(engine.core._images, "_encode", noted)
    engine.core.send(Clear())
    assert depths == [1] * 4
    engine.core.run()
    for request in requests:
        engine.check(request)


def test_texts_get_as_much_time_as_a_slow_image() -> None:
    engine = Engine(SlowEncoder(slices=3))
    advance, times = engine.queue.advance, []

    def slow(budget_s: float) -> list[str]:
        engine.clock.advance(10.0)
        times.append(engine.clock.now())
        return advance(budget_s)

    engine.queue.advance = slow  # type: ignore[method-assign]
    plain, shown = engine.add("plain", max_tokens=50), engine.add("image", image(1))
    for _ in range(20):
        engine.core.step()
        engine.clock.advance(1.0)
    assert plain.num_output_tokens == 20
    assert times[0] == 10.0 and times[1] >= 29.0
    engine.core.scheduler.abort("plain")
    engine.core.run()
    assert shown.num_output_tokens == 5, "without texts, images need not rest"


def test_images_are_refused_where_they_have_no_place() -> None:
    engine = Engine(SlowEncoder())
    for images, message in (
        ([image(1), image(2, 4)], r"images\[1\] is 'tokens 4 to 7'"),
        ([image(1, 4)], r"images\[0\] is 'tokens 4 to 7'"),
        ([image(1, 1)] * 5, "at most 4"),
    ):
        request = Request("r", [3, 9, 9, 9, 9, 5])
        request.images = tuple(images)
        with pytest.raises(InvalidRequestError, match=message):
            engine.core.add_request(request)
    with pytest.raises(InvalidRequestError, match="this model reads no images"):
        request.images = (image(1),)
        Scheduler(SchedulerConfig(), engine.core.scheduler.memory, RequestLimits(50, 99, 99, 4)).add(request)
