"""Where the agent listens and whom it lets in: any address but loopback needs TLS and a credential."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.gate import read_tokens


@dataclass(frozen=True)
class Listen:
    """The ``[api]`` options as a value that has been found safe."""

    host: str
    port: int
    tokens: tuple[bytes, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None

    @staticmethod
    def read(conf: Any) -> Listen:
        """Raises: ValueError with what is missing, OSError for a file that cannot be read."""
        api = conf.api
        listen = Listen(
            host=str(api.bind_host),
            port=api.bind_port,
            tokens=read_tokens(Path(api.token_file)) if api.token_file else (),
            tls_cert=api.tls_cert,
            tls_key=api.tls_key,
            client_ca=api.client_ca,
        )
        tls = listen.tls_cert and listen.tls_key
        if bool(listen.tls_cert) != bool(listen.tls_key):
            raise ValueError("[api] tls_cert and tls_key go together")
        if listen.client_ca and not tls:
            raise ValueError("[api] client_ca needs tls_cert and tls_key")
        if not listen.is_loopback():
            if not tls:
                raise ValueError(
                    f"[api] bind_host {listen.host} is not a loopback address and needs tls_cert and "
                    "tls_key"
                )
            if not (listen.client_ca or listen.tokens):
                raise ValueError(
                    f"[api] bind_host {listen.host} is not a loopback address and needs a credential: "
                    "client_ca (mutual TLS) or token_file"
                )
        return listen

    def check_files(self) -> None:
        """Raises: ValueError if the server could not use a certificate, the key or the CAs."""
        if not self.tls_cert:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # With a password, even an empty one, nobody is asked for it on a terminal.
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as wrong:  # what OpenSSL says is one, too
            raise ValueError(
                f"[api] tls_cert and tls_key ({self.tls_cert}, {self.tls_key}) cannot be used: {wrong}"
            ) from None
        try:
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
        except OSError as wrong:
            raise ValueError(f"[api] client_ca {self.client_ca} cannot be used: {wrong}") from None

    def is_loopback(self) -> bool:
        """``localhost`` is not taken as one: what it resolves to is not ours to know."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def uvicorn(self) -> dict[str, Any]:
        """The listening part of a uvicorn configuration."""
        options: dict[str, Any] = {"host": self.host, "port": self.port}
        if self.tls_cert:
            options |= {"ssl_certfile": self.tls_cert, "ssl_keyfile": self.tls_key}
        if self.client_ca:
            options |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options
