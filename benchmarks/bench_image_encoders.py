r"""The image encoder of transformers, for `quire bench images --peer-python`: runs in its interpreter.

    python benchmarks/bench_image_encoders.py \
        --model FOLDER --images FILE --out FILE --threads N --dtype DTYPE

The images are a JSON list of pixels, which are normalised by the settings of the folder. Prints one line of JSON, with
the seconds of `get_image_features` for each image, after a warm-up; the rows go to a file, as float32. It imports
nothing from quire.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the options, encode the images, and print what it took."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--images", "--out", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    import numpy
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=dtype).eval()
    settings = json.loads((Path(options.model) / "preprocessor_config.json").read_text(encoding="utf-8"))
    mean, deviation = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))

    def prepared(image: dict[str, Any]) -> Any:
        shape = image["height"], image["width"], 3
        pixels = torch.from_numpy(numpy.frombuffer(bytes.fromhex(image["pixels"]), numpy.uint8).reshape(shape).copy())
        return ((pixels.permute(2, 0, 1).float() / 255 - mean) / deviation).to(dtype)

    def encode(pixels: Any) -> Any:
        tiled = model.config.model_type in ("idefics3", "smolvlm")
        batch = pixels[None, None] if tiled else pixels[None]
        found = model.get_image_features(pixel_values=batch)
        found = getattr(found, "pooler_output", found)
        return torch.cat([each.reshape(-1, each.shape[-1]) for each in found]).float()

    images = [prepared(image) for image in json.loads(Path(options.images).read_text(encoding="utf-8"))]
    seconds, rows = [], []
    with torch.inference_mode():
        encode(images[0])
        for image in images:
            started = time.perf_counter()
            rows.append(encode(image).numpy())
            seconds.append(time.perf_counter() - started)
    Path(options.out).write_bytes(numpy.concatenate(rows).astype("<f4").tobytes())
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
