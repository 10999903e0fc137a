"""A VM with a VF that libvirt migrates between two hypervisors: its virtio NIC has its frames meanwhile.

The hosts are those of `test_sriov_two_hosts`, each with a libvirt of its own. The guest has Debian's
kernel with igbvf and net_failover; it runs without KVM, in a guest that runs without KVM.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libvirt  # type: ignore[import-untyped]
import pytest
from lxml import etree

from drivers.vf.commands import LIBVIRT_STATE
from netplugin.libvirt.interfaces import fragments, text
from tests.lab.apart import SHARED, Apart
from tests.lab.guest import GUESTS, Guest, System, apply_tcg_workaround, domain_xml
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.namespaces import within
from tests.lab.processes import Daemon, run, wait_for
from tests.lab.traveller import FLAGS, URI_SOCKET
from tests.nested import prepare
from tests.nested.test_sriov import answered, put
from tests.nested.test_sriov_two_hosts import ADDRESS, SPEC, Host, hosts, wait_reached

__all__ = ["hosts"]
pytestmark = [pytest.mark.nested(hugepages=0), pytest.mark.long, pytest.mark.timeout(3600)]

VM = SPEC["vm_id"]
BOOT_S = 1200.0
STEP_S = 200.0
EVERY_S = 1.0
STEADY = 5
#: In the guest: the NIC of the team that it uses, which is the master of the other two.
NIC = "ls -d /sys/class/net/*/lower_* | cut -d / -f 5 | sort -u"
#: What the CPU of the VM lacks. Two guests with cx16 (`maximum` and `qemu64` of QEMU 7.2) had bits in EFLAGS
#: that are no flags, and a panic early in their boot; the one guest without these two booted.
LACKS = ("cx16", "la57")


@dataclass(frozen=True)
class Hypervisor:
    host: Host
    libvirt: PrivateLibvirt
    guest: Guest

    def domain(self) -> Any:
        return self.libvirt.connect().lookupByName(VM)

    def binding(self) -> Any:
        return self.host.agent.get("/v1/ports/nic1")[1]["binding"]

    def nics(self) -> dict[str, str]:
        """The NICs that the VM has, by their types."""
        found = etree.fromstring(self.domain().XMLDesc()).findall("devices/interface")
        return {nic.get("type", ""): text(nic) for nic in found}

    def vf_xml(self) -> str:
        return text(fragments(self.binding()["interface_xml"])[1])

    def detach_vf(self) -> None:
        self.domain().detachDeviceFlags(self.vf_xml(), libvirt.VIR_DOMAIN_AFFECT_LIVE)
        wait_for(lambda: "hostdev" not in self.nics(), STEP_S, "the VM has let its VF go", self.guest.tail)
        wait_for(lambda: not self.host.has_mac(), STEP_S, "the NIC has forgotten its MAC")

    def attach_vf(self) -> None:
        self.domain().attachDeviceFlags(self.vf_xml(), libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def render(self, xml: str) -> str:
        status, rendered = self.host.agent.call("POST", f"/v1/vms/{VM}:render-domain", {"xml": xml})
        assert status == 200, rendered
        return apply_tcg_workaround(rendered["xml"], migrates=True)

    def boots(self, xml: str) -> None:
        """The VM runs here, with its address."""
        self.guest.start(self.libvirt.connect(), self.render(xml))
        self.guest.boot(BOOT_S)
        self.guest.check(f"nic=$({NIC}) && ip link set $nic up && ip address add {ADDRESS}/24 dev $nic")

    def migrates_to(self, other: Hypervisor) -> int:
        """With the virtio NIC. Gives the downtime in ms."""
        xml = other.render(self.domain().XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE))
        other.guest.prepare()
        parameters = {
            libvirt.VIR_MIGRATE_PARAM_URI: f"unix://{URI_SOCKET}",
            libvirt.VIR_MIGRATE_PARAM_DEST_XML: xml,
        }
        with closing(libvirt.open(self.libvirt.uri)) as own:
            own.lookupByName(VM).migrateToURI3(other.libvirt.uri, parameters, FLAGS)
        return int(other.domain().jobStats(libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED)["downtime"])

    def to_virtio(self) -> int:
        """The frames that went to the virtio NIC."""
        tap = self.host.agent.get(f"/v1/ports/{self.binding()['standby_port_id']}")[1]["binding"]["device"]
        return int(run(within(self.host.name, ["cat", f"/sys/class/net/{tap}/statistics/tx_packets"])))


@dataclass(frozen=True)
class Pings:
    """Pings of the VM by the peer of a host, all the time."""

    log: Path
    stream: Daemon
    began: float

    def sent(self) -> int:
        """About how many were sent until now."""
        return int((time.monotonic() - self.began) / EVERY_S)

    def gaps(self) -> list[tuple[int, int]]:
        """The numbers of those between which two or more were not answered."""
        there = sorted(set(answered(self.log)))
        return [(before, after) for before, after in itertools.pairwise(there) if after - before > 2]

    def steady(self, at: Hypervisor, by_vf: bool) -> int:
        """Wait until some in a row are answered by this NIC of the VM; gives the number of the last."""
        what = f"the VM answers on {at.host.name} by its {'VF' if by_vf else 'virtio NIC'}"

        def is_so() -> bool:
            frames, count = at.to_virtio(), len(answered(self.log))
            self.stream.wait_for(lambda: len(answered(self.log)) >= count + STEADY, STEP_S, what)
            row = answered(self.log)[count : count + STEADY]
            return row[-1] - row[0] == STEADY - 1 and (at.to_virtio() - frames < STEADY) is by_vf

        self.stream.wait_for(is_so, STEP_S, what)
        return answered(self.log)[-1]

    def lost(self, first: int, last: int) -> int:
        return len(set(range(first, last)) - set(answered(self.log)))


@contextmanager
def pings(host: Host, log: Path) -> Iterator[Pings]:
    command = ["stdbuf", "-oL", "ping", "-n", "-i", str(EVERY_S), ADDRESS]
    with Daemon("ping", within(host.peer.name, command), log) as stream:
        yield Pings(log, stream, time.monotonic())


@contextmanager
def hypervisor(host: Host, system: System) -> Iterator[Hypervisor]:
    apart = Apart(host.name, SHARED / host.name)
    apart.make()
    # The agents look where the daemons of one hypervisor alone have their own directory.
    state = apart.outer(LIBVIRT_STATE)
    state.parent.mkdir(parents=True)
    state.symlink_to(SHARED / state.name)
    # The emulated NIC gives what VFs send to the PF only for MACs that the PF has.
    on_pf = [host.peer.mac, "dev", host.pf, "self"]
    run(within(host.name, ["bridge", "fdb", "add", *on_pf, "permanent"]))
    with PrivateLibvirt(apart.root / "libvirt", apart) as private:
        yield Hypervisor(host, private, Guest(VM, apart.outer(GUESTS), system=system))


@pytest.fixture
def system() -> System:
    """A kernel that has the VF's driver."""
    kernel = prepare.fetch().kernel
    return System(kernel, tuple(kernel.load_order(["virtio_net", "igbvf"])))


@pytest.fixture
def hypervisors(hosts: tuple[Host, Host], system: System) -> Iterator[tuple[Hypervisor, Hypervisor]]:
    shared = SHARED / LIBVIRT_STATE.name
    shared.mkdir(parents=True)
    LIBVIRT_STATE.parent.mkdir(parents=True, exist_ok=True)
    LIBVIRT_STATE.symlink_to(shared)
    with ExitStack() as stack:
        one, two = (stack.enter_context(hypervisor(host, system)) for host in hosts)
        yield one, two
    assert not list(shared.iterdir())


def domain_of(system: System) -> str:
    domain = etree.fromstring(domain_xml(VM, system=system))
    cpu = domain.find("cpu")
    assert cpu is not None
    for name in LACKS:
        etree.SubElement(cpu, "feature", policy="disable", name=name)
    return text(domain)


def test_libvirt_migrates_a_vm_with_a_vf(
    hypervisors: tuple[Hypervisor, Hypervisor], system: System, tmp_path: Path
) -> None:
    one, two = hypervisors
    here, there = one.host.state(), two.host.state()
    put(one.host.agent, "nic1", SPEC)
    one.boots(domain_of(system))
    assert one.nics().keys() == {"ethernet", "hostdev"} and one.host.has_mac()
    with pings(two.host, tmp_path / "from-two") as stream:
        with_it = stream.steady(one, by_vf=True)
        wait_reached((one.host, two.host), "the VM has its VF")
        two.host.step("prepare", port=SPEC, activation="auto")
        one.host.step("leave", 409, activation="auto")
        one.detach_vf()
        without = stream.steady(one, by_vf=False)
        one.host.step("leave", activation="auto")
        leaves = stream.sent()
        downtime = one.migrates_to(two)
        runs = stream.sent()
        moved = stream.steady(two, by_vf=False)
        lost = [stream.lost(with_it, without), stream.lost(without, moved)]
        gaps = stream.gaps()
    two.host.step("commit")
    one.host.step("commit", 204)
    assert one.host.state() == here, "the source has given back the VF and the virtio NIC"
    with pings(one.host, tmp_path / "from-one") as stream:
        without = stream.steady(two, by_vf=False)
        two.attach_vf()
        with_it = stream.steady(two, by_vf=True)
        wait_reached((one.host, two.host), "the VM has a VF again")
        lost.append(stream.lost(without, with_it))
    assert two.nics().keys() == {"ethernet", "hostdev"} and two.host.has_mac()
    assert one.libvirt.connect().listAllDomains() == []
    print(f"lost of a ping each {EVERY_S} s while the VF goes, the VM moves, a VF comes: {lost}")
    print(f"downtime {downtime} ms; migration from ping {leaves} to {runs}; gaps of its pings: {gaps}")
    two.domain().destroy()
    assert two.host.agent.call("DELETE", "/v1/ports/nic1")[0] == 204
    assert two.host.state() == there
