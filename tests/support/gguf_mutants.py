"""GGUF files that are broken on purpose, each made from a seed.

A mutant begins as a small model that is whole. Some changes know what a header means (a tensor over another one, a list
in a list, a vocabulary with a hole), others only where its numbers are, and a few know nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from support.gguf_drafts import (
    ARCHITECTURES,
    ARRAY,
    F32,
    FORMS,
    I32,
    STRING,
    U8,
    U32,
    U64,
    VOCABULARY,
    Draft,
    Pair,
    Tensor,
    whole_model,
)
from support.gguf_projector_drafts import whole_pair, whole_single

LENGTHS = (0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 255, 256, 1000, 4096, 1 << 16, 1 << 20, 4_000_000, 1 << 26)
LARGE = ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 32)
NUMBERS = (*LENGTHS, *LARGE, (1 << 64) - 1)
ODD_FLOATS = (0.0, -1.0, 1e-45, 1e30, 3e38, float("inf"), float("nan"), 0.5, 1.0, 1e6)
ODD_TEXTS = (
    *(b"", b"a", b"\xff\xfe", b"\xed\xa0\x80", b"\n\x1b[31m", "é▁漢".encode(), b"x" * 700, b"{{", b"a b c"),
    *(b"llama", b"gpt2", b"linear", *VOCABULARY),
)
ODD_TEMPLATES = (
    *(b"{{", b"{% for", b"{% endfor %}", b"{% if x %}", b"{{ messages[9].content }}", b"{{ raise_exception('no') }}"),
    *(b"{{ messages.__class__ }}", b"{{ ('a' * 99999999)|length }}", b"{{ 2 ** 99999999 }}", b"{% include 'x' %}"),
    *(b"{{ " + b"(" * 300 + b"1", b"{% if 1 %}" * 200, b"{% set x = namespace() %}{% set x.y = x %}{{ x }}"),
    *(b"{% for i in range(99999999) %}{% endfor %}", b"{{ 1 / 0 }}"),
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)


def odd_value(draw: random.Random, kind: int) -> Any:
    if kind == STRING:
        return draw.choice(ODD_TEXTS)
    if kind in (F32, 12):
        return draw.choice(ODD_FLOATS)
    return draw.choice(NUMBERS) if draw.random() < 0.5 else draw.randrange(70)


def _change_value(draw: random.Random, draft: Draft) -> None:
    pair = draw.choice(draft.pairs)
    if pair.kind != ARRAY:
        pair.value = odd_value(draw, pair.kind)
    elif pair.value:
        pair.value[draw.randrange(len(pair.value))] = odd_value(draw, pair.items)


def _change_type(draw: random.Random, draft: Draft) -> None:
    pair = draw.choice(draft.pairs)
    kind = draw.choice([*FORMS, STRING, ARRAY, 13, 200])
    if pair.kind == ARRAY and draw.random() < 0.7:
        pair.items, pair.value = kind, [odd_value(draw, kind) for _ in pair.value]
    elif kind == ARRAY:
        pair.items, pair.value, pair.kind = pair.kind, [pair.value], ARRAY
    else:
        pair.kind, pair.value = kind, odd_value(draw, kind)


def _change_list(draw: random.Random, draft: Draft) -> None:
    lists = [pair for pair in draft.pairs if pair.kind == ARRAY and isinstance(pair.value, list)]
    if not lists:
        return
    pair = draw.choice(lists)
    if not pair.value:
        return
    at, other = draw.randrange(len(pair.value)), draw.randrange(len(pair.value))
    match draw.randrange(6):
        case 0:
            del pair.value[at]
        case 1:
            pair.value.insert(at, pair.value[other])
        case 2:
            pair.value[at], pair.value[other] = pair.value[other], pair.value[at]
        case 3:
            pair.value = pair.value[:at]
        case 4:
            pair.value = pair.value[:100] * draw.choice([2, 3, 50])
        case _:
            pair.items = ARRAY


def _lose_pair(draw: random.Random, draft: Draft) -> None:
    del draft.pairs[draw.randrange(len(draft.pairs))]


def _repeat_pair(draw: random.Random, draft: Draft) -> None:
    draft.pairs.insert(draw.randrange(len(draft.pairs)), draw.choice(draft.pairs))


def _rename_pair(draw: random.Random, draft: Draft) -> None:
    pair = draw.choice(draft.pairs)
    ends = (b"", b"x", b".", b"s", b"\n", b"\xff", b"k" * 1100)
    pair.key = draw.choice([draw.choice(draft.pairs).key, pair.key + draw.choice(ends), b"tokenizer.chat_template.x"])


def _swap_values(draw: random.Random, draft: Draft) -> None:
    one, other = draw.choice(draft.pairs), draw.choice(draft.pairs)
    one.kind, one.value, one.items, other.kind, other.value, other.items = (
        *(other.kind, other.value, other.items),
        *(one.kind, one.value, one.items),
    )


def _align(draw: random.Random, draft: Draft) -> None:
    kind = draw.choice([U8, U32, I32, U64, F32, STRING])
    value = draw.choice([*NUMBERS, 8, 16, 64, 48]) if kind not in (F32, STRING) else odd_value(draw, kind)
    draft.pairs.append(Pair(b"general.alignment", kind, value))
    if value in (8, 16, 32, 64) and draw.random() < 0.8:
        draft.alignment = value
        draft.place()


def _change_tensor(draw: random.Random, draft: Draft) -> None:
    at = draw.randrange(len(draft.tensors))
    tensor, other = draft.tensors[at], draw.choice(draft.tensors)
    places = range(len(tensor.dimensions))
    match draw.randrange(12):
        case 0:
            del draft.tensors[at]
            if draw.random() < 0.5:
                draft.place()
        case 1:
            draft.tensors.append(Tensor(tensor.name, list(tensor.dimensions), tensor.kind))
            draft.place()
        case 2:  # model.norm.weight is what output_norm.weight becomes
            tensor.name = draw.choice([other.name, b"", b"blk.", b"model.norm.weight", b"k" * 1100, b"\xff"])
        case 3 if places:
            tensor.dimensions[draw.choice(places)] = draw.choice(NUMBERS)
        case 4:
            tensor.dimensions = tensor.dimensions[::-1]
            draft.place()
        case 5:
            tensor.dimensions = draw.choice([[], [1] * 5, [*tensor.dimensions, 1], [1 << 32] * 4, [256, 1 << 56]])
        case 6:
            tensor.kind = draw.choice([*range(40), 1 << 31])
        case 7:
            tensor.kind = draw.choice([2, 3, 8, 10, 1, 30])
            draft.place()
        case 8:
            tensor.offset = draw.choice([*NUMBERS, other.offset, tensor.offset + 32, max(tensor.offset - 32, 0)])
        case 9:
            tensor.offset, other.offset = other.offset, tensor.offset
        case 10:
            tensor.dimensions = [each + draw.choice([-1, 1, 8]) for each in tensor.dimensions]
            draft.place()
        case _:
            draft.tensors.append(Tensor(b"blk.0.ffn_up_exps.weight", [1, 1, draw.choice([1, 3, 4096, 5000])], 1))
            draft.place()


def _break_vocabulary(draw: random.Random, draft: Draft) -> None:
    """Make the parts of a tokenizer disagree."""
    found = {pair.key.removeprefix(b"tokenizer.ggml."): pair for pair in draft.pairs}
    odd: dict[bytes, Sequence[Any]] = {
        b"tokens": ([b"a"] * 4, [], [b"x" * 600, *VOCABULARY[1:]], [*VOCABULARY, b"y" * 300], VOCABULARY[:3]),
        b"scores": ([], [0.0], [float("nan")] * 10, [float("inf")] * 10, [b"0.5"] * 10),
        b"token_type": ([], [1], [3] * 10, [4] * 10, [b"1"] * 10, [255] * 10),
        b"merges": ([b"ab"], [b"a  b"], [b"a z"], [b"a b"] * 9, [b""], [], [b" "]),
        b"eos_token_id": (10, 9, 1 << 31, 4),
        b"unknown_token_id": (10, 9, 1 << 31, 0),
        b"model": (b"rwkv", b"gpt2", b"llama", b""),
        b"pre": (b"dialect", b"", b"default", b"qwen2"),
    }
    name = draw.choice(sorted(odd.keys() & found.keys()) or [b""])
    if not name:
        return
    pair = found[name]
    pair.value = draw.choice(odd[name])
    kinds = {bytes: STRING, float: F32, int: I32}
    if isinstance(pair.value, list | tuple):
        pair.kind, pair.items, pair.value = ARRAY, kinds[type((*pair.value, b"")[0])], list(pair.value)
    else:
        pair.kind = kinds[type(pair.value)]


def _break_template(draw: random.Random, draft: Draft) -> None:
    """Add a chat template that fails, or would cost much."""
    key = draw.choice([b"tokenizer.chat_template", b"tokenizer.chat_template", b"tokenizer.chat_template.odd"])
    draft.pairs = [pair for pair in draft.pairs if pair.key != key]
    draft.pairs.append(Pair(key, STRING, draw.choice(ODD_TEMPLATES)))


def _break_settings(draw: random.Random, draft: Draft) -> None:
    """Give a number of the model a value that its tensors do not have, or another family's name."""
    architecture = next((pair for pair in draft.pairs if pair.key == b"general.architecture"), None)
    numbers = [pair for pair in draft.pairs if pair.kind in (U32, F32) and not pair.key.startswith(b"tokenizer")]
    if architecture is not None and (not numbers or draw.random() < 0.2):
        architecture.value = draw.choice(ARCHITECTURES).encode()
    elif numbers:
        pair = draw.choice(numbers)
        pair.value = odd_value(draw, pair.kind)
    scaling = [pair for pair in draft.pairs if pair.key.endswith(b"scaling.type")]
    if scaling and draw.random() < 0.3:
        scaling[0].value = draw.choice([b"longrope", b"su", b"dynamic", b""])


def _miscount(draw: random.Random, draft: Draft) -> None:
    tensors, pairs = len(draft.tensors), len(draft.pairs)
    wrong = [*NUMBERS, tensors + 1, max(tensors - 1, 0), pairs + 1, max(pairs - 1, 0)]
    draft.counts = draw.choice([(draw.choice(wrong), pairs), (tensors, draw.choice(wrong)), (pairs, tensors)])


def _other_version(draw: random.Random, draft: Draft) -> None:
    draft.version = draw.choice([0, 1, 2, 4, 3 << 24, 2 << 24, (1 << 32) - 1])


MEANT: dict[Callable[[random.Random, Draft], None], int] = {
    _change_value: 10,
    _change_type: 8,
    _change_list: 8,
    _lose_pair: 6,
    _repeat_pair: 2,
    _rename_pair: 4,
    _swap_values: 4,
    _align: 4,
    _change_tensor: 24,
    _break_vocabulary: 12,
    _break_template: 2,
    _break_settings: 12,
    _miscount: 2,
    _other_version: 2,
}
CHANGES, WEIGHTS = list(MEANT), list(MEANT.values())


# --- changes of bytes ---------------------------------------------------------------


def mutated_bytes(draw: random.Random, data: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return a file with one change: of a number where one is, of bytes anywhere, of its length."""
    out, at = bytearray(data), draw.randrange(len(data) + 1)
    match draw.randrange(8):
        case 0 | 1 | 2:
            start, width = draw.choice(spans)
            out[start : start + width] = (draw.choice(NUMBERS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        case 3:
            for _ in range(draw.randint(1, 4)):
                out[draw.randrange(len(out))] = draw.randrange(256)
        case 4:
            at = draw.choice(spans)[0] if draw.random() < 0.5 else at
            del out[at:]
        case 5:
            del out[at : at + draw.choice([1, 4, 8, 100])]
        case 6:
            out[at:at] = draw.choice([b"\0", b"\xff" * 8, out[max(0, at - 40) : at], bytes(100)])
        case _:
            start, width = draw.choice(spans)
            out[start] ^= 1 << draw.randrange(8)
    return bytes(out)


def _spliced(draw: random.Random, data: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return the beginning of one file with the end of another."""
    other = whole_model(draw)
    theirs = other.encoded()
    return data[: draw.choice(spans)[0]] + theirs[draw.choice(other.spans)[0] :]


def mutant(seed: int) -> dict[str, bytes]:
    """Return the files of a mutant, by name; the first one is the model. One in six has an image encoder."""
    draw = random.Random(seed)
    if seed % 6 == 5:
        return (
            _pair(draw) if draw.random() < 0.8 else {"m.gguf": _written(draw, _changed(draw, whole_single(draw)), 0.2)}
        )
    draft = whole_model(draw)
    if draw.random() < 0.08:
        return _parts(draw, draft)
    if draw.random() < 0.85:
        for change in draw.choices(CHANGES, WEIGHTS, k=draw.choice([1, 1, 1, 2, 3])):
            if draft.pairs and draft.tensors:
                change(draw, draft)
    return {"m.gguf": _written(draw, draft, 0.35)}


def _pair(draw: random.Random) -> dict[str, bytes]:
    """Return a model and its image encoder, mostly with a change in the latter."""
    text, encoder = whole_pair(draw)
    changed = encoder if draw.random() < 0.9 else text
    _changed(draw, changed)
    files = {"m.gguf": _written(draw, text, 0.02), "mmproj.gguf": _written(draw, encoder, 0.25)}
    if draw.random() < 0.02:
        return {"m.gguf": files["mmproj.gguf"]}
    return files


def _changed(draw: random.Random, draft: Draft) -> Draft:
    """Change a model with images, mostly."""
    if draw.random() < 0.9:
        for change in draw.choices(CHANGES, WEIGHTS, k=draw.choice([1, 1, 1, 2, 3])):
            if draft.pairs and draft.tensors:
                change(draw, draft)
    return draft


def _written(draw: random.Random, draft: Draft, chance: float) -> bytes:
    data = draft.encoded()
    if draw.random() >= chance:
        return data
    match draw.randrange(12):
        case 0:
            return _spliced(draw, data, draft.spans)
        case 1:
            return draw.choice([b"version https://git-lfs", b"PK\x03\x04", b"GGUF", b"", b"FUGG"]) + data[4:]
    return mutated_bytes(draw, data, draft.spans)


def _parts(draw: random.Random, draft: Draft) -> dict[str, bytes]:
    """Return a model in two files, one of them perhaps of another model or missing."""
    cut = draw.randrange(len(draft.tensors))
    second = Draft([], draft.tensors[cut:])
    draft.tensors = draft.tensors[:cut]
    if draw.random() < 0.3:
        second.tensors.append(draw.choice([*draft.tensors, Tensor(b"more", [4], 0)]))
    num_tensors = len(draft.tensors) + len(second.tensors) + (draw.random() < 0.1)
    draft.pairs.append(Pair(b"split.tensors.count", I32, num_tensors))
    for number, part in enumerate((draft, second)):
        part.place()
        part.pairs.append(Pair(b"split.no", 2, number if draw.random() < 0.9 else draw.randrange(4)))
        part.pairs.append(Pair(b"split.count", 2, 2 if draw.random() < 0.9 else draw.randrange(4)))
    names = draw.choice([("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")] * 9 + [("m-00001-of-00000.gguf", "x")])
    files = {name: _written(draw, part, 0.15) for name, part in zip(names, (draft, second), strict=True)}
    if draw.random() < 0.05:
        del files[names[1]]
    return files
