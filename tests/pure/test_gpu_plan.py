"""What an engine on a GPU would be, planned by the real factory from what a driver is said to answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import EngineConfig, InvalidConfigError, cli
from quire.cli.doctor import examine
from quire.compute.adapters.folder import read_adapter
from quire.compute.adapters.places import ADAPTED, OF_EXPERTS
from quire.compute.adapters.room import MOST_SLOTS, AdapterRoom, room_for
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.backend import GPU_KV_SHARE, TorchBackend
from quire.compute.torch.device import CONTEXT_BYTES, DeviceFacts
from quire.compute.torch.footprint import Footprint
from quire.compute.torch.settings import TorchSettings, image_bytes, kv_cache_spec
from quire.compute.vision.weights import vision_bytes
from quire.core.errors import CheckpointError
from quire.core.granted import free_memory
from quire.engine.factory import plan_engine
from quire.guide import GUIDE_FOLDER
from quire.simulate.hardware import find_hardware
from support.adapters import adapter_tensors, write_adapter
from support.quantized_models import write_quantized
from support.spec_models import SPECS, write_spec_model
from support.tiny_gemma4 import write_tiny_gemma4
from support.vision_models import SETTINGS, vision_of, write_vision_model

GIB = 1 << 30
H200 = DeviceFacts("2.11.0", "13.0", "3.6.0", "NVIDIA H200", "", "580.159.03", (9, 0), 140 * GIB, 139 * GIB)
T4 = replace(H200, gpu="Tesla T4", capability=(7, 5))
NO_GPU = DeviceFacts("2.11.0", "13.0", "3.6.0", silence="nvidia-smi, a part of the driver, is not installed")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the machine be one of which this is known; nothing else is replaced."""

    def answer(facts: DeviceFacts) -> None:
        monkeypatch.setattr("quire.compute.torch.device.look", lambda environ, count=1: facts)
        monkeypatch.setattr("quire.cli.doctor.look", lambda environ, count=1: facts)

    return answer


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_where_a_gpu_is_torch_computes_on_it(answers: Any, device: str) -> None:
    answers(H200)
    blueprint = plan_engine(
        EngineConfig(device=device, swap_space="64MiB", max_num_seqs=100_000, max_num_batched_tokens=100_000)
    )
    backend, report = blueprint.backend, blueprint.report
    assert (backend.facts.name, backend.gpu, backend.facts.kv_spec.dtype) == ("torch", H200, "bfloat16")
    assert "runs on     torch backend, NVIDIA H200, capability 9.0\n" in str(report)
    assert blueprint.config.max_steps_under_way == 2
    needs, parts = report.plan.needs, dict(report.plan.parts)
    assert needs.free_bytes == 139 * GIB - CONTEXT_BYTES and needs.host_bytes == pytest.approx(free_memory(), rel=0.1)
    left = needs.free_bytes - backend.facts.weight_bytes - backend.facts.activation_bytes
    assert left * GPU_KV_SHARE - backend.facts.kv_spec.bytes_per_block < parts["KV blocks"] <= left * GPU_KV_SHARE
    assert parts["rest of the process"] == CONTEXT_BYTES
    assert report.plan.total_bytes == sum(parts.values()) - parts["swap, on the host"] < 139 * GIB


@pytest.mark.parametrize(
    ("total_bytes", "settings", "step"),
    [
        (24 * GIB, {}, "256 sequences and 2,048 tokens"),
        (80 * GIB, {}, "256 sequences and 8,192 tokens"),
        (80 * GIB, {"max_num_seqs": 9000}, "9000 sequences and 9,000 tokens"),
        (80 * GIB, {"max_num_batched_tokens": 128}, "128 sequences and 128 tokens"),
        (80 * GIB, {"max_num_seqs": 64, "max_num_batched_tokens": 512}, "64 sequences and 512 tokens"),
        (80 * GIB, {"device": "cpu"}, "64 sequences and 512 tokens"),
    ],
)
def test_the_size_of_a_step_that_is_left_open_is_the_devices(
    answers: Any, total_bytes: int, settings: dict[str, Any], step: str
) -> None:
    answers(replace(H200, total_bytes=total_bytes, free_bytes=20 * GIB))  # all of it counts, whatever else runs there
    blueprint = plan_engine(EngineConfig(**settings))
    assert f"a step      at most {step}\n" in str(blueprint.report)
    config, scheduler = blueprint.config, blueprint.config.scheduler_config(100)
    assert blueprint.backend.facts.config == config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_steps_under_way) == (
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_steps_under_way,
    )


@pytest.mark.parametrize("hardware", ["nvidia-l4", "nvidia-h100"])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 300}, {"max_num_batched_tokens": 96}], ids=str)
def test_a_plan_for_a_gpu_is_the_start_up_table_of_an_engine_on_it(
    answers: Any, hardware: str, settings: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    total_bytes, free_bytes = find_hardware(hardware).memory_bytes, 20 * GIB
    answers(replace(H200, total_bytes=total_bytes, free_bytes=free_bytes + CONTEXT_BYTES))
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["plan", "guide", "--device", "cuda", "--hardware", hardware, "--memory", str(free_bytes), *flags]
    assert cli.main([*arguments, "--json"]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"]
    kv_memory = machine["parts_bytes"]["KV blocks"]
    plan = plan_engine(EngineConfig(device="cuda", kv_memory=kv_memory, **settings)).report.plan
    assert machine["parts_bytes"] == dict(plan.parts[:-1])
    assert (machine["num_blocks"], machine["max_model_len"]) == (plan.num_blocks, plan.max_model_len)
    assert plan.needs.free_bytes == free_bytes


def test_the_pool_is_sized_by_what_was_measured_and_every_byte_has_a_row(
    answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(H200)
    found = Footprint(weight_bytes=30 * GIB, activation_bytes=5 * GIB, graph_bytes=2 * GIB, free_bytes=108 * GIB)
    monkeypatch.setattr("quire.compute.torch.backend.TorchBackend.footprint", lambda backend, note_loaded: found)
    foreseen = plan_engine(EngineConfig(max_num_seqs=1_000_000, max_num_batched_tokens=1_000_000))
    blueprint = foreseen.measured()
    parts = dict(blueprint.report.plan.parts)
    assert (parts["weights"], parts["activations"], parts["graphs"]) == (30 * GIB, 5 * GIB, 2 * GIB)
    assert parts["rest of the process"] == (139 - 30 - 108) * GIB
    left = (108 - 5 - 2) * GIB
    assert (
        left * GPU_KV_SHARE - blueprint.backend.facts.kv_spec.bytes_per_block
        < parts["KV blocks"]
        <= left * GPU_KV_SHARE
    )
    assert f"left free           {(left - parts['KV blocks']) / GIB:8.2f} GiB" in str(blueprint.report)
    assert blueprint.report == replace(foreseen.report, plan=blueprint.report.plan)
    assert "graphs" not in dict(foreseen.report.plan.parts)


def test_adapters_have_slots_in_the_plan(answers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers(H200)
    found = Footprint(weight_bytes=30 * GIB, activation_bytes=5 * GIB, graph_bytes=2 * GIB, free_bytes=108 * GIB)
    monkeypatch.setattr("quire.compute.torch.backend.TorchBackend.footprint", lambda backend, note_loaded: found)
    model = read_model(ModelFolder(GUIDE_FOLDER))
    small, large = (
        write_adapter(tmp_path / f"{rank}", adapter_tensors(model.spec, rank=rank, seed=rank)) for rank in (4, 20)
    )
    config = EngineConfig(adapter={"small": small, "again": small, "large": large}, dtype="bfloat16")
    planned, adapter = plan_engine(config).measured(), read_adapter(large, model.spec, 64)
    room = planned.backend.facts.adapter_room
    assert room is not None and (room.count, room.rank) == (2, 32), "equal files have one slot"
    assert room.slot_bytes == adapter.num_bytes(2) == planned.adapters["small"].num_bytes
    parts = dict(planned.report.plan.parts)
    assert (parts["graphs"], parts["adapters"]) == (2 * GIB, 2 * room.slot_bytes)

    one = AdapterRoom.of(model.spec, 64, ADAPTED, 2, count=1).slot_bytes
    for num_slots, memory in ((1, one), (1, 2 * one - 1), (5, 5 * one), (MOST_SLOTS, 1000 * one)):
        room = plan_engine(EngineConfig(adapter_memory=memory, dtype="bfloat16")).backend.facts.adapter_room
        assert room is not None and (room.count, room.rank, room.slot_bytes) == (num_slots, 64, one)
    assert plan_engine(EngineConfig(adapter_memory=0)).backend.facts.adapter_room is None
    with pytest.raises(InvalidConfigError, match=r"^adapter_memory .* max_adapter_rank"):
        plan_engine(EngineConfig(adapter_memory=one - 1, dtype="bfloat16"))


def test_experts_have_room_for_adapters_if_there_is_enough(tmp_path: Path) -> None:
    spec = SPECS["experts"]
    write_spec_model(tmp_path, spec)
    model = replace(read_model(ModelFolder(GUIDE_FOLDER)), spec=spec)
    whole, few = (AdapterRoom.of(spec, 16, parts, 4, count=1) for parts in (ADAPTED, ADAPTED - OF_EXPERTS))
    config = EngineConfig(max_adapter_rank=16).resolved(None)
    assert room_for(model, replace(config, adapter_memory=whole.slot_bytes), 4) == whole
    assert room_for(model, replace(config, adapter_memory=whole.slot_bytes - 1), 4).parts == few.parts  # type: ignore[union-attr]
    adapter = read_adapter(write_adapter(tmp_path / "tune", adapter_tensors(spec)), spec, 16)
    whole.require(adapter)
    with pytest.raises(CheckpointError, match="adapter_memory"):
        few.require(adapter)


def test_kv_memory_that_was_asked_for_is_held_to_what_was_measured(
    answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(H200)
    found = Footprint(weight_bytes=30 * GIB, activation_bytes=5 * GIB, graph_bytes=2 * GIB, free_bytes=108 * GIB)
    monkeypatch.setattr("quire.compute.torch.backend.TorchBackend.footprint", lambda backend, note_loaded: found)
    fits = plan_engine(EngineConfig(kv_memory=101 * GIB)).measured()
    assert fits.report.plan.num_blocks == 101 * GIB // fits.backend.facts.kv_spec.bytes_per_block
    more = plan_engine(EngineConfig(kv_memory=110 * GIB))
    with pytest.raises(
        InvalidConfigError, match=r"^kv_memory is '110\.00 GiB'; allowed: at most 101\.00 GiB, which is free"
    ):
        more.measured()
    monkeypatch.setattr(
        "quire.compute.torch.backend.TorchBackend.footprint",
        lambda backend, note_loaded: replace(found, free_bytes=7 * GIB),
    )
    with pytest.raises(InvalidConfigError, match=r"is '37\.00 GiB'; allowed: less than the 37\.00 GiB of free memory$"):
        plan_engine(EngineConfig()).measured()


def test_on_a_cpu_there_is_nothing_to_measure() -> None:
    blueprint = plan_engine(EngineConfig(device="cpu"))
    assert blueprint.measured() is blueprint


def test_heads_are_stored_as_they_are_and_numbers_as_the_checkpoint_says(answers: Any, tmp_path: Path) -> None:
    answers(H200)
    settings = json.loads((GUIDE_FOLDER / "config.json").read_text()) | {"head_dim": 24, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = EngineConfig(model=str(tmp_path), kv_dtype="fp8", skip_tokenizer_init=True)
    backend = plan_engine(config).backend
    assert (backend.facts.dtype, backend.facts.kv_spec.dtype, backend.facts.kv_spec.head_dim) == ("float16", "fp8", 24)


def test_layers_with_wide_heads_are_planned_unless_no_kernel_knows_them(answers: Any, tmp_path: Path) -> None:
    answers(H200)
    for head_dim in (512, 520):
        folder = write_tiny_gemma4(tmp_path / f"{head_dim}", global_head_dim=head_dim)
        config = EngineConfig(model=str(folder), skip_tokenizer_init=True, device="auto")
        report = plan_engine(config).report
        told = f"the model has heads of {head_dim} numbers, and the kernels support multiples of 8 up to 512"
        assert (report.backend, f"the GPU is not used: {told}" in report.notices) == (
            ("torch", False) if head_dim == 512 else ("native", True)
        )


def test_cuda_is_refused_where_it_cannot_be_and_auto_computes_on_the_cpu(answers: Any) -> None:
    for facts, told in ((T4, "Tesla T4 has compute capability 7.5"), (NO_GPU, "no NVIDIA GPU answers")):
        answers(facts)
        with pytest.raises(InvalidConfigError, match=rf"^device is 'cuda'; allowed: cpu or auto here; {told}"):
            plan_engine(EngineConfig(device="cuda"))
        blueprint = plan_engine(EngineConfig())
        report = blueprint.report
        assert report.backend in ("native", "reference") and blueprint.config.max_steps_under_way == 1
        assert (report.max_num_seqs, report.max_num_batched_tokens) == (64, 512)
        assert [notice for notice in report.notices if "GPU" in notice] == (
            ["the GPU is not used: Tesla T4 has compute capability 7.5, and the kernels need 8.0 (Ampere) or newer"]
            if facts is T4
            else []
        )


def test_a_model_that_does_not_fit_is_refused_with_its_size(answers: Any) -> None:
    answers(replace(H200, free_bytes=CONTEXT_BYTES + (1 << 20)))
    with pytest.raises(
        InvalidConfigError, match=r"; the engine needs .* MiB of the GPU before any KV memory, and .* are"
    ):
        plan_engine(EngineConfig(device="cuda"))


def test_a_cpu_that_was_asked_for_stays(answers: Any) -> None:
    answers(H200)
    for settings in ({"device": "cpu"}, {"backend": "native"}, {"backend": "reference"}):
        report = plan_engine(EngineConfig(**settings)).report
        assert report.backend in ("native", "reference") and not [each for each in report.notices if "GPU" in each]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"block_size": 8}, "block_size"),
        ({"touch_kv_memory": "start"}, "touch_kv_memory"),
        ({"kv_memory": "200GiB"}, "kv_memory"),
        ({"swap_space": "100000GiB"}, "swap_space"),
        ({"attention_backend": "flashinfer", "batch_invariant": True}, "attention_backend"),
        ({"max_num_batched_tokens": 1 << 24}, "max_num_batched_tokens"),  # of 192 numbers each, the guide's queries
    ],
)
def test_settings_that_a_gpu_cannot_have_are_refused(answers: Any, settings: dict[str, Any], field: str) -> None:
    answers(H200)
    with pytest.raises(InvalidConfigError) as caught:
        plan_engine(EngineConfig(device="cuda", **settings))
    assert caught.value.field == field


def test_a_gpu_without_fp8_is_said_to_have_none(answers: Any) -> None:
    answers(replace(H200, gpu="NVIDIA A100", capability=(8, 0)))
    with pytest.raises(InvalidConfigError, match=r"^kv_dtype is 'fp8'; allowed: another type here: NVIDIA A100 has "):
        plan_engine(EngineConfig(kv_dtype="fp8"))
    assert plan_engine(EngineConfig(kv_dtype="int8")).report.backend == "torch"


def test_a_gpu_reads_images_and_plans_their_memory(answers: Any, tmp_path: Path) -> None:
    answers(H200)
    write_vision_model(tmp_path, SETTINGS["gemma3"])
    settings: dict[str, Any] = {"model": str(tmp_path), "device": "cuda", "skip_tokenizer_init": True}
    blueprints = [plan_engine(EngineConfig(**settings, mmproj=each)) for each in ("auto", "none")]
    backend, texts_only = (each.backend for each in blueprints)
    facts, without, vision = backend.facts, texts_only.facts, vision_of(backend._model)  # type: ignore[attr-defined]
    assert [each.model.vision is not None for each in blueprints] == [True, False]
    assert facts.weight_bytes - without.weight_bytes == vision_bytes(vision, "float32")
    assert facts.activation_bytes - without.activation_bytes > image_bytes(vision, TorchSettings(dtype="float32"))
    with pytest.raises(InvalidConfigError, match="FlashInfer is not used for models that read images"):
        plan_engine(EngineConfig(**settings, attention_backend="flashinfer"))


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"kv_dtype": "fp8"}, {"kv_dtype": "float16"}])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_what_only_torch_knows_is_refused_elsewhere(settings: dict[str, Any], backend: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        plan_engine(EngineConfig(backend=backend, **settings))
    assert caught.value.field in settings


@pytest.mark.parametrize(("kv_dtype", "key_bytes"), [("k8v4", lambda dim: dim + 4), ("int4", lambda dim: dim * 5 / 8)])
def test_a_gpu_stores_4_bits(answers: Any, kv_dtype: str, key_bytes: Callable[[int], float]) -> None:
    answers(H200)
    spec = plan_engine(EngineConfig(device="cuda", kv_dtype=kv_dtype)).backend.facts.kv_spec
    assert spec.dtype == kv_dtype and spec.head_dim % 32 == 0
    assert spec.bytes_per_layer_token == spec.num_kv_heads * (key_bytes(spec.head_dim) + spec.head_dim / 2 + 4)


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_heads_of_an_odd_size_have_no_4_bits(kv_dtype: str) -> None:
    spec = replace(SPECS["learned"], attention=replace(SPECS["learned"].attention, head_dim=15))
    settings = TorchSettings(device="cpu", kv_dtype=kv_dtype)
    told = f"^kv_dtype is '{kv_dtype}'; allowed: another dtype: {kv_dtype} needs heads of an even size, not 15$"
    with pytest.raises(InvalidConfigError, match=told):
        kv_cache_spec(spec, settings)


def test_a_plan_for_a_gpu_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3.1-8b", "--hardware", "nvidia-h200", "--device", "cuda", "--kv-dtype", "fp8"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "KV          fp8" in shown and "nvidia-h200" in shown


@pytest.mark.parametrize("command", ["plan llama-3.1-8b", "simulate llama-3.1-8b --rate 1 --limit 1"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_gpu_is_measured_for_a_plan_and_nothing_without_a_core(
    command: str, device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setitem(sys.modules, "quire._native", None)
    assert cli.main([*command.split(), "--hardware", "here", "--device", device]) == cli.MISUSED
    assert "hardware is 'here'; allowed: a machine from the list, such as nvidia-h100: here" in capsys.readouterr().err


def test_the_doctor_says_what_keeps_a_gpu_from_being_used(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    for facts in (H200, T4, NO_GPU, replace(H200, torch=None, torch_cuda=None)):
        answers(facts)
        told[facts] = {finding.name: finding for finding in examine()}
    assert told[H200]["GPU"].works and told[H200]["GPU"].text == str(H200)
    assert told[H200]["torch"].text == "2.11.0 for CUDA 13.0, triton 3.6.0"
    assert told[T4]["GPU"].works is None and told[T4]["GPU"].text.endswith("8.0 (Ampere) or newer")
    assert told[NO_GPU]["GPU"].works is None
    assert "pip install 'quire[torch]'" in told[replace(H200, torch=None, torch_cuda=None)]["torch"].text
    monkeypatch.setitem(sys.modules, "quire._native", None)
    for facts, works in ((H200, None), (T4, False)):
        answers(facts)
        assert {finding.name: finding for finding in examine()}["compiled core"].works is works


def test_each_rank_needs_a_gpu_of_its_own_and_plans_its_part(answers: Any) -> None:
    def planned(num_ranks: int, others: tuple[str, ...]) -> Any:
        answers(replace(H200, others=others))
        return plan_engine(EngineConfig(device="cuda", tensor_parallel=num_ranks, swap_space="1GiB"))

    one, two = planned(1, ()), planned(2, ("NVIDIA H200",))
    facts = [each.backend.facts for each in (one, two)]
    assert facts[0].kv_spec.bytes_per_block == 2 * facts[1].kv_spec.bytes_per_block
    spec = two.model.spec
    embedding = spec.vocab_size * spec.hidden_size * 2
    assert facts[1].weight_bytes - embedding == (facts[0].weight_bytes - embedding) // 2
    hosts = [each.report.plan.needs.host_bytes for each in (one, two)]
    assert 0 < hosts[1] <= hosts[0]
    for others, allowed in (
        ((), "at most 1 on this machine: each rank needs its own GPU"),
        (("NVIDIA L4",), "1 here: ranks need equal GPUs, not NVIDIA H200 and NVIDIA L4"),
    ):
        with pytest.raises(InvalidConfigError) as caught:
            planned(2, others)
        assert str(caught.value) == f"tensor_parallel is 2; allowed: {allowed}"


def test_packed_weights_stay_packed_where_a_gpu_has_a_kernel(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_quantized(tmp_path / "model", "packed")), skip_tokenizer_init=True)
    model = read_model(ModelFolder(tmp_path / "model"))
    packed, widened = (
        TorchBackend.of("cuda", replace(config, weights=weights).resolved(), model).facts
        for weights in ("auto", "widened")
    )
    assert (packed.block_types, widened.block_types) == (("Q4_0",), ())
    assert packed.weight_bytes < widened.weight_bytes
