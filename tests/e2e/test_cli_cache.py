"""`quire cache`: what a disk cache keeps, whether it is whole, and how it is forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.compute.worker.store.closed import opened
from quire.core.request import CacheScope, Request
from quire.engine.llm import LLM as Engine
from support.tiny_checkpoint import write_tiny_qwen3

PROMPT = list(range(1, 50))


def fill(folder: Path) -> None:
    """Have an engine keep three blocks of two tenants each."""
    with LLM("guide", disk_cache=folder, disk_cache_size="4MiB", disk_write="always", kv_memory="4MiB") as llm:
        assert isinstance(llm, Engine)
        core = llm.engine
        for tenant in ("ada", "bob"):
            core.add_request(Request(tenant, PROMPT, SamplingParams(max_tokens=1), scope=CacheScope(tenant, tenant)))
        core.run()


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run a command; return its exit status and what it printed."""
    status = main(["cache", *arguments])
    return status, capsys.readouterr().out


def test_stores_are_listed_verified_and_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "cache")
    folder = str(tmp_path / "cache")
    status, text = output(capsys, "ls", folder)
    assert status == 0
    assert "guide" in text and "6 of 16 tokens" in text and "ada 3, bob 3" in text
    assert json.loads(output(capsys, "ls", folder, "--json")[1])["tenants"] == {"ada": 3, "bob": 3}
    assert output(capsys, "verify", folder)[1].endswith("blocks: 6 intact, 0 damaged\n")
    assert output(capsys, "forget", folder, "--tenant", "ada")[1].endswith("blocks: 3 erased\n")
    assert json.loads(output(capsys, "ls", folder, "--json")[1])["tenants"] == {"bob": 3}
    assert output(capsys, "forget", folder, "--all")[1].endswith("blocks: 3 erased\n")
    (path,) = (tmp_path / "cache").glob("*/blocks.bin")
    assert not path.read_bytes().strip(b"\0"), "the bytes are gone too"


def test_damage_is_told_and_a_store_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "cache")
    folder = str(tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*/blocks.bin")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert output(capsys, "verify", folder) == (1, f"{path.parent.name}  blocks: 5 intact, 1 damaged\n")
    with LLM("guide", disk_cache=folder, disk_cache_size="4MiB", kv_memory="4MiB"):
        assert "in use" in output(capsys, "ls", folder)[1]
        assert output(capsys, "verify", folder) == (1, f"{path.parent.name}  in use; stop the engine first\n")
        status, text = output(capsys, "forget", folder, "--all")
        assert status == 1 and "stop the engine first" in text


def test_blocks_are_computed_again_and_every_byte_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "cache")
    folder = str(tmp_path / "cache")
    status, text = output(capsys, "verify", folder, "--recompute", "4")
    assert (status, text.splitlines()[1].split("  ")[1]) == (0, "blocks: 4 recomputed, 0 different")
    assert "blocks: 6 recomputed, 0 different" in output(capsys, "verify", folder, "--recompute", "99")[1]
    (path,) = (tmp_path / "cache").glob("*/blocks.bin")
    with opened(path.parent) as store:
        assert store is not None
        block, data = store.kept[0], bytearray(store.block_bytes)
        store.read(block.slot, memoryview(data))
        data[7] ^= 1  # wrong bytes with the right checksum
        store.write(block, memoryview(data))
    status, text = output(capsys, "verify", folder, "--recompute", "6")
    assert (status, text.splitlines()[1].split("  ")[1]) == (1, "blocks: 6 recomputed, 1 different")


def test_blocks_of_another_model_are_not_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "cache")
    (tmp_path / "other").mkdir()
    write_tiny_qwen3(tmp_path / "other")
    assert (
        main(["cache", "verify", str(tmp_path / "cache"), "--recompute", "1", "--model", str(tmp_path / "other")]) == 2
    )
    assert "different: kv, model, weights" in capsys.readouterr().err


def test_blocks_go_to_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "cache")
    folder, other, file = str(tmp_path / "cache"), str(tmp_path / "other"), str(tmp_path / "blocks")
    assert output(capsys, "export", folder, file)[1].endswith(f"blocks: 6 of 6 written to {file}\n")
    (tmp_path / "other").mkdir(mode=0o700)
    assert main(["cache", "import", other, file]) == 2
    assert "start the engine once" in capsys.readouterr().err
    with LLM("guide", disk_cache=other, disk_cache_size="4MiB", kv_memory="4MiB"):
        status, text = output(capsys, "import", other, file)
        assert status == 1 and "stop the engine first" in text
    taken = "blocks: 6 imported, 0 already in the store, 0 damaged, 0 did not fit\n"
    assert output(capsys, "import", other, file)[1].endswith(taken)
    assert json.loads(output(capsys, "ls", other, "--json")[1])["tenants"] == {"ada": 3, "bob": 3}
    with LLM("guide", disk_cache=other, disk_cache_size="4MiB", kv_memory="4MiB") as llm:
        assert isinstance(llm, Engine)
        llm.engine.add_request(Request("ada", PROMPT, SamplingParams(max_tokens=1), scope=CacheScope("ada", "ada")))
        (answer,) = llm.engine.run()
        assert answer.num_disk_tokens == 48, "the blocks are hit"
        assert output(capsys, "export", other, str(tmp_path / "second"))[0] == 1
    assert not (tmp_path / "second").exists()
    assert main(["cache", "export", folder, file]) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert main(["cache", "export", folder, str(tmp_path / "second"), "--store", "none"]) == 2
    assert "--store" in capsys.readouterr().err
    (tmp_path / "empty").mkdir(mode=0o700)
    assert main(["cache", "export", str(tmp_path / "empty"), str(tmp_path / "second")]) == 2
    assert "allowed: one with a store" in capsys.readouterr().err


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", str(tmp_path / "missing")]) == 2
    assert "disk_cache" in capsys.readouterr().err
