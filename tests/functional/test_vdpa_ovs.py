"""The vdpa backend on a real OVS-DPDK, with devices of DPDK's own in the place of VFs.

The VFs and their NIC are a model; rows, flows, vswitchd and packets are real. Of native mode only
the rows are: no OVS that has the type was available.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from drivers.ovs.sockets import new_path
from drivers.vdpa.driver import Vdpa
from drivers.vdpa.model import BRIDGE, NATIVE_TYPE
from netplugin.api.errors import HostError
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host.flow import Flow
from netplugin.host.names import VHOST, device_name
from netplugin.host.ovs_rows import OvsRoot
from tests.functional import isolation_frames as frames
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import rows
from tests.lab.agent import PrivateAgent
from tests.lab.driven import Driven
from tests.lab.namespaces import namespace, pings, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.raw_frames import hearing, mouth, send_all
from tests.lab.testpmd import Testpmd, TestpmdOptions
from tests.lab.vm import DEVICE as NIC
from tests.lab.vm import Vm
from tests.unit.drivers.sriov.model import Model, ModelPf

FAR, FAR_ADDRESS = "np-far", "10.7.0.1"
WAIT_S = 30.0
#: What a NIC in switchdev mode does not let be set of a VF.
OF_SWITCHDEV = {"vlan", "spoofchk", "trust", "rate", "link_state"}
#: What the device in the VF's place brings: it is promiscuous, as a trusted VF may be.
TO_VM = {
    "broadcast": frames.plain(frames.OTHER, frames.EVERYBODY),
    "neighbour solicitation": frames.plain(frames.OTHER, "33:33:ff:00:00:01"),
    "VRRP": frames.plain(frames.OTHER, "01:00:5e:00:00:12"),
    "another's MAC": frames.plain(frames.OTHER, "52:54:00:00:00:77"),
}
# What vswitchd says of a type that it has not (EAFNOSUPPORT, ``netdev_open`` in OVS's lib/netdev.c).
_UNKNOWN_TYPE = "Address family not supported"


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    """One that takes NICs, and none by itself."""
    with PrivateOvs(BASE / "ovs", other_config={"dpdk-extra": "-a 0000:00:00.0 --in-memory"}) as own:
        yield own


@pytest.fixture
def with_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of OVS says that it has the type: vswitchd itself would take it off the row."""
    real = OvsRoot.read

    def read(row: Any, store_mark: str) -> OvsRoot:
        found = real(row, store_mark)
        return replace(found, iface_types=found.iface_types | {NATIVE_TYPE})

    monkeypatch.setattr(OvsRoot, "read", read)


@pytest.fixture
def wire() -> Iterator[str]:
    """A wire of the kernel's: DPDK has one end of it, as its driver for such devices is a VF's."""
    with namespace(FAR):
        run(["ip", "link", "add", "npwire", "type", "veth", "peer", "name", "far", "netns", FAR])
        run(["ip", "link", "set", "npwire", "up"])
        run(within(FAR, ["ip", "link", "set", "far", "up"]))
        run(within(FAR, ["ip", "address", "add", f"{FAR_ADDRESS}/24", "dev", "far"]))
        yield "net_af_packet0,iface=npwire"


class WiredPf(ModelPf):
    """A NIC whose one VF is a device that DPDK makes itself; its driver is left in place."""

    device = ""

    def vf_address(self, number: int) -> str:
        return self.device or super().vf_address(number)


@contextmanager
def hosted(directory: Path, ovs: PrivateOvs, *nics: ModelPf, **model: Any) -> Iterator[Driven]:
    """The backend on a real OVS and model NICs."""
    kernel = Model(*nics)
    vars(kernel).update(model)
    driven = Driven(directory / "agent", ovs, {}, lambda conf, host: Vdpa(conf, host, kernel=kernel))
    try:
        yield driven
    finally:
        driven.close()


def spec_of(number: int = 1, **fields: Any) -> dict[str, Any]:
    return make_spec(number, **{"backend": "vdpa", **fields})


def dropped(ovs: PrivateOvs) -> int:
    """How many frames the filters of the relays have dropped."""
    lines = (x for x in ovs.ofctl("dump-flows", BRIDGE).splitlines() if "actions=drop" in x)
    return sum(int(count) for x in lines for count in re.findall(r"n_packets=(\d+)", x))


# -- relay ---------------------------------------------------------------------------------------


def test_what_a_vm_sends_into_a_relay_is_filtered_as_on_a_bridge(
    ovs: PrivateOvs, wire: str, short_path: Path
) -> None:
    """No tag and no address that bridges do not forward passes, whatever the filter; and what comes
    back is the VM's."""
    nic = WiredPf("0000:03:00.0", "eth3", "physnet1", total=0, vf_driver="mlx5_core")
    nic.device = wire
    nic.make_vfs(1)
    never = {**frames.tags(), **frames.reserved()}
    refused = {**frames.of_router(), **frames.of_dhcp_server(), **frames.of_bridges()}
    addresses = {"allowed_addresses": frames.ADDRESSES}
    with hosted(short_path, ovs, nic) as driven, hearing(FAR, "far") as far:
        path = driven.put("p1", spec_of()).model_dump()["socket_path"]
        with Vm("vm-p1", path, frames.MAC, frames.IP4, tagged=True), mouth("vm-p1", NIC) as out:
            ovs.wait_connected(device_name(VHOST, "p1"))

            def passes(security: dict[str, Any]) -> set[str]:
                driven.put("p1", spec_of(port_security=security))
                assert driven.planned() == []
                tried = {**never, **refused, **frames.harmless()}
                found = send_all(out, far, tried, frames.plain())
                return {name for name, arrivals in found.items() if arrivals}

            assert passes({}) == passes(addresses) == frames.harmless().keys()
            of_switches = frames.of_bridges().keys() - {"PVST+", "CDP", "GVRP"}
            everything = refused.keys() - of_switches | frames.harmless().keys()
            assert passes({"enabled": False}) == everything

            with hearing("vm-p1", NIC) as near, mouth(FAR, "far") as wire_end:

                def arrives(**fields: Any) -> set[str]:
                    driven.put("p1", spec_of(**fields))
                    assert driven.planned() == []
                    found = send_all(wire_end, near, TO_VM, frames.plain(frames.OTHER, frames.MAC))
                    return {name for name, arrivals in found.items() if arrivals}

                groups = TO_VM.keys() - {"another's MAC"}
                assert arrives() == groups == arrives(vf={"trusted": True})
                trusted = {"vf": {"trusted": True}, "port_security": {"enabled": False}}
                assert arrives(**trusted) == TO_VM.keys()
        driven.delete("p1")


def test_flows_of_a_relay_are_read_with_the_commit_that_writes_them(
    ovs: PrivateOvs, wire: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nic = WiredPf("0000:03:00.0", "eth3", "physnet1", total=0, vf_driver="mlx5_core")
    nic.device = wire
    nic.make_vfs(1)
    with hosted(short_path, ovs, nic) as driven:
        flows = driven.host.ovs.flows
        dump, asked = flows.dump, []

        def noted(bridge: str, *arguments: Any) -> list[Flow]:
            asked.append(bridge)
            return dump(bridge, *arguments)

        monkeypatch.setattr(flows, "dump", noted)
        driven.put("p1", spec_of())
        assert asked == [], "a plug reads no flows again"
        driven.put("p1", spec_of(port_security={"allowed_addresses": frames.ADDRESSES}))
        assert asked == [BRIDGE], "a change reads them once, before it"
        ovs.ofctl("del-flows", BRIDGE)
        assert driven.planned() != [] and len(asked) == 2, "a look at the host reads them all"
        driven.delete("p1")


def test_a_relay_carries_frames_and_does_again_when_vswitchd_was_killed(
    ovs: PrivateOvs, wire: str, short_path: Path
) -> None:
    nic = WiredPf("0000:03:00.0", "eth3", "physnet1", total=0, vf_driver="mlx5_core")
    nic.device = wire
    nic.make_vfs(1)
    before = asdict(nic.vfs[0])
    with hosted(short_path, ovs, nic) as driven:
        driven.put("p1", spec_of(queues=2))
        assert driven.planned() == []
        path = Path(new_path(driven.host.ovs.settings, "p1"))
        with Testpmd(path, TestpmdOptions(mac=spec_of()["mac"])) as vm:
            ovs.wait_connected(device_name(VHOST, "p1"))
            wait_for(lambda: pings(FAR, "10.7.0.5"), WAIT_S, "the VM answers", vm.daemon.tail)
            ovs.kill_vswitchd()
        ovs.start_vswitchd()
        driven.wait_for_ovs()
        report = driven.reconciler.check()
        kinds = {change.change for change in report.changes}
        assert kinds == {"SetFilter", "SetBridgeFlows"} and not report.errors
        with Testpmd(path, TestpmdOptions(mac=spec_of()["mac"])) as vm:
            ovs.wait_connected(device_name(VHOST, "p1"))
            wait_for(lambda: pings(FAR, "10.7.0.5"), WAIT_S, "and again", vm.daemon.tail)
        with Testpmd(path, TestpmdOptions(mac="52:54:00:99:99:99")):
            ovs.wait_connected(device_name(VHOST, "p1"))
            run(within(FAR, ["ip", "neigh", "flush", "all"]))
            wait_for(lambda: pings(FAR, "10.7.0.5") or dropped(ovs), WAIT_S, "another VM answers")
            assert dropped(ovs) and not pings(FAR, "10.7.0.5"), "and its MAC does not pass the filter"
        driven.delete("p1")
        assert ovs.vsctl("list-br") == ""
        assert asdict(nic.vfs[0]) == before


def test_what_dpdk_cannot_open_is_an_error_in_its_words_and_leaves_no_trace(
    ovs: PrivateOvs, short_path: Path
) -> None:
    nic = ModelPf("0000:03:00.0", "eth3", "physnet1", total=1)
    before = asdict(nic.vfs.get(0) or nic.new_vf(0))
    with hosted(short_path, ovs, nic) as driven:
        with pytest.raises(HostError, match=r"0000:03:10\.0"):
            driven.put("p1", spec_of())
        assert driven.store.records() == [] and ovs.vsctl("list-br") == ""
        assert asdict(nic.vfs[0]) == before


# -- native --------------------------------------------------------------------------------------


def test_native_without_the_type_is_unavailable_and_never_another_backend(ovs: PrivateOvs) -> None:
    groups = {
        "agent": {"enabled_backends": "dpdkvhostuser,vdpa"},
        "sriov": {"devices": "physnet1:eth99"},
        "vdpa": {"mode": "native"},
    }
    with PrivateAgent(BASE / "vdpa-agent", ovs, groups, ready=False) as agent:
        wait_for(lambda: NATIVE_TYPE in json.dumps(agent.get("/v1/backends")[1]), WAIT_S, "it has looked")
        status, problem = agent.call("PUT", "/v1/ports/p1", spec_of())
        assert (status, problem["code"]) == (503, "backend_unavailable"), problem
        assert NATIVE_TYPE in problem["detail"] and "vendor" in problem["fix"]
        [reported] = [b for b in agent.get("/v1/backends")[1] if b["name"] == "vdpa"]
        assert reported["facts"]["mode"] == "native" and not reported["usable"]
        assert agent.get("/v1/ports")[1] == []
    assert ovs.vsctl("list-br") == ""


@pytest.mark.usefixtures("with_type")
def test_native_by_the_rows_written_alone(ovs: PrivateOvs, short_path: Path) -> None:
    """The rows are in a real database; vswitchd, which has no such type, refuses the port."""
    nic = ModelPf("0000:81:00.0", "eth8", "physnet1", total=3, vf_driver="mlx5_core", switchdev=True)
    with hosted(short_path, ovs, nic, unsupported=OF_SWITCHDEV) as driven:
        desired = PortSpec.model_validate(spec_of(vlan_id=100, queues=4))
        seen = driven.backend.observe(["p1"], time.monotonic() + 60)
        intent = Intent("p1", desired, driven.backend.claims(Intent("p1", desired), seen, {}))
        plan = driven.backend.plan([intent], seen)
        applied = driven.backend.apply(plan.changes, time.monotonic() + 30)
        assert not plan.refused and not applied.failed
        name = device_name(VHOST, "p1")
        [interface] = [
            row for row in rows(ovs, "Interface", "name", "type", "options") if row["name"] == name
        ]
        assert (interface["type"], interface["options"]) == (
            NATIVE_TYPE,
            {
                "vdpa-socket-path": new_path(driven.host.ovs.settings, "p1"),
                "vdpa-accelerator-devargs": "0000:81:10.0",
                "dpdk-devargs": "0000:81:00.0,representor=[0]",
                "vdpa-max-queues": "4",
                "vdpa-sw": "true",
            },
        )
        [port] = [r for r in rows(ovs, "Port", "name", "tag", "vlan_mode") if r["name"] == name]
        assert (port["tag"], port["vlan_mode"]) == (100, "access")
        assert ovs.vsctl("list-ports", "br-phys1").split() == [name], "on its network's bridge"
        assert nic.vfs[0].attributes.mac == desired.mac and nic.vfs[0].attributes.vlan == 0
        again = driven.backend.read_back(seen, plan.changes, ["p1"], time.monotonic() + 60)
        assert driven.backend.plan([intent], again).changes == ()
        reported = driven.backend.observed_ports([intent], again)["p1"]
        assert _UNKNOWN_TYPE in str(reported.fault), "what vswitchd says of it is told"
        leave = driven.backend.plan([Intent("p1", None, intent.claims)], again)
        assert not driven.backend.apply(leave.changes, time.monotonic() + 30).failed
        assert ovs.vsctl("list-br") == ""


@pytest.mark.usefixtures("with_type")
def test_what_is_refused_in_native_mode_is_undone_and_never_becomes_a_relay(
    ovs: PrivateOvs, short_path: Path
) -> None:
    """A first plug in native mode that vswitchd refuses is undone: there is no port, and no relay."""
    nic = ModelPf("0000:81:00.0", "eth8", "physnet1", total=1, vf_driver="mlx5_core", switchdev=True)
    with hosted(short_path, ovs, nic, unsupported=OF_SWITCHDEV) as driven:
        with pytest.raises(HostError, match=_UNKNOWN_TYPE):
            driven.put("p1", spec_of())
        assert driven.store.records() == [] and ovs.vsctl("list-br") == ""
