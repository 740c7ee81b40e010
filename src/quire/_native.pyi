"""The compiled core of quire, built from native/."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.compute.sampling.draws import Choices, Draws

def cpu_features() -> dict[str, bool]:
    """What the processor and the operating system let a kernel use, by name."""

def instruction_set() -> Literal["portable", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"]:
    """The best form of the kernels here: portable, avx2, avx2_vnni, avx512, avx512_bf16 or amx."""

def crc32(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """The checksum of bytes that zlib.crc32 gives, behind bytes whose checksum is `before`."""

def kernel_names() -> list[str]:
    """The instruction sets that this machine has kernels for, the fastest last."""

class Kernels:
    """The kernels of one instruction set."""

    @property
    def name(self) -> str: ...
    @property
    def has_compact(self) -> bool:
        """Whether matrices of bfloat16 can take 12 bits a number."""

def kernels(name: str) -> Kernels:
    """The kernels of an instruction set that this machine has."""

class ThreadTeam:
    """Threads that compute a step together."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def size(self) -> int: ...

def activation_bytes(shape: Mapping[str, object], num_tokens: int, num_logits: int, num_threads: int) -> int:
    """The bytes of activations that Decoder.reserve allocates."""

def activate(kernels: Kernels, numbers: NDArray[np.float32], activation: str) -> None:
    """Write the activation of each number in its place; their count is a multiple of the panel width."""

class RowProduct:
    """A matrix for rows; see native/include/quire/row_product.h."""

    def __init__(
        self,
        kernels: Kernels,
        team: ThreadTeam,
        rows: NDArray[np.float32] | NDArray[np.uint16],
        bias: NDArray[np.float32] | None,
    ) -> None: ...
    @property
    def output_stride(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def run(self, rows: NDArray[np.float32], output: NDArray[np.float32], activation: str = "") -> None:
        """Write the activation of each row's product to `output`, whose rows have `output_stride` numbers."""

class Decoder:
    """A decoder-only model; see native/include/quire/decoder.h."""

    def __init__(self, shape: Mapping[str, object], kernels: Kernels, team: ThreadTeam) -> None: ...
    def set_matrix(
        self,
        part: str,
        layer: int,
        expert: int,
        rows: NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8],
        *,
        blocks: str = "",
        codes: str = "",
    ) -> None: ...
    def set_bias(self, part: str, layer: int, expert: int, bias: NDArray[np.float32]) -> None: ...
    def set_bounds(self, part: str, layer: int, bounds: NDArray[np.float32]) -> None: ...
    def set_vector(self, part: str, layer: int, numbers: NDArray[np.float32]) -> None: ...
    def set_norm(self, part: str, layer: int, weight: NDArray[np.float32]) -> None: ...
    def set_norm_bias(self, part: str, layer: int, bias: NDArray[np.float32]) -> None: ...
    def set_embedding(
        self, rows: NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8], *, blocks: str = ""
    ) -> None: ...
    def set_key_centre(self, layer: int, centre: NDArray[np.float32]) -> None: ...
    def set_positions(self, rows: NDArray[np.float32]) -> None: ...
    def set_layer_embedding(self, rows: NDArray[Any], *, blocks: str = "") -> None: ...
    def set_layer_scale(self, layer: int, scale: float) -> None: ...
    def set_convolution(self, layer: int, filter: NDArray[np.float32]) -> None: ...
    def set_mamba(self, layer: int, bias: NDArray[np.float32], skip: NDArray[np.float32]) -> None: ...
    def set_delta(
        self, layer: int, filter: NDArray[np.float32], offsets: NDArray[np.float32], speeds: NDArray[np.float64]
    ) -> None: ...
    def set_cache(self, places: Sequence[tuple[NDArray[Any], NDArray[Any]]], dtype: str, block_size: int) -> None: ...
    def reserve(self, num_tokens: int, num_logits: int) -> None: ...
    def prepare_memory(self, kv_memory: Sequence[NDArray[Any]]) -> None: ...
    def num_unprepared(self) -> int: ...
    def weight_bytes(self) -> int: ...
    def run(
        self,
        query_starts: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        logit_indices: NDArray[np.int64],
        slots: Sequence[NDArray[np.int64]],
        tables: Sequence[NDArray[np.int64]],
        logits: NDArray[np.float32],
        finite_logits: NDArray[np.bool_],
        finite_tokens: NDArray[np.bool_],
        state_indices: NDArray[np.int64],
        states: NDArray[np.float32],
        adapters: Sequence[Adapter],
        adapter_of: NDArray[np.int64],
        given: NDArray[np.int64],
        given_rows: NDArray[np.float32],
        coordinates: NDArray[np.int64],
        ends_seen: NDArray[np.int64],
        *,
        layers: tuple[int, int] = (0, -1),
    ) -> None: ...
    def embed(self, token_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None: ...
    def project(
        self, states: NDArray[np.float32], logits: NDArray[np.float32], finite_logits: NDArray[np.bool_]
    ) -> None: ...

class Adapter:
    """A LoRA adapter of a decoder; see native/include/quire/adapter.h."""

    def __init__(self, decoder: Decoder) -> None: ...
    def set(
        self,
        part: str,
        layer: int,
        index: int,
        a: NDArray[np.float32] | NDArray[np.uint16],
        b: NDArray[np.float32] | NDArray[np.uint16],
        scale: float,
    ) -> None: ...

def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of a seed and a position."""

DRAW_PARAMETERS: tuple[str, ...]
"""The names of the rows of `Draws.parameters`, as they were when this was compiled."""

class Sampler:
    """Chooses tokens from logits; see native/include/quire/sampler.h."""

    def __init__(self, kernels: Kernels, team: ThreadTeam, vocab_size: int) -> None: ...
    def sample(self, logits: NDArray[np.float32], draws: Draws, choices: Choices) -> None: ...
    def report(
        self,
        logits: NDArray[np.float32],
        logit_rows: NDArray[np.int64],
        num_logprobs: NDArray[np.int64],
        choices: Choices,
    ) -> None: ...
