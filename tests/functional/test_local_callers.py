"""Which users of the host may call the agent: real processes under other uids, on its real socket."""

from __future__ import annotations

import grp
import json
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent

#: Where the options say, in the sandbox's own /run.
SOCKET = Path("/run/netplugin/agent.sock")
NOBODY = 65534
GROUP = "daemon"
DEADLINE_S = 60.0
OPEN = make_spec(backend="linuxbridge", vlan_id=None, port_security={"enabled": False})

# What a user without any right of ours can try: the port that used to be open, and the socket.
_TRY = """
import http.client, json, socket, sys
class Local(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)
said = []
where, method, path, body = json.loads(sys.argv[1])
for connection in (http.client.HTTPConnection("127.0.0.1", 7071), Local(where)):
    try:
        connection.request(method, path, body, {"Host": "localhost"})
        said.append(connection.getresponse().status)
    except OSError as refused:
        said.append(type(refused).__name__)
print(json.dumps(said))
"""


class LocalAgent(PrivateAgent):
    """An agent with the default ``[api]`` options (and ``api``), called over its socket as root."""

    def __init__(self, api: Mapping[str, str] | None = None, path: Path = SOCKET) -> None:
        options = {"linuxbridge": {"physical_interfaces": "physnet1:"}}
        # While the first one runs, others are never ready: the bridges are the first one's to work at.
        super().__init__(BASE / f"of-{path.stem}", options=options, ready=path == SOCKET)
        self.groups["api"] = dict(api or {})
        self.path = path

    def __exit__(self, *error: Any) -> None:
        try:
            for port in self.get("/v1/ports")[1] or []:
                self.call("DELETE", f"/v1/ports/{port['port_id']}")
        finally:
            super().__exit__(*error)
            shutil.rmtree(self.directory)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEADLINE_S,
    ) -> tuple[int, Any]:
        transport = httpx.HTTPTransport(uds=str(self.path), verify=False)
        with httpx.Client(transport=transport, verify=False, timeout=timeout) as client:
            try:
                answer = client.request(method, f"http://localhost{path}", json=body, headers=headers)
            except httpx.TransportError:
                return 0, None
            return answer.status_code, answer.json() if answer.content else None


def as_user(
    method: str, path: str, body: Any = None, *, group: str | None = None, where: Path = SOCKET
) -> list[Any]:
    """What a process of the user nobody gets: over TCP where the agent used to listen, and over its
    socket. Each a status, or the error that kept it from one."""
    call = json.dumps([str(where), method, path, None if body is None else json.dumps(body)])
    groups = f"--groups={grp.getgrnam(group).gr_gid}" if group else "--clear-groups"
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", groups]
    done = subprocess.run(
        [*user, "/usr/bin/python3", "-c", _TRY, call],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    printed: list[Any] = json.loads(done.stdout)
    return printed


@pytest.fixture(scope="module")
def agent() -> Iterator[LocalAgent]:
    with LocalAgent() as made:
        yield made


def test_by_default_only_root_can_call(agent: LocalAgent) -> None:
    refused = ["ConnectionRefusedError", "PermissionError"]
    assert as_user("PUT", "/v1/ports/open", OPEN) == refused
    assert as_user("GET", "/healthz") == refused
    assert agent.get("/v1/ports") == (200, [])
    mode = SOCKET.stat()
    assert (stat.S_IMODE(mode.st_mode), mode.st_uid, mode.st_gid) == (0o600, 0, 0)
    assert agent.call("PUT", "/v1/ports/mine", OPEN)[0] == 200
    assert agent.call("DELETE", "/v1/ports/mine")[0] == 204


def test_the_command_line_finds_it_by_itself(agent: LocalAgent) -> None:
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    command = [*agent.daemon.args[:2], "netplugin.cli.main", "backend", "list", "-f", "json"]
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert [backend["name"] for backend in json.loads(done.stdout)] == ["linuxbridge"]


def test_a_second_agent_does_not_take_the_socket_away(agent: LocalAgent, tmp_path: Path) -> None:
    config = tmp_path / "netplugin.conf"
    text = agent.config.read_text()
    config.write_text(text.replace(str(agent.directory / "state"), str(tmp_path / "state")))
    command = [str(word) for word in [*agent.daemon.args[:-1], config]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1, done.stderr
    assert f"[api] socket {SOCKET}: another process listens on it" in done.stderr
    assert agent.get("/healthz")[0] == 200


def test_the_socket_of_an_agent_that_died_is_replaced_and_goes_with_one_that_ends() -> None:
    path = BASE / "other.sock"
    with LocalAgent({"socket": str(path)}, path) as agent:
        agent.kill()
        assert path.is_socket()
        agent.start(ready=False)
        assert agent.get("/v1/ports") == (200, [])
    assert not path.exists()


def test_members_of_the_group_may_call_and_tcp_needs_a_token(tmp_path: Path) -> None:
    path = BASE / "other.sock"
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token\n")
    tokens.chmod(0o600)
    api = {
        "socket": str(path),
        "socket_group": GROUP,
        "bind_host": "127.0.0.1",
        "token_file": str(tokens),
    }
    with LocalAgent(api, path) as agent:
        assert as_user("GET", "/v1/ports", where=path) == [401, "PermissionError"]
        assert as_user("GET", "/v1/ports", where=path, group=GROUP) == [401, 200]
        assert agent.get("/v1/ports") == (200, []), "no token is needed there"


def test_loopback_without_a_credential_is_for_labs_and_warns() -> None:
    with PrivateAgent(BASE / "lab-agent", ready=False) as agent:
        assert agent.get("/v1/ports") == (200, [])
        assert "insecure_loopback: every user of this host may call" in agent.log.read_text()
        with socket.create_connection(("127.0.0.1", agent.port), DEADLINE_S):
            pass
    shutil.rmtree(agent.directory)
