"""That a receiver of results can tell the agent from anybody else: signature, certificate, https."""

from __future__ import annotations

import hashlib
import hmac
import queue
import shutil
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.functional.conftest import BASE
from tests.functional.test_api_security import Pki, not_started
from tests.lab.agent import PrivateAgent

DEADLINE_S = 60.0
KEY = b"a-key-that-only-these-two-know"


@dataclass(frozen=True)
class Delivery:
    headers: Any
    body: bytes
    #: Of the verified client certificate.
    sender: str


@contextmanager
def receiver(pki: Pki) -> Iterator[tuple[str, queue.Queue[Delivery]]]:
    """A platform's callback server over TLS that takes nothing without a certificate of the CA."""
    got: queue.Queue[Delivery] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            connection: Any = self.connection
            subject = connection.getpeercert()["subject"]
            got.put(Delivery(self.headers, body, subject[0][0][1]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not to standard error."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.agent, pki.agent_key)
    context.load_verify_locations(pki.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}/cb", got
        server.shutdown()
        thread.join(DEADLINE_S)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "callback.key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    return path


def test_a_result_is_signed_and_sent_with_a_certificate(pki: Pki, key: Path) -> None:
    certificate, private = pki.certificate("hypervisor-1", "ca")
    with receiver(pki) as (url, got):
        tasks = {
            "callback_insecure_http": "false",
            "callback_allow": url,
            "callback_ca": str(pki.ca),
            "callback_cert": str(certificate),
            "callback_key": str(private),
            "callback_secret": str(key),
        }
        with PrivateAgent(BASE / "signing-agent", options={"tasks": tasks}, ready=False) as agent:
            headers = {"taskuuid": "t1", "callbackurl": url}
            assert agent.call("DELETE", "/v1/ports/none", headers=headers) == (200, None)
            delivery = got.get(timeout=DEADLINE_S)
            assert KEY.decode() not in agent.log.read_text()
        shutil.rmtree(agent.directory)
    assert delivery.sender == "hypervisor-1"
    assert delivery.headers["taskuuid"] == "t1"
    # Computed as the documentation says, and not by the agent's own function.
    expected = hmac.new(KEY, b"t1\n" + delivery.body, hashlib.sha256).hexdigest()
    assert delivery.headers["X-Netplugin-Signature"] == f"sha256={expected}"


def test_not_with_callbacks_in_the_clear_unless_it_is_allowed(tmp_path: Path) -> None:
    allow = "https://manager.example.org/cb,http://127.0.0.1:9000/"
    printed, state = not_started(tmp_path, tasks={"callback_allow": allow})
    assert "[tasks] callback_allow http://127.0.0.1:9000/" in printed
    assert "callback_insecure_http" in printed
    assert not state.exists()


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"callback_cert": "/nonexistent"}, "callback_cert and callback_key go together"),
        ({"callback_cert": "/nonexistent", "callback_key": "/nonexistent"}, "callback_cert"),
        ({"callback_ca": "/nonexistent"}, "callback_ca"),
        ({"callback_secret": "/nonexistent"}, "/nonexistent"),
    ],
)
def test_not_with_files_that_cannot_be_used(tmp_path: Path, wrong: dict[str, str], names: str) -> None:
    printed, state = not_started(tmp_path, tasks=wrong)
    assert names in printed
    assert not state.exists()


def test_not_with_a_key_that_others_can_read_or_guess(tmp_path: Path, key: Path) -> None:
    key.chmod(0o644)
    printed, _ = not_started(tmp_path, tasks={"callback_secret": str(key)})
    assert f"{key} can be read by others" in printed
    key.chmod(0o600)
    key.write_text("short\n")
    printed, _ = not_started(tmp_path, tasks={"callback_secret": str(key)})
    assert "fewer than 16 bytes" in printed
