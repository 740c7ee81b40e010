"""Train the guide, the small model that ships inside quire, and write its folder.

    python scripts/guide/train.py --out src/quire/guide

Needs torch, tokenizers and safetensors; README.md in this folder has the duration. All randomness comes from fixed
seeds, on one thread, with torch's deterministic algorithms: the same corpus, versions and kind of processor give the
same files. Products are computed in bfloat16, the final format of the weights; on a processor without AVX-512 they are
computed in float32, which is several times as fast there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from corpus import Conversation, ConversationMaker, Topic, read_documents, read_topics
from decoder import ROPE_THETA, Guide, Shape
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional

SEED = 2309_06180  # the number of the paper
NUM_THREADS = 1  # two are faster on an idle machine, but much slower if another process uses the second core
END_OF_TEXT, START, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (  # Qwen's pattern for splitting text before BPE
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (Path(__file__).parents[2] / "src/quire/guide/chat_template.jinja").read_text(encoding="utf-8")

TOKENS_PER_STEP = 3072
ROW_LENGTH, LONG_ROW_LENGTH = 384, 1536
LONG_EVERY = 16  # one of this many steps has long conversations
DOCUMENT_LENGTH = 256  # tokens of a piece of a document
DOCUMENTS_PER_EPOCH = 25
SHARE_OF_BEGINNINGS, BEGINNING = 0.65, 12  # this share of conversations stops this many tokens into the last answer:
# the topic is decided by then, and the saved time goes into more questions
COLUMNS = ("token_ids", "positions", "owners", "next", "weights")
ANSWER_WEIGHT, DOCUMENT_WEIGHT = 1.0, 0.3
PEAK_LEARNING_RATE, WARM_UP_STEPS, WEIGHT_DECAY, DROPOUT = 3e-3, 100, 0.1, 0.15
NUM_STEPS = 2000


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer in the form of Qwen's; equal texts give equal tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(slots=True)
class Piece:
    """The tokens of a text, and the weight of each token in the loss."""

    token_ids: list[int]
    weights: list[float]

    def cut(self, length: int) -> Piece:
        """Return its first `length` tokens."""
        return Piece(self.token_ids[:length], self.weights[:length])


class PieceMaker:
    """Turns conversations and documents into pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def of_conversation(self, conversation: Conversation, *, last_tokens: int | None = None) -> Piece:
        """Return a conversation in the chat template; only answers and their ends count in the loss.

        `last_tokens`: cut the last answer to this many tokens.
        """
        system_prompt, turns = conversation
        piece = Piece([], [])
        if system_prompt:
            self._add(piece, f"{START}system\n{system_prompt}{END}\n", 0.0)
        for question, answer in turns:
            self._add(piece, f"{START}user\n{question}{END}\n", 0.0)
            self._add(piece, f"{START}assistant\n", 0.0)
            self._add(piece, f"{answer}{END}", ANSWER_WEIGHT)
            self._add(piece, "\n", 0.0)
        return piece

    def of_documents(self, texts: list[str]) -> list[Piece]:
        """Return the texts, cut into pieces."""
        pieces = []
        for text in texts:
            token_ids = [*self.tokenizer.encode(text).ids, *self.tokenizer.encode(END_OF_TEXT).ids]
            for start in range(0, len(token_ids), DOCUMENT_LENGTH):
                part = token_ids[start : start + DOCUMENT_LENGTH]
                pieces.append(Piece(part, [DOCUMENT_WEIGHT] * len(part)))
        return pieces

    def _add(self, piece: Piece, text: str, weight: float) -> None:
        token_ids = self.tokenizer.encode(text).ids
        piece.token_ids += token_ids
        piece.weights += [weight] * len(token_ids)


def endless_pieces(
    topics: list[Topic], documents: list[Piece], maker: PieceMaker, *, first_epoch: int = 0
) -> Iterator[Piece]:
    """Yield the pieces of one epoch after another; no two epochs are equal."""
    epoch = first_epoch
    while True:
        shuffled = random.Random(f"{SEED}/documents/{epoch}")
        pieces = []
        for conversation in ConversationMaker(topics, f"{SEED}/{epoch}").epoch():
            is_beginning = shuffled.random() < SHARE_OF_BEGINNINGS
            pieces.append(maker.of_conversation(conversation, last_tokens=BEGINNING if is_beginning else None))
        pieces += shuffled.sample(documents, min(DOCUMENTS_PER_EPOCH, len(documents)))
        shuffled.shuffle(pieces)
        yield from pieces
        epoch += 1


def endless_long_pieces(topics: list[Topic], maker: PieceMaker) -> Iterator[Piece]:
    """Yield endless long conversations, so that late turns of a chat are as good as the first."""
    conversations = ConversationMaker(topics, f"{SEED}/long")
    while True:
        yield maker.of_conversation(conversations.long_conversation(num_turns=20))


Batch = dict[str, torch.Tensor]


def endless_batches(pieces: Iterator[Piece], row_length: int) -> Iterator[Batch]:
    """Yield packed batches [num_rows, row_length]: token ids, positions, owners, next tokens and their weights."""
    waiting: list[Piece] = []
    while True:
        columns: dict[str, list[list[float]]] = {name: [] for name in COLUMNS}
        for _ in range(TOKENS_PER_STEP // row_length):
            while len(waiting) < 32:  # enough to find one that fits into the rest of a row
                waiting.append(next(pieces).cut(row_length))
            for name, row in _packed_row(waiting, row_length).items():
                columns[name].append(row + [0] * (row_length - len(row)))
        weights = torch.tensor(columns.pop("weights"))
        yield {name: torch.tensor(rows, dtype=torch.long) for name, rows in columns.items()} | {"weights": weights}


def mixed(batches: Iterator[Batch], long_batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches of short texts, and every `LONG_EVERY` steps one of long conversations."""
    while True:
        for _ in range(LONG_EVERY - 1):
            yield next(batches)
        yield next(long_batches)


def _packed_row(waiting: list[Piece], row_length: int) -> dict[str, list[float]]:
    """Fill a row with waiting pieces, in their order, while one fits. Mutates `waiting`."""
    row: dict[str, list[float]] = {name: [] for name in COLUMNS}
    owner = 0
    while (room := row_length - len(row["token_ids"])) > 0:
        place = next((place for place, piece in enumerate(waiting) if len(piece.token_ids) <= room), None)
        if place is None:
            break
        piece, owner = waiting.pop(place), owner + 1
        row["token_ids"] += piece.token_ids
        row["positions"] += range(len(piece.token_ids))
        row["owners"] += [owner] * len(piece.token_ids)
        row["next"] += [*piece.token_ids[1:], 0]
        row["weights"] += [*piece.weights[1:], 0.0]
    return row


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Return the rate of a step: a linear warm-up, then half a cosine down to a hundredth of the peak."""
    warm_up_steps = min(WARM_UP_STEPS, num_steps // 10)
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    done = (step - warm_up_steps) / max(1, num_steps - warm_up_steps)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def train(guide: Guide, batches: Iterator[Batch], num_steps: int, *, peak_rate: float = PEAK_LEARNING_RATE) -> None:
    """Train in place; print the loss now and then."""
    matrices = [weight for weight in guide.parameters() if weight.dim() == 2]
    vectors = [weight for weight in guide.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), foreach=True)
    began, mean_loss = time.monotonic(), 0.0
    has_bfloat16 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, peak_rate)
        batch = next(batches)
        wanted = batch["weights"] > 0
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16):
            logits = guide(batch["token_ids"], batch["positions"], batch["owners"], wanted)
        losses = functional.cross_entropy(logits.float(), batch["next"][wanted], reduction="none")
        weights = batch["weights"][wanted]
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(guide.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 50 == 49:
            print(f"step {step + 1}/{num_steps}  loss {mean_loss:.4f}  {time.monotonic() - began:.0f} s", flush=True)


def write_folder(folder: Path, guide: Guide, tokenizer: Tokenizer) -> None:
    """Write the model folder: settings, tokenizer, template, and the weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    end, end_of_text = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **guide.shape.fields(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end_of_text,
        "hidden_act": "silu",
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }
    generation = {"do_sample": False, "eos_token_id": end, "pad_token_id": end_of_text, "max_new_tokens": 256}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": guide.shape.max_position_embeddings,
    }
    for name, value in (("config", config), ("generation_config", generation), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in guide.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only the owner can read


def main() -> None:
    """Read the corpus, train, and write the folder."""
    parser = argparse.ArgumentParser(description="Train the guide, the small model that ships inside quire.")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, help="training steps; fewer for a trial; default: %(default)s"
    )
    options = parser.parse_args()

    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    topics, texts = read_topics(), read_documents()
    spoken = [
        text for topic in topics for text in (*topic.questions, *topic.terms, *topic.deeds, topic.answer, topic.more)
    ]
    tokenizer = train_tokenizer(spoken * 4 + texts, Shape().vocab_size)
    maker = PieceMaker(tokenizer)
    guide = Guide(Shape(vocab_size=tokenizer.get_vocab_size()), dropout=DROPOUT)
    num_parameters = sum(weight.numel() for weight in guide.parameters())
    digest = hashlib.sha256("\0".join(spoken + texts).encode()).hexdigest()[:16]
    print(f"{len(topics)} topics, {len(texts)} documents, texts {digest}, {num_parameters} parameters", flush=True)
    short = endless_batches(endless_pieces(topics, maker.of_documents(texts), maker), ROW_LENGTH)
    train(guide, mixed(short, endless_batches(endless_long_pieces(topics, maker), LONG_ROW_LENGTH)), options.steps)
    write_folder(options.out, guide, tokenizer)
    written = (options.out / "model.safetensors").read_bytes()
    print(f"wrote {options.out}, weights {hashlib.sha256(written).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
