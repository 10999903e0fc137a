"""Certificates of the lab, made by openssl: two authorities, an agent's, and clients' of either."""

from __future__ import annotations

import ssl
from pathlib import Path

from tests.lab.processes import run

#: An address of this host that is no loopback one, but in the sandbox's own network.
ADDRESS = "10.99.0.1"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


class Pki:
    """A certificate authority, the agent's certificate, and clients' from it and from another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ca = self._authority("ca")
        self.other_ca = self._authority("other")
        self.agent, self.agent_key = self.certificate("agent", "ca")

    def _authority(self, name: str) -> Path:
        certificate, key = self._paths(name)
        out: list[str | Path] = ["-keyout", key, "-out", certificate]
        run(["openssl", "req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}", *out])
        return certificate

    def certificate(self, name: str, authority: str) -> tuple[Path, Path]:
        certificate, key = self._paths(name)
        ca, ca_key = self._paths(authority)
        request = self._directory / f"{name}.csr"
        names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{ADDRESS},IP:127.0.0.1"]
        run(["openssl", "req", *KEY, *names, "-keyout", key, "-out", request])
        run(
            [
                "openssl",
                "x509",
                "-req",
                "-in",
                request,
                "-CA",
                ca,
                "-CAkey",
                ca_key,
                "-days",
                "2",
                "-copy_extensions",
                "copy",
                "-out",
                certificate,
            ]
        )
        return certificate, key

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self._directory / f"{name}.pem", self._directory / f"{name}.key"

    def client(self, name: str = "", authority: str = "ca") -> ssl.SSLContext:
        """A client that knows the agent's CA, with a certificate of its own if it has a name."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if name:
            context.load_cert_chain(*self.certificate(name, authority))
        return context

    def tls(self) -> dict[str, str]:
        return {"tls_cert": str(self.agent), "tls_key": str(self.agent_key)}
