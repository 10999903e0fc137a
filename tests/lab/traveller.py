"""A VM under traffic that libvirt migrates between two hypervisors, as a platform would do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import libvirt  # type: ignore[import-untyped]

from tests.lab.apart import SHARED
from tests.lab.guest import Guest, apply_tcg_workaround
from tests.lab.hypervisor import Hypervisor, Nic, silence
from tests.lab.namespaces import within
from tests.lab.sequenced import PROGRAM, Peer, program, start_in
from tests.lab.two_hosts import MTU, PEER, PEER_ADDRESS, PEER_MAC, TwoHosts, know_at_peer

URI_SOCKET = SHARED / "migration.sock"
FLAGS = libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PEER2PEER


class Way(StrEnum):
    """Who opens the port on the destination and closes it on the source, and when."""

    PUT = "PUT, DELETE"
    """Nobody: it is plugged on both while the VM moves, which is the state of things without phases."""
    MANUAL = "manual"
    """The platform, when libvirt's call has returned: as with hooks before and after only."""
    AUTO = "auto"
    """The agents, when the guest stops and runs."""


@dataclass(frozen=True)
class Moved:
    """What a migration took."""

    downtime_ms: int
    """From the stop of the guest on the source to its start on the destination, as libvirt reports it."""


class Traveller:
    """A VM with one NIC: ``home`` is the hypervisor that it runs on, ``away`` the other."""

    def __init__(self, hosts: TwoHosts, nic: Nic) -> None:
        self.nic = nic
        self.home, self.away = hosts.one, hosts.two
        self.guest = self._guest(self.home)

    def boot(self) -> None:
        """Plug its port and start it; it knows its peer for good, and is known by it."""
        self.home.plug(self.nic)
        domain = apply_tcg_workaround(self.home.render(self.nic), migrates=True)
        self.guest.start(self.home.libvirt.connect(), domain)

    def configure(self) -> None:
        """Wait until it has booted, and give it its address."""
        self.guest.boot()
        silence(self.guest)
        device = self.guest.configure(self.nic.mac, f"{self.nic.address}/24")
        self.guest.check(f"arp -i {device} -s {PEER_ADDRESS} {PEER_MAC}")
        know_at_peer(self.nic.address, self.nic.mac)
        self.guest.wait_pings(PEER_ADDRESS)

    def renew(self) -> None:
        """End it wherever it is, with its ports, and boot it again: a test has failed."""
        for host in (self.home, self.away):
            host.destroy([self.nic])
            host.unplug([self.nic])
        self.guest = self._guest(self.home)
        self.boot()
        self.configure()

    def domain(self, host: Hypervisor) -> Any:
        return host.libvirt.connect().lookupByName(self.nic.vm_id)

    def destination_xml(self) -> str:
        """The domain as it runs, with the NIC that the destination's agent renders."""
        xml = self.domain(self.home).XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE)
        path = f"/v1/vms/{self.nic.vm_id}:render-domain"
        rendered = str(self.away.call("POST", path, {"xml": xml})["xml"])
        return apply_tcg_workaround(rendered, migrates=True)

    def migrate(self) -> Moved:
        """Migrate to the other hypervisor, where its port must be. Raises: libvirt.libvirtError."""
        self.start_migration()
        self.has_moved()
        stats = self.domain(self.home).jobStats(libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED)
        return Moved(int(stats["downtime"]))

    def start_migration(self, bandwidth_mb_s: int | None = None, xml: str | None = None) -> None:
        """Let libvirt migrate it, and wait until it has. Raises: libvirt.libvirtError.

        ``xml`` is the domain on the destination, if it is not what the agent there renders.
        """
        self.prepare_destination()
        desired: dict[str, Any] = {
            libvirt.VIR_MIGRATE_PARAM_URI: f"unix://{URI_SOCKET}",
            libvirt.VIR_MIGRATE_PARAM_DEST_XML: xml or self.destination_xml(),
        }
        if bandwidth_mb_s is not None:
            desired[libvirt.VIR_MIGRATE_PARAM_BANDWIDTH] = bandwidth_mb_s
        # A connection of its own: once, with libvirt 9.0, a call beside this one on the same connection never
        # came back, while libvirtd answered others.
        with closing(libvirt.open(self.home.libvirt.uri)) as own:
            domain = own.lookupByName(self.nic.vm_id)
            domain.migrateToURI3(self.away.libvirt.uri, desired, FLAGS)

    def prepare_destination(self) -> None:
        """Write there what the domain has booted."""
        self._guest(self.away).prepare()

    def has_moved(self) -> None:
        """It runs on the other hypervisor now: commands go there."""
        self.home, self.away = self.away, self.home
        self.guest.close()
        self.guest = self._guest(self.home)
        self.guest.attach()

    def phase(self, host: Hypervisor, phase: str, **fields: Any) -> Any:
        """Answer of the agent to a phase of the port's migration."""
        return host.call("POST", f"/v1/ports/{self.nic.port_id}:migrate", {"phase": phase, **fields})

    def move(self, way: Way, peer: Peer) -> Moved:
        """Migrate with the port, from the first call to the last; the peer is reached before and after.

        Not by what the last calls do, unless that is the way.
        """
        self.prepare(way)
        peer.wait_received()
        moved = self.migrate()
        if way is not Way.MANUAL:
            peer.wait_received()
        self.conclude(way)
        peer.wait_received()
        return moved

    def prepare(self, way: Way) -> None:
        if way is Way.PUT:
            self.away.plug(self.nic)
            return
        self.phase(self.away, "prepare", port=self.nic.spec(), activation=way.value)
        if way is Way.AUTO:
            self.phase(self.home, "leave", activation="auto")

    def conclude(self, way: Way) -> None:
        """What is left to do where the VM runs now, and where it ran."""
        if way is Way.PUT:
            self.away.unplug([self.nic])
            return
        if way is Way.MANUAL:
            self.phase(self.home, "activate")
            self.phase(self.away, "leave")
        self.phase(self.home, "commit")
        self.phase(self.away, "commit")

    def give_up(self, way: Way) -> None:
        """Undo `prepare`: the VM stays where it is."""
        if way is Way.PUT:
            self.away.unplug([self.nic])
            return
        self.phase(self.away, "abort")
        if way is Way.AUTO:
            self.phase(self.home, "abort")

    @contextmanager
    def traffic(self, directory: Path) -> Iterator[Peer]:
        """Numbered datagrams both ways and a TCP stream for the time of the block.

        In the guest they end with the next of these, or when its counts are read (`Peer.settle`).
        """
        self.guest.run("kill -9 $(cat /tmp/pid)")
        with Peer(directory, within(PEER, []), PEER_ADDRESS, self.nic.address) as peer:
            start_in(self.guest, self.nic.address, PEER_ADDRESS)
            peer.wait_connected()
            peer.wait_received()
            yield peer

    def _guest(self, host: Hypervisor) -> Guest:
        return Guest(self.nic.vm_id, host.guests, {PROGRAM: program()})


def nic_of(backend: str, number: int) -> Nic:
    return Nic(backend, number, mtu=MTU)
