"""Hypervisors with OVS-DPDK in namespaces of one machine, on wires that a test made."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from netplugin import options
from tests.functional import isolation_frames
from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import entered, namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.raw_frames import hearing, marked, mouth
from tests.lab.switch import wire
from tests.lab.vm import DEVICE as NIC
from tests.lab.vm import Vm

UNDERLAY = "br-underlay"
# include/uapi: asm-generic/socket.h and linux/udp.h.
_SO_NO_CHECK, _UDP_NO_CHECK6_TX = 11, 101


@dataclass
class Host:
    """One hypervisor: its own namespace, OVS and agent."""

    name: str
    ovs: PrivateOvs
    agent: PrivateAgent
    #: Its tunnels' address.
    address: str

    def put(self, port_id: str, spec: Mapping[str, Any]) -> tuple[int, Any]:
        return self.agent.call("PUT", f"/v1/ports/{port_id}", spec)

    def plug(self, port_id: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        status, body = self.put(port_id, spec)
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    def network(self, network_id: str, vni: int, *peers: str, **fields: Any) -> dict[str, Any]:
        spec = {"type": "vxlan", "vni": vni, "peers": list(peers), **fields}
        status, body = self.agent.call("PUT", f"/v1/networks/{network_id}", spec)
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    @property
    def conf(self) -> Any:
        """The agent's options, as it reads them."""
        return options.load([self.agent.config])

    @contextmanager
    def vm(self, port_id: str, spec: Mapping[str, Any], address: str) -> Iterator[Vm]:
        """A VM on the port, which is plugged if it is not, with the port's MTU."""
        body = self.plug(port_id, spec)
        path, mtu = body["binding"]["socket_path"], body["spec"]["network"]["mtu"]
        with Vm(f"vm-{port_id}", path, str(spec["mac"]), address, mtu) as vm:
            self.ovs.wait_connected(body["binding"]["device"])
            yield vm

    def planned(self) -> list[dict[str, Any]]:
        status, report = self.agent.call("POST", "/v1/reconcile", {"dry_run": True})
        assert status == 200 and report["errors"] == [], report
        changes: list[dict[str, Any]] = report["changes"]
        return changes

    def repair(self) -> None:
        status, report = self.agent.call("POST", "/v1/reconcile", {})
        assert status == 200 and report["errors"] == [], report

    def flows(self, bridge: str, *match: str) -> list[str]:
        """The bridge's flows in a fixed order, without counters; tables that learn are left out."""
        text = self.ovs.ofctl("--no-stats", "--no-names", "dump-flows", bridge, *match)
        lines = (line.strip() for line in text.splitlines() if "cookie=" in line)
        return sorted(line for line in lines if "hard_timeout" not in line)

    def missed(self) -> int:
        """Frames for which the lab's NICs had no room: libpcap's drops, reported every 5 s."""
        names = self.ovs.vsctl("--bare", "--columns=name", "find", "interface", "type=dpdk").split()
        counted = "statistics:rx_missed_errors"
        return sum(int(self.ovs.vsctl("get", "interface", name, counted)) for name in names)

    def ip(self, *words: str) -> str:
        return run(within(self.name, ["ip", *words]))


def nic(number: int, device: str) -> str:
    """A kernel device as DPDK takes it: its pcap driver replaces a NIC with jumbo frames."""
    return f"net_pcap{number},rx_iface_in={device},tx_iface={device}"


@contextmanager
def host(
    number: int,
    *,
    uplinks: Sequence[str] = (),
    cabled: bool = True,
    more: Mapping[str, str] | None = None,
    memory_mb: int = 128,
    underlay_mtu: int = 1600,
    family: int = 4,
) -> Iterator[Host]:
    """A hypervisor on the switch, whose tunnels leave by ``eth1`` on a bridge of the operator's.

    ``uplinks`` are more devices, of ``physnet1``, on the switch unless they are not ``cabled``: then
    a test does that. ``more`` are options of ``[ovs]``.
    """
    name = f"np-h{number}"
    address = f"10.9.0.{number}" if family == 4 else f"fd09::{number}"
    groups = {"ovs": {"local_ip": address, **(more or {})}}
    if uplinks:
        groups["ovs"]["uplinks"] = uplinks_option(*uplinks)
    with ExitStack() as stack:
        stack.enter_context(namespace(name))
        for device in ("eth1", *(uplinks if cabled else ())):
            wire(name, device)
        directory = BASE / name
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ovs = PrivateOvs(directory / "ovs", socket_mem_mb=memory_mb, netns=name)
        stack.enter_context(ovs)
        _make_underlay(ovs, name, address, underlay_mtu)
        agent = PrivateAgent(directory / "agent", ovs, groups, netns=name)
        stack.enter_context(agent)
        yield Host(name, ovs, agent, address)


@dataclass
class Intruder:
    """Somebody on the underlay who speaks VXLAN."""

    address: str
    _outbox: socket.socket

    def sends(self, to: str, vni: int, frame: bytes) -> None:
        """RFC 7348, section 5: flags, of which one says that there is a VNI, and the VNI."""
        header = (0x08 << 24).to_bytes(4) + (vni << 8).to_bytes(4)
        self._outbox.sendto(header + frame, (to, 4789))


@contextmanager
def intruder(number: int, family: int = 4) -> Iterator[Intruder]:
    name = f"np-s{number}"
    address, prefix = (f"10.9.0.{number}", 24) if family == 4 else (f"fd09::{number}", 64)
    nodad = [] if family == 4 else ["nodad"]
    with namespace(name):
        wire(name, "eth1")
        run(within(name, ["ip", "address", "add", f"{address}/{prefix}", "dev", "eth1", *nodad]))
        kind = socket.AF_INET if family == 4 else socket.AF_INET6
        with entered(name):
            outbox = socket.socket(kind, socket.SOCK_DGRAM)
        with outbox:
            # Without a checksum: a veth leaves it to a NIC, and there is none.
            if family == 4:
                outbox.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
            else:
                outbox.setsockopt(socket.IPPROTO_UDP, _UDP_NO_CHECK6_TX, 1)
            outbox.bind((address, 0))
            yield Intruder(address, outbox)


def let_in_by_peers_alone(one: Host, other: Host, family: int = 4) -> None:
    """A frame for a VM comes out of its NIC, and its sender is learned, if a peer sent it."""
    both = [one.address, other.address]
    for each in (one, other):
        each.network("blue", 5001, *both, mtu=1430)
        each.network("red", 5002, *both, f"{'10.9.0.' if family == 4 else 'fd09::'}9", mtu=1430)
    lied, admitted, known = (isolation_frames.plain(mac(n), "ff:ff:ff:ff:ff:ff") for n in (3, 4, 2))
    with (
        one.vm("a", spec_on("blue", 1), "10.0.0.1") as a,
        other.vm("b", spec_on("blue", 2), "10.0.0.2") as b,
        intruder(9, family) as third,
        hearing(a.name, NIC) as ear,
        mouth(b.name, NIC) as out,
    ):
        one.plug("r", spec_on("red", 5))
        wait_for(lambda: b.pings(a.address), 60, "the peer reaches the VM")

        def received(number: int) -> bool:
            ear.listen(time.monotonic() + 0.1)
            return bool(ear.of(number))

        for _ in range(3):
            third.sends(one.address, 5001, marked(lied, 1))

        def known_comes() -> bool:
            out.send(marked(known, 2))
            return received(2)

        wait_for(known_comes, 60, "the peer's frame is there, which was sent later")
        assert not received(1), "a peer of another network is none of this one"
        assert mac(3) not in one.ovs.ofctl("dump-flows", "np-tunnels", "table=10")
        assert one.planned() == []
        one.network("blue", 5001, *both, third.address, mtu=1430)

        def comes() -> bool:
            third.sends(one.address, 5001, marked(admitted, 3))
            return received(3)

        wait_for(comes, 60, "once it is a peer its frames come")
        assert mac(4) in one.ovs.ofctl("dump-flows", "np-tunnels", "table=10")
        assert one.planned() == []
        one.network("blue", 5001, *both, mtu=1430)
        assert mac(4) not in one.ovs.ofctl("dump-flows", "np-tunnels", "table=10")


def uplinks_option(*devices: str) -> str:
    """``[ovs] uplinks`` with these devices of physnet1: each has commas, so it is quoted."""
    entries = (nic(number, device) for number, device in enumerate(devices, start=1))
    return "'" + ",".join(f'"physnet1:{entry}"' for entry in entries) + "'"


@contextmanager
def clean(*hosts: Host) -> Iterator[None]:
    """Take off what is plugged on these hosts, and forget their networks, after the block."""
    yield
    for each in hosts:
        ids = [port["port_id"] for port in each.agent.get("/v1/ports")[1]]
        if ids:
            assert each.agent.call("POST", "/v1/ports:batch", {"delete": ids})[0] == 200
        for network in each.agent.get("/v1/networks")[1]:
            each.agent.call("DELETE", f"/v1/networks/{network['network_id']}")


def _make_underlay(ovs: PrivateOvs, name: str, address: str, mtu: int) -> None:
    """As docs/operating/ovs.md tells the operator."""
    device = nic(0, "eth1")
    ovs.vsctl(
        "add-br",
        UNDERLAY,
        "--",
        "set",
        "bridge",
        UNDERLAY,
        "datapath_type=netdev",
        "--",
        "add-port",
        UNDERLAY,
        "dpdk0",
        "--",
        "set",
        "interface",
        "dpdk0",
        "type=dpdk",
        f'options:dpdk-devargs="{device}"',
        f"mtu_request={mtu}",
    )
    prefix = "24" if "." in address else "64"
    nodad = [] if "." in address else ["nodad"]
    run(within(name, ["ip", "address", "add", f"{address}/{prefix}", "dev", UNDERLAY, *nodad]))
    run(within(name, ["ip", "link", "set", UNDERLAY, "up"]))


def spec_on(network_id: str, number: int, **fields: Any) -> dict[str, Any]:
    """A port's spec on a VXLAN network."""
    return {
        "vm_id": f"vm{number}",
        "mac": mac(number),
        "backend": "dpdkvhostuser",
        "network": {"type": "vxlan", "network_id": network_id},
        **fields,
    }


def mac(number: int) -> str:
    return f"52:54:00:00:00:{number:02x}"
