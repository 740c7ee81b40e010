"""Backend: one way to compute a model. Each engine has its own folder, and its backend is the entry to it.

    EngineConfig, ModelDescription ──► Backend ──► needs ──► number of blocks ──► load ──► WorkerParts ──► Worker
                                       native, torch, reference                            ▲
                                                              grammars, failpoints, watches ┘

A backend is made from settings only: it reads no weights and allocates no memory until a method needs them. Everything
that changes how an engine computes (grammars, failpoints, a benchmark's watch) changes the *parts* before the `Worker`
is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from quire.compute.arrays import BoolArray, IntArray, Logits
from quire.compute.sampling.draws import Sampler
from quire.compute.speculation.base import Proposer
from quire.compute.weights.classifier import Classifier
from quire.compute.weights.dense import Dense
from quire.compute.worker.image_queue import EncodedImages, ImageEncoder
from quire.compute.worker.kv_memory import KVMemory
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.compute.worker.step_ahead import Launcher
from quire.compute.worker.store.slot_file import SlotFile
from quire.core.byte_sizes import format_bytes
from quire.core.config import ResolvedConfig
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.granted import free_memory, resident_bytes
from quire.core.kv_spec import KVCacheSpec
from quire.core.memory_needs import MemoryNeeds

if TYPE_CHECKING:
    from quire.compute.adapters.folder import Adapter
    from quire.compute.adapters.room import AdapterRoom
    from quire.compute.grammar import MaskService
    from quire.compute.models import ModelDescription

LATENT_KV: Final = "auto, float32 or bfloat16: all heads read one latent, which is not rounded to fewer bits"


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """The facts about an engine that are known before it is loaded.

    `weights`: the format of the matrices, as `weight_bytes` names it; `block_types`: of the matrices that stay as
    their file stores them; `compact`: matrices of bfloat16 take 12 bits a number. `makes_vectors`: whether the engine
    can pool hidden states. `adapter_bytes`: the memory for adapters; `adapter_room`: its slots, if each adapter takes
    one.
    """

    name: str
    device: str
    config: ResolvedConfig
    dtype: str
    weights: str
    instruction_set: str
    num_threads: int
    kv_spec: KVCacheSpec
    weight_bytes: int
    activation_bytes: int
    block_types: tuple[str, ...] = ()
    compact: bool = False
    makes_vectors: bool = False
    adapter_bytes: int = 0
    adapter_room: AdapterRoom | None = None


@dataclass(frozen=True, slots=True)
class DraftParts:
    """A second, smaller model that guesses tokens; its keys and values share the model's blocks (`cache.draft`).

    `sampler` chooses among the tokens that both models have. `context_length` is the longest text that the draft model
    reads, and `most_tokens` the most tokens in one pass.
    """

    runner: ModelRunner[Any]
    cache: KVMemory
    sampler: Sampler
    context_length: int
    most_tokens: int


class GuessLayer(Protocol):
    """A model's own layer that guesses tokens. It keeps hidden states between calls, in the memory of its engine.

    Its keys and values share the model's blocks (`cache.draft`).
    """

    def run_model(self, runner: ModelRunner[Any], inputs: StepInputs, cache: KVMemory) -> StepOutputs:
        """Compute a step of the model, and keep the hidden states of its tokens. Mutates the cache."""
        ...

    def read(self, inputs: StepInputs, places: IntArray) -> None:
        """Read tokens of the model's last step, computed or launched; `places`: those of the tokens in that step.

        The inputs have the next token of each. Keeps the output for the last token of each sequence. Does not wait.
        Mutates the slots of the tokens in the memory.
        """
        ...

    def read_on(self, inputs: StepInputs, places: IntArray) -> None:
        """Read the next token of some sequences, whose hidden states are the kept outputs at these places.

        Keeps their outputs instead. Mutates the slots of the tokens in the memory.
        """
        ...

    def logits(self, places: IntArray) -> tuple[Logits, BoolArray]:
        """Return the logits of the kept outputs at these places, valid until the next call, and which are finite."""
        ...


@dataclass(frozen=True, slots=True)
class GuessLayerParts:
    """The model's own layer that guesses tokens. `context_length` is the longest text that the layer reads."""

    layer: GuessLayer
    sampler: Sampler
    context_length: int


class AdapterShelf(Protocol):
    """The adapters that a model has in memory."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter for rows to use, unless it is in memory. Raises `CheckpointError`. Mutates."""
        ...

    def has_adapter(self, digest: str) -> bool:
        """Whether an adapter is in memory. Does not mutate."""
        ...

    def drop_adapter(self, digest: str) -> None:
        """Free the memory of an adapter that no row uses. Mutates."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker. `launcher`: the runner, if it can launch steps ahead. `masks` is for grammars.

    `proposer` guesses tokens without a model, `draft` with a draft model, and `layer` with a layer of the model; None:
    not used. `store` keeps blocks on disk; None: they are not kept. `adapters`: the runner's; None: it supports none.
    `classifier`: of a model with labels. `dense`: the layers after the pooling of vectors. `image_encoder`: of a model
    that reads images; `encoded_images`: its results. `has_adapter` is called before a row gets an adapter, and can wait
    until that is loaded. `on_start` is called once the KV memory is allocated.
    """

    runner: ModelRunner[Any]
    cache: KVMemory
    sampler: Sampler
    eos_token_ids: frozenset[int] = frozenset()
    launcher: Launcher[Any] | None = None
    masks: MaskService | None = None
    proposer: Proposer | None = None
    draft: DraftParts | None = None
    layer: GuessLayerParts | None = None
    on_start: Callable[[], None] | None = None
    store: SlotFile | None = None
    adapters: AdapterShelf | None = None
    has_adapter: Callable[[str], bool] | None = None
    classifier: Classifier | None = None
    dense: tuple[Dense, ...] = ()
    image_encoder: ImageEncoder | None = None
    encoded_images: EncodedImages = field(default_factory=lambda: EncodedImages(0))

    def with_runner(self, runner: ModelRunner[Any]) -> WorkerParts:
        """Return the parts with another runner, which sees every step: the launcher is dropped."""
        return replace(self, runner=runner, launcher=None)


class Backend(Protocol):
    """One way to compute one model."""

    @property
    def facts(self) -> BackendFacts:
        """The facts that are known before it is loaded."""
        ...

    def needs(self) -> MemoryNeeds:
        """Return the memory that the engine is expected to use, and its device's free memory. Does not mutate."""
        ...

    def measured(self, note_loaded: NoteLoaded | None = None) -> MemoryNeeds | None:
        """Load the weights, and return the measured memory of the weights and the largest steps; None: not measured.

        Keeps the weights for `load`. Raises `InvalidConfigError` if they do not fit. Mutates.
        """
        ...

    def load(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Load the weights, unless loaded, and return a worker's parts, with this many blocks of KV memory."""
        ...


def adapter_bytes(model: ModelDescription, config: ResolvedConfig, dtype: str) -> int:
    """Return the bytes for adapters: as configured, or else the sum of the named adapters. Does not mutate.

    Raises `InvalidConfigError` if one of these needs more than is configured: its requests would wait forever.
    """
    sizes = {each.digest: each.num_bytes(4 if dtype == "float32" else 2) for each in model.adapters.values()}
    if config.adapter_memory is None:
        return sum(sizes.values())
    memory, largest = int(config.adapter_memory), max(sizes.values(), default=0)
    if memory < largest:
        allowed = f"at least {format_bytes(largest)}, for the largest adapter"
        raise InvalidConfigError("adapter_memory", format_bytes(memory), allowed)
    return memory


def needs_on_host(facts: BackendFacts) -> MemoryNeeds:
    """Return the needs of an engine that computes in the main memory of this machine. Does not mutate."""
    return MemoryNeeds(
        facts.weight_bytes,
        facts.activation_bytes,
        resident_bytes() or 0,
        free_memory(),
        adapter_bytes=facts.adapter_bytes,
    )
