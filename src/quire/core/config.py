"""The settings of each subsystem, as frozen values, each with its help text.

Each constructor takes its own narrow config and nothing else. Flags, environment variables and reference pages are
made from the fields (name, default, help). A new engine setting is a field of `EngineConfig` and, for the types of
keyword arguments, an entry of `EngineSettings`. Every config checks itself.

Settings that depend on the device may be left unset. `EngineConfig.resolved` chooses them once the device is known.
Every part of an engine takes the `ResolvedConfig`, so the types enforce this step.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from quire.core.byte_sizes import parse_bytes
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import MAX_BLOCK_SIZE, USUAL_BLOCK_SIZE
from quire.core.pooling import POOLINGS
from quire.core.setting_checks import require_int, require_number, require_one_of

TOUCH_KV_MEMORY = ("start", "idle", "use")
PREFIX_INDEXES = ("hash_chain", "radix_tree", "none")
EVICTIONS = ("lru", "fifo", "priority")
POLICIES = ("fcfs", "priority", "fair_share")
PREEMPTIONS = ("recompute", "swap", "auto")
DTYPES = ("auto", "bfloat16", "float16", "float32")
WEIGHTS = ("auto", "widened", "int8", "int4")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8", "k8v4", "int4")
BACKENDS = ("auto", "native", "reference", "torch")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer", "plain")
TENSOR_PARALLEL_SUMS = ("gather", "reduce")
DISK_WRITES = ("on_hit", "always")
AUTO: Final = "auto"
NO_IMAGES: Final = "none"
"""The `mmproj` with which a model reads texts only."""
IMAGE_PATCHES: Final = (1024, 1 << 16)
"""The least and the most `max_image_patches`. The tiles of models that cut images have up to 1,024."""
MTP: Final = "mtp"
SPECULATIONS = ("off", "auto", "ngram", MTP)
MOST_DRAFTS: Final = 15
"""The most guesses for a sequence in a step: with the token before them, they fill the rows of one kernel call."""
ADAPTER_NAME: Final = re.compile(r"[\w.][\w./:-]{0,127}", re.ASCII)
USUAL_SLOWDOWN: Final = 4.0
"""On a CPU, a step with 512 tokens of a prompt takes 20 times as long as one of decodes."""
LARGE_GPU_BYTES: Final = 64 << 30
"""A GPU with this much memory is so fast that kernel launches would limit a small model's steps of 2,048 tokens."""


def setting(default: Any, text: str, *, metavar: str = "", secret: bool = False) -> Any:
    """Declare a field with its help; `metavar` names its value there. A secret field is never shown."""
    metadata = {"help": text, "metavar": metavar, "secret": secret}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How the KV memory is managed."""

    num_blocks: int = setting(1024, "blocks of KV memory on the device")
    num_host_blocks: int = setting(0, "blocks of KV memory on the host for swapping; 0: preempt by recompute only")
    keeps_on_host: bool = setting(False, "also keep cached blocks on the host once no request holds them")
    prefix_index: str = setting("hash_chain", "how cached prefixes are found: hash_chain, radix_tree or none")
    eviction: str = setting("lru", "which cached block to evict first: lru, fifo or priority")
    hash_bits: int = setting(128, "bits of the prefix hash; lower it only to force collisions in tests")
    hash_key: bytes = setting(b"", "secret key of the prefix hash, at most 64 bytes", secret=True)
    max_cached_blocks_per_tenant: int | None = setting(None, "maximum cached blocks per tenant; None: no limit")
    num_disk_slots: int = setting(0, "blocks kept on disk, also across restarts; 0: none")
    disk_write: str = setting("on_hit", "which blocks to write to disk: on_hit (once they were hit again) or always")

    def __post_init__(self) -> None:
        require_int("num_disk_slots", self.num_disk_slots, 0, (1 << 31) - 1)
        require_one_of("disk_write", self.disk_write, DISK_WRITES)
        require_int("num_blocks", self.num_blocks, 1, (1 << 31) - 1)
        require_int("num_host_blocks", self.num_host_blocks, 0, (1 << 31) - 1)
        if not isinstance(self.keeps_on_host, bool):
            raise InvalidConfigError("keeps_on_host", self.keeps_on_host, "True or False")
        require_one_of("prefix_index", self.prefix_index, PREFIX_INDEXES)
        require_one_of("eviction", self.eviction, EVICTIONS)
        require_int("hash_bits", self.hash_bits, 1, 512)
        if not isinstance(self.hash_key, bytes):
            raise InvalidConfigError("hash_key", self.hash_key, "at most 64 bytes")
        if len(self.hash_key) > 64:
            raise InvalidConfigError("hash_key", f"{len(self.hash_key)} bytes", "at most 64 bytes")
        if self.max_cached_blocks_per_tenant is not None:
            require_int("max_cached_blocks_per_tenant", self.max_cached_blocks_per_tenant, 0, (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which requests run next, and how large a step may be."""

    max_num_seqs: int = setting(256, "sequences that run at once")
    max_num_batched_tokens: int = setting(2048, "tokens computed per step, over all sequences")
    max_model_len: int = setting(4096, "maximum tokens per sequence, prompt and output")
    policy: str = setting("fcfs", "order of the queue: fcfs, priority or fair_share")
    priority_ageing_s: float = setting(30.0, "seconds of waiting that count as one level of priority")
    headroom: float = setting(0.02, "share of blocks to keep free when admitting a request while others run")
    preemption: str = setting("auto", "how to preempt a request: recompute, swap, or auto (the cheaper one)")
    recompute_tokens_per_s: float = setting(2000.0, "speed of recomputing tokens, used by preemption auto")
    swap_bytes_per_s: float = setting(4e9, "speed of copying blocks to or from the host, used by preemption auto")
    max_steps_under_way: int = setting(1, "steps to submit to the executor before waiting for the first result")
    itl_slo_ms: float | None = setting(None, "maximum ms between two tokens while prompts are computed; None: no limit")
    max_slowdown: float = setting(0.0, "how many steps of decodes a step with prompts may take; 0: no limit")
    max_drafts: int = setting(0, "tokens guessed ahead for a sequence in a step; 0: none")
    max_depth: int = setting(0, "the most of these that a draft model guesses; 0: no draft model")

    def __post_init__(self) -> None:
        require_int("max_num_seqs", self.max_num_seqs, 1, 1 << 20)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 30)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfigError(
                "max_num_batched_tokens", self.max_num_batched_tokens, f"max_num_seqs ({self.max_num_seqs}) or more"
            )
        require_int("max_model_len", self.max_model_len, 1, 1 << 30)
        require_one_of("policy", self.policy, POLICIES)
        require_number("priority_ageing_s", self.priority_ageing_s, 1e-3, 1e9)
        require_number("headroom", self.headroom, 0.0, 0.9)
        require_one_of("preemption", self.preemption, PREEMPTIONS)
        require_number("recompute_tokens_per_s", self.recompute_tokens_per_s, 1e-3, 1e12)
        require_number("swap_bytes_per_s", self.swap_bytes_per_s, 1.0, 1e15)
        require_int("max_steps_under_way", self.max_steps_under_way, 1, 16)
        require_int("max_drafts", self.max_drafts, 0, MOST_DRAFTS)
        require_int("max_depth", self.max_depth, 0, self.max_drafts)
        if self.itl_slo_ms is not None:
            require_number("itl_slo_ms", self.itl_slo_ms, 1.0, 1e6)
        require_number("max_slowdown", self.max_slowdown, 0.0, 1e6)
        if self.max_slowdown and self.itl_slo_ms is not None:
            raise InvalidConfigError("max_slowdown", self.max_slowdown, "0 with itl_slo_ms, which sets the time")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine, in one value; the keywords of `LLM` and the command line derive from it.

    Settings have vLLM's names if they mean the same. Sizes of memory are bytes, or texts such as "4GiB".

    >>> EngineConfig(model="guide", kv_memory="1GiB").kv_memory
    1073741824
    """

    model: str = setting(
        "guide", "a folder, a GGUF file, a name that quire models lists, or ORG/REPO on the hub; guide: built in"
    )
    tokenizer: str | None = setting(None, "folder with the tokenizer; none: the model's own", metavar="FOLDER")
    skip_tokenizer_init: bool = setting(False, "take and return token ids only; load no tokenizer")
    mmproj: str = setting(
        "auto",
        "file with the image encoder of a GGUF model; auto: the mmproj-*.gguf next to it, if one fits, or that "
        "in its own file; none: read no images",
        metavar="FILE",
    )
    max_image_patches: int = setting(
        5120,
        "maximum patches of an image, for models that take any size; a larger image is resized. A layer of the image "
        "encoder delays running texts by a time that grows with the square of the patches",
    )
    dtype: str = setting(
        "auto", "number type for computing: bfloat16, float32, float16 (torch only); auto: the checkpoint's"
    )
    weights: str = setting(
        "auto", "number type of the weights: auto (as stored), widened (to dtype), int8 or int4 (made while loading)"
    )
    kv_dtype: str = setting(
        "auto",
        "number type of the KV memory: auto (same as dtype), bfloat16, float32, float16 or fp8 (torch only), int8, "
        "k8v4 (int8 keys, 4-bit values) or int4",
    )
    device: str = setting("auto", "device to compute on: cpu, cuda (a GPU), or auto (a GPU if one is usable)")
    backend: str = setting(
        "auto", "engine that computes: native, reference, torch, or auto (torch on a GPU, otherwise native)"
    )
    attention_backend: str = setting(
        "auto", "attention kernels for torch: triton, flashinfer, plain, or auto (triton on a GPU)"
    )
    batch_invariant: bool = setting(
        False, "torch: give each request the same bits whatever else runs; native always does"
    )
    tensor_parallel: int = setting(
        1, "processes that compute each step together, each with a part of every matrix; on GPUs, one GPU each"
    )
    tensor_parallel_sums: str = setting(
        "gather",
        "what these processes exchange: gather (whole sums, bits of one process) or reduce (partial sums, faster)",
    )
    num_threads: int | None = setting(None, "compute threads; none: one per core that this process may use")
    block_size: int | None = setting(
        None, "tokens in one block of KV memory; none: 16, or more if a model's layers keep states"
    )
    max_memory: int | str | None = setting(
        None, "maximum memory for weights, KV memory and everything else of the engine; none: all free memory"
    )
    kv_memory: int | str | None = setting(
        None, "size of the KV memory; none: half of the free memory (most of a GPU's), or less if that is enough"
    )
    touch_kv_memory: str = setting(
        "idle", "when to claim KV memory: start (before the engine is ready), idle (between steps) or use (as it fills)"
    )
    swap_space: int | str = setting(0, "KV memory on the host for swapping; 0: preempt by recompute only")
    host_cache: int | str = setting(0, "host memory for a GPU's cached and swapped KV blocks; 0: none")
    disk_cache: str | None = setting(
        None, "folder for KV blocks of shared prefixes, kept across restarts; none: no disk cache", metavar="FOLDER"
    )
    disk_cache_size: int | str = setting("4GiB", "size of the disk cache")
    disk_write: str = setting(
        "on_hit", "which blocks go to the disk cache: on_hit (once a second request has hit them) or always"
    )
    max_num_seqs: int | None = setting(None, "sequences that run at once; none: 64, or 256 on a GPU")
    max_num_batched_tokens: int | None = setting(
        None,
        "tokens computed per step, over all sequences; none: 512; on a GPU 2048, or 8192 if it has at least 64 GiB",
    )
    max_model_len: int | None = setting(
        None, "maximum tokens per sequence, prompt and output; none: the model's limit, or less if memory is short"
    )
    enable_prefix_caching: bool = setting(True, "reuse KV blocks between requests that share a prefix")
    prefix_index: str = setting("hash_chain", "how cached prefixes are found: hash_chain, radix_tree or none")
    eviction: str = setting("lru", "which cached block to evict first: lru, fifo or priority")
    policy: str = setting("fcfs", "order of the queue: fcfs, priority or fair_share")
    preemption: str = setting("auto", "how to preempt a request: recompute, swap, or auto (the cheaper one)")
    max_steps_under_way: int | None = setting(
        None, "steps to submit before waiting for a result; none: 1, or 2 with torch"
    )
    itl_slo_ms: float | None = setting(
        None, "milliseconds allowed between two tokens of a text while prompts are computed; none: no limit"
    )
    max_slowdown: float | None = setting(
        None,
        "while others generate, how many times as long as a step of decodes a step with prompts may take; it always "
        "has room for 128 prompt tokens; 0: no limit; none: 4, or 0 on a GPU or with itl_slo_ms",
    )
    speculation: str = setting(
        "off",
        "guess tokens ahead and verify several in a step, for the same text in less time: off, ngram (tokens that "
        "followed the last tokens earlier in the text), auto (ngram, tokens forced by a grammar, earlier answers, and "
        "mtp if that should pay), mtp (the layer that some models have to guess their own next tokens, in addition to "
        "auto), or a smaller model with the same tokenizer, by folder or name (in addition to auto)",
    )
    adapter: tuple[str, ...] = setting(
        (), "LoRA adapter that requests may ask for, as NAME=FOLDER; none: no adapter", metavar="NAME=FOLDER"
    )
    adapter_memory: int | str | None = setting(
        None, "memory for adapters, least recently used dropped first; none: enough for the adapters named"
    )
    max_adapter_rank: int = setting(64, "highest rank of an adapter")
    pooling: str = setting(
        "auto",
        "how a text becomes a vector: last (token), mean (of all tokens), cls (the first token; only for an encoder), "
        "or auto (as the model's folder says)",
    )
    score_tokens: str | None = setting(
        None,
        "two tokens that score a text, such as yes,no: the score is the share of the first; none: no scores",
        metavar="TOKEN,TOKEN",
    )
    cuda_graphs: bool = setting(True, "on a GPU: record steps at startup and replay them")
    max_cached_blocks_per_tenant: int | None = setting(None, "maximum cached blocks per tenant; none: no limit")
    seed: int = setting(0, "base seed for requests that set none")
    step_log: str | None = setting(
        None, "new file that records every request and decision, prompts as token ids; none: no log", metavar="FILE"
    )

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "mmproj", "step_log", "speculation", "disk_cache"):
            self._take_path(name)
        for name in ("max_memory", "kv_memory", "adapter_memory"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for name in ("swap_space", "host_cache", "disk_cache_size"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        remedy = "while prefix caching is off; set enable_prefix_caching and a prefix_index"
        if self.disk_cache is not None and (not self.enable_prefix_caching or self.prefix_index == "none"):
            raise InvalidConfigError("disk_cache", self.disk_cache, f"no disk cache {remedy}")
        if self.host_cache and (not self.enable_prefix_caching or self.prefix_index == "none"):
            raise InvalidConfigError("host_cache", self.host_cache, f"0 {remedy}")
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("weights", self.weights, WEIGHTS)
        require_one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        require_one_of("touch_kv_memory", self.touch_kv_memory, TOUCH_KV_MEMORY)
        require_one_of("pooling", self.pooling, ("auto", *POOLINGS))
        if self.score_tokens is not None and (not isinstance(self.score_tokens, str) or self.skip_tokenizer_init):
            raise InvalidConfigError("score_tokens", self.score_tokens, "two tokens of a model with a tokenizer")
        require_one_of("device", self.device, DEVICES)
        require_one_of("backend", self.backend, BACKENDS)
        require_one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.device == "cuda" and self.backend not in ("auto", "torch"):
            raise InvalidConfigError("backend", self.backend, "torch or auto: nothing else runs on device cuda")
        self._take_adapters()
        require_int("max_adapter_rank", self.max_adapter_rank, 1, 512)
        require_int("max_image_patches", self.max_image_patches, *IMAGE_PATCHES)
        if self.block_size is not None:
            require_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        require_int("tensor_parallel", self.tensor_parallel, 1, 64)
        require_one_of("tensor_parallel_sums", self.tensor_parallel_sums, TENSOR_PARALLEL_SUMS)
        require_int("seed", self.seed, 0, (1 << 63) - 1)
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool) and not isinstance(getattr(self, field.name), bool):
                raise InvalidConfigError(field.name, getattr(self, field.name), "True or False")
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1, 1024)
        MemoryConfig(**self._shared(MemoryConfig))
        SchedulerConfig(**{"max_num_seqs": 1, "max_num_batched_tokens": 1 << 30} | self._shared(SchedulerConfig))

    def resolved(self, gpu_bytes: int | None = None, block_size: int = USUAL_BLOCK_SIZE) -> ResolvedConfig:
        """Return the settings for a GPU with `gpu_bytes` of memory, or for a CPU, with the sizes of steps set. Pure.

        `block_size`: the one that suits the model, if the settings name none.

        A step has at least one token for each of its sequences: if only one of the two settings is given, the other
        follows from it. torch starts a step while another runs, also on a CPU.

        >>> def limits(config: ResolvedConfig) -> tuple[int, int, int]:
        ...     return config.max_num_seqs, config.max_num_batched_tokens, config.max_steps_under_way
        >>> limits(EngineConfig().resolved()), limits(EngineConfig().resolved(24 << 30))
        ((64, 512, 1), (256, 2048, 2))
        >>> limits(EngineConfig(max_num_seqs=1000).resolved()), limits(EngineConfig().resolved(80 << 30))
        ((1000, 1000, 1), (256, 8192, 2))
        """
        sequences, tokens = (64, 512) if gpu_bytes is None else (256, 2048 if gpu_bytes < LARGE_GPU_BYTES else 8192)
        sequences = self.max_num_seqs or min(sequences, self.max_num_batched_tokens or tokens)
        tokens = self.max_num_batched_tokens or max(tokens, sequences)
        steps = self.max_steps_under_way or (1 if gpu_bytes is None and self.backend != "torch" else 2)
        sizes = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens, "max_steps_under_way": steps}
        sizes["block_size"] = self.block_size or block_size
        paced = gpu_bytes is None and self.itl_slo_ms is None
        slowdown = (USUAL_SLOWDOWN if paced else 0.0) if self.max_slowdown is None else self.max_slowdown
        return ResolvedConfig(**dataclasses.asdict(self) | sizes | {"max_slowdown": slowdown})

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folders of adapters by name.

        >>> EngineConfig(adapter={"tune": "/adapters/tune"}).adapter_folders
        {'tune': '/adapters/tune'}
        """
        return dict(_name_and_value(each) for each in self.adapter)

    @property
    def guesses_by_model(self) -> bool:
        """Whether `speculation` is a draft model."""
        return self.speculation not in SPECULATIONS

    @property
    def max_drafts(self) -> int:
        """The most tokens guessed ahead for a sequence in a step."""
        return 0 if self.speculation == "off" else MOST_DRAFTS

    def memory_config(
        self, num_blocks: int, num_host_blocks: int, hash_key: bytes, num_disk_slots: int = 0
    ) -> MemoryConfig:
        """Return the settings of the KV memory. Does not mutate."""
        sizes = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks, "num_disk_slots": num_disk_slots}
        sizes["keeps_on_host"] = bool(self.host_cache)
        index = self.prefix_index if self.enable_prefix_caching else "none"
        return MemoryConfig(**self._shared(MemoryConfig) | sizes | {"prefix_index": index, "hash_key": hash_key})

    def _shared(self, kind: type[MemoryConfig | SchedulerConfig]) -> dict[str, Any]:
        """Return the settings that a narrower config also has, without unset ones."""
        names = {field.name for field in dataclasses.fields(kind)}
        shared = {field: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}
        return {field.name: value for field, value in shared.items() if value is not None or field.default is not None}

    def _take_adapters(self) -> None:
        """Store adapters as texts NAME=FOLDER; the caller may also give a mapping of names to folders."""
        given, allowed = self.adapter, "NAME=FOLDER, each name once"
        if isinstance(given, Mapping):
            if not all(isinstance(folder, str | os.PathLike) for folder in given.values()):
                raise InvalidConfigError("adapter", given, "a folder for each name")
            given = tuple(f"{name}={os.fspath(folder)}" for name, folder in given.items())
        if not isinstance(given, tuple | list) or not all(isinstance(each, str) for each in given):
            raise InvalidConfigError("adapter", given, allowed)
        object.__setattr__(self, "adapter", tuple(given))
        names = set[str]()
        for each in given:
            name, folder = _name_and_value(each)
            if not folder or "\0" in folder or name in names or not ADAPTER_NAME.fullmatch(name):
                raise InvalidConfigError("adapter", each, f"{allowed}, of letters, digits and ._/:-")
            names.add(name)

    def _take_path(self, name: str) -> None:
        """Store a path as text."""
        value = getattr(self, name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
            object.__setattr__(self, name, value)
        optional = name in ("tokenizer", "step_log", "disk_cache")
        if not (optional and value is None) and not (isinstance(value, str) and value and "\0" not in value):
            allowed = "the path of a file" if name in ("step_log", "mmproj") else "the path of a folder, or a name"
            if name == "speculation":
                allowed = f"{', '.join(SPECULATIONS)}, or a model's folder or name"
            raise InvalidConfigError(name, value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The settings of an engine on a known device: the sizes of its blocks and steps are numbers.

    `one_step`: each text is computed in one step, because tokens of the model attend to later ones.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_under_way: int
    max_slowdown: float
    one_step: bool = False

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """Return the settings of the scheduler. Does not mutate."""
        given = {"max_model_len": max_model_len, "max_drafts": self.max_drafts}
        given |= {"max_depth": self.max_drafts if self.guesses_by_model or self.speculation == MTP else 0}
        return SchedulerConfig(**self._shared(SchedulerConfig) | given)


class EngineSettings(TypedDict, total=False):
    """The settings of `EngineConfig` except the model, as keywords."""

    tokenizer: str | os.PathLike[str] | None
    skip_tokenizer_init: bool
    mmproj: str | os.PathLike[str]
    max_image_patches: int
    dtype: str
    weights: str
    kv_dtype: str
    device: str
    backend: str
    attention_backend: str
    batch_invariant: bool
    tensor_parallel: int
    tensor_parallel_sums: str
    num_threads: int | None
    block_size: int | None
    max_memory: int | str | None
    kv_memory: int | str | None
    touch_kv_memory: str
    swap_space: int | str
    host_cache: int | str
    disk_cache: str | os.PathLike[str] | None
    disk_cache_size: int | str
    disk_write: str
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    enable_prefix_caching: bool
    prefix_index: str
    eviction: str
    policy: str
    preemption: str
    max_steps_under_way: int | None
    itl_slo_ms: float | None
    max_slowdown: float | None
    speculation: str | os.PathLike[str]
    adapter: Mapping[str, str | os.PathLike[str]] | Sequence[str]
    adapter_memory: int | str | None
    max_adapter_rank: int
    pooling: str
    score_tokens: str | None
    cuda_graphs: bool
    max_cached_blocks_per_tenant: int | None
    seed: int
    step_log: str | os.PathLike[str] | None


def _name_and_value(text: str) -> tuple[str, str]:
    """Return NAME and FOLDER; if only a folder is given, NAME is the folder's own name."""
    name, separator, value = text.partition("=")
    return (name, value) if separator else (os.path.basename(os.path.normpath(text)), text)
