"""Where the agent listens: nothing but loopback without TLS and a credential."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from agents import main as agent_main
from agents.gate import read_tokens
from agents.listen import Listen
from netplugin import options

TLS = {"tls_cert": "/c.pem", "tls_key": "/k.pem"}


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return _tokens(tmp_path, "one\n", 0o600)


def _tokens(directory: Path, text: str, mode: int) -> str:
    path = directory / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def listen(**api: Any) -> Listen:
    conf = options.load([])
    for name, value in api.items():
        conf.set_override(name, value, group="api")
    return Listen.read(conf)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_needs_nothing(host: str) -> None:
    assert listen(bind_host=host).uvicorn() == {"host": host, "port": 7071}


# ``localhost`` and the like: what a name resolves to may change after it was judged.
ELSEWHERE = ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "localhost", "127.0.0.1.example.org",
             "::ffff:192.0.2.1"]  # fmt: skip


@pytest.mark.parametrize("host", ELSEWHERE)
def test_any_other_address_needs_tls_and_a_credential(host: str, token_file: str) -> None:
    with pytest.raises(ValueError, match="tls_cert and tls_key"):
        listen(bind_host=host)
    with pytest.raises(ValueError, match="tls_cert and tls_key"):
        listen(bind_host=host, token_file=token_file)
    with pytest.raises(ValueError, match="credential"):
        listen(bind_host=host, **TLS)
    assert listen(bind_host=host, token_file=token_file, **TLS).tokens == (b"one",)
    assert listen(bind_host=host, client_ca="/ca.pem", **TLS).client_ca == "/ca.pem"


def test_half_a_tls_is_refused_everywhere() -> None:
    for half in ({"tls_cert": "/c"}, {"tls_key": "/k"}):
        with pytest.raises(ValueError, match="go together"):
            listen(**half)
    with pytest.raises(ValueError, match="client_ca needs"):
        listen(client_ca="/ca")


def test_a_client_certificate_is_required_not_asked_for() -> None:
    made = listen(client_ca="/ca.pem", **TLS).uvicorn()
    assert made["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    assert (made["ssl_certfile"], made["ssl_keyfile"]) == ("/c.pem", "/k.pem")
    assert made["ssl_ca_certs"] == "/ca.pem"


def test_tokens(tmp_path: Path) -> None:
    path = _tokens(tmp_path, "# of alice\n\n  one \r\ntwo # not a comment\n", 0o600)
    assert read_tokens(Path(path)) == (b"one", b"two # not a comment")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o610, 0o602, 0o666])
def test_a_token_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = _tokens(tmp_path, "one\n", mode)
    with pytest.raises(ValueError, match="chmod 600"):
        listen(token_file=path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_token_file_of_ours_alone_is_taken(tmp_path: Path, mode: int) -> None:
    assert listen(token_file=_tokens(tmp_path, "one\n", mode)).tokens == (b"one",)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_token_file_without_a_token_lets_nobody_in(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="no token"):
        listen(token_file=_tokens(tmp_path, text, 0o600))


def test_a_token_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nonexistent"):
        listen(token_file=str(tmp_path / "nonexistent"))


def test_the_agent_says_why_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_log: None
) -> None:
    conf = tmp_path / "netplugin.conf"
    state = tmp_path / "state"
    conf.write_text(f"[DEFAULT]\nstate_path = {state}\n[api]\nbind_host = 0.0.0.0\n")
    assert agent_main.main(["--config-file", str(conf)]) == 2
    assert "[api] bind_host 0.0.0.0 is not a loopback address" in capsys.readouterr().err
    assert not state.exists()
