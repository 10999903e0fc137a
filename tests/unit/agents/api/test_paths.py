"""Whatever a caller makes of a path, no call does more than the caller's role."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from fastapi import Response

from agents.api.access import Access, Token
from agents.api.audit import AuditLog
from agents.api.bodies import JsonRoute
from agents.api.guard import Limits, RequestGuard
from agents.api.roles import BodyRules, Role, right_of
from agents.api.tasks import call_app
from agents.off_loop import OffLoop
from netplugin.api.models import PortSpec
from tests.unit.agent import DEADLINE_S, GENEROUS, SPEC, Agent, agent, gated, served, with_access

READ, PLUG, OPERATE = Role
#: The role that each call is to require, apart from its body; None for everybody.
ROLES: dict[tuple[str, str], Role | None] = {
    ("GET", "/v1/ports"): READ,
    ("GET", "/v1/ports/{port_id}"): READ,
    ("GET", "/v1/ports/{port_id}/counters"): READ,
    ("PUT", "/v1/ports/{port_id}"): PLUG,
    ("DELETE", "/v1/ports/{port_id}"): PLUG,
    ("POST", "/v1/ports/{port_id}:migrate"): PLUG,
    ("POST", "/v1/ports:migrate-check"): READ,
    ("POST", "/v1/ports:batch"): PLUG,
    ("POST", "/v1/ports:retag"): PLUG,
    ("GET", "/v1/service-ports"): READ,
    ("GET", "/v1/service-ports/{port_id}"): READ,
    ("PUT", "/v1/service-ports/{port_id}"): PLUG,
    ("DELETE", "/v1/service-ports/{port_id}"): PLUG,
    ("POST", "/v1/vms/{vm_id}:render-domain"): PLUG,
    ("POST", "/v1/vms/{vm_id}:check-domain"): READ,
    ("GET", "/v1/networks"): READ,
    ("GET", "/v1/networks/{network_id}"): READ,
    ("PUT", "/v1/networks/{network_id}"): PLUG,
    ("DELETE", "/v1/networks/{network_id}"): PLUG,
    ("GET", "/v1/physical-networks"): READ,
    ("GET", "/v1/physical-networks/{name}"): READ,
    ("PUT", "/v1/physical-networks/{name}"): OPERATE,
    ("DELETE", "/v1/physical-networks/{name}"): OPERATE,
    ("GET", "/v1/events"): READ,
    ("GET", "/v1/backends"): READ,
    ("GET", "/v1/host"): READ,
    ("GET", "/v1/host/checks"): READ,
    ("GET", "/v1/vfs"): READ,
    ("DELETE", "/v1/vfs/{pci_address}/quarantine"): OPERATE,
    ("GET", "/v1/pmd"): READ,
    ("GET", "/v1/pmd/proposal"): READ,
    ("PUT", "/v1/pmd"): OPERATE,
    ("POST", "/v1/reconcile"): PLUG,
    ("GET", "/v1/tasks/{taskuuid}"): READ,
    ("GET", "/metrics"): READ,
    ("GET", "/openapi.json"): READ,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
}
OPEN = {**SPEC, "port_security": {"enabled": False}}
#: Bodies that take the role ``operate``, by route.
MORE: dict[tuple[str, str], Any] = {
    ("PUT", "/v1/ports/{port_id}"): OPEN,
    ("POST", "/v1/ports/{port_id}:migrate"): {"phase": "prepare", "port": OPEN},
    ("POST", "/v1/ports:batch"): {"put": [{"port_id": "p1", "spec": OPEN}]},
    ("POST", "/v1/ports:retag"): {"ports": ["open"], "to_vlan": 200},
    ("PUT", "/v1/service-ports/{port_id}"): {"trusted": True},
    ("POST", "/v1/reconcile"): {"remove_orphans": True},
}
#: What is put behind a path, before it, and in the place of one of its slashes or colons.
ENDS = (
    *(
        "%0A",
        "%0D",
        "%0D%0A",
        "%00",
        "%09",
        "%20",
        "%7F",
        "%0A/",
        "/%0A",
        "/",
        "//",
        "/.",
        "/..",
        "/x/..",
        ".",
    ),
    *(";", ";x=1", "%3B", "%3F", "%3Fx", "?", "%23", "#", "#x", "\\", "%5C", "%2F", "%2E", "%2E%2E", "%250A"),
    *(
        "%C2%A0",
        "%E2%80%A8",
        "%C2%85",
        "%EF%BC%8F",
        "%C0%AF",
        "%FF",
        "%",
        "%zz",
        ":",
        "%3A",
        ".json",
        "+",
        "*",
    ),
)
SLASHES = (
    "//",
    "/./",
    "/x/../",
    "%2F",
    "%2f",
    "%252F",
    "\\",
    "%5C",
    "/%0A",
    "/;/",
    "/;x/",
    "/%2E/",
    "\u2215",
)
COLONS = ("%3A", "%3a", "%253A", "::", "/:", ":/", "\uff1a", ";", "%0A:", ":%0A")
NORMAL = re.compile(r"(?i)(http://agent)?(/(%3a|[a-z0-9._:-])+)+([?#].*)?")
PCI = "0000:03:00.1"


def test_every_route_has_its_role(tmp_path: Path) -> None:
    with agent(tmp_path) as running:
        declared = {
            (method, route.path): right_of(route.endpoint).role
            for route in running.app.routes
            if isinstance(route, JsonRoute)
            for method in route.methods or ()
        }
    assert declared == ROLES


def spellings(path: str) -> Iterator[str]:
    yield path
    yield from (path + end for end in ENDS)
    yield from (start + path for start in ("/", "/.", "/x/..", "/%0A", "%2F", "/;", "http://agent"))
    for old, news in (("/", SLASHES), (":", COLONS)):
        for at in (at for at, letter in enumerate(path) if letter == old):
            yield from (path[:at] + new + path[at + 1 :] for new in news)
    yield from (path.upper(), path.title(), path.swapcase())
    for at in (1, len(path) // 2, len(path) - 1):
        yield f"{path[:at]}%{ord(path[at]):02X}{path[at + 1 :]}"
        yield f"{path[:at]}%25{ord(path[at]):02X}{path[at + 1 :]}"


class Calls:
    """A gate before the agent's routes, which note who reached them in place of what they do."""

    def __init__(self, running: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached: list[tuple[str, str]] = []

        handle = JsonRoute.handle

        async def noted(route: JsonRoute, scope: Any, receive: Any, send: Any) -> None:
            if scope["method"] not in route.methods:
                await handle(route, scope, receive, send)
                return
            self.reached.append((scope["method"], route.path))
            await Response()(scope, receive, send)

        monkeypatch.setattr(JsonRoute, "handle", noted)
        tokens = tuple(Token(str(role).encode(), str(role), role) for role in Role)
        access = Access(tokens)
        rules = BodyRules((), lambda retag: {"open": PortSpec.model_validate(OPEN)})
        self._app = running.app
        journal: Any = self
        self._gate = RequestGuard(
            running.app, journal, with_access(access), AuditLog(None), Limits(*GENEROUS), OffLoop(), rules
        )

    async def accept(self, taskuuid: str, url: str, method: str, target: str, body: bytes) -> None:
        """In place of the journal: carry out a call at once, as it would be later."""
        await call_app(self._app, method, target, body)

    async def call(
        self, role: Role, method: str, target: str, body: bytes, *more: tuple[bytes, bytes]
    ) -> int:
        """As uvicorn would call the gate."""
        raw = (
            urlsplit(target).path if target.startswith("http") else target.partition("#")[0].partition("?")[0]
        )
        status = 0
        head = [(b"authorization", f"Bearer {role}".encode()), *more]
        scope = {"type": "http", "method": method, "path": unquote(raw), "raw_path": raw.encode()}
        scope |= {"query_string": b"", "headers": head, "root_path": ""}

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await self._gate(scope, receive, send)
        return status


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with agent(tmp_path) as running:
        yield Calls(running, monkeypatch)


def test_no_spelling_of_a_path_does_more_than_the_role(calls: Calls) -> None:
    task = ((b"taskuuid", b"t-1"), (b"callbackurl", b"http://127.0.0.1/"))
    wrong: list[str] = []

    async def tried() -> int:
        number = 0
        for method, template in ROLES:
            body = json.dumps(MORE.get((method, template), {})).encode()
            path = template.replace("{pci_address}", PCI).replace("{", "").replace("}", "")
            for target in spellings(path):
                number += 1
                # The journal and the role take turns, to halve the calls.
                for role, more in ((READ, ()), (PLUG, task if number % 2 else ())):
                    calls.reached.clear()
                    status = await calls.call(role, method, target, body, *more)
                    for there in calls.reached:
                        least = OPERATE if there in MORE and there == (method, template) else ROLES[there]
                        if least is not None and role < least:
                            wrong.append(f"{role}: {method} {target!r} reached {there}")
                    if calls.reached:
                        assert NORMAL.fullmatch(target), (target, calls.reached)
                    else:
                        assert status in (401, 403, 404, 405, 422), (target, status)
        return number

    assert asyncio.run(tried()) > 3000
    assert not wrong, wrong[:5]


def test_an_operator_reaches_every_route_by_its_path_alone(calls: Calls) -> None:
    """So that the refusals above are not those of everything."""
    for method, template in ROLES:
        path = template.replace("{pci_address}", PCI).replace("{", "").replace("}", "")
        assert asyncio.run(calls.call(OPERATE, method, path, b"{}")) == 200
        assert calls.reached.pop() == (method, template)
        for odd in (path + "%0A", path + "/", path.replace("/", "//", 1), path + "%00"):
            assert asyncio.run(calls.call(OPERATE, method, odd, b"{}")) in (401, 422), odd
        for other in {"GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"} - {method}:
            asyncio.run(calls.call(READ, other, path, b"{}", (b"x-http-method-override", method.encode())))
            for there in calls.reached:
                assert there[0] == other and (ROLES[there] or READ) is READ
            calls.reached.clear()
    address = f"/v1/vfs/{PCI.replace(':', '%3A')}/quarantine"
    assert asyncio.run(calls.call(OPERATE, "DELETE", address, b"")) == 200


TARGETS = (
    "/v1/ports:batch%0A",
    "/v1/ports%3Abatch",
    "//v1/ports:batch",
    "http://agent/v1/ports:batch%0A",
    "/v1/ports:batch;x",
    "/v1/./ports:batch",
    "/v1/ports:batch%00",
)


def test_a_newline_after_a_path_takes_no_filter_off(tmp_path: Path) -> None:
    """With the server's own reading of a request; the audit log has a line for each call."""
    log = tmp_path / "audit.log"
    body = json.dumps({"put": [{"port_id": "p1", "spec": OPEN}]}).encode()
    with agent(tmp_path) as running:
        gate = gated(running.app, running.tasks)
        access = Access((Token(b"plug", "plugger", PLUG),))
        gate._credentials, gate._audit = with_access(access), AuditLog(log)
        with served(gate) as url:
            address = urlsplit(url)
            for target in TARGETS:
                head = f"POST {target} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer plug\r\n"
                head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
                with socket.create_connection((str(address.hostname), address.port or 0), DEADLINE_S) as line:
                    line.sendall(head.encode() + body)
                    answer = b"".join(iter(lambda: line.recv(65536), b""))
                assert answer.split()[1] in (b"400", b"403", b"404", b"422"), (target, answer)
        assert running.store.get("p1") is None
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(entry["caller"] == "plugger" for entry in entries)
    assert {entry["path"] for entry in entries} >= {"/v1/ports:batch\n", "/v1/ports:batch\0"}
    assert not [pair for pair in itertools.pairwise(entries) if pair[0]["time"] > pair[1]["time"]]
