"""Where the agent listens: a UNIX socket; TCP not without a credential, nor outside loopback TLS."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agents import main as agent_main
from agents.api.access import Token, read_tokens
from agents.api.listen import Listen, LocalSocket
from agents.api.roles import Role
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


def test_by_default_only_a_socket_for_the_agents_own_user() -> None:
    made = listen()
    assert made.socket == LocalSocket(Path("/run/netplugin/agent.sock"), None)
    assert made.host is None
    with pytest.raises(ValueError, match="nobody could call"):
        listen(socket="")


LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_a_credential_too(host: str, token_file: str) -> None:
    with pytest.raises(ValueError, match="insecure_loopback"):
        listen(bind_host=host)
    with pytest.raises(ValueError, match="insecure_loopback"):
        listen(bind_host=host, **TLS)
    assert listen(bind_host=host, token_file=token_file).access.has_credential
    assert listen(bind_host=host, client_ca="/ca.pem", **TLS).access.has_credential
    open_to_all = listen(bind_host=host, insecure_loopback=True)
    assert (open_to_all.host, open_to_all.access.has_credential) == (host, False)


# ``localhost`` and the like: what a name resolves to may change after it was judged.
ELSEWHERE = [
    "0.0.0.0",
    "::",
    "192.0.2.1",
    "2001:db8::1",
    "localhost",
    "127.0.0.1.example.org",
    "::ffff:192.0.2.1",
]


@pytest.mark.parametrize("host", ELSEWHERE)
def test_any_other_address_needs_tls_and_a_credential(host: str, token_file: str) -> None:
    with pytest.raises(ValueError, match="tls_cert and tls_key"):
        listen(bind_host=host)
    with pytest.raises(ValueError, match="tls_cert and tls_key"):
        listen(bind_host=host, token_file=token_file)
    for lab in (False, True):
        with pytest.raises(ValueError, match="credential"):
            listen(bind_host=host, insecure_loopback=lab, **TLS)
    assert listen(bind_host=host, token_file=token_file, **TLS).access.has_credential
    assert listen(bind_host=host, client_ca="/ca.pem", **TLS).client_ca == "/ca.pem"


def test_half_a_tls_is_refused_everywhere() -> None:
    for half in ({"tls_cert": "/c"}, {"tls_key": "/k"}):
        with pytest.raises(ValueError, match="go together"):
            listen(**half)
    with pytest.raises(ValueError, match="client_ca needs"):
        listen(client_ca="/ca")


@pytest.mark.parametrize(
    "path",
    ["agent.sock", "/" + "x" * 107, "/run/" + "\N{LATIN SMALL LETTER A WITH DIAERESIS}" * 60],
)
def test_a_socket_is_a_path_that_the_kernel_takes(path: str) -> None:
    with pytest.raises(ValueError, match="absolute path of 107 bytes"):
        listen(socket=path)


def test_a_group_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such group"):
        listen(socket_group="nobody-has-this-group")


def test_a_socket_is_for_its_user_or_its_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "agent.sock"
    for gid, mode in ((None, 0o600), (os.getgid(), 0o660)):
        with LocalSocket(path, gid).bind():
            assert stat.S_IMODE(path.stat().st_mode) == mode
            with pytest.raises(OSError, match="another process listens"):
                LocalSocket(path, gid).bind()
        assert path.is_socket(), "it is left by who dies, and replaced"


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("mine")
    with pytest.raises(OSError, match="is no socket"):
        LocalSocket(path, None).bind()
    assert path.read_text() == "mine"


def test_of_many_that_start_at_once_one_listens(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    LocalSocket(path, None).bind().close()  # of one that died

    def bind(_: int) -> socket.socket | None:
        try:
            return LocalSocket(path, None).bind()
        except OSError:
            return None

    with ThreadPoolExecutor(16) as threads:
        made = [each for each in threads.map(bind, range(64)) if each]
    assert len(made) == 1
    made[0].close()


def test_tokens(tmp_path: Path) -> None:
    path = _tokens(tmp_path, "# of alice\n\n  one \r\nread:grafana two\nplug:zstack\tthree\n", 0o600)
    one, *named = read_tokens(Path(path))
    assert (one.secret, one.role) == (b"one", Role.OPERATE)
    assert "one" not in one.name
    expected = [Token(b"two", "grafana", Role.READ), Token(b"three", "zstack", Role.PLUG)]
    assert named == expected


@pytest.mark.parametrize(
    "line",
    [
        "two words",
        "oprate:x s3cret",
        "OPERATE:x s3cret",
        "plug: s3cret",
        "plug:a/b s3cret",
        "plug:x s3cret more",
        "s3cret # a comment",
    ],
)
def test_a_line_that_is_neither_form_is_refused_and_not_shown(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match="line 2") as caught:
        read_tokens(Path(_tokens(tmp_path, f"one\n{line}\n", 0o600)))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o610, 0o602, 0o666])
def test_a_token_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = _tokens(tmp_path, "one\n", mode)
    with pytest.raises(ValueError, match="chmod 600"):
        listen(token_file=path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_token_file_of_ours_alone_is_taken(tmp_path: Path, mode: int) -> None:
    [token] = listen(token_file=_tokens(tmp_path, "one\n", mode)).tokens()
    assert token.secret == b"one"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_token_file_without_a_token_lets_nobody_in(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="no token"):
        listen(token_file=_tokens(tmp_path, text, 0o600))


def test_a_token_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token_file .*nonexistent cannot be read: No such file"):
        listen(token_file=str(tmp_path / "nonexistent"))


def test_the_agent_says_why_and_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "netplugin.conf"
    state = tmp_path / "state"
    conf.write_text(f"[DEFAULT]\nstate_path = {state}\n[api]\nbind_host = 0.0.0.0\n")
    assert agent_main.main(["--config-file", str(conf)]) == 2
    assert "[api] bind_host 0.0.0.0 is not a loopback address" in capsys.readouterr().err
    assert not state.exists()
