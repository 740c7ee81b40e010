"""ImagesAhead: has the images of requests encoded between steps, before the requests start.

    request ──► its images, without those in its cached prefix ──► ImageEncoding: a short time before each step
            ◄── AwaitImages: it waits; its images are encoded, so it starts ──┘

The rows of images stay in memory until their request has computed them. A preempted request that computes images again
waits for them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quire.core.clock import Clock
from quire.core.executor import ImageEncoding
from quire.core.request import Request, RequestStatus
from quire.engine.commands import AwaitImages
from quire.scheduler.scheduler import Scheduler

ENCODING_S: Final = 0.05
"""The time for images before each step; texts that are generated wait for it. What an image takes longer, steps get."""

STARTS_ANEW: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


Send = Callable[[AwaitImages], None]
"""Carries out a command, and logs it. A method of the engine, which is not kept: the two would free no memory."""


class ImagesAhead:
    """The requests of an engine that have images."""

    def __init__(self, encoding: ImageEncoding, scheduler: Scheduler, clock: Clock) -> None:
        self._encoding = encoding
        self._scheduler = scheduler
        self._clock = clock
        self._requests: dict[str, Request] = {}  # until they end
        self._holding: set[str] = set()  # those that have not computed all their images
        self._waiting: set[str] = set()  # those that start when their images are encoded
        self._next_s = clock.now()

    @property
    def are_awaited(self) -> bool:
        """Whether a request waits for its images."""
        return bool(self._waiting)

    def add(self, request: Request, send: Send) -> None:
        """Have the images of a new request encoded. Mutates."""
        self._requests[request.request_id] = request
        self._encode(request, send)

    def go_on(self, send: Send) -> None:
        """Encode images for a short time; requests whose images are encoded can start. Mutates."""
        self.tend(send)
        began_s = self._clock.now()
        if not self._waiting or (began_s < self._next_s and self._scheduler.running):
            return
        for request_id in self._encoding.advance(ENCODING_S):
            self._waiting.remove(request_id)
            send(AwaitImages(request_id, False))
        ended_s = self._clock.now()
        self._next_s = ended_s + (ended_s - began_s) - ENCODING_S

    def tend(self, send: Send) -> None:
        """Release images that are computed, and encode those that a preempted request computes again. Mutates."""
        for request_id, leader in list(self._requests.items()):
            members = [each for each in (leader.group.members if leader.group else [leader]) if not each.is_finished]
            anew = next((each for each in members if each.status in STARTS_ANEW), None)
            if anew is None and all(each.num_computed >= each.images[-1].end for each in members):
                self._encoding.drop(request_id)
                self._holding.discard(request_id)
            elif anew is not None and request_id not in self._holding:
                self._encode(anew, send)
            if not members:
                self._waiting.discard(request_id)
                del self._requests[request_id]

    def _encode(self, request: Request, send: Send) -> None:
        """Let a request wait while its images are encoded, except those in its cached prefix. Mutates."""
        num_cached = self._scheduler.memory.match_prefix(request).num_tokens
        missing = [image for image in request.images if image.end > num_cached]
        self._holding.add(request.request_id)
        if self._encoding.add(request.request_id, missing, request.scope):
            self._waiting.add(request.request_id)
            send(AwaitImages(request.request_id, True))
