"""What in a folder is a model, how the memory is divided, and how long models stay, as people write it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from quire.core.clock import ManualClock
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.guide import GUIDE_FOLDER
from quire.serve.config import ServerConfig
from quire.serve.loading.budget import plan_fleet
from quire.serve.loading.build import make_model_set
from quire.serve.loading.folder import MAX_ENTRIES, models_in
from quire.serve.loading.keep_alive import keep_alive_s
from quire.serve.services import model_name


def test_folders_with_settings_and_gguf_files_are_models(tmp_path: Path) -> None:
    for name in ("qwen", "notes", "gguf", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    for name in ("gguf/one.gguf", "phi.GGUF", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-x.gguf"):
        (tmp_path / name).write_text("")
    (tmp_path / "read.me").write_text("")
    found = models_in(str(tmp_path))
    assert [Path(path).name for path in found.paths] == ["big-00001-of-00002.gguf", "gguf", "phi.GGUF", "qwen"]
    assert [line.removeprefix(f"{tmp_path}/") for line in found.skipped] == [
        "big-00002-of-00002.gguf: a later part of a model in several files",
        "mmproj-x.gguf: the image encoder of a model, not a model",
        "notes: no config.json and no GGUF file in it",
        "read.me: neither a folder nor a GGUF file",
    ]


def test_a_model_has_the_name_of_its_folder_its_file_or_the_link_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sha256-0f").write_text("")
    (tmp_path / "small").mkdir()
    (tmp_path / "phi.gguf").symlink_to("sha256-0f")
    (tmp_path / "large").symlink_to("small")
    monkeypatch.chdir(tmp_path / "small")
    for model in ("phi.gguf", "small", "large"):
        assert {model_name(f"{tmp_path}/{model}"), model_name(f"../{model}"), model_name(f"../small/../{model}")} == {
            model
        }
    assert [model_name(model) for model in (".", "./", "owner/name")] == ["small", "small", "owner/name"]


def test_a_folder_that_is_empty_missing_or_too_full_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"model_dir is .* a folder with model folders or GGUF files in it"):
        models_in(str(tmp_path))
    with pytest.raises(InvalidConfigError, match=r"model_dir is .*\(No such file"):
        models_in(str(tmp_path / "none"))
    for index in range(MAX_ENTRIES + 1):
        (tmp_path / f"{index}.gguf").touch()
    with pytest.raises(InvalidConfigError, match="at most 1000 entries"):
        models_in(str(tmp_path))


def test_models_of_one_share_fit_together_and_their_plan_depends_on_nothing_else() -> None:
    configs = [EngineConfig(model="guide", max_memory="600MiB", max_num_seqs=32) for _ in range(4)]
    fleet = plan_fleet(configs, 4, 3)
    assert fleet.budget_bytes == 600 << 20
    assert sum(each.report.plan.engine_bytes for each in fleet.blueprints[:3]) <= fleet.budget_bytes
    assert {each.config.max_memory for each in fleet.blueprints} == {200 << 20}
    assert {each.limits.max_model_len for each in fleet.blueprints} == {2048}


def test_a_model_takes_as_many_shares_as_it_needs() -> None:
    small = EngineConfig(model="guide", max_memory="600MiB", max_num_seqs=8)
    large = EngineConfig(model="guide", max_memory="600MiB", kv_memory="300MiB")
    fleet = plan_fleet([small, large, small], 3, 3)
    assert [int(each.config.max_memory or 0) >> 20 for each in fleet.blueprints] == [200, 400, 200]


def test_one_model_is_planned_as_ever() -> None:
    [alone] = plan_fleet([EngineConfig(model="guide", max_memory="600MiB")], 1, 3).blueprints
    assert alone.config.max_memory == 600 << 20


def test_what_never_fits_is_refused_if_it_was_named_and_listed_if_it_was_found(tmp_path: Path) -> None:
    fits = EngineConfig(model="guide", max_memory="600MiB", max_num_seqs=8)
    never = EngineConfig(model="guide", max_memory="600MiB", kv_memory="2GiB")
    with pytest.raises(InvalidConfigError, match=r"kv_memory is '2\.00 GiB'; allowed: at most"):
        plan_fleet([fits, never], 2, 3)
    fleet = plan_fleet([fits, never], 1, 3)
    assert len(fleet.blueprints) == 1
    assert fleet.broken[0][0] == "guide"
    with pytest.raises(InvalidConfigError, match="model_dir is 'a folder of broken models'"):
        plan_fleet([never], 0, 3)


def test_two_models_of_one_name_are_refused_and_both_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an error shows no more than the beginning of a long path
    folders = [Path("x/guide"), Path("y/guide")]
    for folder in folders:
        shutil.copytree(GUIDE_FOLDER, folder)
    configs = [EngineConfig(model=folder) for folder in folders]
    with pytest.raises(InvalidConfigError) as refused:
        make_model_set(configs, ServerConfig(), ManualClock(), num_named=2)
    assert str(folders[0]) in str(refused.value)
    assert str(folders[1]) in str(refused.value)
    with pytest.raises(InvalidConfigError, match="served_model_name is 'x'; allowed: one model"):
        make_model_set([EngineConfig(), EngineConfig()], ServerConfig(served_model_name=("x",)), ManualClock())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("5m", 300.0), ("90s", 90.0), ("1h30m", 5400.0), ("1.5h", 5400.0), ("250ms", 0.25), (" 2M ", 120.0)),
        *((0, 0.0), ("0", 0.0), ("0s", 0.0), (10, 10.0), (2.5, 2.5), ("300", 300.0)),
        *(
            (-1, math.inf),
            ("-1", math.inf),
            ("-1m", math.inf),
            ("never", math.inf),
            (10**400, math.inf),
            (1e300, math.inf),
        ),
    ],
)
def test_a_time_to_stay_is_read_as_ollama_reads_it(text: object, seconds: float) -> None:
    assert keep_alive_s(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "5 minutes", "5m5", "m", "--1", "1e3", "٣s", True, None, math.nan, "9" * 99])
def test_what_is_no_time_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="seconds, or a time such as"):
        keep_alive_s(text)


def test_the_option_says_what_is_allowed() -> None:
    assert ServerConfig(keep_alive=None).keep_alive_s == math.inf
    with pytest.raises(InvalidConfigError, match="keep_alive is 'soon'"):
        ServerConfig(keep_alive="soon")
