"""Who a caller is, what each call needs, and how much one caller may ask for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agents.api import roles
from agents.api.access import Access, Peer, Rules, Token
from agents.api.audit import MAX_BODY, AuditedCall, AuditLog
from agents.api.guard import Limits
from agents.api.roles import OfBody, Right, Role
from netplugin import options
from netplugin.api.errors import Forbidden, Overloaded
from tests.unit.agent import NO_DEVICES, SPEC
from tests.unit.agents.api.test_paths import ROLES


def test_what_changes_something_needs_more_than_read() -> None:
    harmless = {
        "/v1/vms/{vm_id}:check-domain",
        "/v1/ports:migrate-check",
        "/network/ovsdpdk/checkbridge",
        "/network/ovsdpdk/resource/configure",
        "/hostvirtualnetworkinterface/generate",
        "/hostvirtualnetworkinterface/ungenerate",
        "/network/checkphysicalnetworkinterface",
    }
    for (method, path), role in ROLES.items():
        assert (role in (None, Role.READ)) == (method == "GET" or path in harmless), (method, path)


OPEN: Any = {**SPEC, "port_security": {"enabled": False}}


@pytest.mark.parametrize(
    ("of_body", "body", "field"),
    [
        (roles.of_port, SPEC, None),
        (roles.of_port, OPEN, "port_security.enabled=false"),
        (roles.of_port, {**SPEC, "port_security": {"roles": ["router"]}}, "port_security.roles"),
        (roles.of_port, {**SPEC, "vf": {"trusted": True}}, "vf.trusted=true"),
        (roles.of_port, {**SPEC, "vf": {"spoofchk": False}}, "vf.spoofchk=false"),
        (roles.of_port, {**SPEC, "vf": {"trunk": True}}, "vf.trunk=true"),
        (roles.of_port, {**SPEC, "vf": {"trusted": False, "spoofchk": True}}, None),
        (roles.of_batch, {"put": [{"port_id": "a", "spec": SPEC}]}, None),
        (
            roles.of_batch,
            {"put": [{"port_id": "a", "spec": SPEC}, {"port_id": "b", "spec": OPEN}]},
            "port_security.enabled=false",
        ),
        (roles.of_reconcile, {"dry_run": True}, None),
        (roles.of_reconcile, {"remove_orphans": True}, "remove_orphans=true"),
        (None, {"port_security": {"enabled": False}}, None),
    ],
)
def test_the_role_of_a_body(of_body: OfBody | None, body: Any, field: str | None) -> None:
    assert Right(Role.PLUG, of_body).more(json.dumps(body).encode(), NO_DEVICES) == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b"null",
        b"1",
        b'{"put": {"a": 1}}',
        b'{"put": [1, null]}',
        b'{"vf": [], "port_security": 0}',
    ],
)
@pytest.mark.parametrize("of_body", [roles.of_port, roles.of_batch, roles.of_reconcile])
def test_what_is_no_body_of_ours_is_for_the_application_to_refuse(of_body: OfBody, body: bytes) -> None:
    assert Right(Role.PLUG, of_body).more(body, NO_DEVICES) is None


def test_of_a_repeated_field_the_one_counts_that_the_application_takes() -> None:
    twice = b'{"port_security": {"enabled": true}, "port_security": {"enabled": false}}'
    assert Right(Role.PLUG, roles.of_port).more(twice, NO_DEVICES) is not None


# -- rules ---------------------------------------------------------------------------------------


def rules(**api: list[str]) -> Rules:
    conf = options.load([])
    for name, value in api.items():
        conf.set_override(name, value, group="api")
    return Rules.read(conf.api)


def test_users_and_groups_of_the_socket() -> None:
    made = rules(socket_roles=["read:*", "plug:@4711", "operate:1234"])
    assert made.of_user(Peer("unix", 0)) is Role.OPERATE
    assert made.of_user(Peer("unix", 1234)) is Role.OPERATE
    assert made.of_user(Peer("unix", 1235, frozenset({5, 4711}))) is Role.PLUG
    assert made.of_user(Peer("unix", 1235, frozenset({5}))) is Role.READ
    assert rules(socket_roles=[]).of_user(Peer("unix", 1235)) is None
    assert rules().of_user(Peer("unix", 1235)) is Role.PLUG


def test_names_of_certificates() -> None:
    made = rules(cert_roles=["plug:platform", "operate:spiffe://example.org/ops"])
    assert made.of_certificate(["platform"]) is Role.PLUG
    assert made.of_certificate(["x", "spiffe://example.org/ops", "platform"]) is Role.OPERATE
    assert made.of_certificate(["stranger"]) is None
    assert rules().of_certificate([]) is Role.OPERATE


@pytest.mark.parametrize(
    ("option", "entry"),
    [
        ("socket_roles", "plug"),
        ("socket_roles", "plug:"),
        ("socket_roles", "write:*"),
        ("socket_roles", "plug:no-such-user-here"),
        ("socket_roles", "plug:@no-such-group-here"),
        ("socket_roles", "plug:\N{SUPERSCRIPT TWO}"),
        ("socket_roles", "plug:@\N{SUPERSCRIPT TWO}"),
        ("cert_roles", "platform"),
        ("cert_roles", "Plug:platform"),
    ],
)
def test_a_wrong_rule_is_named(option: str, entry: str) -> None:
    with pytest.raises(ValueError, match=option):
        rules(**{option: [entry]})


def test_with_both_a_caller_has_the_lesser_role() -> None:
    tokens = (Token(b"t", "t", Role.OPERATE), Token(b"r", "r", Role.READ))
    both = Access(tokens, True, rules(cert_roles=["plug:platform"]))
    platform = Peer("192.0.2.1:5", names=("platform",))
    assert both.identify(platform, b"Bearer t").role is Role.PLUG
    assert both.identify(platform, b"Bearer r").role is Role.READ
    with pytest.raises(Forbidden, match="cert_roles"):
        both.identify(Peer("192.0.2.1:5", names=("stranger",)), b"Bearer t")


# -- limits --------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_caller_that_sends_too_much_is_refused_until_time_has_passed() -> None:
    clock = Clock()
    limits = Limits(changes_per_second=2, calls_at_once=100, clock=clock)

    def change(caller: str) -> None:
        with limits.call(caller, changes=True):
            pass

    for _ in range(4):
        change("a")
    with pytest.raises(Overloaded, match="2 changing calls a second"):
        change("a")
    change("b")
    with limits.call("a", changes=False):
        pass  # who only reads is not counted
    clock.now += 0.5
    change("a")
    with pytest.raises(Overloaded):
        change("a")


def test_calls_at_once_are_counted_until_they_end() -> None:
    limits = Limits(changes_per_second=100, calls_at_once=2, clock=Clock())
    with limits.call("a", changes=False):
        with limits.call("a", changes=True):
            with pytest.raises(Overloaded), limits.call("a", changes=False):
                pass
            with limits.call("b", changes=False):
                pass
        with limits.call("a", changes=False):
            pass


# -- the audit log -------------------------------------------------------------------------------


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(log: AuditLog, **more: Any) -> None:
    call = AuditedCall(Peer("192.0.2.1:5"), **{"method": "PUT", "path": "/v1/ports/p1", **more})
    asyncio.run(log.called(call, 200))


def test_a_file_that_is_moved_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path)
    write(log)
    path.rename(tmp_path / "audit.log.1")
    write(log, method="DELETE")
    assert [e["method"] for e in entries(tmp_path / "audit.log.1")] == ["PUT"]
    assert [e["method"] for e in entries(path)] == ["DELETE"]
    assert path.stat().st_mode & 0o777 == 0o600
    log.close()


def test_an_entry_has_no_secret_and_no_large_body(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path)
    write(log, body=json.dumps(SPEC).encode())
    write(log, body=b'"' + b"x" * MAX_BODY + b'"')
    write(log, path="/v1/vms/v1:render-domain", body=b'{"xml": "<graphics passwd=\'s3cret\'/>"}')
    write(log, taskuuid="t1", callback="https://user:s3cret@manager:8080/cb?token=s3cret")
    write(log, path="/" + "x" * 10_000)
    log.close()
    text = path.read_text()
    assert "s3cret" not in text
    small, large, domain, task, _ = entries(path)
    assert small["body"] == SPEC
    assert large["body_bytes"] == MAX_BODY + 2 and "body" not in large
    assert "body" not in domain
    assert (task["event"], task["callback"]) == ("accepted", "https://manager:8080")
    assert all(len(line) < 2 * MAX_BODY for line in text.splitlines())
