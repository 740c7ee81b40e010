"""TLS: the certificate and key of a server that serves HTTPS."""

from __future__ import annotations

import ssl
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.serve.config import ServerConfig

WITHOUT_PASSWORD: Final = "a key file without a password; openssl pkey -in KEY -out NEW removes the password"


def make_tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context for these settings, or None for HTTP.

    TLS 1.2 and later. Raises `InvalidConfigError` for unusable files. A key with a password is refused: a server that
    starts unattended cannot ask for the password.
    """
    certificate, key = config.tls_cert, config.tls_key
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise InvalidConfigError(name, path, f"a file that can be read ({error.strerror})") from None

    def refuse_password() -> str:
        raise InvalidConfigError("tls_key", key, WITHOUT_PASSWORD)

    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidConfigError("tls_key", key, f"the key of the certificate {certificate}") from None
        allowed = "a PEM file with the certificate, then its intermediate certificates, and a PEM file with its key"
        raise InvalidConfigError("tls_cert", certificate, allowed) from None
    return context
