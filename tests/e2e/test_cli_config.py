"""`quire config show`, and the schema of options behind all commands: flag, environment, file, default."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from quire.cli import OneLineParser
from quire.cli.options import environment_name, options_of, read_count
from quire.cli.server_options import ServeSettings, add_serve_options, serve_settings
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.serve.config import ServerConfig
from quire.serve.tenants import read_tenants

ALL = [field.name for kind in (EngineConfig, ServerConfig) for field in fields(kind)]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ALL, "config"]:
        monkeypatch.delenv(environment_name(name), raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "quire.yaml"
    path.write_text("block_size: 32\nport: 9000\n")
    yield path


def resolved(*arguments: str, **environ: str) -> ServeSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_serve_options(parser)
    return serve_settings(parser.parse_args(arguments), environ)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["config", "show", "--json", *arguments]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_every_setting_of_engine_and_server_is_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    text = parser.format_help()
    for name in ALL:
        assert name == "model" or f"--{name.replace('_', '-')}" in text
        assert environment_name(name) in text
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize(
    "line",
    ["A B --port 1", "A --port 1 B", "--port 1 A B", "--port=1 A -- B", "A --port 1 --no-access-log B", "-- A B"],
)
def test_models_may_stand_before_and_after_options(line: str) -> None:
    parser = OneLineParser()
    add_serve_options(parser)
    settings = serve_settings(parser.parse_args(line.split()), {})
    assert [each.model for each in settings.named] == ["A", "B"]
    assert settings.server.port == (1 if "port" in line else 8000)


def test_a_flag_goes_before_the_environment_that_before_a_file_and_that_before_the_default(file: Path) -> None:
    config = ("--config", str(file))
    assert resolved().engine.block_size is None
    assert resolved(*config).engine.block_size == 32
    assert resolved(*config, QUIRE_BLOCK_SIZE="64").engine.block_size == 64
    assert resolved(*config, "--block-size", "128", QUIRE_BLOCK_SIZE="64").engine.block_size == 128
    assert resolved(*config).server.port == 9000
    assert resolved(QUIRE_CONFIG=str(file)).server.port == 9000
    assert resolved("--config", "", QUIRE_CONFIG=str(file)).server.port == 8000


def test_every_value_has_an_origin(file: Path) -> None:
    settings = resolved("--config", str(file), "--host", "::1", QUIRE_MAX_BODY="1KiB").settings
    assert list(settings) == ALL
    assert settings["host"].origin == "flag"
    assert settings["max_body"].origin == "environment QUIRE_MAX_BODY"
    assert settings["port"].origin == f"file {file}"
    assert settings["block_size"].origin == f"file {file}"
    assert settings["seed"].origin == "default"


def test_values_are_read_as_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(
        "max-num-batched-tokens: 1k\nkv_memory: 64MiB\nenable_prefix_caching: no\nrequest_timeout_s: null\n"
        "served_model_name: [a, b]\ndrain_timeout_s: 5\nmax_queued_tokens: none\napi_key: sesame\n"
    )
    made = resolved("--config", str(path), "--max-queued-sequences", "2K", QUIRE_WRITE_TIMEOUT_S="1.5")
    assert (made.engine.max_num_seqs, made.engine.max_num_batched_tokens) == (None, 1000)
    open_again = resolved("--config", str(path), "--max-num-batched-tokens", "none", QUIRE_MAX_NUM_SEQS="8")
    assert (open_again.engine.max_num_seqs, open_again.engine.max_num_batched_tokens) == (8, None)
    assert made.engine.kv_memory == 64 << 20
    assert made.engine.enable_prefix_caching is False
    assert made.server.request_timeout_s is None
    assert made.server.served_model_name == ("a", "b")
    assert made.server.api_key == ("sesame",)
    assert (made.server.drain_timeout_s, made.server.write_timeout_s) == (5, 1.5)
    assert (made.server.max_queued_tokens, made.server.max_queued_sequences) == (None, 2048)
    assert resolved("--request-timeout-s", "none").server.request_timeout_s is None
    assert resolved("--seed", "7", "--skip-tokenizer-init").engine.seed == 7


def test_lists_are_said_several_times_or_with_commas() -> None:
    assert resolved("--api-key", "a,b", "--api-key", "c").server.api_key == ("a,b", "c")
    assert resolved(QUIRE_API_KEY="a, b").server.api_key == ("a", "b")


@pytest.mark.parametrize("text", ["", " ", "\t", ",", " , ,", "a,", ",a", "a, ,b", "a b", "\u00e9", "a\x07", "\u200b"])
def test_a_key_that_is_none_never_opens_a_server(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"^QUIRE_API_KEY is '(blank|a key of \d+ characters)'; allowed: 1 to"):
        resolved(QUIRE_API_KEY=text)
    if "," not in text:
        with pytest.raises(InvalidConfigError, match=r"^api_key\[0\] is"):
            resolved("--api-key", text)
        (tmp_path / "quire.yaml").write_text(f"api_key: {json.dumps(text)}\n")
        with pytest.raises(InvalidConfigError, match=r"^api_key\[0\] in .* is"):
            resolved("--config", str(tmp_path / "quire.yaml"))


@pytest.mark.parametrize("name", ["api_key", "api_keys_file", "tenant_secret", "allowed_host"])
@pytest.mark.parametrize("value", ["", "null", "~", "[]", '""', '" "', "[null]", '[""]'])
def test_a_line_left_empty_never_opens_a_server(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "quire.yaml").write_text(f"{name}: {value}\n")
    with pytest.raises(InvalidConfigError, match=f"^{name}"):
        read_tenants(resolved("--config", str(tmp_path / "quire.yaml")).server, b"drawn at the start")


@pytest.mark.parametrize("variable", ["QUIRE_API_KEYS_FILE", "QUIRE_TENANT_SECRET", "QUIRE_ALLOWED_HOST"])
def test_a_variable_left_empty_is_refused(variable: str) -> None:
    for text in ("", " "):
        with pytest.raises(InvalidConfigError, match=f"^(api_keys_file|{variable})"):
            read_tenants(resolved(**{variable: text}).server, b"drawn at the start")


@pytest.mark.parametrize("name", ["http://quire.example", "quire.example:80", "a b", "*.example", "[::1", "::1", "é"])
def test_a_name_that_no_client_can_call_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"^allowed_host is"):
        resolved("--allowed-host", name)
    assert resolved("--allowed-host", "*", "--allowed-host", "[::1]").server.allowed_host == ("*", "[::1]")


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("-1", -1), ("32K", 32768), ("25.6k", 25600), ("1m", 10**6), (" 2M ", 2 << 20)]
)
def test_counts_may_have_units(text: str, number: int) -> None:
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["", "1.5", "k", "1e3", "٤", "1 2", "0x10", "1kk", "nan", "9" * 41])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an integer"):
        read_count(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "blok_size: 3",
            r"^key of .*quire\.yaml is 'blok_size'; allowed: names of settings; the closest is block_size$",
        ),
        ("prot: 3", r"is 'prot'; .* the closest is port$"),
        ("3: 3", r"^key of .*quire\.yaml is 3; .* the closest is "),
        ("block_size: x", r"^block_size in .*quire\.yaml is 'x'; allowed: an integer$"),
        ("block_size: 0", r"^block_size in .*quire\.yaml is 0; allowed: an integer from 1"),
        ("block_size: 1.5", r"^block_size in .*quire\.yaml is 1\.5"),
        ("port: [1]", r"^port in .*quire\.yaml is \[1\]"),
        ("kv_memory: lots", r"^kv_memory in .*quire\.yaml is 'lots'"),
        ("api_key: [sesame, 7]", r"^api_key\[1\] in .*quire\.yaml is 'a value of type int'"),
        ("- port", r"^config is .*; allowed: a YAML file with names"),
        ("a: [", r"^config is .*; allowed: a YAML file in UTF-8$"),
        ("[" * 5000, r"^config is .*; allowed: a YAML file in UTF-8$"),
        ("port: 2026-13-01", r"^config is .*; allowed: a YAML file in UTF-8$"),  # no such day
    ],
)
def test_what_a_file_gets_wrong_is_named(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidConfigError, match=message):
        resolved("--config", str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"^config is '.*; allowed: a file that can be read"):
        resolved("--config", str(tmp_path / "none.yaml"))


def test_what_the_environment_gets_wrong_is_named() -> None:
    for value in ("x", "0"):
        with pytest.raises(InvalidConfigError, match=r"^QUIRE_BLOCK_SIZE is "):
            resolved(QUIRE_BLOCK_SIZE=value)
    with pytest.raises(InvalidConfigError, match=r"^QUIRE_LOG_FORMAT is 'xml'"):
        resolved(QUIRE_LOG_FORMAT="xml")


def test_several_keys_share_fairly_unless_it_is_said_otherwise() -> None:
    assert resolved("--api-key", "a").engine.policy == "fcfs"
    made = resolved("--api-key", "a", "--api-key", "b")
    assert made.engine.policy == "fair_share"
    assert made.settings["policy"].origin == "default with several keys"
    assert resolved("--api-key", "a", "--api-key", "b", "--policy", "fcfs").engine.policy == "fcfs"
    assert resolved(QUIRE_API_KEYS_FILE="keys.yaml").engine.policy == "fair_share"


# ---- the command ----------------------------------------------------------------------------------------------------


def test_show_prints_value_and_origin(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert cli.main(["config", "show", "--config", str(file), "--max-body", "1536KiB", "--api-key", "sesame"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["setting"].split() == ["setting", "value", "origin"]
    assert lines["block_size"].split() == ["block_size", "32", "file", str(file)]
    assert lines["max_body"].split() == ["max_body", "1.5", "MiB", "flag"]
    assert lines["model"].split() == ["model", "guide", "default"]
    assert lines["kv_memory"].split() == ["kv_memory", "none", "default"]
    assert lines["open_metrics"].split() == ["open_metrics", "no", "default"]
    assert lines["api_key"].split() == ["api_key", "********", "flag"]
    assert "sesame" not in out
    assert len(lines) == len(ALL) + 1


def test_show_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TENANT_SECRET", "hush")
    value = shown(capsys, "folder", "--kv-memory", "1GiB", "--api-key", "sesame", "--api-key", "other")
    assert value["model"] == {"value": "folder", "origin": "flag"}
    assert value["kv_memory"] == {"value": 1 << 30, "origin": "flag"}
    assert value["api_key"] == {"value": ["********", "********"], "origin": "flag"}
    assert value["tenant_secret"] == {"value": "********", "origin": "environment QUIRE_TENANT_SECRET"}
    assert value["policy"] == {"value": "fair_share", "origin": "default with several keys"}
    assert value["api_keys_file"] == {"value": None, "origin": "default"}
    assert list(value) == ALL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "quire: error: port is 70000"),
        (("--port", "x"), "argument --port: 'x' is not an integer"),
        (("--no-open-metrics=1",), "error"),
        (("--drain-timeout-s", "soon"), "argument --drain-timeout-s: 'soon' is not a number"),
        (("--max-num-seqs", "0"), "quire: error: max_num_seqs is 0"),
        (
            ("--max-num-seqs", "9", "--max-num-batched-tokens", "8"),
            "max_num_batched_tokens is 8; allowed: max_num_seqs (9)",
        ),
        (("--api-key", ""), "quire: error: api_key[0] is"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.main(["config", "show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_other_commands_read_the_same_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("port: 9000\nkv_memory: lots\n")
    monkeypatch.setenv("QUIRE_CONFIG", str(path))
    assert cli.main(["generate", "-p", "x"]) == 2
    assert f"kv_memory in {path} is 'lots'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig])
def test_the_name_of_a_value_says_whether_it_is_a_folder_or_a_file(kind: type) -> None:
    begins = ("folder", "file", "YAML file", "new file")
    paths = [each for each in options_of(kind).values() if each.help.startswith(begins)]
    assert len(paths) >= 3
    assert {each.name: each.metavar for each in paths} == {
        each.name: "FOLDER" if each.help.startswith("folder") else "FILE" for each in paths
    }
