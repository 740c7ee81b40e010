"""Stores of other programs and quantised folders, broken on purpose from seeds, and what quire makes of them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from quire.compute.models import read_model
from quire.compute.models.hub_cache import find_removal
from quire.compute.models.inventory import stored_models
from quire.compute.models.source import ModelFolder
from quire.compute.models.stores import find_stored
from quire.compute.weights.decoder_weights import WeightReader
from quire.core.errors import CheckpointError
from support.gguf_drafts import whole_model
from support.model_stores import OLDER, add_file, add_to_hub, add_to_ollama
from support.odd_json import mutated_bytes, mutated_json
from support.quantized_models import FORMS, write_quantized

NAMES = ("tiny:1b", "tiny", "hf.co/maker/tiny:F32", "maker/one", "maker/one:Q8_0", "org/m", "org/m@v1", "org/two:Q4_0")
ODD_NAMES = (
    "x\ny",
    "\x1b[31m",
    "é",
    "..x",
    "a--b--c",
    "models--",
    "models--a",
    "x" * 200,
    " ",
    "\udcff",
    "m.gguf",
    "CON",
)


def whole_stores(home: Path) -> None:
    """Write one model or more into each store."""
    model = whole_model(random.Random(1)).encoded()
    add_to_ollama(home, "registry.ollama.ai/library/tiny/1b", "1", {"stop": ["x"], "top_k": 5}).write_bytes(model)
    add_to_ollama(home, "hf.co/maker/tiny/F32", "2").write_bytes(model)
    studio = home / ".lmstudio" / "models" / "maker" / "one"
    studio.mkdir(parents=True)
    (studio / "m-Q8_0.gguf").write_bytes(model)
    for commit, reference in (("a" * 40, "main"), (OLDER, "v1")):
        snapshot = add_to_hub(home, "org/m", commit, reference)
        add_file(snapshot, "config.json", b'{"architectures": ["LlamaForCausalLM"]}')
        add_file(snapshot, "model.safetensors", b"\x02\0\0\0\0\0\0\0{}")
    for kind in ("Q4_0", "Q8_0"):
        add_file(add_to_hub(home, "org/two"), f"m-{kind}.gguf", model + kind.encode())


def break_stores(draw: random.Random, home: Path) -> None:
    """Change one entry of the stores, or put an odd one there. No link is followed, so nothing outside is touched."""
    paths = sorted(Path(folder, name) for folder, *names in os.walk(home) for name in (*names[0], *names[1]))
    path = draw.choice(paths)
    kind = draw.randrange(8)
    if kind < 4 and path.is_file():
        data = path.read_bytes()
        try:
            value = json.loads(data) if draw.random() < 0.7 else None
        except ValueError:  # it is none, or was broken before
            value = None
        changed = mutated_bytes(draw, data or b" ") if value is None else json.dumps(mutated_json(draw, value)).encode()
        path.unlink()
        path.write_bytes(draw.choice([changed, changed, changed, data[: len(data) // 2], b"", b"\0" * 50]))
    elif kind < 6:
        other = draw.choice(paths)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        match draw.randrange(5):
            case 0:
                path.symlink_to(draw.choice(["nothing", path.name, "/dev/zero", str(other), ".."]))
            case 1:
                path.mkdir()
            case 2:
                os.mkfifo(path)
            case 3:
                path.write_bytes(b"{}")
    elif path.is_dir():
        name = draw.choice(ODD_NAMES)
        if draw.random() < 0.5:
            path.rename(path.with_name(name))
        else:
            (path / name).write_bytes(b"x")
    else:
        path.rename(path.with_name(draw.choice(ODD_NAMES)))


def stores_trial(seed: int, home: Path) -> Iterator[str]:
    """Yield what comes of each use of broken stores: a model, or a refusal of one line."""
    draw = random.Random(seed)
    whole_stores(home)
    for _ in range(draw.choice([1, 1, 2, 5])):
        break_stores(draw, home)
    for model in stored_models(home, {}):
        assert model.name.isprintable() and model.problem.isprintable(), f"seed {seed}: {model.name!r}"
        assert (model.source is None) == bool(model.problem)
        if model.source is not None:
            source = model.source
            yield attempt(seed, lambda source=source: str(read_model(source).architecture))
    for name in NAMES:
        yield attempt(seed, lambda name=name: str(find_stored(name, home, {})))
    yield attempt(seed, lambda: str(find_removal(draw.choice(NAMES[-4:]), home, {}).num_files))


def quantised_trial(seed: int, place: Path) -> str:
    """Return what comes of a quantised folder whose settings or tensors' header were changed."""
    draw = random.Random(seed)
    folder = write_quantized(place / "model", draw.choice(sorted(FORMS)))
    path = folder / draw.choice(["config.json", "config.json", "model.safetensors"])
    data = path.read_bytes()
    if path.name == "config.json":
        value = json.loads(data)
        value["quantization_config"] = mutated_json(draw, value["quantization_config"])
        path.write_text(json.dumps(value))
    else:
        end = 8 + int.from_bytes(data[:8], "little")
        text = json.dumps(mutated_json(draw, json.loads(data[8:end]))).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    def load() -> str:
        source = ModelFolder(folder)
        model, tensors = read_model(source), source.tensors()
        WeightReader(model.spec, tensors, "float32")
        for name in tensors.entries:
            tensors.require_floats(name)
            tensors.tensor(name)
        return "a model"

    return attempt(seed, load)


def attempt(seed: int, use: object) -> str:
    """Return what a use gives, or "refused"; raises for what is no typed error of one line."""
    assert callable(use)
    try:
        return str(use())
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 2500, f"seed {seed}: {str(error)[:200]!r}"
        return "refused"
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
