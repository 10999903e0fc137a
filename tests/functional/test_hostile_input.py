"""Input that means harm: each field of each request, and a host that does not notice."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import agents
import drivers
import netplugin
from netplugin.api.batch_models import Batch, Retag
from netplugin.api.migration_models import MigrateRequest
from netplugin.api.models import PortSpec, ReconcileRequest
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.api.pmd_models import AutoLoadBalanceRequest, PmdRequest
from netplugin.api.service_models import ServicePortSpec
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

STRINGS = [
    "",
    " ",
    ";reboot",
    "a;reboot",
    "'",
    '"',
    "a'b",
    'a"b',
    "`reboot`",
    "$(reboot)",
    "a$(reboot)",
    "${PATH}",
    "a|b",
    "a&b",
    "a>b",
    "*",
    "a b",
    " a",
    "a ",
    "a\n",
    "a\nb",
    "\na",
    "a\rb",
    "a\tb",
    "../a",
    "..",
    ".",
    "a/../b",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "-rf",
    "--help",
    "a\x00",
    "a\x00b",
    "\x1b[2J",
    "%s%n",
    "%00",
    "{{7*7}}",
    "<x/>",
    "]]>",
    "&amp;",
    "a,b=c",
    "é",
    "\uff41",
    "\u202ea",
    "\ud800",
    "a\U0001f600",
    "a" * 10_000,
    "../" * 3_000,
]
WRONG_TYPES = [None, True, 0, -1, 1.5, 2**63, 2**70, [], ["a"], {}, {"a": 1}]
#: Of these JSON types, what may be right for a field that takes the type.
MAY_BE: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "string": (str,),
    "object": (dict,),
    "array": (list,),
}
OUT_OF_RANGE = [
    -1,
    0,
    3,
    129,
    1024.0,
    1e400,
    float("nan"),
    10_000,
    400_000_001,
    2**31,
    2**63,
    2**70,
]
Place = tuple[str | int, ...]


# -- what fields there are, from the models themselves -------------------------------------------


@dataclass(frozen=True)
class Field:
    """One field: where it is, what JSON types it takes, and its own schema without null."""

    place: Place
    types: frozenset[str]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.place)


def fields_of(model: Any) -> list[Field]:
    whole = model.model_json_schema()
    return list(_walk((), whole, whole.get("$defs", {})))


def _walk(place: Place, schema: dict[str, Any], known: dict[str, Any]) -> Iterator[Field]:
    options = [_resolved(option, known) for option in schema.get("anyOf", [schema])]
    types = {_type(option) for option in options}
    [real] = [option for option in options if _type(option) != "null"]
    if place:
        yield Field(place, frozenset(types), real)
    for name, inner in real.get("properties", {}).items():
        yield from _walk((*place, name), inner, known)
    if real.get("type") == "array":
        yield from _walk((*place, 0), real["items"], known)


def _resolved(schema: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return known[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def _type(schema: dict[str, Any]) -> str:
    if "type" in schema:
        return str(schema["type"])
    return {str: "string", int: "integer"}[type(schema["enum"][0])]


def hostile(field: Field) -> Iterator[Any]:
    """What the field must not be. Free text and integers in range are left out."""
    right = tuple(kind for name in field.types for kind in MAY_BE[name])
    free_text = "string" in field.types and not {"pattern", "enum"} & set(field.schema)
    if not free_text:
        yield from STRINGS
        yield "a-name-that-is-none" if "enum" in field.schema else "1 "
    for value in WRONG_TYPES:
        is_right = isinstance(value, right) and not (isinstance(value, bool) and bool not in right)
        if not is_right:
            yield value
    if "integer" in field.types:
        yield from (value for value in OUT_OF_RANGE if not _in_range(value, field.schema))
    if "object" in field.types:
        yield from ({"unknown": 1}, {"__proto__": 1}, {"": 1}, {"a" * 10_000: 1}, {"\ud800": 1})


def _in_range(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]  # 1024.0 is 1024
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    return isinstance(value, int) and bool(least <= value <= most)


def replaced(body: Any, place: Place, value: Any) -> Any:
    changed = copy.deepcopy(body)
    inner = changed
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    return changed


# -- how it is sent, and what must not have happened ---------------------------------------------

WHOLE_SPEC = make_spec(
    vf={"pci_address": None, "allowed_vlans": [100]},
    qos={},
    numa_node=None,
    port_name=None,
    vhost_user_socket=None,
    attachment=None,
    port_security={"roles": ["router"], "allowed_addresses": [{"ip": "10.0.0.5", "mac": None}]},
    device=None,
    internal=False,
)
WHOLE_SERVICE = {name: WHOLE_SPEC[name] for name in ("mac", "backend", "network", "port_security")} | {
    "device": "nothing0",
    "internal": False,
    "trusted": False,
}


@pytest.fixture(scope="module")
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """One for all these tests: what none of them harms need not be made again."""
    directory = BASE / "agent"
    with PrivateAgent(directory, ovs) as private:
        assert private.call("PUT", "/v1/ports/mine", make_spec(9))[0] == 200
        yield private
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def client(agent: PrivateAgent) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=agent.url, trust_env=False, timeout=300) as made:
        yield made


@pytest.fixture(autouse=True)
def unharmed(ovs: PrivateOvs, agent: PrivateAgent) -> Iterator[None]:
    """One port is there; after the test the host is as before, and the agent well and alone."""
    pid, before, logged = agent.daemon.pid, _all_there_is(ovs, agent), agent.log.stat().st_size
    yield
    assert _all_there_is(ovs, agent) == before
    assert planned(agent) == []
    assert agent.get("/readyz")[0] == 200
    assert agent.daemon.running and agent.daemon.pid == pid
    # The check of the host may run an ovs-ofctl at any moment, which ends.
    wait_for(lambda: not _children(pid), 30, "the agent has no processes of its own")
    assert b"Traceback" not in agent.log.read_bytes()[logged:], "a mistake of ours"


def _children(pid: int) -> str:
    found = ""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += path.read_text()
    return found


def _all_there_is(ovs: PrivateOvs, agent: PrivateAgent) -> Any:
    return (
        ovs.get("Open_vSwitch", ".", "next_cfg"),
        ovs.vsctl("show"),
        agent.get("/v1/ports"),
        sorted(path.name for path in agent.directory.rglob("*") if path.name != "agent.log"),
    )


def send(client: httpx.Client, method: str, path: str, body: Any) -> httpx.Response:
    # Python's own notation for NaN and lone surrogates: neither is JSON, both are sent by somebody
    return client.request(method, path, content=json.dumps(body).encode())


def assert_refused(answer: httpx.Response, field: str, sent: Any) -> None:
    shown = f"{field}={str(sent)[:60]!r}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code == 422, shown
    assert answer.headers["content-type"] == "application/problem+json", shown
    error = answer.json()
    assert error["code"] == "invalid_request", shown
    named = [wrong["field"] for wrong in error["errors"]]
    assert any(_names(name, field) for name in named), f"{shown} names {named}"
    assert len(error["detail"]) < 2_000, "what was sent is not sent back"


def _names(named: str, field: str) -> bool:
    """The field itself, a part of it, or (where fields must fit each other) what it is in."""
    return named == field or named.startswith(f"{field}.") or field.rpartition(".")[0] == named


def attack(client: httpx.Client, method: str, path: str, body: Any, model: Any, under: Place = ()) -> int:
    """Each field of the model, somewhere in the body, replaced by each hostile value."""
    count = 0
    for field in fields_of(model):
        place = (*under, *field.place)
        for value in hostile(field):
            answer = send(client, method, path, replaced(body, place, value))
            assert_refused(answer, ".".join(str(part) for part in place), value)
            count += 1
    return count


# -- bodies --------------------------------------------------------------------------------------


def test_the_walk_finds_the_fields() -> None:
    """So that no test passes because there was nothing to try."""
    found = {field.name for field in fields_of(PortSpec)}
    assert {
        "vm_id",
        "mac",
        "network.vlan_id",
        "vf.pci_address",
        "vf.trusted",
        "qos.ingress_kbps",
        "numa_node",
        "port_security.allowed_addresses.0.ip",
        "port_security.enabled",
        "rx_queue_size",
    } <= found
    assert {field.name for field in fields_of(PmdRequest)} == {
        "cpus",
        "count",
        "siblings",
        "affinity",
        "clear_affinity",
        "clear_affinity.0",
        "clear_all_affinity",
        "proposed",
        "auto_load_balance",
        *(f"auto_load_balance.{name}" for name in AutoLoadBalanceRequest.model_fields),
    }
    assert "put.0.spec.network.mtu" in {field.name for field in fields_of(Batch)}


def test_every_field_of_a_port(client: httpx.Client) -> None:
    assert attack(client, "PUT", "/v1/ports/p1", WHOLE_SPEC, PortSpec) > 1_000


def test_every_field_of_a_step_of_a_migration(client: httpx.Client) -> None:
    step = {"phase": "prepare", "activation": "auto", "port": WHOLE_SPEC}
    assert attack(client, "POST", "/v1/ports/p1:migrate", step, MigrateRequest) > 1_000


def test_every_field_of_a_check_before_a_migration(client: httpx.Client) -> None:
    check = {
        "port_id": "p1",
        "port": WHOLE_SPEC,
        "source": WHOLE_SPEC,
        "source_facts": {},
        "postcopy": True,
    }
    # Facts have the names that a backend gives them, so an unknown one is no error.
    for part in ("port", "source"):
        assert attack(client, "POST", "/v1/ports:migrate-check", check, PortSpec, (part,)) > 1_000


def test_every_field_of_a_service_port(client: httpx.Client) -> None:
    assert attack(client, "PUT", "/v1/service-ports/p1", WHOLE_SERVICE, ServicePortSpec) > 500
    both = WHOLE_SERVICE | {"trusted": True}
    assert_refused(send(client, "PUT", "/v1/service-ports/p1", both), "body", both)
    off = WHOLE_SERVICE | {"port_security": {"enabled": False}}
    assert_refused(send(client, "PUT", "/v1/service-ports/p1", off), "body", off)
    assert_refused(send(client, "PUT", "/v1/service-ports/p1", WHOLE_SERVICE), "device", "nothing0")
    assert_refused(send(client, "PUT", "/v1/ports/p1", WHOLE_SPEC | {"device": "lo"}), "device", "lo")


def test_every_field_of_a_port_that_is_there(client: httpx.Client) -> None:
    for name in ("mac", "vm_id"):
        for value in STRINGS:
            assert_refused(send(client, "PUT", "/v1/ports/mine", make_spec(9) | {name: value}), name, value)


@pytest.mark.parametrize("method_and_path", ["PUT /v1/ports/p1", "POST /v1/ports:batch", "PUT /v1/pmd"])
@pytest.mark.parametrize("body", [None, True, 5, 1.5, "text", [], [1], [{}]])
def test_a_body_of_the_wrong_type(client: httpx.Client, method_and_path: str, body: Any) -> None:
    method, path = method_and_path.split()
    assert_refused(send(client, method, path, body), "body", body)


def test_unknown_fields_everywhere(client: httpx.Client) -> None:
    for name in (
        "unknown",
        "spec",
        "state",
        "__class__",
        "$ref",
        "a.b",
        "\ud800",
        "",
        "x" * 10_000,
    ):
        for place in ((), ("network",), ("vf",), ("qos",), ("port_security",)):
            body = replaced(WHOLE_SPEC, (*place, name), 1)
            # what cannot be printed cannot be named: then it is what it is in
            field = ".".join(place if name == "\ud800" else (*place, name)) or "body"
            answer = send(client, "PUT", "/v1/ports/p1", body)
            assert answer.status_code == 422, (name[:50], place, answer.text[:300])
            named = [error["field"] for error in answer.json()["errors"]]
            assert field in named, (name[:50], place, named)


def test_every_field_of_a_batch(client: httpx.Client) -> None:
    """One bad port refuses the batch: it is the request that is not valid."""
    good: dict[str, Any] = {
        "put": [{"port_id": "p1", "spec": WHOLE_SPEC, "if_match": "*"}],
        "delete": ["p2"],
    }
    assert attack(client, "POST", "/v1/ports:batch", good, Batch) > 1_000
    for body, field in (
        ({"put": [good["put"][0]] * 2}, "body"),
        ({"delete": ["p1", "p1"]}, "body"),
        ({"put": good["put"], "delete": ["p1"]}, "body"),
        ({"delete": [f"p{n}" for n in range(4_097)]}, "delete"),
        ({"put": {"0": good["put"][0]}}, "put"),
    ):
        assert_refused(send(client, "POST", "/v1/ports:batch", body), field, body)


def test_every_field_of_a_retag(client: httpx.Client) -> None:
    good: dict[str, Any] = {"ports": ["none"], "to_vlan": 200, "network": None, "from_vlan": None}
    assert attack(client, "POST", "/v1/ports:retag", good, Retag) > 100
    for body, field in (
        ({"to_vlan": 200}, "body"),
        ({"to_vlan": 200, "ports": ["p1", "p1"]}, "body"),
        ({"to_vlan": 200, "ports": [f"p{n}" for n in range(4_097)]}, "ports"),
    ):
        assert_refused(send(client, "POST", "/v1/ports:retag", body), field, body)


def test_every_field_of_a_physical_network(client: httpx.Client) -> None:
    """The backend linuxbridge is not enabled here: whatever is valid is refused too."""
    good: dict[str, Any] = {
        "bridge": "br-hostile",
        "mtu": 1500,
        "keep": True,
        "ovs": {"devices": ["0000:03:00.0", "0000:03:00.1"], "bond": "lacp"},
        "linuxbridge": {"interface": "eth1"},
        "sriov": {"devices": ["eth1#0-7"]},
    }
    assert attack(client, "PUT", "/v1/physical-networks/hostile", good, PhysicalNetworkSpec) > 300
    assert_refused(send(client, "PUT", "/v1/physical-networks/hostile", good), "linuxbridge", good)
    for body, field in (
        ({}, "body"),
        ({"bridge": "br-1", "sriov": {"devices": ["eth1"]}}, "bridge"),
        ({"mtu": 1500, "ovs": {}}, "mtu"),
    ):
        assert_refused(send(client, "PUT", "/v1/physical-networks/hostile", body), field, body)


def test_every_field_of_a_reconcile(client: httpx.Client) -> None:
    body = {"dry_run": True, "remove_orphans": False}
    assert attack(client, "POST", "/v1/reconcile", body, ReconcileRequest) > 50
    wrong: Any
    for wrong in ({"dryrun": True}, {"dry-run": True}, {"dry_run": "true"}, [], "x", 1):
        assert send(client, "POST", "/v1/reconcile", wrong).status_code == 422


def test_every_field_of_a_pmd_request(client: httpx.Client, ovs: PrivateOvs) -> None:
    mask = ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask")
    cpus, count, *others = fields_of(PmdRequest)
    for value in [
        *STRINGS,
        *WRONG_TYPES,
        "0,",
        ",0",
        "0-",
        "5-3",
        "0--1",
        "0x1",
        "99999",
        "0-99999999999",
        "1" * 1_025,
        "٣",
        "0\n",
        "+1",
        "1.0",
    ]:
        if value is not None:
            assert_refused(send(client, "PUT", "/v1/pmd", {"cpus": value}), cpus.name, value)
    for value in [*hostile(count), 1_025, 1_000]:
        if value is not None:
            assert_refused(send(client, "PUT", "/v1/pmd", {"count": value}), count.name, value)
    # With a port that is not there, so that what may be right is not done.
    body = {
        "affinity": {"none": {"0": 1}},
        "clear_affinity": ["none"],
        "clear_all_affinity": False,
        "proposed": False,
        "auto_load_balance": {"load_threshold": 50},
    }
    for field in others:
        for value in hostile(field):
            answer = send(client, "PUT", "/v1/pmd", replaced(body, field.place, value))
            assert_refused(answer, field.name, value)
    for pins in (
        {"a b": {"0": 1}},
        {"": {"0": 1}},
        {"p": {"": 1}},
        {"p": {"0 ": 1}},
        {"p": {"٣": 1}},
        {"p": {"0": "1"}},
        {"p": {"0": 1.5}},
        {"p": {"0": True}},
        {"p": []},
        {"p": {"-1": 1}},
        {"\ud800": {"0": 1}},
        {"a\n": {"0": 1}},
        {"p" * 10_000: {"0": 1}},
    ):
        assert_refused(send(client, "PUT", "/v1/pmd", {"affinity": pins}), "affinity", pins)
    for both in ({"cpus": "0", "count": 1}, {}, {"cpus": None}, {"cpus": "0", "unknown": 1}):
        assert send(client, "PUT", "/v1/pmd", both).status_code == 422
    assert ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask") == mask


def test_a_domain_that_means_harm(client: httpx.Client, tmp_path: Path) -> None:
    """Entities are neither fetched nor blown up; what is no domain is refused."""
    secret = tmp_path / "secret"
    secret.write_text("the-secret")
    lol = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))
    for xml in (
        f'<!DOCTYPE domain [<!ENTITY x SYSTEM "file://{secret}">]><domain><name>&x;</name></domain>',
        f'<!DOCTYPE domain SYSTEM "file://{secret}"><domain/>',
        f'<!DOCTYPE domain [<!ENTITY l0 "lol">{lol}]><domain><name>&l11;</name></domain>',
        '<domain xmlns:xi="http://www.w3.org/2001/XInclude"><xi:include parse="text" '
        f'href="file://{secret}"/></domain>',
        "<domain>" * 5_000,
        "<domain",
        "",
        " ",
        "\x00",
        "\ud800",
        "<network/>",
        "[]",
        "<domain/><domain/>",
    ):
        answer = send(client, "POST", "/v1/vms/vm9:render-domain", {"xml": xml})
        assert answer.status_code in (200, 422), answer.text[:300]
        assert "the-secret" not in answer.text and len(answer.content) < 100_000
    for body in (
        {},
        {"xml": 5},
        {"xml": None},
        {"xml": "<domain/>", "policy": {"unknown": 1}},
        {"xml": "<domain/>", "policy": {"pin": "yes"}},
        {"xml": "x" * 1_000_001},
    ):
        assert send(client, "POST", "/v1/vms/vm9:render-domain", body).status_code == 422


# -- JSON itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"{'vm_id': 1}",
        b"nul",
        b"\x00",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"vm_id": "\xff"}',
        b'{"queues": ' + b"9" * 10_000 + b"}",
        b'{"vm_id": "a\nb"}',
        b"vm_id=a&mac=b",
        b"<spec/>",
        b"--boundary\r\n\r\n",
        b'{"a": 1}{"b": 2}',
        b"/* */ {}",
    ],
    ids=lambda body: repr(body[:16]),
)
def test_what_is_no_json(client: httpx.Client, body: bytes) -> None:
    for method, path in (("PUT", "/v1/ports/p1"), ("POST", "/v1/ports:batch"), ("PUT", "/v1/pmd")):
        answer = client.request(method, path, content=body)
        assert_refused(answer, "body", body)
    if body.strip():
        assert_refused(client.post("/v1/reconcile", content=body), "body", body)


def test_a_body_without_end_is_not_read_to_the_end(agent: PrivateAgent) -> None:
    head = b"PUT /v1/ports/p1 HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", agent.port), 20) as connection:
        connection.sendall(head)
        try:
            for _ in range(100):
                connection.sendall(chunk)
            sent_all = True
        except OSError:
            sent_all = False
        connection.settimeout(60)
        answer = b"" if not sent_all else connection.recv(65536)
    assert not sent_all or answer.startswith(b"HTTP/1.1 422")


@pytest.mark.parametrize("what", ["fields", "entries", "ports"])
def test_however_much_is_wrong_the_answer_is_short_and_soon(client: httpx.Client, what: str) -> None:
    """A few megabytes must neither keep the agent from others nor come back as hundreds."""
    put = {"port_id": "p", "spec": WHOLE_SPEC | {"qos": {f"k{n}": 1 for n in range(50)}}}
    bodies: dict[str, dict[str, Any]] = {
        "fields": {f"k{n}": 1 for n in range(400_000)},
        "entries": {"delete": [";"] * 1_000_000},
        "ports": {"put": [put] * 4_000},
    }
    start = time.monotonic()
    answer = send(client, "POST", "/v1/ports:batch", bodies[what])
    assert answer.status_code == 422
    assert time.monotonic() - start < 300 and len(answer.content) < 100_000


# -- paths, queries and headers ------------------------------------------------------------------

#: Without what a client's own library takes out or cannot send.
NAMES = [name for name in STRINGS if name not in ("", ".", "..", "\ud800")]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_port_ids(client: httpx.Client, method: str) -> None:
    for name in NAMES:
        body = json.dumps(make_spec()) if method == "PUT" else None
        answer = client.request(method, f"/v1/ports/{quote(name, safe='')}", content=body)
        assert answer.status_code == 422, (name[:50], answer.text[:300])
        error = answer.json()
        assert error["errors"][0]["field"] in ("port_id", "path")
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(error["detail"]) < 20_000


def test_vm_ids(client: httpx.Client) -> None:
    for name in NAMES:
        path = f"/v1/vms/{quote(name, safe='')}:render-domain"
        answer = client.post(path, content=b'{"xml": "<domain/>"}')
        assert answer.status_code in (404, 422), (name[:50], answer.text[:300])


def test_task_ids(client: httpx.Client) -> None:
    for name in NAMES:
        assert client.get(f"/v1/tasks/{quote(name, safe='')}").status_code in (404, 422)


@pytest.mark.parametrize("parameter", ["vm_id", "backend", "state"])
def test_queries(client: httpx.Client, parameter: str) -> None:
    for value in [*NAMES, "0", "[]"]:
        if parameter != "state" and value == "0":
            continue  # a name
        answer = client.get(f"/v1/ports?{parameter}={quote(value, safe='')}")
        assert_refused(answer, parameter, value)


@pytest.mark.parametrize("path", ["ports", "service-ports", "networks", "physical-networks", "vfs"])
@pytest.mark.parametrize("parameter", ["limit", "after"])
def test_pages(client: httpx.Client, path: str, parameter: str) -> None:
    for value in [*NAMES, "0", "-1", "1.5", "1e3", "4097", str(2**70), "[]", "=" * 100, "A" * 1000]:
        answer = client.get(f"/v1/{path}?{parameter}={quote(value, safe='')}")
        assert_refused(answer, parameter, value)


@pytest.mark.parametrize(
    "raw",
    [
        b"/v1/ports/a\x00b",
        b"/v1/ports/\xff\xfe",
        b"/v1/ports/a b",
        b"//",
        b"*",
        b"/v1/../v1/ports",
        b"/v1/ports/.",
        b"/v1/ports/..",
        b"/v1/ports/%",
        b"/v1/ports/%zz",
        b"/v1/ports/%ff",
        b"/v1/ports/%C0%AE%C0%AE",
        b"http://evil.example.org/v1/ports/a b",
        b"/v1/ports/" + b"a" * 100_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_targets_that_no_client_sends(agent: PrivateAgent, raw: bytes) -> None:
    for method in (b"GET", b"PUT", b"DELETE"):
        status = _raw(
            agent,
            method + b" " + raw + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n",
        )
        assert 400 <= status < 500, (method, status)


@pytest.mark.parametrize(
    "header",
    [
        b"taskuuid: ../../x",
        b"taskuuid: a;reboot",
        b"taskuuid: $(reboot)",
        b"taskuuid: ",
        b"taskuuid: a\x00b",
        b"taskuuid: " + b"a" * 10_000,
        b"taskuuid: \xff\xfe",
        b"taskuuid: t1",
        b"taskuuid: t1\r\ncallbackurl: ",
        b"taskuuid: t1\r\ncallbackurl: file:///etc/passwd",
        b"taskuuid: t1\r\ncallbackurl: $(reboot)",
        b"taskuuid: t1\r\ncallbackurl: http://127.0.0.1:1/",
        b"taskuuid: t1\r\ncallbackurl: \xff",
        b"taskuuid: t1\r\ncallbackurl: " + b"http://" * 2_000,
        b"If-Match: ",
        b"If-Match: mine",
        b'If-Match: "mine',
        b'If-Match: *, "a"',
        b"If-Match: \xff",
        b'If-Match: "a\x00"',
        b"If-Match: " + b'"a",' * 1_000 + b'"a"',
        b'If-Match: "' + b"a" * 10_000 + b'"',
        b"If-Match: *\r\nIf-Match: *",
        b"If-None-Match: $(reboot)",
        b"If-None-Match: *\r\nIf-None-Match: a",
        b"Origin: https://evil.example.org",
        b"Origin: null",
        b"Host: evil.example.org",
    ],
    ids=lambda header: repr(header[:40]),
)
def test_headers_that_are_refused(agent: PrivateAgent, header: bytes) -> None:
    body = json.dumps(make_spec()).encode()
    host = b"" if header.startswith(b"Host") else b"Host: 127.0.0.1\r\n"
    head = b"PUT /v1/ports/p1 HTTP/1.1\r\n" + host + header
    request = head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert _raw(agent, request) in (400, 403, 422)
    assert agent.get("/v1/tasks/t1")[0] == 404


@pytest.mark.parametrize(
    "tags",
    [
        ['"mine"'],
        ['"mine", W/"other", ""'],
        ['"\\\\"'],
        ['"../../x"', '"$(reboot)"'],
        ['"a",' * 63 + '"a"'],
    ],
    ids=lambda tags: tags[0][:20],
)
def test_tags_that_nobody_was_given(client: httpx.Client, tags: list[str]) -> None:
    """Of a port that is there, and of one that is not: nothing is changed, and nothing is created."""
    body = json.dumps(make_spec(8)).encode()
    held = [("If-Match", tag) for tag in tags]
    for method, name in (("PUT", "mine"), ("DELETE", "mine"), ("PUT", "p1")):
        answer = client.request(method, f"/v1/ports/{name}", content=body, headers=held)
        assert (answer.status_code, answer.json()["code"]) == (412, "precondition_failed"), answer.text
    others = [("If-None-Match", tag) for tag in tags]
    assert client.get("/v1/ports/mine", headers=others).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Type: text/plain",
        b"Content-Type: $(reboot)",
        b"Content-Type: application/xml",
        b"Content-Encoding: gzip",
        b"Accept: image/png",
        b"X-Forwarded-For: 10.0.0.1",
        b"Cookie: a=b",
        b"Authorization: Bearer x",
        b"Authorization: \xff",
        b"X-HTTP-Method-Override: PUT",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"X-Long: " + b"a" * 30_000,
    ],
    ids=lambda header: repr(header[:40]),
)
def test_headers_that_change_nothing(agent: PrivateAgent, header: bytes) -> None:
    request = b"GET /v1/ports/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n" + header + b"\r\n\r\n"
    assert _raw(agent, request) in (400, 404)
    body = b'{"vm_id": 5}'
    head = b"PUT /v1/ports/p1 HTTP/1.1\r\nHost: 127.0.0.1\r\n" + header
    request = head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert _raw(agent, request) in (400, 422)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: -1",
        b"Content-Length: x",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding : chunked",
    ],
)
def test_lengths_that_contradict_each_other(agent: PrivateAgent, head: bytes) -> None:
    """Two servers in a row must not disagree on where a request ends."""
    smuggled = b"0\r\n\r\nDELETE /v1/ports/mine HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    request = b"PUT /v1/ports/p1 HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n" + smuggled
    assert 400 <= _raw(agent, request) < 500
    assert agent.get("/v1/ports/mine")[0] == 200, "what follows is no request of its own"


def _raw(agent: PrivateAgent, request: bytes) -> int:
    """The status of what answers to these bytes; 400 for a connection that is just closed."""
    with socket.create_connection(("127.0.0.1", agent.port), 20) as connection:
        connection.settimeout(60)
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except ConnectionError:
            return 400
    return int(answer.split(b" ", 2)[1]) if answer else 400


# -- no shell, ever ------------------------------------------------------------------------------


def test_nothing_of_ours_runs_a_shell() -> None:
    """No call that takes a command as one string, and none that asks for a shell."""
    found = []
    for package in (netplugin, agents, drivers):
        for file in sorted(Path(next(iter(package.__path__))).rglob("*.py")):
            found += [f"{file}:{line}: {what}" for line, what in shells_in(file.read_text())]
    assert found == []


def test_a_shell_would_be_found() -> None:
    for bad in (
        "os.system('x')",
        "os.popen(x)",
        "subprocess.run(x, shell=True)",
        "subprocess.getoutput(x)",
        "subprocess.run('ls')",
        "subprocess.Popen(f'ls {x}')",
        "run('ls ' + x)",
        "eval(x)",
        "asyncio.create_subprocess_shell(x)",
        "subprocess.run(['sh', '-c', x])",
        "subprocess.check_output(args='ls')",
        "pickle.loads(x)",
        "exec(x)",
    ):
        assert shells_in(bad), bad
    assert not shells_in("subprocess.run(['ls', x], check=True)\nrun([program, *words])\nself.run('x')")


_NEVER = {
    "system",
    "popen",
    "getoutput",
    "getstatusoutput",
    "create_subprocess_shell",
    "eval",
    "exec",
}
_COMMANDS = {"run", "Popen", "call", "check_call", "check_output", "create_subprocess_exec"}
_SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "env"}


def shells_in(source: str) -> Sequence[tuple[int, str]]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [(call.lineno, ast.unparse(call)) for call in calls if _is_shell(call)]


def _is_shell(call: ast.Call) -> bool:
    of_module = isinstance(call.func, ast.Name) or (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in ("os", "subprocess", "asyncio", "pickle")
    )
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if any(word.arg == "shell" for word in call.keywords):
        return True
    if not of_module:
        return False
    if name in _NEVER or (name == "loads" and "pickle" in ast.unparse(call.func)):
        return True
    given = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "args")]
    return name in _COMMANDS and any(map(_one_string_or_shell, given))


def _one_string_or_shell(given: ast.expr) -> bool:
    if isinstance(given, ast.List) and given.elts:
        first = given.elts[0]
        return isinstance(first, ast.Constant) and first.value in _SHELLS
    texts: tuple[type, ...] = (ast.JoinedStr, ast.BinOp)
    return isinstance(given, texts) or (isinstance(given, ast.Constant) and isinstance(given.value, str))
