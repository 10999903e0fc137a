"""Roles, the audit log, limits, and credentials that change while the agent runs: real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.conftest import BASE, make_spec
from tests.functional.test_api_security import Pki
from tests.functional.test_local_callers import GROUP, NOBODY, LocalAgent, as_user
from tests.lab.agent import PrivateAgent
from tests.lab.processes import wait_for
from tests.unit.agents.api.test_tasks import Receiver

DEADLINE_S = 60.0
TOKENS = {"grafana": "token-that-reads", "zstack": "token-that-plugs", "ops": "token-that-operates"}
FILE = (
    f"read:grafana {TOKENS['grafana']}\nplug:zstack {TOKENS['zstack']}\n"
    f"operate:ops {TOKENS['ops']}\nall-rights-without-a-name\n"
)
SPEC = make_spec(backend="linuxbridge", vlan_id=None)
OPEN = {**SPEC, "port_security": {"enabled": False}}
ROUTER = {**SPEC, "port_security": {"roles": ["router"]}}
TRUSTED = {**SPEC, "vf": {"trusted": True}}
BRIDGE = {"linuxbridge": {"physical_interfaces": "physnet1:"}, "agent": {"service_devices": "dhcp*"}}


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS.get(name, name)}", **more}


def service(device: str) -> dict[str, Any]:
    return {"device": device, "backend": "linuxbridge", "network": SPEC["network"], "mac": SPEC["mac"]}


def write_tokens(path: Path, text: str, mode: int = 0o600) -> None:
    """In one step, as a tool that deploys secrets would."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.rename(path)


def audit(agent: PrivateAgent) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (agent.directory / "audit.log").read_text().splitlines()]


@contextmanager
def with_tokens(directory: Path, **groups: dict[str, str]) -> Iterator[PrivateAgent]:
    tokens = directory / "tokens"
    write_tokens(tokens, FILE)
    home = BASE / "access-agent"
    api = {
        "insecure_loopback": "false",
        "token_file": str(tokens),
        "audit_log": str(home / "audit.log"),
        **groups.pop("api", {}),
    }
    with PrivateAgent(home, options={**BRIDGE, **groups, "api": api}) as agent:
        yield agent
        for name in ("p1", "p2"):
            agent.call("DELETE", f"/v1/ports/{name}", headers=bearer("ops"))
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def agent(tmp_path: Path, receiver: Receiver) -> Iterator[PrivateAgent]:
    with with_tokens(tmp_path, tasks={"callback_allow": receiver.url}) as made:
        yield made


#: Who may, of each kind of call: the least role, the call, and what answers it to who may.
CALLS: tuple[tuple[str, str, str, Any, int], ...] = (
    ("read", "GET", "/v1/ports", None, 200),
    ("read", "GET", "/v1/host/checks", None, 200),
    ("read", "GET", "/metrics", None, 200),
    ("plug", "PUT", "/v1/ports/p1", SPEC, 200),
    ("read", "GET", "/v1/ports/p1/counters", None, 200),
    ("plug", "POST", "/v1/ports:batch", {"put": [{"port_id": "p1", "spec": SPEC}]}, 200),
    ("plug", "POST", "/v1/reconcile", {}, 200),
    ("plug", "PUT", "/v1/service-ports/svc", service("dhcp9"), 422),  # there is no such device
    ("operate", "PUT", "/v1/service-ports/svc", service("vnet9"), 422),
    ("operate", "PUT", "/v1/ports/p1", OPEN, 200),
    ("operate", "PUT", "/v1/ports/p2", ROUTER, 200),
    ("operate", "PUT", "/v1/ports/p2", TRUSTED, 409),
    ("operate", "POST", "/v1/ports:batch", {"put": [{"port_id": "p1", "spec": OPEN}]}, 200),
    ("operate", "POST", "/v1/reconcile", {"remove_orphans": True}, 200),
    ("operate", "DELETE", "/v1/vfs/0000:03:00.1/quarantine", None, 404),
    ("operate", "PUT", "/v1/pmd", {"count": 1}, 503),
    ("plug", "DELETE", "/v1/ports/p1", None, 204),
)
HAS = {"grafana": ["read"], "zstack": ["read", "plug"], "ops": ["read", "plug", "operate"]}


def test_each_call_needs_its_role(agent: PrivateAgent) -> None:
    for needed, method, path, body, status in CALLS:
        for name, has in HAS.items():
            got, answer = agent.call(method, path, body, headers=bearer(name))
            if needed in has:
                assert got == status, (name, method, path, body, answer)
                continue
            assert (got, answer["code"]) == (403, "forbidden"), (name, method, path, body, answer)
            assert "needs the role" in answer["detail"] and answer["fix"]
            assert answer["detail"].endswith(f"{name} has {has[-1]}")
            if name == "zstack":
                assert f"needs the role {needed}" in answer["detail"]


def test_a_task_is_refused_as_the_call_itself_is(agent: PrivateAgent, receiver: Receiver) -> None:
    headers = bearer("zstack", taskuuid="open", callbackurl=receiver.url)
    assert agent.call("PUT", "/v1/ports/p1", OPEN, headers=headers)[0] == 403
    assert agent.call("GET", "/v1/tasks/open", headers=bearer("ops"))[0] == 404


def test_a_token_without_a_name_may_do_all(agent: PrivateAgent) -> None:
    all_rights = bearer("all-rights-without-a-name")
    assert agent.call("PUT", "/v1/ports/p1", OPEN, headers=all_rights)[0] == 200
    assert agent.call("GET", "/v1/ports", headers=bearer("operate:ops"))[0] == 401


def test_the_audit_log_says_who_did_what(agent: PrivateAgent, receiver: Receiver) -> None:
    before = len(audit(agent))
    agent.call("PUT", "/v1/ports/p1", SPEC, headers=bearer("zstack"))
    agent.call("PUT", "/v1/ports/p1", OPEN, headers=bearer("zstack"))
    agent.call("PUT", "/v1/ports/p1", SPEC, headers={"Authorization": "Bearer guessed-wrong"})
    agent.call("GET", "/v1/ports", headers=bearer("grafana"))
    agent.call("PUT", "/v1/ports/p1", {"vm_id": 7}, headers=bearer("ops"))
    done, denied, unknown, invalid = audit(agent)[before:]
    assert (done["caller"], done["role"], done["method"], done["path"], done["status"]) == (
        "zstack",
        "plug",
        "PUT",
        "/v1/ports/p1",
        200,
    )
    assert done["from"].startswith("127.0.0.1:") and done["body"] == SPEC
    assert (denied["caller"], denied["status"], denied["code"]) == ("zstack", 403, "forbidden")
    assert (unknown["caller"], unknown["status"]) == ("unknown", 401)
    assert (invalid["caller"], invalid["status"]) == ("ops", 422)

    before = len(audit(agent))
    headers = bearer("zstack", taskuuid="audited", callbackurl=receiver.url)
    assert agent.call("DELETE", "/v1/ports/p1", headers=headers)[0] == 200
    wait_for(lambda: len(audit(agent)) >= before + 2, DEADLINE_S, "the task is carried out")
    accepted, carried_out = audit(agent)[before:]
    assert (accepted["event"], accepted["caller"]) == ("accepted", "zstack")
    assert (carried_out["event"], carried_out["status"]) == ("carried_out", 204)
    assert accepted["taskuuid"] == carried_out["taskuuid"] == "audited"

    text = (agent.directory / "audit.log").read_text() + agent.log.read_text()
    assert not any(secret in text for secret in (*TOKENS.values(), "guessed-wrong"))


def test_a_caller_that_sends_too_much_gets_429_and_others_do_not(tmp_path: Path) -> None:
    with with_tokens(tmp_path, api={"changes_per_second": "1"}) as agent:
        url = f"{agent.url}/v1/ports/nothing"
        with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
            assert client.delete(url, headers=bearer("zstack")).status_code == 204
            # At once: one after the other a busy machine might take as long for each as is allowed.
            with ThreadPoolExecutor(30) as callers:
                calls = [callers.submit(client.delete, url, headers=bearer("zstack")) for _ in range(30)]
            answers = [call.result() for call in calls]
            refused = [answer for answer in answers if answer.status_code == 503]
            assert refused and {answer.status_code for answer in answers} <= {204, 503}
            assert refused[0].json()["code"] == "overloaded"
            assert int(refused[0].headers["Retry-After"]) >= 1
            assert client.delete(url, headers=bearer("ops")).status_code == 204
            ports = client.get(f"{agent.url}/v1/ports", headers=bearer("zstack"))
            assert ports.status_code == 200, "who only reads is not held up"


# -- the local socket ----------------------------------------------------------------------------


def test_roles_of_local_users() -> None:
    path = BASE / "roles.sock"
    api = {"socket": str(path), "socket_group": GROUP}
    with LocalAgent(api, path) as agent:
        assert as_user("PUT", "/v1/ports/p1", SPEC, group=GROUP, where=path)[1] == 200
        assert as_user("PUT", "/v1/ports/p1", OPEN, group=GROUP, where=path)[1] == 403
        assert agent.call("PUT", "/v1/ports/p1", OPEN)[0] == 200, "root may do all"
        entry = [line for line in agent.log.read_text().splitlines() if '"audit"' in line][-1]
        assert json.loads(entry)["audit"]["caller"] == "uid-0"
    api["socket_roles"] = f"read:*,operate:{NOBODY}"
    with LocalAgent(api, path):
        assert as_user("PUT", "/v1/ports/p1", OPEN, group=GROUP, where=path)[1] == 200
    api["socket_roles"] = f"read:@{GROUP}"
    with LocalAgent(api, path):
        assert as_user("GET", "/v1/ports", group=GROUP, where=path)[1] == 200
        assert as_user("DELETE", "/v1/ports/p1", group=GROUP, where=path)[1] == 403


# -- credentials that change ---------------------------------------------------------------------


def status_with(agent: PrivateAgent, token: str) -> int:
    return agent.call("GET", "/v1/ports", headers=bearer(token))[0]


def metric(agent: PrivateAgent, token: str) -> str:
    text = str(agent.call("GET", "/metrics", headers=bearer(token))[1])
    return next(
        line.split()[1] for line in text.splitlines() if line.startswith("netplugin_credentials_stale ")
    )


@pytest.mark.parametrize("signalled", [True, False], ids=["SIGHUP", "by itself"])
def test_tokens_are_taken_up_while_it_runs(tmp_path: Path, signalled: bool) -> None:
    def changed(text: str, mode: int = 0o600) -> None:
        write_tokens(tmp_path / "tokens", text, mode)
        if signalled:
            os.kill(agent.daemon.pid, signal.SIGHUP)

    with with_tokens(tmp_path) as agent:
        pid = agent.daemon.pid
        assert status_with(agent, "ops") == 200
        changed(f"operate:ops {TOKENS['ops']}\nread:new brand-new\n")
        wait_for(lambda: status_with(agent, "brand-new") == 200, DEADLINE_S, "the new token is known")
        assert status_with(agent, "zstack") == 401
        assert metric(agent, "ops") == "0.0"
        wrong = [("other\n", 0o644), ("one two three\n", 0o600), ("", 0o600)]
        for text, mode in wrong if signalled else wrong[:1]:
            changed(text, mode)
            wait_for(lambda: metric(agent, "ops") == "1.0", DEADLINE_S, "the fault is reported")
            assert status_with(agent, "ops") == 200, "what was before goes on"
            changed(FILE)
            wait_for(lambda: metric(agent, "ops") == "0.0", DEADLINE_S, "it is repaired")
            assert status_with(agent, "zstack") == 200
        assert "new tokens or certificates are not used" in agent.log.read_text()
        assert agent.daemon.pid == pid and agent.daemon.running


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


class TlsAgent(PrivateAgent):
    """Mutual TLS on loopback, the files of its credentials its own copies."""

    def __init__(self, pki: Pki, **api: str) -> None:
        home = BASE / "tls-agent"
        self.files = home / "tls"
        self.files.mkdir(parents=True)
        self.install(pki.agent, pki.agent_key, pki.ca)
        options = {"tls_cert": "agent.pem", "tls_key": "agent.key", "client_ca": "ca.pem"}
        api = {"insecure_loopback": "false", **api}
        api |= {name: str(self.files / file) for name, file in options.items()}
        super().__init__(home, options={**BRIDGE, "api": api}, ready=False)
        self.url = f"https://127.0.0.1:{self.port}"
        self.context = pki.client("platform")

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self.directory)

    def install(self, certificate: Path, key: Path, ca: Path) -> None:
        for source, name in ((certificate, "agent.pem"), (key, "agent.key"), (ca, "ca.pem")):
            new = self.files / f"{name}.new"
            shutil.copy(source, new)
            new.rename(self.files / name)

    def call(self, method: str, path: str, body: Any = None, *more: Any, **named: Any) -> Any:
        return self.call_as(self.context, method, path, body)

    def call_as(self, context: ssl.SSLContext, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        try:
            with httpx.Client(verify=context, trust_env=False, timeout=DEADLINE_S) as client:
                answer = client.request(method, self.url + path, json=body)
        except httpx.TransportError as failed:
            return 0, str(failed)
        return answer.status_code, answer.json() if answer.content else None

    def name(self, context: ssl.SSLContext) -> str:
        """Of the certificate that it shows to a new connection; empty if there is none."""
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
            ):
                subject: Any = (tls.getpeercert() or {})["subject"]
                return str(subject[0][0][1])
        except OSError:
            return ""


def test_roles_of_certificates(pki: Pki) -> None:
    roles = "plug:platform,operate:ops"
    with TlsAgent(pki, cert_roles=roles) as agent:
        assert agent.call("PUT", "/v1/ports/p1", SPEC)[0] == 200
        status, error = agent.call("PUT", "/v1/ports/p1", OPEN)
        assert status == 403 and "platform has plug" in error["detail"]
        assert agent.call_as(pki.client("ops"), "PUT", "/v1/ports/p1", OPEN)[0] == 200
        status, error = agent.call_as(pki.client("somebody"), "GET", "/v1/ports")
        assert status == 403 and "somebody has no role" in error["detail"]
        assert agent.call("DELETE", "/v1/ports/p1")[0] == 204


def test_certificates_are_taken_up_and_connections_go_on(pki: Pki) -> None:
    renewed = pki.certificate("renewed", "ca")
    other = pki.client("of-other", "other")
    with TlsAgent(pki) as agent:
        limits = httpx.Limits(keepalive_expiry=None)
        with httpx.Client(verify=agent.context, trust_env=False, limits=limits, timeout=DEADLINE_S) as kept:
            assert kept.get(f"{agent.url}/v1/ports").status_code == 200
            opened = _connection(kept)
            assert agent.name(agent.context) == "agent"
            assert agent.call_as(other, "GET", "/v1/ports")[0] == 0

            agent.install(*renewed, pki.ca)
            _until(lambda: agent.name(agent.context) == "renewed", "the new certificate is shown")
            agent.install(*renewed, pki.other_ca)
            _until(lambda: agent.call_as(other, "GET", "/v1/ports")[0] == 200, "the new CA is trusted")
            assert agent.call("GET", "/v1/ports")[0] == 0, "and the old one is not"

            agent.install(renewed[0], pki.agent_key, pki.other_ca)  # a key of another certificate
            _until(lambda: "are not used" in agent.log.read_text(), "it says that they do not fit")
            assert agent.call_as(other, "GET", "/v1/ports")[0] == 200

            assert kept.get(f"{agent.url}/v1/ports").status_code == 200
            assert _connection(kept) is opened, "on the connection of before"


def _until(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, DEADLINE_S, what)


def _connection(client: httpx.Client) -> Any:
    pool = client._transport._pool  # type: ignore[attr-defined]
    [connection] = pool.connections
    return connection


def test_new_connections_are_never_refused_meanwhile(pki: Pki) -> None:
    both = [(pki.agent, pki.agent_key), pki.certificate("renewed", "ca")]
    with TlsAgent(pki) as agent:
        for number in range(20):
            agent.install(*both[number % 2], pki.ca)
            os.kill(agent.daemon.pid, signal.SIGHUP)
            with closing(socket.create_connection(("127.0.0.1", agent.port), DEADLINE_S)):
                pass
            assert agent.call("GET", "/healthz")[0] == 200
