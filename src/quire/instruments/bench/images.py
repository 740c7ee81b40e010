"""`quire bench images`: the time of encoding images, and of texts that are generated meanwhile.

encode    one image at a time, compared with the machine's arithmetic
chats     the time between two tokens of some texts, while images arrive one after another
peer      the same images in transformers, if an interpreter has it
"""

from __future__ import annotations

import argparse
import math
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.cli.machine_limits import limits_of
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.core.images import CHANNELS, Image
from quire.core.sampling_params import SamplingParams
from quire.engine.commands import Add
from quire.instruments.bench.flags import add_choices, add_count, add_model_options, add_size
from quire.instruments.bench.image_peer import measure_peer
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.shapes import measured_config
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import summarize

if TYPE_CHECKING:
    from quire.compute.worker.image_queue import ImageEncoder

LEAST_ARITHMETIC: Final = 50.0
PARTS: Final = ("encode", "chats", "peer")
DESCRIPTION = "Measure the time of encoding images, and of texts that are generated meanwhile."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_count(parser, "repeat", 5, "runs of each kind")
    add_count(parser, "edge", 448, "pixels of an image's edges, if the model takes images of several sizes")
    add_count(parser, "chats", 4, "texts that are generated while images are encoded")
    add_count(parser, "images", 4, "images that arrive meanwhile")
    add_count(parser, "tokens", 128, "tokens of each text")
    parser.add_argument("--peer-python", metavar="PATH", help="Python interpreter with transformers; none: quire only")
    add_choices(parser, "only", PARTS, PARTS, "measure only these parts")
    add_size(parser, "read-size", "64MiB", "amount of memory to read when measuring the machine")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config:
            own = config if config.device == "cuda" else replace(config, touch_kv_memory="start")
            if "encode" in options.only:
                yield measure_encoding(own, options, tell)
            if "chats" in options.only:
                yield measure_chats(own, options, tell)
            if "peer" in options.only and options.peer_python is not None:
                with MeasuredEngine(own) as engine:
                    encoder, vision = _encoder_of(engine)
                    images = [_image(vision, options.edge, index) for index in range(options.repeat)]
                    rows = [(_encode(encoder, image), image) for image in images]
                    threads = engine.blueprint.backend.facts.num_threads
                yield measure_peer(Path(config.model), options.peer_python, rows, threads, tell)

    return run_benchmark(options, "Images", measure)


def measure_encoding(config: EngineConfig, options: argparse.Namespace, tell: Tell) -> Section:
    """Measure one image at a time, and the arithmetic of the machine before each."""
    seconds, longest, shares = list[float](), list[float](), list[float]()
    with MeasuredEngine(config) as engine:
        encoder, vision = _encoder_of(engine)
        limits = limits_of(engine.blueprint.backend.facts, options.read_size)
        _encode(encoder, _image(vision, options.edge, options.repeat))
        for index in range(options.repeat):
            tell(f"encode: image {index + 1} of {options.repeat}")
            arithmetic, image = limits.arithmetic(), _image(vision, options.edge, index)
            parts = _encode(encoder, image)[1]
            seconds.append(sum(parts))
            longest.append(max(parts))
            if arithmetic is not None:
                operations = operations_of(vision, image.height, image.width)
                shares.append(100 * operations / seconds[-1] / arithmetic)
    share = summarize(shares) if shares else None
    goals = []
    if share is not None:
        goals.append(Goal("images: % of the arithmetic", share.median, LEAST_ARITHMETIC, at_least=True))
    text = (
        f"Random pixels, {image.height} × {image.width}, {image.num_tokens} tokens. The longest part is what a step "
        f"may have to wait for. The arithmetic is that of {limits.name} on registers, measured right before. Median of "
        f"{options.repeat} images (min–max)."
    )
    row = (f"{image.height} × {image.width}", cell(summarize(seconds)), cell(summarize(longest)), cell(share))
    header = ("image", "s", "longest part, s", "% of the arithmetic")
    return Section("Encoding an image", text, header, [row], {"s": seconds, "%": shares}, goals)


def measure_chats(config: EngineConfig, options: argparse.Namespace, tell: Tell) -> Section:
    """Measure the time between two tokens of texts, without images and while some are encoded."""
    gaps: dict[str, list[float]] = {"no image": [], "images": []}
    for index in range(options.repeat):
        tell(f"chats: run {index + 1} of {options.repeat}")
        for kind in gaps:
            with MeasuredEngine(config) as engine:
                engine.warm_up()
                _, vision = _encoder_of(engine)
                images = [_image(vision, options.edge, each) for each in range(options.images)]
                gaps[kind] += _gaps(engine, vision, options, images if kind == "images" else [])
    rows = [
        (kind, cell(summarize(found)), f"{np.quantile(found, 0.99):.3g}", f"{max(found):.3g}")
        for kind, found in gaps.items()
    ]
    text = (
        f"{options.chats} texts are generated while {options.images} requests with an image each arrive at once. "
        f"Median of all pauses of {options.repeat} runs (min–max)."
    )
    header = ("", "between tokens, s", "p99, s", "longest, s")
    return Section("Texts while images are encoded", text, header, rows, {"s": gaps})


def _gaps(engine: MeasuredEngine, vision: VisionSpec, options: argparse.Namespace, images: list[Image]) -> list[float]:
    """Return the times between two tokens of texts, from the arrival of the images on. Mutates the engine."""
    chats = [f"chat {index}" for index in range(options.chats)]
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    for index, name in enumerate(chats):
        prompt = array("i", [(31 * index + each) % vision.placeholder for each in range(32)])
        engine.client.send(Add(name, prompt, replace(sampling, max_tokens=options.tokens)))
    last_s, gaps = dict[str, float](), list[float]()
    for step in range(1 << 30):
        if step == options.tokens // 8:
            for index, image in enumerate(images):
                prompt = array("i", [1 + index, *[vision.placeholder] * image.num_tokens, 2])
                moved = (image.moved_to(1),)
                engine.client.send(Add(f"image {index}", prompt, replace(sampling, max_tokens=4), images=moved))
        if engine.client.is_idle:
            return gaps
        updates, now = engine.client.receive(), time.perf_counter()
        for update in updates:
            if update.request_id in chats and update.token_ids:
                if step > options.tokens // 8:
                    gaps.append(now - last_s[update.request_id])
                last_s[update.request_id] = now
    return gaps


def operations_of(vision: VisionSpec, height: int, width: int) -> int:
    """Return the multiplications and additions of encoding an image of this size. Pure."""
    tower = vision.tower
    rows, columns = vision.patches.grid(height, width)
    num_patches = rows * columns
    num_rows = num_patches + vision.patches.num_first
    of_layers = sum(math.prod(shape) for shape in expected_tensors(tower).values() if len(shape) == 2)
    attention = 2 * num_rows * num_rows * tower.attention.num_heads * tower.attention.head_dim * len(tower.layers)
    scale = num_patches / vision.patches.max_patches
    around = sum(scale * count * math.prod(each.shape) for each, count in vision.products())
    return round(2 * (num_rows * of_layers + attention + around))


def _encoder_of(engine: MeasuredEngine) -> tuple[ImageEncoder, VisionSpec]:
    """Return the encoder of a model, and its settings; raises `InvalidConfigError` if it reads no images."""
    vision, encoder = engine.blueprint.model.vision, engine.watch.image_encoder
    if vision is None or encoder is None:
        raise InvalidConfigError("model", engine.blueprint.config.model, "one that reads images")
    return encoder, vision


def _image(vision: VisionSpec, edge: int, seed: int) -> Image:
    patches = vision.patches
    unit = patches.size * patches.merge
    edge = patches.image_size or max(unit, edge // unit * unit)
    pixels = np.random.default_rng(seed).integers(0, 256, (edge, edge, CHANNELS), dtype=np.uint8)
    return Image.of(0, vision.num_placeholders(edge, edge), edge, edge, pixels.tobytes())


def _encode(encoder: ImageEncoder, image: Image) -> tuple[np.ndarray, list[float]]:
    """Return the rows of an image, and the seconds of each part of the work."""
    work, rows, parts = encoder.begin(image), None, list[float]()
    while rows is None:
        started = time.perf_counter()
        rows = work.advance(0.0)
        parts.append(time.perf_counter() - started)
    return rows, parts
