"""Model folders of strangers: every one is loaded or refused in one line, soon, and with little memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.compute.models import FAMILIES, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.core.errors import CheckpointError, InvalidRequestError, ModelError, QuireError
from quire.core.model_files import MAX_SETTINGS_BYTES, open_model_file, read_model_file
from quire.engine.text.tokenizer import Tokenizer
from support.odd_json import NUMBERS, mutated_bytes, mutated_json
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

LIMIT_S = 60
VOCAB_SIZE = 384
SETTINGS = {"vocab_size": VOCAB_SIZE, "eos_token_id": 299}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_chatml(write_tiny_qwen3(tmp_path / "model", settings=SETTINGS))


@contextmanager
def bounded() -> Iterator[None]:
    """Fail what takes very long, also what waits for another process."""

    def stop(*_: object) -> None:
        raise SystemExit("it does not end")  # nothing catches this one

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def load(folder: Path) -> Tokenizer:
    """Check what an engine checks of a folder before it takes memory."""
    from quire.core.config import EngineConfig
    from quire.engine.factory import plan_engine

    blueprint = plan_engine(EngineConfig(model=str(folder), kv_memory="1MiB", num_threads=1, backend="reference"))
    blueprint.check_weights()
    return Tokenizer.open(blueprint.tokenizer_files, vocab_size=blueprint.vocab_size)


def refusal(folder: Path) -> str:
    """Return what is said of a folder that is refused."""
    with bounded(), pytest.raises(CheckpointError) as caught:
        load(folder)
    said = str(caught.value)
    assert said.isprintable() and len(said) < 2500
    return said


# --- files that are none ---------------------------------------------------------------------------------------------

READ = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path has at most 107 bytes
    os.close(folder)


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 10**9)


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (make_pipe, "is 'a pipe'; allowed: a plain file"),
    "a socket": (make_socket, "is 'a socket'; allowed: a plain file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is 'a device'; allowed: a plain file"),
    "a folder": (Path.mkdir, "is 'a folder'; allowed: a plain file"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "is 'a broken link'"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "levels of symbolic links"),
    "10 GB of nothing": (make_sparse, "10000000000; allowed: at most|header length is 0"),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_refused_without_being_opened(kind: str, name: str, folder: Path) -> None:
    make, said = NO_FILES[kind]
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    message = refusal(folder)
    assert name in message
    assert any(part in message for part in said.split("|")), message


def test_the_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    assert load(snapshot).has_chat_template
    checkpoint = Checkpoint.open(snapshot)
    assert all(checkpoint.tensor(name).size for name in checkpoint.entries)


def test_a_descriptor_is_closed_and_not_inherited(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_model_file(folder / "config.json") as file:
        assert not os.get_inheritable(file.fileno())
    for _ in range(3):
        with pytest.raises(CheckpointError):
            open_model_file(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_grows_while_it_is_read_is_read_to_the_limit_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_bytes(b" " * 5000)
    real = os.fstat

    def small(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[6] = 0  # st_size, as of a file that was empty a moment ago, or of one in /proc
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", small)
    with pytest.raises(CheckpointError, match="size is 101; allowed: at most 100 bytes"):
        read_model_file(folder / "config.json", 100)


@pytest.mark.parametrize("change", [-4, 4])
def test_weights_that_changed_since_they_were_checked_are_not_mapped(change: int, folder: Path) -> None:
    checkpoint, path = Checkpoint.open(folder), folder / "model.safetensors"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CheckpointError, match="bytes, as when it was checked"):
        checkpoint.tensor("model.norm.weight")


# --- JSON ------------------------------------------------------------------------------------------------------------

LARGE = {
    "lists": b'{"a": [' + b"[]," * 5_000_000 + b"[]]}",
    "objects": b'{"a": [' + b"{}," * 5_000_000 + b"{}]}",
    "depth": b"[" * 1_000_000,
    "closed depth": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
    "bytes": b'{"a": "' + b"x" * MAX_SETTINGS_BYTES + b'"}',
    "half a pair": b'{"a": "\\ud800", "bos_token": "\\uD800"}',
    "keys": b'{"' + b"k" * 1_000_000 + b'": 1, "' + b"k" * 1_000_000 + b'": 2}',
}


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", LARGE)
def test_json_that_would_fill_the_memory_is_refused(kind: str, name: str, folder: Path) -> None:
    (folder / name).write_bytes(LARGE[kind])
    assert name in refusal(folder)


def test_a_header_of_many_values_is_refused(folder: Path) -> None:
    text = LARGE["lists"]
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert "header is 'JSON of more than" in refusal(folder)


def test_what_is_printed_of_a_strangers_names_is_short_and_printable(folder: Path) -> None:
    data = {"\x1b[31m\n" + "n" * 5000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(data).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    assert "tensors (missing" in refusal(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.safetensors\0"])
def test_an_index_does_not_reach_out_of_its_folder(shard: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "the plain name of a .safetensors file in the same folder" in refusal(folder)


# --- settings --------------------------------------------------------------------------------------------------------

SIZES = (
    *("head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "vocab_size"),
)


@pytest.mark.parametrize("field", SIZES)
def test_a_size_out_of_proportion_is_refused_by_name(field: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for number in NUMBERS:
        (folder / "config.json").write_text(json.dumps(config | {field: number}))
        with bounded(), pytest.raises(CheckpointError, match=f"{field} is "):
            read_model(ModelFolder(folder))


def test_sizes_that_are_large_together_take_no_memory_before_they_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    large = {"hidden_size": 1 << 23, "num_attention_heads": 1 << 16, "head_dim": 4096, "num_hidden_layers": 1000}
    (folder / "config.json").write_text(json.dumps(config | large | {"num_key_value_heads": 1 << 16}))
    with bounded(), pytest.raises(QuireError):
        load(folder)
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 1 << 16, "moe_intermediate_size": 1}
    (folder / "config.json").write_text(json.dumps(config | experts))
    with bounded(), pytest.raises(CheckpointError, match="num_experts is 65536; allowed: an integer from 1 to 21845"):
        load(folder)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def replaced(count: int, text: str = "aa") -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": text}
    return {"type": "Sequence", "normalizers": [step] * count, "decoders": [step] * count}


def around(count: int) -> dict[str, Any]:
    piece, rest = {"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "x", "ids": [1] * count, "tokens": ["a"] * count}
    single = [piece] * count + [rest]
    return {"type": "TemplateProcessing", "single": single, "pair": [rest, rest], "special_tokens": {"x": token}}


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("normalizer", replaced(40), "40 steps that make a text 1099511627776 times as long"),
        ("decoder", replaced(40), "40 steps that make a text 1099511627776 times as long"),
        ("normalizer", replaced(1, "a" * 1000), "1 steps that make a text 1000 times as long"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}, "1073741824 times as long"),
        ("post_processor", around(1000), "1000000 tokens around each text"),
        ("model", {"type": "BPE", "vocab": {"a" * 5000: 0, "b" * 5000: 1}, "merges": []}, "texts of 5000 bytes"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_grows_without_end_is_refused(part: str, value: Any, said: str, folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    assert said in refusal(folder)


def test_a_long_added_token_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][0]["content"] = "<" * 1000
    path.write_text(json.dumps(content))
    assert "an added token is '1000 characters'; allowed: at most 256" in refusal(folder)


def test_an_expression_that_takes_too_long_fails_the_text_and_not_the_process(folder: Path) -> None:
    path = folder / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": split}))
    tokenizer = load(folder)
    with bounded(), pytest.raises(RuntimeError, match="the tokenizer failed"):  # rather than a panic, no Exception
        tokenizer.encode("a" * 40 + "b")


# --- what is there instead -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 200])  # as in the hub's cache
def test_a_family_that_does_not_run_is_named_with_those_that_do(folder: Path, length: int) -> None:
    folder = folder.rename(folder.with_name("model" + "s" * length))
    (folder / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelError, match="a model of the family 'MambaForCausalLM', which quire cannot run") as caught:
        read_model(ModelFolder(folder))
    listed, found = str(caught.value).partition("Use a model of one of these: ")[2], []
    for ending in ("ForCausalLM", "ForConditionalGeneration", "Model"):
        names, _, listed = listed.partition(f" (each + {ending})")
        found += [name + ending for name in names.removeprefix(", ").split(", ")]
    assert sorted(found) == sorted(FAMILIES) and not listed


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("MambaForCausalLM", "its layers are state-space layers (Mamba)"),
        ("FalconMambaForCausalLM", "its layers are state-space layers (Mamba)"),
        ("JambaForCausalLM", "some of its layers are state-space layers"),
        ("Zamba2ForCausalLM", "some of its layers are state-space layers"),
        ("KimiLinearForCausalLM", "it has linear attention"),
        ("MiniMaxText01ForCausalLM", "it has linear attention"),
        ("RecurrentGemmaForCausalLM", "its layers are recurrent"),
        ("Rwkv7ForCausalLM", "its layers are recurrent"),
        ("LongcatFlashForCausalLM", "its layers have two sublayers of attention with latents (MLA)"),
        ("DeepseekV32ForCausalLM", "its attention chooses tokens by an index (DSA)"),
        ("BloomForCausalLM", "its positions are by ALiBi"),
        ("InternVLChatModel", "it needs its own code; the folder with -hf or -HF at the end of its name does not"),
        ("Qwen2AudioForConditionalGeneration", "it reads images or sound, or has an encoder"),
        ("ElectraForSequenceClassification", "it generates no text, and is none of the encoders that run"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"auto_map": {"AutoModelForCausalLM": "own.Own"}}], ids=["plain", "own-code"])
def test_a_family_with_other_layers_is_refused_with_what_it_has(
    family: str, reason: str, settings: dict[str, object], folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": [family], **settings}))
    with pytest.raises(ModelError) as caught:
        read_model(ModelFolder(folder))
    assert f"a model of the family '{family}', which quire cannot run: {reason}. Use a model of" in str(caught.value)


# --- anything --------------------------------------------------------------------------------------------------------

MUTATED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
OTHERS: dict[str, Any] = {
    "num_experts": 4,
    "layer_types": ["full_attention"] * 3,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "text_config": {},
    "torch_dtype": "float16",
}


def mutate(draw: random.Random, folder: Path) -> None:
    """Change one file of a folder."""
    name = draw.choice(MUTATED)
    path = folder / name
    data = path.read_bytes()
    start = 8 if name == "model.safetensors" else 0
    end = 8 + int.from_bytes(data[:8], "little") if start else len(data)
    text = data[start:end]
    if draw.random() < 0.75:
        value = json.loads(text)
        if name == "config.json":
            value |= {key: OTHERS[key] for key in draw.sample(sorted(OTHERS), draw.randint(0, 2))}
            if draw.random() < 0.4:
                value["architectures"] = [draw.choice(sorted(FAMILIES))]
        text = json.dumps(mutated_json(draw, value)).encode()
    else:
        text = mutated_bytes(draw, text)
    length = draw.choice([len(text), len(text), len(text), 0, 2**31, 2**64 - 1])
    path.write_bytes((length.to_bytes(8, "little") if start else b"") + text + data[end:])


@pytest.mark.parametrize("part", range(8))
def test_any_folder_is_loaded_or_refused_in_one_line(part: int, folder: Path, tmp_path: Path) -> None:
    num_loaded = 0
    for seed in range(50 * part, 50 * part + 50):
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        mutate(random.Random(seed), other)
        try:
            with bounded():
                tokenizer = load(other)
                tokenizer.encode("hello <|im_end|>")
                if tokenizer.has_chat_template:
                    tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
            num_loaded += 1
        except QuireError as error:
            assert str(error).isprintable() and len(str(error)) < 2500, f"seed {seed}"
            assert isinstance(error, InvalidRequestError | CheckpointError | ValueError), f"seed {seed}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        shutil.rmtree(other)
    assert 0 < num_loaded < 50  # neither is all refused, nor nothing
