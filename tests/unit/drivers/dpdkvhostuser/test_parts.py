"""The small parts of the backend: policers, offload, what is learned, and what is reported of a host."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivers.dpdkvhostuser.findings import fault, findings
from drivers.ovs import apply, usability
from drivers.ovs.apply import Applier
from drivers.ovs.findings import of_interface
from drivers.ovs.flow_changes import DropFlows, FlowEdit, PurgeDatapath
from drivers.ovs.model import ObservedOvsBridge, OvsObservation
from drivers.ovs.overlays import ObservedTunnels
from drivers.ovs.ports import Policer, policer_refused
from netplugin.api.errors import HostError
from netplugin.host import cpus
from netplugin.host.flow import COOKIE_MARK
from netplugin.host.ovs_bonds import BondUse, OvsBond
from netplugin.host.ovs_rows import OvsInterface, OvsPort, OvsRoot
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_underlay import Underlay
from netplugin.host.ovs_versions import keeps_old_actions
from netplugin.pmd.settings import threads_by_node

# -- policers -------------------------------------------------------------------------------------


def test_rates_become_bytes_for_what_is_received_and_kbit_for_what_is_sent() -> None:
    policer = Policer.of(100_000, 1500, tso=False)
    assert policer == Policer(100_000, 80_000)
    assert policer.qos_columns()["other_config"] == {"cir": "12500000", "cbs": "10000000"}
    assert Policer.of(None, 1500, tso=False) is None


def test_a_bucket_holds_some_frames_and_with_tso_a_segment() -> None:
    slow = Policer.of(13, 9000, tso=False)
    assert slow and int(slow.other_config["cbs"]) >= 4 * 9000
    segments = Policer.of(13, 1500, tso=True)
    assert segments and int(segments.other_config["cbs"]) >= 65535


def test_a_policer_that_vswitchd_refused_is_seen() -> None:
    policer = Policer(100_000, 80_000)
    shown = "QoS: npv1 egress-policer\ncir: 12500000\ncbs: 10000000\n"
    assert policer_refused(shown, policer) is None
    assert policer_refused("QoS not configured on npv1\n", None) is None
    assert "it has none" in str(policer_refused("QoS not configured on npv1\n", policer))
    assert policer_refused(shown.replace("12500000", "1"), policer)
    assert policer_refused(shown, None)


# -- userspace TSO --------------------------------------------------------------------------------


def _root(version: str | None, tso: str = "true") -> OvsRoot:
    return OvsRoot(ovs_version=version, other_config={"userspace-tso-enable": tso})


@pytest.mark.parametrize(
    ("version", "tunnels_refused", "nic_must"),
    [
        ("3.1.0", True, True),
        ("3.3.1", True, False),
        ("3.4.2", True, False),
        ("3.5.0", False, False),
        ("4.0.0", False, False),
        (None, True, True),
    ],
)
def test_what_tso_breaks_in_which_version(version: str | None, tunnels_refused: bool, nic_must: bool) -> None:
    error = usability.refuse_tunnels(_root(version))
    assert (error is not None) == tunnels_refused
    if error:
        assert error.code == "unsupported" and "other_config userspace-tso-enable" in str(error.fix)
    assert usability.nic_must_segment(_root(version)) == nic_must


def test_without_tso_nothing_is_refused() -> None:
    for root in (_root("3.1.0", "false"), OvsRoot(ovs_version="3.1.0")):
        assert usability.refuse_tunnels(root) is None and not usability.nic_must_segment(root)


# -- old actions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "kept"),
    [
        ("2.13.8", True),
        ("2.17.7", True),
        ("2.17.8", False),
        ("3.0.4", True),
        ("3.0.5", False),
        ("3.1.0", True),
        ("3.1.3", False),
        ("3.2.0", False),
        ("4.0.0", False),
        (None, True),
    ],
)
def test_which_ovs_keeps_old_actions(version: str | None, kept: bool) -> None:
    assert keeps_old_actions(OvsRoot(ovs_version=version).version) == kept
    seen = OvsObservation(
        {},
        bridges={"br-phys1": ObservedOvsBridge("br-phys1", True, "netdev", "secure")},
        root=OvsRoot(ovs_version=version),
    )
    assert ("ovs-old-actions" in [f.id for f in findings(seen, None)]) == kept


def test_a_port_that_comes_or_goes_costs_the_others_no_purge() -> None:
    own = FlowEdit((COOKIE_MARK | 1,))
    assert not apply.may_be_used(DropFlows(("p1",), "br-phys1", (1,)), own, {"p1"})
    assert apply.may_be_used(DropFlows(("p1",), "br-phys1", (1,)), own, set())
    assert apply.may_be_used(DropFlows((), "br-phys1", (1,)), own, {"p1"})
    assert not apply.may_be_used(DropFlows(("p1",), "br-phys1", ()), FlowEdit(), set())


def test_a_purge_that_failed_is_planned_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flows are as desired by then: nothing else would be left to do."""
    view = SimpleNamespace(
        root=OvsRoot(ovs_version="3.1.0"), bridge=lambda name: name, port=lambda name: None
    )
    flows = SimpleNamespace(
        replace=lambda *arguments: [], editing=lambda bridge, deadline: contextlib.nullcontext()
    )
    settings = SimpleNamespace(sockets=OvsSockets.below(Path("/nowhere")))
    ovs: Any = SimpleNamespace(view=view, flows=flows, settings=settings, purge_failed=False)
    works: list[bool] = []

    def appctl(sockets: OvsSockets, *command: str, deadline: float) -> str:
        assert command == ("revalidator/purge",)
        if not works:
            raise HostError("vswitchd does not answer", step="vswitchd")
        return ""

    monkeypatch.setattr(apply, "appctl", appctl)
    applier, deadline = Applier(ovs), time.monotonic() + 60
    applied = applier.apply([DropFlows(("p1",), "br-phys1", (1,))], deadline)
    assert applied.failed.keys() == {"p1"} and ovs.purge_failed
    again = PurgeDatapath(("p1", "p2"))
    assert applier.apply([again], deadline).failed.keys() == {"p1", "p2"} and ovs.purge_failed
    works.append(True)
    assert applier.apply([again], deadline).failed == {} and not ovs.purge_failed


# Captured from OVS 3.1.0.
DPCTL_SHOW = """\
netdev@ovs-netdev:
  lookups: hit:0 missed:0 lost:0
  flows: 0
  port 0: ovs-netdev (tap)
  port 2: npu1 (dpdk: configured_rx_queues=1, lsc_interrupt_mode=false, mtu=1500, rx_csum_offload=false, \
tx_tso_offload=false)
  port 3: npu2 (dpdk: configured_rx_queues=1, mtu=1500, tx_tso_offload=true)
  port 4: npv1 (dpdkvhostuserclient: configured_rx_queues=1, mtu=1500)
"""


def test_a_nic_that_cannot_segment_is_found_and_reported() -> None:
    cannot = usability.cannot_segment(DPCTL_SHOW)
    assert cannot == {"npu1"}
    row = _row("npv1", "br1")
    seen = OvsObservation({}, rows={"p": row}, bridges={"br1": _bridge(_row("npu1", "br1"))})
    found = replace(seen, root=_root("3.1.0"), cannot_segment=cannot)
    assert "cannot segment" in str(fault(row, found))
    assert fault(row, replace(seen, root=_root("3.3.0"))) is None


# -- what is reported -----------------------------------------------------------------------------


def _row(name: str, bridge: str, queues: int = 1, mtu: int = 1500, **columns: object) -> OvsPort:
    interface = OvsInterface(
        name=name,
        type="dpdk",
        options={},
        external_ids={"netplugin-queues": str(queues)},
        mtu_request=mtu,
        mtu=mtu,
        ofport=1,
        error=None,
        link_state="up",
    )
    return OvsPort(name, bridge, 7, "access", {}, (replace(interface, **columns),))  # type: ignore[arg-type]


def _bridge(*uplinks: OvsPort) -> ObservedOvsBridge:
    return ObservedOvsBridge("br1", True, "netdev", "secure", uplinks={row.name: row for row in uplinks})


def test_an_uplink_that_is_narrower_than_its_port_is_a_fault() -> None:
    row = _row("npv1", "br1", mtu=9000)
    wide, narrow = _bridge(_row("npu1", "br1", mtu=9000)), _bridge(_row("npu1", "br1", mtu=1500))
    seen = OvsObservation({}, rows={"p": row}, bridges={"br1": wide})
    assert fault(row, seen) is None
    reported = fault(row, replace(seen, bridges={"br1": narrow}))
    assert "npu1 has 1500" in str(reported)


@pytest.mark.parametrize(
    ("error", "late"),
    [
        ("Error attaching device '0000:01:10.0' to DPDK", True),
        ("could not open network device npv1 (Unknown error -1)", False),
    ],
)
def test_a_device_that_dpdk_cannot_take_may_be_for_vfio_that_was_loaded_late(error: str, late: bool) -> None:
    problem = str(of_interface(_row("npr1", "br1", error=error).interfaces[0]))
    assert problem.startswith(f"OVS says of npr1: {error}")
    assert ("restart ovs-vswitchd" in problem) is late


def test_a_dead_bond_is_a_fault_of_what_it_carries() -> None:
    dead = BondUse(OvsBond("npu1", "balance-tcp", "configured", (("a", False),)), "br1", 1, False)
    row, other = _row("npv1", "br1"), _row("npv2", "br2")
    seen = OvsObservation({}, rows={"p": row, "q": other}, bonds=(dead,))
    assert "does not answer LACP" in str(fault(row, seen))
    assert fault(other, seen) is None


def test_more_queues_than_pmd_threads_are_reported() -> None:
    seen = OvsObservation({}, rows={"p": _row("npv1", "br1", queues=4)}, pmd_threads={0: 2})
    (reported,) = findings(seen, None)
    assert (reported.id, reported.status) == ("pmd-queues", "warn") and "4 queues" in reported.found
    assert findings(replace(seen, pmd_threads={0: 4}), None) == []


@pytest.mark.parametrize(
    ("node", "threads", "near"),
    [
        (1, {0: 1, 1: 1}, 1),
        (0, {0: 3, 1: 1}, 3),
        (1, {0: 3, 1: 1}, 1),
        (1, {0: 3}, 3),
        (2, {0: 2, 1: 1}, 3),  # none on its node: those of all others
        (None, {0: 1, 1: 1}, 1),
        (None, {0: 1, 1: 3}, 3),  # no VM yet: on one node, whichever it is
    ],
)
def test_a_queue_is_polled_on_the_node_of_its_port(
    node: int | None, threads: dict[int, int], near: int
) -> None:
    for queues in (near, near + 1):
        row = _row("npv1", "br1", queues=queues, numa_node=node)
        reported = findings(OvsObservation({}, rows={"p": row}, pmd_threads=threads), None)
        assert [f.id for f in reported] == ["pmd-queues"] * (queues - near)
        assert all(f"as few as {near} PMD threads" in f.found for f in reported)


def test_without_a_mask_vswitchd_runs_a_thread_on_each_node(tmp_path: Path) -> None:
    nodes = tmp_path / "devices/system/node"
    for number, text in enumerate(("0-1,4\n", "2-3\n", "\n")):  # the third has memory only
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}/cpulist").write_text(text)
    (nodes / "has_cpu").write_text("0-1\n")
    found = cpus.by_node(tmp_path)
    assert found == {0: {0, 1, 4}, 1: {2, 3}}
    for mask in (None, "", "words"):
        assert threads_by_node(mask, found) == {0: 1, 1: 1}
    assert threads_by_node("0x16", found) == {0: 2, 1: 1}
    assert threads_by_node("0x13", found) == {0: 3}
    assert threads_by_node("0x21", found) == {0: 1}, "CPU 5 is not on line"
    for number in (8, 252):  # sparse, and the CPUs of one went off line between two reads
        (nodes / f"node{number}").mkdir()
        (nodes / f"node{number}/cpulist").write_text("5\n" if number == 8 else "\n")
    (nodes / "has_cpu").write_text("0-1,8,252\n")
    assert cpus.by_node(tmp_path) == found | {8: {5}}


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-3\n")
    assert cpus.by_node(tmp_path) == {0: {0, 1, 2, 3}}


def test_the_underlay_is_reported_once_it_is_configured() -> None:
    good = Underlay("10.9.0.1", "br", True, True, (("br", 1600),))
    seen = OvsObservation({}, tunnels=ObservedTunnels(underlay=good))
    assert [f.status for f in findings(seen, "10.9.0.1")] == ["ok"]
    gone = replace(seen, tunnels=ObservedTunnels(underlay=Underlay("10.9.0.1")))
    (reported,) = findings(gone, "10.9.0.1")
    assert reported.status == "fail" and reported.fix
