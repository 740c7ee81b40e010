"""The settings of the server, and the tenants that its keys make."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidConfigError, InvalidRequestError
from quire.core.request import DEFAULT_SCOPE
from quire.serve.config import ServerConfig
from quire.serve.tenants import ANYBODY, Tenant, Tenants, read_tenants

SECRET = b"drawn at the start"
YAML_WANTED = r"^api_keys_file is 'keys\.yaml'; allowed: a file of YAML in UTF-8$"


def test_every_setting_has_a_default_and_a_line_of_help() -> None:
    config = ServerConfig()
    for field in fields(ServerConfig):
        text = field.metadata["help"]
        assert text == text.strip() != ""
        assert "\n" not in text
        assert not text.endswith(".")
        assert isinstance(field.metadata["secret"], bool)
    assert config.host == "127.0.0.1"
    with pytest.raises(FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("default_sampling", value) for value in ("", "x=1", "temperature", "temperature=-1", "min_p=nan", 7)),
        *(("default_sampling", value) for value in ("top_k=0.5", "top_p=1,top_p=1", "temperature=1,", "seed=1")),
        *(("host", value) for value in ("", 7, None, "a\nb")),
        *(("port", value) for value in (-1, 65_536, "8000", True)),
        *(("max_body", value) for value in (0, "lots", -1, None)),
        *(("max_header_bytes", value) for value in (0, 255, "1TiB")),
        *(("max_queued_sequences", value) for value in (0, 1.5, "1")),
        *(("max_queued_tokens", value) for value in (0, -1)),
        *(("max_sequences_per_key", value) for value in (0, "x")),
        *(("max_choices", value) for value in (0, None)),
        *(("max_connections", value) for value in (0, None)),
        *(("max_live_readers", value) for value in (-1, None, True)),
        *(("max_wait_s", value) for value in (0, -1, "30", float("nan"))),
        *(("request_timeout_s", value) for value in (0, -1, float("nan"), float("inf"))),
        *(("header_timeout_s", value) for value in (0, None)),
        *(("body_timeout_s", value) for value in (0, 1e9)),
        *(("write_timeout_s", value) for value in (0, "1")),
        *(("keep_alive_timeout_s", value) for value in (0, -5)),
        *(("drain_timeout_s", value) for value in (-1, None)),
        *(("metrics_compat", value) for value in ("", "VLLM", None)),
        *(("log_format", value) for value in ("xml", None)),
        *(("open_metrics", value) for value in (1, "yes")),
        *(("access_log", value) for value in (0, None)),
        *(("served_model_name", value) for value in ("guide", ["guide"], ("",), (7,), ("n" * 257,))),
        *(("api_keys_file", value) for value in ("", 7)),
        *(("tenant_secret", value) for value in ("", b"x")),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_name(setting: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        ServerConfig(**{setting: value})
    assert caught.value.field.partition("[")[0] == setting


@pytest.mark.parametrize(
    "keys", ["sesame", ["sesame"], ("sesame", "sesame"), ("",), ("ses ame",), ("sésame",), ("x" * 513,), (b"sesame",)]
)
def test_a_key_that_is_refused_is_not_shown(keys: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"^api_key") as caught:
        ServerConfig(api_key=keys)
    for key in ("sesame", "ses ame", "sésame"):
        assert key not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    shown = repr(ServerConfig(api_key=("sesame",), tenant_secret="hush"))
    assert "sesame" not in shown
    assert "hush" not in shown
    assert {field.name for field in fields(ServerConfig) if field.metadata["secret"]} == {"api_key", "tenant_secret"}


# ---- tenants --------------------------------------------------------------------------------------------------------


def tenants(**settings: Any) -> Tenants:
    return read_tenants(ServerConfig(**settings), SECRET)


def found(where: Tenants, key: str) -> Tenant:
    tenant = where.find(key.encode())
    assert tenant is not None
    return tenant


def test_without_keys_nobody_needs_one() -> None:
    assert not tenants().has_keys
    assert tenants().find(b"anything") is None
    assert ANYBODY.scope == DEFAULT_SCOPE


def test_each_key_is_a_tenant_with_a_salt_of_its_own() -> None:
    both = tenants(api_key=("one", "two"), max_sequences_per_key=3)
    first, second = found(both, "one"), found(both, "two")
    assert (first.name, second.name, first.max_sequences) == ("key-1", "key-2", 3)
    assert (first.scope.tenant, second.scope.tenant) == ("key-1", "key-2")
    assert len({first.scope.salt, second.scope.salt, ""}) == 3
    assert both.find(b"") is both.find(b"on") is both.find(b"onetwo") is None


def test_salts_come_from_the_secret_alone() -> None:
    def salt(secret: str | None, drawn: bytes) -> str:
        config = ServerConfig(api_key=("one",), tenant_secret=secret)
        return found(read_tenants(config, drawn), "one").scope.salt

    assert salt(None, b"a") == salt(None, b"a") != salt(None, b"b")
    assert salt("given", b"a") == salt("given", b"b") != salt("other", b"a")
    assert salt("long " * 40, b"a") != salt("long " * 41, b"a")


def test_a_salt_of_a_request_is_within_that_of_its_tenant() -> None:
    both = tenants(api_key=("one", "two"))
    first, second = found(both, "one"), found(both, "two")
    scopes = [each.scope_for(salt) for each in (first, second) for salt in (None, "a", "b", "a" * 1024)]
    assert len(set(scopes)) == len(scopes)
    assert {scope.tenant for scope in scopes} == {"key-1", "key-2"}
    assert first.scope_for("a") == first.scope_for("a")
    assert first.scope_for("\ud800") != first.scope_for("a")


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7, b"salt", ["salt"]])
def test_a_salt_that_is_none_is_refused(salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^cache_salt is"):
        ANYBODY.scope_for(salt)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_tenants_of_a_file_have_names_limits_and_as_many_keys_as_they_like(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.yaml",
        "- {name: alice, key: sk-a, max_sequences: 8}\n- name: bob\n  key: [sk-b1, sk-b2]\n",
    )
    read = tenants(api_key=("mine",), api_keys_file=path, max_sequences_per_key=2)
    alice, bob = found(read, "sk-a"), found(read, "sk-b1")
    assert (alice.name, alice.max_sequences) == ("alice", 8)
    assert (bob.name, bob.max_sequences) == ("bob", 2)
    assert found(read, "sk-b2") is bob
    assert found(read, "mine").name == "key-1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a list of tenants"),
        ("name: alice", "a list of tenants"),
        ("- alice", r"^api_keys_file\[0\]"),
        ("- {name: alice}", r"^api_keys_file\[0\]\.key is"),
        ("- {name: alice, key: 7}", "needs quotes in YAML"),
        ("- {name: alice, key: []}", r"^api_keys_file\[0\]\.key is"),
        *((f"- {{name: alice, key: {key}}}", r"^api_keys_file\[0\]\.key is") for key in ("'a b'", "''", "' '", "['']")),
        ("- {name: alice, key: ''}\n- {name: bob, key: b}", r"^api_keys_file\[0\]\.key is 'blank'"),
        ("\n \n\n", "a list of tenants"),
        ("[]", "a list of tenants"),
        ("- \n", r"^api_keys_file\[0\]"),
        ("- {name: alice, key: sesame, best_priority: no}", r"best_priority is False"),
        ("- {key: sesame}", r"^api_keys_file\[0\]\.name is"),
        (
            "- {name: %s, key: sesame}" % ("x" * 65),
            r"name is 'a text of 65 characters'; allowed: 1 to 64 printable characters",
        ),
        ("- {name: alice, key: sesame, max_sequences: 0}", r"max_sequences is 0"),
        ("- {name: alice, key: sesame, operator: 1}", "operator is 1; allowed: true or false"),
        (
            "- {name: alice, key: sesame, limit: 5}",
            "is 'a tenant whose field 3 is unknown'; allowed: only name, key, max_sequences",
        ),
        ("- {name: alice, key: a1}\n- {name: alice, key: a2}", r"^api_keys_file\[1\]\.name is 'alice'"),
        ("- {name: alice, key: sesame}\n- {name: bob, key: sesame}", "each key once"),
        ("- {name: key-1, key: other}", "a name that no other tenant uses"),
        ("- {name: alice, key: mine}", "each key once"),
        ("- {name: alice, key: sesame", "a file of YAML"),
        ("- !!python/object/apply:os.getcwd []", "a file of YAML"),
        ("- {name: sesame, key: 2026-99-99}", YAML_WANTED),
        ("- {name: sesame, key: !!int sesame}", YAML_WANTED),
        ("- {name: sesame, key: !!float sesame}", YAML_WANTED),
        ("- {name: sesame, max_sequences: %s}" % ("7" * 5000), YAML_WANTED),
        ("[" * 5000 + "sesame", YAML_WANTED),
        ("- {sesame: alice}", r"^api_keys_file\[0\] is 'a tenant whose field 1 is unknown'"),
        ("- {? [sesame] : alice}", YAML_WANTED),
        ("- {name: [sesame], key: a}", r"^api_keys_file\[0\]\.name is 'a list'"),
        ('- {name: "sesame\\n", key: a}', r"^api_keys_file\[0\]\.name is 'a text of 7 characters'"),
        ("- {name: alice, key: [[sesame]]}", r"^api_keys_file\[0\]\.key is 'a value of type list'"),
        ("- {name: alice, key: a, operator: sesame}", "operator is 'a text of 6 characters'; allowed: true or false"),
        ("- {name: alice, key: a, max_sequences: sesame}", r"max_sequences is 'a text of 6 characters'"),
        ("- {name: alice, key: a, best_priority: {sesame: 1}}", r"best_priority is 'a dict'"),
        ("- &a {name: *a, key: sesame}", r"name is 'a dict'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_keys_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(Path("keys.yaml"), text)
    with pytest.raises(InvalidConfigError, match=message) as caught:
        tenants(api_key=("mine",), api_keys_file=path)
    assert "sesame" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="No such file"):
        tenants(api_keys_file=str(tmp_path / "none.yaml"))
    (tmp_path / "torn").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidConfigError, match="a file of YAML in UTF-8"):
        tenants(api_keys_file=str(tmp_path / "torn"))
