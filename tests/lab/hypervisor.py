"""A whole hypervisor: OVS-DPDK, libvirt, the agent, and VMs on the NICs that it plugged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.agent import PrivateAgent
from tests.lab.apart import Apart
from tests.lab.guest import BOOT_DEADLINE_S, GUESTS, Guest, apply_tcg_workaround, domain_xml
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import LabError, Running

BASE = Path("/run/np")
OVS_BACKEND = "dpdkvhostuser"
BRIDGE_BACKEND = "linuxbridge"
# What one cannot do without an uplink is not in the lab: both networks have none.
PHYSICAL_NETWORK = {OVS_BACKEND: "physnet1", BRIDGE_BACKEND: "physnet2"}


@dataclass(frozen=True, slots=True)
class Nic:
    """One port as the platform would ask for it, and the address its guest gives it."""

    backend: str
    number: int
    vlan_id: int | None = None
    mtu: int = 1500
    spec_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def port_id(self) -> str:
        return f"{self.backend}-{self.number}"

    @property
    def vm_id(self) -> str:
        return f"vm-{self.backend}-{self.number}"

    @property
    def mac(self) -> str:
        return f"52:54:00:{0x0D if self.backend == OVS_BACKEND else 0x1B:02x}:00:{self.number:02x}"

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number}"

    def spec(self, vlan_id: int | None = None, **fields: Any) -> dict[str, Any]:
        """The body of the PUT; what is given here instead of what the NIC has."""
        vlan_id = vlan_id or self.vlan_id
        network: dict[str, Any] = {
            "type": "flat" if vlan_id is None else "vlan",
            "physical_network": PHYSICAL_NETWORK[self.backend],
            "mtu": self.mtu,
        }
        if vlan_id is not None:
            network["vlan_id"] = vlan_id
        asked = {"vm_id": self.vm_id, "mac": self.mac, "backend": self.backend, "network": network}
        return {**asked, **self.spec_fields, **fields}


class Hypervisor(Running):
    """The daemons of one hypervisor in a sandbox, and the guests on it."""

    def __init__(
        self,
        backends: Sequence[str],
        directory: Path = BASE,
        apart: Apart | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
        ovs_memory_mb: int = 256,
    ) -> None:
        """``apart`` if there are several in the sandbox; ``options`` of the agent, over those of here."""
        self.directory = directory
        self._backends = tuple(backends)
        self._apart = apart
        netns = apart.name if apart else None
        self.ovs = PrivateOvs(directory / "ovs", socket_mem_mb=ovs_memory_mb, netns=netns)
        self.libvirt = PrivateLibvirt(directory / "libvirt", apart)
        networks = {"physical_interfaces": f"{PHYSICAL_NETWORK[BRIDGE_BACKEND]}:"}
        groups: dict[str, dict[str, str]] = {
            "agent": {"enabled_backends": ",".join(backends)},
            "ovs": {"bridge_mappings": f"{PHYSICAL_NETWORK[OVS_BACKEND]}:br-phys1"},
            **({"linuxbridge": networks} if BRIDGE_BACKEND in backends else {}),
        }
        for group, values in (options or {}).items():
            groups.setdefault(group, {}).update(values)
        self.agent = PrivateAgent(directory / "agent", self.ovs, groups, netns=netns, as_installed=True)
        self._running = ExitStack()

    def start(self) -> None:
        if self._apart is not None:
            self._apart.make()
        if OVS_BACKEND in self._backends:
            self.start_part(self.ovs)
        for part in (self.libvirt, self.agent):
            self.start_part(part)

    @property
    def guests(self) -> Path:
        """Where the lab finds the guests' files."""
        return self._apart.outer(GUESTS) if self._apart else GUESTS

    @property
    def network_namespace(self) -> str | None:
        """Where its daemons are called, or None for where we are."""
        return self._apart.name if self._apart else None

    def start_part(self, part: PrivateOvs | PrivateLibvirt | PrivateAgent) -> None:
        """Start one daemon; `stop` stops them in the opposite order."""
        self._running.enter_context(part)

    def stop(self) -> None:
        self._running.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """What the agent answers; anything but success is an error that shows it."""
        status, answer = self.agent.call(method, path, body)
        if not 200 <= status < 300:
            raise LabError(f"{method} {path}: {status} {answer}\n{self.agent.daemon.tail()}")
        return answer

    def plug(self, nic: Nic, vlan_id: int | None = None, **fields: Any) -> dict[str, Any]:
        port = self.call("PUT", f"/v1/ports/{nic.port_id}", nic.spec(vlan_id, **fields))
        if not isinstance(port, dict) or port["state"] != "active":
            raise LabError(f"{nic.port_id} is not active: {port}")
        if nic.backend == OVS_BACKEND:
            # Until then the datapath may do what it did before: vswitchd goes through its flows by and by.
            self.ovs.appctl("revalidator/wait")
        return port

    def unplug(self, nics: Sequence[Nic]) -> None:
        answer = self.call("POST", "/v1/ports:batch", {"delete": [nic.port_id for nic in nics]})
        bad = [result for result in answer["results"] if result["status"] != 204]
        if bad:
            raise LabError(f"not deleted: {bad}")

    def render(self, nic: Nic) -> str:
        """The VM's domain with its NICs, from the agent."""
        answer = self.call("POST", f"/v1/vms/{nic.vm_id}:render-domain", {"xml": domain_xml(nic.vm_id)})
        return str(answer["xml"])

    def start_guests(self, nics: Sequence[Nic]) -> list[Guest]:
        """Start a guest on each NIC from what the agent rendered; on OVS in turn (see ``wait_connected``)."""
        connection = self.libvirt.connect()
        guests = [Guest(nic.vm_id) for nic in nics]
        for guest, nic in zip(guests, nics, strict=True):
            guest.start(connection, apply_tcg_workaround(self.render(nic)))
            if nic.backend == OVS_BACKEND:
                port = self.call("GET", f"/v1/ports/{nic.port_id}")
                self.ovs.wait_connected(port["binding"]["device"], BOOT_DEADLINE_S)
        return guests

    def boot(self, nics: Sequence[Nic], each: Callable[[Guest, Nic], None] | None = None) -> list[Guest]:
        """`start_guests`, wait until all are up, and give each NIC its address."""
        guests = self.start_guests(nics)
        for guest, nic in zip(guests, nics, strict=True):
            guest.boot()
            silence(guest)
            guest.configure(nic.mac, f"{nic.address}/24")
            if each is not None:
                each(guest, nic)
        return guests

    def destroy(self, nics: Sequence[Nic]) -> None:
        for nic in nics:
            self.libvirt.destroy_domain(nic.vm_id)


def silence(guest: Guest) -> None:
    """No IPv6 in the guest: it sends frames by itself, and tests count frames."""
    guest.check("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
