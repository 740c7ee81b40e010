"""ImageQueue: encodes images between steps, a little at a time, before their requests start.

    request ─► queue of its tenant ─► one image at a time, tenants in turn ─► EncodedImages ─► steps of the request

An image can take seconds. Within a step, all running texts would wait for it; so each step is preceded by a short part
of the work, and the request starts when its images are encoded. Their rows stay in memory until it has computed them.
So a request whose images have no room waits until others have computed theirs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from quire.compute.arrays import FloatArray
from quire.core.images import Image
from quire.core.request import CacheScope

MAX_BYTES: Final = 128 << 20
"""The most memory for the rows of encoded images, unless a single image takes more."""

Key = tuple[str, str, bytes]


class ImageWork(Protocol):
    """The encoding of one image."""

    def advance(self, budget_s: float) -> FloatArray | None:
        """Work for about this long; return the rows once they are complete. Mutates."""
        ...


class ImageEncoder(Protocol):
    """Turns the images of a model into rows of its hidden size. Equal pixels give equal bits."""

    @property
    def placeholder(self) -> int:
        """The token whose places in a prompt take the rows."""
        ...

    @property
    def cell(self) -> int | None:
        """The pixels per side of a token's part of the image, if tokens have coordinates; None: only positions."""
        ...

    def begin(self, image: Image) -> ImageWork:
        """Return the work of encoding an image. Several may be begun; does not mutate."""
        ...


class EncodedImages:
    """The rows of images: those that requests hold, and the last used ones.

    Tenants share none: a fast answer would tell of the images of others.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_held = 0  # rows of images that are held, encoded or not
        self._rows: OrderedDict[Key, FloatArray] = OrderedDict()
        self._num_rows = 0
        self._holders: Counter[Key] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def get(self, key: Key) -> FloatArray | None:
        """Return the rows of an image, if they are here. Mutates the order of use."""
        rows = self._rows.get(key)
        if rows is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: Key, rows: FloatArray) -> None:
        """Keep the rows of an image; if there is no room, drop those used least recently, held ones last. Mutates."""
        self._remove(key)
        self._rows[key] = rows
        self._num_rows += len(rows)
        while self._num_rows > self.max_rows and len(self._rows) > 1:
            oldest = next(iter(self._rows))
            free = next((each for each in self._rows if each not in self._holders and each != key), oldest)
            self._remove(free)

    def has_room(self, images: Mapping[Key, Image]) -> bool:
        """Return whether these images can be held besides the others; without others, any can. Does not mutate."""
        num_rows = sum(image.num_tokens for key, image in images.items() if key not in self._holders)
        return not self.num_held or self.num_held + num_rows <= self.max_rows

    def hold(self, image: Image, key: Key) -> None:
        """Keep the rows of an image, now or once they are encoded, for one more request. Mutates."""
        self.num_held += 0 if key in self._holders else image.num_tokens
        self._holders[key] += 1

    def release(self, image: Image, key: Key) -> None:
        """Keep the rows of an image for one request less. Mutates."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.num_held -= image.num_tokens

    def _remove(self, key: Key) -> None:
        self._num_rows -= len(self._rows.pop(key, ()))


def room_for(row_bytes: int, largest: int, context: int) -> int:
    """Return the most rows of encoded images in memory: those of one prompt, as far as they fit. Pure.

    `largest`: the rows of the largest image.

    >>> room_for(2304, 64, context=8192), room_for(16_384, 576, context=131_072), room_for(1 << 20, 576, context=8192)
    (8192, 8192, 576)
    """
    return max(largest, min(context, MAX_BYTES // row_bytes))


def key_of(image: Image, scope: CacheScope) -> Key:
    """Return what identifies an image among those of all tenants."""
    return scope.tenant, scope.salt, image.digest


@dataclass(slots=True)
class _Asked:
    """The distinct images of a request. `missing`: those not encoded yet, in order. `is_begun`: it holds its rows."""

    scope: CacheScope
    images: dict[Key, Image]
    missing: deque[Key] = field(default_factory=deque)
    is_begun: bool = False


class ImageQueue:
    """Implements `quire.core.executor.ImageEncoding`."""

    def __init__(self, encoder: ImageEncoder, encoded: EncodedImages) -> None:
        self._encoder = encoder
        self._encoded = encoded
        self._requests: dict[str, _Asked] = {}
        self._turns: OrderedDict[str, deque[str]] = OrderedDict()  # waiting requests by tenant, the next tenant first
        self._work: tuple[str, Key, ImageWork] | None = None  # for a request, on the first of its missing images

    def add(self, request_id: str, images: Sequence[Image], scope: CacheScope) -> bool:
        """Encode images of a request, behind earlier ones of its tenant; False: all of them are encoded. Mutates.

        Their rows stay in memory until the request is dropped; if they are there already, only while no request waits.
        """
        self.drop(request_id)
        asked = self._requests[request_id] = _Asked(scope, {key_of(image, scope): image for image in images})
        if all(key in self._encoded for key in asked.images):
            if not self._turns:  # otherwise a request that waits for room might never get it
                self._begin(asked)
            return False
        self._turns.setdefault(scope.tenant, deque()).append(request_id)
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request, which has computed its images or has ended. Mutates."""
        asked = self._requests.pop(request_id, None)
        if asked is None:
            return
        for key, image in asked.images.items() if asked.is_begun else ():
            self._encoded.release(image, key)
        self._end_wait(request_id, asked.scope.tenant)
        if self._work is not None and self._work[0] == request_id:
            self._work = None

    def advance(self, budget_s: float) -> list[str]:
        """Work for about this long on the next image; return the requests that need not wait any more. Mutates.

        A request whose image fails need not wait either: its step will fail for the same reason.
        """
        request_id = self._next() if self._work is None else self._work[0]
        if request_id is None:
            return []
        asked = self._requests[request_id]
        while asked.missing and asked.missing[0] in self._encoded:  # by another request
            asked.missing.popleft()
        if asked.missing:
            key = asked.missing[0]
            if self._work is None or self._work[1] != key:
                self._work = request_id, key, self._encoder.begin(asked.images[key])
            try:
                rows = self._work[2].advance(budget_s)
            except Exception:
                self.drop(request_id)
                return [request_id]
            if rows is None:
                return []
            self._encoded.put(asked.missing.popleft(), rows)
            self._turns.move_to_end(asked.scope.tenant)
        self._work = None
        if asked.missing:
            return []
        self._end_wait(request_id, asked.scope.tenant)
        return [request_id]

    def _next(self) -> str | None:
        """Return the request to work for; None if none waits, or their images have no room. Mutates.

        A request that has begun goes on. The others begin in turn: behind one that has no room, none does.
        """
        is_full = False
        for request_ids in self._turns.values():
            asked = self._requests[request_ids[0]]
            if not asked.is_begun and not is_full:
                is_full = not self._encoded.has_room(asked.images)
                if not is_full:
                    self._begin(asked)
            if asked.is_begun:
                return request_ids[0]
        return None

    def _begin(self, asked: _Asked) -> None:
        for key, image in asked.images.items():
            self._encoded.hold(image, key)
        asked.is_begun = True
        asked.missing = deque(key for key in asked.images if key not in self._encoded)

    def _end_wait(self, request_id: str, tenant: str) -> None:
        turns = self._turns.get(tenant, ())
        if request_id in turns:
            self._turns[tenant].remove(request_id)
            if not self._turns[tenant]:
                del self._turns[tenant]
