"""What quire makes of GGUF files that are broken on purpose, before it maps any weight.

python -m support.gguf_trials FOLDER SEED          run one seed again, and print what comes of it; in tests/
python -m support.gguf_trials FOLDER FIRST COUNT   run many within a limit on memory, and print counts as JSON
"""

from __future__ import annotations

import json
import resource
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import PIL.Image  # noqa: F401 - before the limit on memory, which is for what a file costs

from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.pooling import pooling_of
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.vision.weights import VisionWeights, fitted, vision_bytes
from quire.compute.weights.decoder_weights import WeightReader, weight_bytes
from quire.core.errors import CheckpointError, InvalidRequestError, InvariantError
from quire.core.pooling import PAIR_TEMPLATE
from quire.engine.images.reader import ImageReader
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.tokenizer import Tokenizer
from support.gguf_mutants import mutant

EXTRA_BYTES = 256 << 20  # that a process may take beyond what it has when it begins
MAX_PEAK_BYTES = 16 << 20  # of one case in Python; a window of the reader has four
MAX_CALLS = 200_000  # of Python functions, in one case
SAMPLED = 400  # one case of this many is measured
MESSAGES = [{"role": "user", "content": text} for text in ("c", "ab", "ab <|im_end|>")]


def read_whole(path: Path) -> str:
    """Read all that quire reads of a file before it maps weights; return how far it came."""
    encoder = path.with_name("mmproj.gguf")
    file = GgufFile(path, image_encoder=encoder if encoder.exists() else None)
    if file.image_encoder is None and file.has_own_encoder:
        file = GgufFile(path, image_encoder=path)
    model = read_model(file)
    assert isinstance(file.type, str)
    tensors, num_bytes = file.tensors(), {path: path.stat().st_size for path in path.parent.glob("*.gguf")}
    for entry in tensors.entries.values():
        start, stop = (entry.tensor.start + at for at in entry.byte_range)
        assert 0 < start <= stop <= num_bytes[entry.tensor.file]
    assert weight_bytes(model.spec, "bfloat16", "auto", file.block_types()) > 0
    WeightReader(model.spec, tensors, "float32", block_types=tensors.block_types)
    images = None if model.vision is None else _reader(file, model.vision)
    tokenizer = Tokenizer.open(file, vocab_size=model.spec.vocab_size, images=images)
    tokenizer.encode("ab c\n")
    pooling_of(file)
    if tokenizer.has_chat_template or tokenizer.pair_template:
        try:
            tokenizer.encode_chat(MESSAGES, ChatOptions(template=PAIR_TEMPLATE))
        except InvalidRequestError as error:
            _require_one_line(error)
            return "a chat template that fails"
    return "a model" if images is None else "a model with images"


def _reader(file: GgufFile, vision: VisionSpec) -> ImageReader:
    """Read all that quire reads of an image encoder, its small weights too, and return the reader of its images."""
    tensors = file.tensors()
    own = fitted(vision, tensors)
    WeightReader(own.tower, tensors, "float32", block_types=tensors.block_types)
    VisionWeights.load(own, tensors, "float32")
    assert vision_bytes(vision, "bfloat16", tensors.block_types) > 0

    def num_rows(height: int, width: int, wanted: int) -> int:
        try:
            return vision.num_placeholders(height, width, wanted)
        except InvariantError:
            return 0

    return ImageReader.open(file, max_tokens=4096, num_rows=num_rows)


def _require_one_line(error: Exception) -> None:
    if not str(error).isprintable() or len(str(error)) > 2500:
        raise AssertionError(f"{len(str(error))} characters, not of one line: {str(error)[:200]!r}")


def outcome(path: Path) -> str:
    """Return what comes of a mutant: a model, or the line of our source that refuses it."""
    try:
        return read_whole(path)
    except CheckpointError as error:
        _require_one_line(error)
        return _line_of(error)


def _line_of(error: Exception) -> str:
    """Return the last line of our source in a traceback."""
    found, step = "", error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if "/quire/" in path:
            found = f"{path.rpartition('/quire/')[2]}:{step.tb_lineno}"
        step = step.tb_next
    return found


class Meter:
    """Measures one case: calls of Python functions, and bytes at the peak."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __enter__(self) -> Meter:
        tracemalloc.start()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.num_calls += event == "call"


def run(folder: Path, seed: int, seen: Counter[str], *, measured: bool = False) -> None:
    """Make one mutant and read it; raises for what is neither a model nor one typed error of one line."""
    files = mutant(seed)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    try:
        if measured:
            with Meter() as meter:
                seen[outcome(folder / next(iter(files)))] += 1
            seen["most calls"] = max(seen["most calls"], meter.num_calls)
            seen["most bytes"] = max(seen["most bytes"], meter.peak_bytes)
            if meter.peak_bytes > MAX_PEAK_BYTES or meter.num_calls > MAX_CALLS:
                raise AssertionError(f"{meter.peak_bytes} bytes, {meter.num_calls} calls")
        else:
            seen[outcome(folder / next(iter(files)))] += 1
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        for name in files:
            (folder / name).unlink()


def main(folder: Path, first: int, count: int = 1) -> None:
    """Run seeds, each named in a file before it is run, so that one that ends the process is known."""
    seen: Counter[str] = Counter()
    if count > 1:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + EXTRA_BYTES,) * 2)
    for seed in range(first, first + count):
        (folder / "seed").write_text(str(seed))
        run(folder, seed, seen, measured=seed % SAMPLED == 0 or count == 1)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
