"""ImageQueue: encodes images between steps, a little at a time, before their requests start.

    request ─► queue of its tenant ─► one image at a time, tenants in turn ─► EncodedImages ─► steps of the request

An image can take seconds. Within a step, all running texts would wait for it; so each step is preceded by a short part
of the work, and the request starts when its images are encoded. Rows that were dropped in the meantime, because others
needed the room, are made again within a step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from quire.compute.arrays import FloatArray
from quire.core.images import Image
from quire.core.request import CacheScope

MAX_BYTES: Final = 128 << 20
IMAGES_KEPT: Final = 32
"""There is memory for the rows of this many of the largest images, as far as they fit into `MAX_BYTES`."""

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
    """The rows of images, the last used ones. Tenants share none: a fast answer would tell of the images of others."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Key, FloatArray] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def get(self, key: Key) -> FloatArray | None:
        """Return the rows of an image, if they are here. Mutates the order of use."""
        rows = self._rows.get(key)
        if rows is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: Key, rows: FloatArray) -> None:
        """Keep the rows of an image, and drop those used least recently if there is no room. Mutates."""
        self._rows[key] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes and len(self._rows) > 1:
            _, dropped = self._rows.popitem(last=False)
            self._num_bytes -= dropped.nbytes


def room_for(largest_bytes: int) -> int:
    """Return the memory for rows of encoded images; the largest one takes `largest_bytes`. Pure.

    >>> room_for(1 << 20), room_for(100 << 20), room_for(200 << 20)
    (33554432, 134217728, 209715200)
    """
    return max(largest_bytes, min(MAX_BYTES, IMAGES_KEPT * largest_bytes))


def key_of(image: Image, scope: CacheScope) -> Key:
    """Return what identifies an image among those of all tenants."""
    return scope.tenant, scope.salt, image.digest


@dataclass(slots=True)
class _Waiting:
    """A request that waits for its images: those not encoded yet, in order."""

    scope: CacheScope
    images: deque[Image]


class ImageQueue:
    """Implements `quire.core.executor.ImageEncoding`."""

    def __init__(self, encoder: ImageEncoder, encoded: EncodedImages) -> None:
        self._encoder = encoder
        self._encoded = encoded
        self._requests: dict[str, _Waiting] = {}
        self._turns: OrderedDict[str, deque[str]] = OrderedDict()  # requests by tenant, the next tenant first
        self._work: tuple[str, ImageWork] | None = None  # of the first image of a request

    def add(self, request_id: str, images: Sequence[Image], scope: CacheScope) -> bool:
        """Encode images of a request, behind earlier ones of its tenant; False: all of them are encoded. Mutates."""
        missing = deque(image for image in images if key_of(image, scope) not in self._encoded)
        if missing:
            self._requests[request_id] = _Waiting(scope, missing)
            self._turns.setdefault(scope.tenant, deque()).append(request_id)
        return bool(missing)

    def drop(self, request_id: str) -> None:
        """Forget a request, if it waits. Mutates."""
        waiting = self._requests.pop(request_id, None)
        if waiting is None:
            return
        tenant = waiting.scope.tenant
        self._turns[tenant].remove(request_id)
        if not self._turns[tenant]:
            del self._turns[tenant]
        if self._work is not None and self._work[0] == request_id:
            self._work = None

    def advance(self, budget_s: float) -> list[str]:
        """Work for about this long on the next image; return the requests that need not wait any more. Mutates.

        A request whose image fails need not wait either: its step will fail for the same reason.
        """
        if not self._requests:
            return []
        if self._work is None:
            request_id = next(iter(self._turns.values()))[0]
            self._work = request_id, self._encoder.begin(self._requests[request_id].images[0])
        request_id, work = self._work
        waiting = self._requests[request_id]
        try:
            rows = work.advance(budget_s)
        except Exception:
            self.drop(request_id)
            return [request_id]
        if rows is None:
            return []
        self._work = None
        self._encoded.put(key_of(waiting.images.popleft(), waiting.scope), rows)
        self._turns.move_to_end(waiting.scope.tenant)
        if waiting.images:
            return []
        self.drop(request_id)
        return [request_id]
