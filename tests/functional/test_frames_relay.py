"""Every kind of frame that a VM may send, on a relay: docs/security-frames.md is held to this.

The VFs are devices of DPDK's own, their NICs a model: what a VF's own VLAN and spoof check do is the
NIC's, and not seen here. The rest is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from drivers.vdpa.driver import Vdpa
from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_vdpa_ovs import WiredPf
from tests.lab.driven import Driven
from tests.lab.frames import Backend, Sender, Setting
from tests.lab.frames_nics import Ear, host_stack, packet_nic, vhost_nics
from tests.lab.frames_scene import Scene, untagged
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run
from tests.unit.drivers.sriov.model import Model

FAR = "np-far"
#: The sender's VF, and that of a VM that must receive nothing.
PORTS = ("sender", "bystander")


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    """One that takes NICs, and none by itself."""
    with PrivateOvs(BASE / "ovs", other_config={"dpdk-extra": "-a 0000:00:00.0 --in-memory"}) as own:
        yield own


def test_each_frame_comes_out_where_the_table_says(ovs: PrivateOvs, short_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(namespace(FAR))
        nics = [_wired(number) for number in range(len(PORTS))]
        kernel = Model(*nics)
        driven = Driven(short_path / "agent", ovs, {}, lambda conf, host: Vdpa(conf, host, kernel=kernel))
        stack.callback(driven.close)
        specs = {name: _spec(number) for number, name in enumerate(PORTS)}
        sockets = []
        for name, spec in specs.items():
            path = driven.put(name, spec).model_dump()["socket_path"]
            sockets.append(Path(path))
            stack.callback(driven.delete, name)
        macs = [spec["mac"] for spec in specs.values()]
        vms = stack.enter_context(vhost_nics("np-vms", sockets, macs))
        for name in PORTS:
            ovs.wait_connected(device_name(VHOST, name), 90.0)
        wires = [stack.enter_context(packet_nic(FAR, f"far{number}")) for number in range(len(PORTS))]
        others: dict[str, Ear] = {
            "the sender": vms[0],
            "a VM of another relay": vms[1],
            "another VF": wires[1],
            "the host's own protocols": stack.enter_context(host_stack(None)),
        }
        scene = Scene(
            Backend.RELAY,
            "relay",
            Sender(macs[0], "02:00:00:00:00:01", "10.9.0.1"),
            vms[0],
            wires[0],
            untagged,
            None,
            others,
            settle=lambda: ovs.appctl("revalidator/wait"),
        )
        differences: list[str] = []
        for setting in Setting:
            driven.put("sender", {**specs["sender"], "port_security": setting.port_security})
            differences += scene.differences(setting)
        assert not differences, "\n".join(differences)


def _spec(number: int) -> dict[str, Any]:
    network = {"physical_network": f"physnet{number + 1}"}
    return make_spec(number + 1, vlan_id=None, backend="vdpa", network=network)


def _wired(number: int) -> WiredPf:
    """A NIC whose VF is the near end of a wire; it goes with the namespace of the far end."""
    near, far = f"npwire{number}", f"far{number}"
    run(["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", FAR])
    run(["ip", "link", "set", near, "up"])
    run(within(FAR, ["ip", "link", "set", far, "up"]))
    nic = WiredPf(
        f"0000:0{number + 3}:00.0",
        f"eth{number + 3}",
        f"physnet{number + 1}",
        total=0,
        vf_driver="mlx5_core",
    )
    nic.device = f"net_pcap{number},rx_iface_in={near},tx_iface={near}"
    nic.make_vfs(1)
    return nic
