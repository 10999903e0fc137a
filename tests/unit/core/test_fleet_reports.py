"""What an operator is shown of a fleet, by what hosts have written; and how values are made and changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from netplugin.api.errors import Conflict, HostError, InvalidRequest
from netplugin.cli.main import main
from netplugin.fleet import values
from netplugin.fleet.access import host_grants
from netplugin.fleet.errors import HostRefuses, NotAsDesired
from netplugin.fleet.etcd import KeyValue, Snapshot
from netplugin.fleet.names import Ref
from netplugin.fleet.operate import merged
from netplugin.fleet.reports import Report, Written, findings, refs, reports, standing
from netplugin.fleet.values import Fault, Summary
from netplugin.fleet.writer import encoded

CLUSTER = 0xABC
NIC = Ref.of("port/nic1")
SPEC = {
    "vm_id": "vm1",
    "mac": "52:54:00:00:00:01",
    "backend": "linuxbridge",
    "network": {"type": "flat", "physical_network": "physnet1"},
}


def summary(revision: int = 10, **fields: Any) -> Summary:
    counts: dict[str, int] = fields.pop("counts", {})
    base = {"identity": "i", "version": "1", "highest": 10, "accepted": 0, "digest": "", "cluster": "abc"}
    return Summary(**{**base, "revision": revision, "counts": {"owned": 1, "open": 0, **counts}, **fields})


def report(**fields: Any) -> Report:
    return Report("h1", "abc", **{"is_alive": True, "summary": summary(), **fields})


def ids(*given: Report, newest: int = 0) -> list[str]:
    found = {each.host: each for each in given}
    return [each.id for each in findings(found, {"h1": newest} if newest else {}, 20)]


def test_verified_is_what_the_host_has_carried_out_of_this_etcd_without_a_fault() -> None:
    assert report().is_verified(NIC, 10) and not report().is_verified(NIC, 11)
    assert not report(summary=None).is_verified(NIC, 1)
    assert not report(summary=summary(cluster="def")).is_verified(NIC, 1)
    with pytest.raises(HostRefuses, match="older"):
        report(summary=summary(refused=Conflict("older", step="fleet").problem())).is_verified(NIC, 1)
    with pytest.raises(NotAsDesired, match="nic1 is waiting"):
        report(faults={NIC: Fault(state="waiting")}).is_verified(NIC, 1)
    # A host lists some of its faults only: of the others nothing is known.
    hidden = report(summary=summary(counts={"failed": 2}), faults={Ref.of("port/a"): Fault(state="failed")})
    with pytest.raises(NotAsDesired, match="unknown"):
        hidden.is_verified(NIC, 1)


def test_what_a_host_writes_is_read_with_suspicion() -> None:
    root, good = values.root(), summary().model_dump_json().encode()
    written = [
        ("reported/a/summary", good), ("reported/a/port/nic1", b'{"state": "failed", "new": 1}'),
        ("reported/b/summary", b'{"identity": 3}'), ("reported/b/port/nic1", b"\xff"),
        ("reported/b/elsewhere/x", b'{"state": "failed"}'),
    ]  # fmt: skip
    items = tuple(KeyValue(root + key, value, 1) for key, value in written)
    alive = (KeyValue(values.alive_key("a"), b"[]", 1), KeyValue(values.alive_key("c"), b"{}", 1))
    found = reports(Snapshot(CLUSTER, 9, items), Snapshot(CLUSTER, 9, alive))
    assert list(found) == ["a", "b", "c"] and found["a"].faults[NIC].state == "failed"
    assert found["a"].is_alive and found["a"].off == 1 and found["c"].cluster == "abc"
    assert len(found["b"].unreadable) == 3 and found["b"].summary is None
    assert "unreadable-b" in ids(found["b"])
    keys = [
        KeyValue(f"{values.root('desired')}{end}", b"", 1) for end in ("h1/port/nic1", "h1/x", "h1/port/a/b")
    ]
    assert [(host, ref) for host, ref, _ in refs(keys)] == [("h1", NIC)]


def test_findings_name_what_is_wrong_once() -> None:
    assert ids(report()) == [] and ids(report(), newest=10) == []
    assert ids(report(), newest=11) == ["behind-h1"]
    assert ids(report(is_alive=False), newest=11) == ["dead-h1"]
    assert ids(newest=5) == ["dead-h1"]
    assert ids(report(summary=summary(cluster="def"))) == ["elsewhere-h1"]
    other = {
        Ref.of(f"port/p{n}"): Fault(state=state) for n, state in enumerate(["failed", "waiting", "failed"])
    }
    found = list(findings({"h1": report(faults=other)}, {}, 20))
    assert [each.id for each in found] == ["failed-h1", "waiting-h1"]
    assert ids(report(faults={NIC: Fault(state="unheard")})) == ["failed-h1"]
    assert "2 could not" in found[0].found and found[0].fix and "explain p0" in found[0].fix
    assert found[1].fix and "accept --revision 20 --host h1" in found[1].fix


@pytest.mark.parametrize(
    ("given", "revision", "state"),
    [
        (report(), 10, "verified"),
        (report(), 11, "open"),
        (report(is_alive=False), 11, "unreachable"),
        (report(is_alive=False), 10, "verified"),
        (report(summary=summary(refused=Conflict("x", step="fleet").problem())), 1, "refused"),
        (report(faults={NIC: Fault(state="unlisted")}), None, "unlisted"),
        (
            report(faults={NIC: Fault(state="degraded", error=HostError("x", step="y").problem())}),
            10,
            "degraded",
        ),
        (report(faults={NIC: Fault(state="unheard")}), 10, "unheard"),
    ],
)
def test_an_object_has_one_state(given: Report, revision: int | None, state: str) -> None:
    desired = encoded(NIC, {"spec": SPEC}, 1)[0]
    found = standing(given, NIC, None if revision is None else Written("h1", NIC, revision, desired))
    assert found[0] == state and (state == "verified" or found[2])


def test_a_tombstone_that_is_left_is_shown_as_removed() -> None:
    desired = encoded(NIC, {"deleted": True}, 1)[0]
    assert standing(report(), NIC, Written("h1", NIC, 10, desired))[0] == "removed"


def test_a_value_has_what_the_caller_gave_and_nothing_more() -> None:
    assert json.loads(encoded(NIC, {"spec": SPEC}, 7)[1]) == {"generation": 7, "spec": SPEC}
    for wrong in (float("nan"), object()):
        with pytest.raises(InvalidRequest, match="JSON"):
            encoded(NIC, {"spec": {**SPEC, "mac": wrong}}, 7)
    with pytest.raises(InvalidRequest, match="generation"):
        encoded(NIC, {"deleted": True}, 1 << 63)


def test_a_change_is_a_merge_patch() -> None:
    there = {"mtu": 1500, "ovs": {"devices": ["a"], "bond": "lacp"}}
    change = {"mtu": None, "ovs": {"bond": "active-backup"}, "keep": True}
    assert merged(there, change) == {"ovs": {"devices": ["a"], "bond": "active-backup"}, "keep": True}
    assert merged(there, {}) == there and there["mtu"] == 1500
    assert merged({"a": [1]}, {"a": {"b": {"c": None}}}) == {"a": {"b": {}}}


def test_a_host_reads_and_writes_its_own_keys() -> None:
    assert all("h1" in key or key.endswith("accepted") for key in host_grants("h1"))
    written = [key for key, writes in host_grants("h1").items() if writes]
    assert written == [values.reported_prefix("h1"), values.alive_key("h1")]


def test_a_command_says_which_option_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ENDPOINTS", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"NETPLUGIN_FLEET_{name}", raising=False)
    assert main(["fleet", "status"]) == 1
    assert "endpoints: is required. Fix: set NETPLUGIN_FLEET_ENDPOINTS" in capsys.readouterr().err
    given = ("--endpoints", "127.0.0.1:1", "--ca", "none.pem", "--cert", "none.pem", "--key", "none.pem")
    assert main(["fleet", "roll", "port/nic1", *given]) == 1
    assert "must be physical-network/NAME" in capsys.readouterr().err
    assert main(["fleet", "hosts", *given]) == 1
    assert "none.pem" in capsys.readouterr().err
