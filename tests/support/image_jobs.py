"""Requests with images for tiny models, and engines that run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire import LLM, SamplingParams
from quire.compute.models import ModelDescription
from quire.core.images import MIN_IMAGE_TOKENS, Image
from quire.core.request import FinishReason, Request
from support.vision_models import SIZES, random_image, vision_of

Text = tuple[list[int], list[Any]]
Job = tuple[list[int], tuple[Image, ...], SamplingParams]


def workload(name: str, model: ModelDescription, *, are_whole: bool) -> list[Job]:
    """Return prompts with none to three of a few images, some of them alike for a while."""
    chance, vision = random.Random(5), vision_of(model)
    pictures = [random_image(vision, *size, seed=seed) for seed in range(3) for size in SIZES[name]]
    pictures = [each for each in pictures if each.num_tokens >= MIN_IMAGE_TOKENS]
    jobs = []
    for index in range(10):
        prompt = [(5 * i * i + 3 * i + 1) % 60 for i in range(chance.choice([2, 14, 40]))]
        images = []
        for _ in range(index % 4):
            image = chance.choice(pictures)
            images.append(replace(image, start=len(prompt), is_whole=are_whole))
            prompt += [vision.placeholder] * image.num_tokens
            prompt += [chance.randrange(60) for _ in range(chance.choice([0, 1, 9]))]
        prompt += [chance.randrange(60) for _ in range(1 + 3 * index)]
        sampling = SamplingParams(
            temperature=chance.choice([0.0, 1.0]), seed=index, max_tokens=5 + index, ignore_eos=True, logprobs=3
        )
        jobs.append((prompt, tuple(images), sampling))
    return jobs


def run(llm: LLM, jobs: Sequence[Job]) -> list[Text]:
    requests = []
    for index, (prompt, images, sampling) in enumerate(jobs):
        request = Request(str(index), prompt, sampling)
        request.images = images
        llm.engine.add_request(request)
        requests.append(request)
    llm.engine.run()
    llm.engine.scheduler.check()
    assert {each.finish_reason for each in requests} == {FinishReason.LENGTH}, [each.error for each in requests]
    return [(each.output_token_ids, each.logprobs) for each in requests]
