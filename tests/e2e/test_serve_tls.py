"""HTTPS: a certificate of one's own, and files that are not what they should be."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from quire.core.errors import InvalidConfigError
from quire.serve import guard
from quire.serve.config import ServerConfig
from quire.serve.connections import ACCEPTED_AT_ONCE
from quire.serve.tls import make_tls_context
from support.bare_server import BareServer, serving
from support.waiting import wait_until


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for localhost, and its key."""
    folder, issued = tmp_path_factory.mktemp("tls"), authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for index, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(folder / "cert.pem", append=index > 0)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def https(server: BareServer, authority: trustme.CA) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("localhost", server.port, timeout=60, context=trusting(authority))


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_a_client_that_trusts_the_certificate_is_answered(authority: trustme.CA, files: tuple[str, str]) -> None:
    with serving(tls_cert=files[0], tls_key=files[1]) as server:
        deadline = time.monotonic() + 60
        while not any("ready after" in line for line in server.said) and time.monotonic() < deadline:
            time.sleep(0.01)
        address = next(line for line in server.said if line.startswith("listening on "))
        assert address.startswith("listening on https://127.0.0.1:")
        assert any("https://127.0.0.1" in line and "curl" in line for line in server.said)
        with closing(http.client.HTTPSConnection("localhost", server.port, context=trusting(authority))) as connection:
            for _ in range(2):
                connection.request("GET", "/livez")
                answer = connection.getresponse()
                assert (answer.status, answer.read()) == (200, b'{"status":"alive"}')
        with (
            closing(
                http.client.HTTPSConnection("localhost", server.port, context=ssl.create_default_context())
            ) as other,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            other.request("GET", "/livez")


def test_a_client_that_does_not_shake_hands_is_left_and_hurts_no_other(
    authority: trustme.CA, files: tuple[str, str]
) -> None:
    with serving(tls_cert=files[0], tls_key=files[1], header_timeout_s=0.3) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        plain = socket.create_connection(("127.0.0.1", server.port))
        plain.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with closing(http.client.HTTPSConnection("localhost", server.port, context=trusting(authority))) as connection:
            connection.request("GET", "/livez")
            assert connection.getresponse().status == 200
        for client in (*silent, plain):
            client.settimeout(60)
            with suppress(ConnectionResetError):
                assert not client.recv(4096).startswith(b"HTTP")
            client.close()


def test_the_oldest_handshakes_make_room_for_new_ones(authority: trustme.CA, files: tuple[str, str]) -> None:
    limits = {"max_connections": 20, "header_timeout_s": 300}
    with serving(tls_cert=files[0], tls_key=files[1], **limits) as server, ExitStack() as opened:
        address = "127.0.0.1", server.port
        silent = [opened.enter_context(closing(socket.create_connection(address, timeout=60))) for _ in range(40)]
        with closing(https(server, authority)) as connection:
            connection.request("GET", "/livez")
            assert connection.getresponse().status == 200
        for client in silent[:20]:
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        for client in silent[-5:]:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)


@pytest.mark.parametrize("are_used", [False, True])
def test_clients_that_do_not_agree_to_end_take_no_more_places(
    authority: trustme.CA, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, are_used: bool
) -> None:
    monkeypatch.setattr(guard, "IDLE_S", 0.0)
    most = 2 + ACCEPTED_AT_ONCE * are_used
    with serving(tls_cert=files[0], tls_key=files[1], max_connections=2) as server, ExitStack() as opened:
        wait_until(lambda: server.services.gate.is_ready)
        connections = server.server._http.server_state.connections
        for number in range(2 + ACCEPTED_AT_ONCE + 8):
            client = opened.enter_context(closing(https(server, authority)))
            with suppress(OSError):  # it was refused in the middle of its handshake
                client.connect()
            if are_used and number < 2:
                client.request("GET", "/v1/wait")
                wait_until(lambda number=number: server.services.gate.num_visits > number)
        wait_until(lambda: len(connections) <= most)
        assert len(connections) == most


def test_a_client_that_reads_nothing_is_cut_off(
    authority: trustme.CA, files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(tls_cert=files[0], tls_key=files[1], write_timeout_s=0.2) as server,
        closing(https(server, authority)) as client,
    ):
        client.request("GET", "/v1/large", headers={"Connection": "close"})
        wait_until(lambda: server.server._http.server_state.connections)
        wait_until(lambda: not server.server._http.server_state.connections)
    assert "Exception" not in caplog.text


def refusal(**settings: str | None) -> str:
    with pytest.raises(InvalidConfigError) as caught:
        make_tls_context(ServerConfig(**settings))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_not_what_they_should_be(authority: trustme.CA, files: tuple[str, str], tmp_path: Path) -> None:
    cert, key = files
    assert refusal(tls_cert=cert) == "tls_key is None; allowed: a file, because tls_cert is set"
    assert refusal(tls_key=key) == "tls_cert is None; allowed: a file, because tls_key is set"
    assert "No such file" in refusal(tls_cert=str(tmp_path / "none"), tls_key=key)
    assert "No such file" in refusal(tls_cert=cert, tls_key=str(tmp_path / "none"))
    assert refusal(tls_cert=key, tls_key=cert).startswith("tls_cert is ")
    other = tmp_path / "other.pem"
    authority.issue_cert("localhost").private_key_pem.write_to_path(other)
    assert refusal(tls_cert=cert, tls_key=str(other)).endswith(f"allowed: the key of the certificate {cert}")
    locked = tmp_path / "locked.pem"
    pem = load_pem_private_key(Path(key).read_bytes(), None)
    locked.write_bytes(pem.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert "without a password" in refusal(tls_cert=cert, tls_key=str(locked))
    assert make_tls_context(ServerConfig()) is None
    made = make_tls_context(ServerConfig(tls_cert=cert, tls_key=key))
    assert made is not None and made.minimum_version is ssl.TLSVersion.TLSv1_2
