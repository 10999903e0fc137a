"""Who may call the agent, and when it does not start at all: real processes, real TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.conftest import BASE, make_spec
from tests.lab import preloaded
from tests.lab.agent import PrivateAgent
from tests.lab.certificates import ADDRESS, Pki
from tests.lab.processes import run, wait_for

DEADLINE_S = 60.0
TOKEN = "a-token-of-alice"


@pytest.fixture(scope="module", autouse=True)
def address() -> Iterator[str]:
    run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"])
    yield ADDRESS
    run(["ip", "address", "delete", f"{ADDRESS}/32", "dev", "lo"])


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# alice\n{TOKEN}\n")
    path.chmod(0o600)
    return path


class SecureAgent(PrivateAgent):
    """An agent behind TLS; ``context`` and ``token`` are of the client that this class is."""

    def __init__(
        self,
        address: str,
        context: ssl.SSLContext,
        api: Mapping[str, str],
        token: str = "",
        options: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """On ``address``, or where else ``api`` says, but called by this address."""
        groups = {"api": {"bind_host": address, **api}, **(options or {})}
        super().__init__(BASE / "agent", options=groups, ready=False)
        self.address = address
        self.url = f"https://{address}:{self.port}"
        self.context, self.token = context, token

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        shutil.rmtree(self.directory)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,
        *,
        context: ssl.SSLContext | None = None,
    ) -> tuple[int, Any]:
        """The status and the body; 0 if there is no connection, or no TLS on it."""
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        sent.update(headers or {})
        try:
            with httpx.Client(verify=context or self.context, trust_env=False) as client:
                answer = client.request(method, self.url + path, json=body, headers=sent, timeout=timeout)
        except httpx.TransportError as failed:
            return 0, str(failed)
        kind = answer.headers.get("content-type", "")
        whole = answer.content and "json" in kind
        return answer.status_code, answer.json() if whole else answer.text


def not_started(directory: Path, status: int = 2, **groups: Mapping[str, str]) -> tuple[str, Path]:
    """What the agent says as it does not start, and the state directory it was given."""
    state = directory / "state"
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config: dict[str, dict[str, str]] = {
        "DEFAULT": {"state_path": str(state)},
        "api": {"bind_port": str(port)},
        "agent": {"enabled_backends": "linuxbridge"},
    }
    for group, values in groups.items():
        config.setdefault(group, {}).update(values)
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in vs.items()) for g, vs in config.items()]
    file = directory / "netplugin.conf"
    file.write_text("".join(lines))
    log = directory / "agent.log"
    with log.open("wb") as output:
        started = preloaded.agent().start(["--config-file", str(file)], os.environ, output.fileno())
    ended = started.wait(DEADLINE_S)
    printed = log.read_text()
    assert ended == status, printed
    assert "Traceback" not in printed
    assert printed.strip().splitlines()[-1].startswith("netplugin-agent: ")
    for host in ("127.0.0.1", ADDRESS):
        with closing(socket.socket()) as probe:
            assert probe.connect_ex((host, port)) != 0, "something listens"
    return printed, state


# -- it does not start ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ADDRESS])
@pytest.mark.parametrize(
    ("has", "names"),
    [
        ("", ["tls_cert", "tls_key"]),
        ("token", ["tls_cert", "tls_key"]),
        ("tls", ["client_ca", "token_file"]),
    ],
)
def test_not_on_an_address_for_others_without_tls_and_a_credential(
    tmp_path: Path, pki: Pki, tokens: Path, host: str, has: str, names: list[str]
) -> None:
    api = {"bind_host": host}
    if has == "token":
        api["token_file"] = str(tokens)
    elif has == "tls":
        api.update(pki.tls())
    printed, state = not_started(tmp_path, api=api)
    assert f"[api] bind_host {host}" in printed
    assert all(name in printed for name in names)
    assert not state.exists(), "nothing was touched"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_not_with_a_token_file_that_others_can_read(tmp_path: Path, tokens: Path, mode: int) -> None:
    tokens.chmod(mode)
    printed, state = not_started(tmp_path, api={"token_file": str(tokens)})
    assert f"[api] token_file {tokens} can be " in printed and f"Fix: chmod 600 {tokens}" in printed
    assert not state.exists()


def test_not_with_a_token_file_that_is_not_there_or_empty(tmp_path: Path, tokens: Path) -> None:
    printed, _ = not_started(tmp_path, api={"token_file": "/nonexistent/tokens"})
    assert "/nonexistent/tokens" in printed
    tokens.write_text("# nobody\n")
    printed, _ = not_started(tmp_path, api={"token_file": str(tokens)})
    assert f"{tokens} has no token in it" in printed


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"tls_cert": "/nonexistent/cert.pem"}, "tls_cert"),
        ({"tls_key": "/nonexistent/key.pem"}, "tls_key"),
        ({"tls_cert": "NOISE"}, "tls_cert"),
        ({"tls_key": "OTHER"}, "tls_key"),
        ({"client_ca": "/nonexistent/ca.pem"}, "client_ca"),
        ({"client_ca": "NOISE"}, "client_ca"),
    ],
)
def test_not_with_tls_files_that_cannot_be_used(
    tmp_path: Path, pki: Pki, tokens: Path, wrong: dict[str, str], option: str
) -> None:
    """Found before the host is touched, and reported in a sentence."""
    noise = tmp_path / "noise.pem"
    noise.write_text("this is no certificate\n")
    names = {"NOISE": str(noise), "OTHER": str(pki.other_ca.with_suffix(".key"))}
    wrong = {name: names.get(value, value) for name, value in wrong.items()}
    api = {"bind_host": ADDRESS, "token_file": str(tokens), **pki.tls(), **wrong}
    printed, state = not_started(tmp_path, api=api)
    assert f"[api] {option}" in printed or "[api] tls_cert and tls_key" in printed
    assert not state.exists()


def test_not_a_second_time_on_the_same_state(tmp_path: Path) -> None:
    with PrivateAgent(BASE / "agent", ready=False) as first:
        state = first.directory / "state"
        printed, _ = not_started(tmp_path, 1, DEFAULT={"state_path": str(state)})
        assert f"another agent runs with state_path {state}" in printed
        assert first.get("/healthz")[0] == 200
        first.kill()  # however it ends, the next one starts
        first.start(ready=False)
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert stat.S_IMODE((state / "agent.db").stat().st_mode) == 0o600
    shutil.rmtree(BASE / "agent")


@pytest.mark.parametrize(
    ("group", "values", "name"),
    [
        ("api", {"bind_port": "99999"}, "bind_port"),
        ("api", {"bind_host": "not an address"}, "bind_host"),
        ("agent", {"batch_size": "0"}, "batch_size"),
        ("DEFAULT", {"log_level": "LOUD"}, "log_level"),
    ],
)
def test_not_with_an_option_out_of_range(
    tmp_path: Path, group: str, values: dict[str, str], name: str
) -> None:
    printed, state = not_started(tmp_path, **{group: values})
    assert name in printed
    assert not state.exists()


# -- a bearer token ------------------------------------------------------------------------------


@pytest.fixture
def with_token(pki: Pki, tokens: Path) -> Iterator[SecureAgent]:
    api = {"token_file": str(tokens), **pki.tls()}
    tasks = {"tasks": {"callback_allow": "http://127.0.0.1:1/"}}
    with SecureAgent(ADDRESS, pki.client(), api, TOKEN, tasks) as agent:
        yield agent


def test_only_who_has_a_token_is_let_in(with_token: SecureAgent) -> None:
    agent = with_token
    assert agent.get("/v1/ports") == (200, [])
    put = make_spec(backend="linuxbridge")
    for wrong in ("", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN):
        headers = {"Authorization": wrong}
        for method, path, body in (
            ("GET", "/v1/ports", None),
            ("GET", "/metrics", None),
            ("GET", "/openapi.json", None),
            ("GET", "/v1/nowhere", None),
            ("PUT", "/v1/ports/p1", put),
            ("DELETE", "/v1/ports/p1", None),
            ("POST", "/v1/reconcile", {}),
            ("PUT", "/v1/pmd", {"count": 1}),
        ):
            status, error = agent.call(method, path, body, headers=headers)
            assert (status, error["code"]) == (401, "unauthorized"), (method, path, wrong)
            assert TOKEN not in str(error)
    task = {"Authorization": "", "taskuuid": "t1", "callbackurl": "http://127.0.0.1:1/"}
    assert agent.call("PUT", "/v1/ports/p1", put, headers=task)[0] == 401
    assert agent.get("/v1/tasks/t1")[0] == 404
    assert agent.get("/v1/ports") == (200, [])


def test_health_is_open(with_token: SecureAgent) -> None:
    none = {"Authorization": ""}
    assert with_token.call("GET", "/healthz", headers=none)[0] == 200
    assert with_token.call("GET", "/readyz", headers=none)[0] in (200, 503)
    assert with_token.call("GET", "/healthz/../v1/ports", headers=none)[0] in (401, 404)


def test_without_tls_nothing_is_answered(with_token: SecureAgent) -> None:
    with closing(socket.create_connection((ADDRESS, with_token.port), DEADLINE_S)) as plain:
        request = f"GET /v1/ports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        plain.sendall(request.encode())
        assert b"HTTP/1.1 200" not in _read(plain)
    with closing(socket.socket()) as probe:
        assert probe.connect_ex(("127.0.0.1", with_token.port)) != 0, "it listens elsewhere too"


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""


def test_the_agent_is_who_its_certificate_says(with_token: SecureAgent, pki: Pki) -> None:
    other_context = ssl.create_default_context(cafile=str(pki.other_ca))
    assert with_token.call("GET", "/healthz", context=other_context)[0] == 0


def test_clients_that_say_nothing_hold_up_nobody(with_token: SecureAgent) -> None:
    """Neither half a TLS handshake nor half a request."""
    with ExitStack() as silent:
        for number in range(101):
            peer = silent.enter_context(
                closing(socket.create_connection((ADDRESS, with_token.port), DEADLINE_S))
            )
            if number % 2:
                tls = with_token.context.wrap_socket(peer, server_hostname=ADDRESS)
                silent.enter_context(closing(tls))
                tls.sendall(b"PUT /v1/ports/p1 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert with_token.get("/v1/ports") == (200, [])
        # Before the agent has closed the last of them.
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)


def test_half_a_handshake_is_a_connection_and_has_a_deadline(pki: Pki, tokens: Path) -> None:
    api = {"token_file": str(tokens), **pki.tls(), "max_connections": "8", "header_timeout": "3600"}
    with SecureAgent(ADDRESS, pki.client(), api, TOKEN) as agent:

        def silent(sent: bytes) -> socket.socket:
            made = opened.enter_context(closing(socket.create_connection((ADDRESS, agent.port))))
            made.settimeout(DEADLINE_S / 2)  # asyncio itself waits for 60 s
            made.sendall(sent)
            return made

        with ExitStack() as opened:
            first = silent(b"")
            for _ in range(20):
                silent(b"\x16\x03\x01")  # the head of a TLS record: a handshake
            assert agent.get("/v1/ports") == (200, [])
            assert _read(first) == b"", "the one that is idle for longest makes room"
        agent.stop()
        agent.groups["api"]["header_timeout"] = "1"
        agent.start(ready=False)
        with ExitStack() as opened:
            for sent in (b"", b"\x16\x03\x01"):
                assert _read(silent(sent)) == b"", sent
        # A caller without a CPU may not be through its handshake in a second either.
        wait_for(lambda: agent.get("/v1/ports") == (200, []), DEADLINE_S, "others are served")


def test_neither_token_nor_key_is_in_the_log(with_token: SecureAgent, pki: Pki) -> None:
    with_token.get("/v1/ports")
    with_token.call("GET", "/v1/ports", headers={"Authorization": "Bearer guessed-wrong"})
    log = with_token.log.read_text()
    assert "listening on" in log
    assert TOKEN not in log and "guessed-wrong" not in log
    assert pki.agent_key.read_text().splitlines()[1] not in log


# -- mutual TLS ----------------------------------------------------------------------------------


def test_with_mutual_tls_a_client_needs_a_certificate(pki: Pki) -> None:
    mine = pki.client("client")
    with SecureAgent(ADDRESS, mine, {"client_ca": str(pki.ca), **pki.tls()}) as agent:
        assert agent.get("/v1/ports") == (200, [])
        assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
        for untrusted in (pki.client(), pki.client("stranger", "other")):
            for path in ("/v1/ports", "/healthz"):
                # TLS 1.3: the client takes the handshake for done and then finds itself cut off
                assert agent.call("GET", path, context=untrusted)[0] == 0
        assert agent.get("/v1/ports") == (200, [])


def test_with_both_a_client_needs_both(pki: Pki, tokens: Path) -> None:
    mine = pki.client("client")
    api = {"client_ca": str(pki.ca), "token_file": str(tokens), **pki.tls(), "bind_host": "0.0.0.0"}
    with SecureAgent(ADDRESS, mine, api, TOKEN) as agent:
        assert agent.get("/v1/ports") == (200, [])
        assert agent.call("GET", "/v1/ports", headers={"Authorization": ""})[0] == 401
        assert agent.call("GET", "/v1/ports", context=pki.client())[0] == 0
