"""What may end on a hypervisor while a VM migrates, and what a platform does after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

import libvirt  # type: ignore[import-untyped]

from tests.lab.hypervisor import OVS_BACKEND, Hypervisor
from tests.lab.processes import CommandError, LabError, run, wait_for
from tests.lab.traveller import Traveller, Way

DEADLINE_S = 60.0
# So slow that the migration goes on until it is told to hurry.
SLOW_MB_S = 1


class Victim(StrEnum):
    AGENT = "agent"
    VSWITCHD = "vswitchd"
    LIBVIRTD = "libvirtd"
    QEMU = "QEMU"


class Moment(StrEnum):
    PREPARED = "prepared"
    """The ports are, and libvirt has not been called."""
    MOVING = "moving"
    """The VM's memory is being copied."""
    MOVED = "moved"
    """The VM runs on the destination, and the ports are not committed."""


@dataclass(frozen=True)
class Mishap:
    moment: Moment
    victim: Victim
    at_destination: bool

    def __str__(self) -> str:
        side = "destination" if self.at_destination else "source"
        return f"{self.moment.value}-{self.victim.value}-{side}"


def mishaps(backends: Sequence[str]) -> Iterator[tuple[str, Mishap]]:
    """Every backend's."""
    for backend, moment, victim, at_destination in product(backends, Moment, Victim, (False, True)):
        # Before libvirt is called there is no QEMU on the destination, and after it none on the source.
        has_qemu = moment is Moment.MOVING or at_destination == (moment is Moment.MOVED)
        if {Victim.VSWITCHD: backend == OVS_BACKEND, Victim.QEMU: has_qemu}.get(victim, True):
            yield backend, Mishap(moment, victim, at_destination)


def befall(traveller: Traveller, way: Way, mishap: Mishap, directory: Path) -> Hypervisor | None:
    """Migrate under traffic, let it happen, and do what a platform does then.

    Returns where the VM runs then and is reached, with nothing left on the other side; None if it has ended,
    and was booted again.
    """
    where = traveller.away if mishap.at_destination else traveller.home
    with traveller.traffic(directory) as peer:
        traveller.prepare(way)
        if mishap.moment is Moment.PREPARED:
            kill(where, mishap.victim, traveller)
        elif mishap.moment is Moment.MOVING:
            with moving(traveller):
                kill(where, mishap.victim, traveller)
        else:
            traveller.start_migration()
            kill(where, mishap.victim, traveller)
        lives = recover(traveller, way)
        assert_one_side(traveller)
        if lives:
            peer.wait_received()
            return traveller.home
    traveller.boot()
    traveller.configure()
    return None


def qemu_pids(host: Hypervisor, vm_id: str) -> list[int]:
    """The processes of a VM on a hypervisor, which are in its network namespace and nowhere else."""
    netns = os.stat(f"/run/netns/{host.ovs.netns}").st_ino
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            here = os.stat(process / "ns" / "net").st_ino == netns
        except OSError:
            continue  # it has ended
        if here and any(word.startswith(f"guest={vm_id},".encode()) for word in words):
            found.append(int(process.name))
    return found


def kill(host: Hypervisor, victim: Victim, traveller: Traveller) -> None:
    """Kill it, and start it again as systemd would; a QEMU that was killed stays so."""
    if victim is Victim.AGENT:
        host.agent.kill()
        host.agent.start()
    elif victim is Victim.VSWITCHD:
        host.ovs.kill_vswitchd()
        host.ovs.start_vswitchd()
    elif victim is Victim.LIBVIRTD:
        host.libvirt.kill_libvirtd()
        host.libvirt.start_libvirtd()
    else:
        for pid in qemu_pids(host, traveller.nic.vm_id):
            os.kill(pid, signal.SIGKILL)
        connection = host.libvirt.connect()
        wait_for(
            lambda: traveller.nic.vm_id not in [each.name() for each in connection.listAllDomains()],
            DEADLINE_S,
            "libvirt has noticed the end of QEMU",
        )


@contextmanager
def moving(traveller: Traveller) -> Iterator[None]:
    """The VM's memory is being copied while the block begins; then libvirt may end it, or give it up."""
    errors: list[libvirt.libvirtError] = []

    def migrate() -> None:
        try:
            traveller.start_migration(SLOW_MB_S)
        except libvirt.libvirtError as error:
            errors.append(error)

    # Nothing that must outlive this thread is started by it.
    thread = threading.Thread(target=migrate)
    thread.start()
    try:
        domain = traveller.domain(traveller.home)
        wait_for(lambda: errors or _copied(domain), DEADLINE_S, "memory is being copied")
        if errors:
            raise LabError(f"the migration does not begin: {errors[0]}")
        yield
    finally:
        _hurry(traveller)
        thread.join(DEADLINE_S * 3)
        if thread.is_alive():
            raise LabError("libvirt goes on migrating")


def _copied(domain: libvirt.virDomain) -> bool:
    try:
        return int(domain.jobStats().get("memory_processed", 0)) > 0
    except libvirt.libvirtError:
        return False  # not yet, or ended


def _hurry(traveller: Traveller) -> None:
    try:
        traveller.domain(traveller.home).migrateSetMaxSpeed(1 << 20)
    except libvirt.libvirtError:
        pass  # there is no migration, or no VM, any more


def homes(traveller: Traveller) -> list[Hypervisor]:
    """Where libvirt has the VM running, once it has made up its mind."""
    hosts = (traveller.home, traveller.away)

    def states() -> list[int | None]:
        found: list[int | None] = []
        for host in hosts:
            try:
                found.append(int(traveller.domain(host).state()[0]))
            except libvirt.libvirtError:
                found.append(None)
        return found

    wait_for(
        lambda: set(states()) <= {None, libvirt.VIR_DOMAIN_RUNNING} and None in states(),
        DEADLINE_S,
        "the VM runs on one side at most",
    )
    return [host for host, state in zip(hosts, states(), strict=True) if state is not None]


def recover(traveller: Traveller, way: Way) -> bool:
    """What a platform does when a migration has ended in whatever way; whether the VM still runs."""
    where = homes(traveller)
    if where == [traveller.away]:
        traveller.has_moved()
        traveller.conclude(way)
    else:
        traveller.give_up(way)
    return bool(where)


def assert_one_side(traveller: Traveller) -> None:
    """The port is on the VM's side alone, as an ordinary one, and nothing is left on the other."""
    home, away, nic = traveller.home, traveller.away, traveller.nic
    port = home.call("GET", f"/v1/ports/{nic.port_id}")
    wait_for(
        lambda: home.call("GET", f"/v1/ports/{nic.port_id}")["state"] == "active",
        DEADLINE_S,
        "the port works where the VM is",
    )
    assert away.agent.get(f"/v1/ports/{nic.port_id}")[0] == 404
    assert devices(home, nic.backend) - {port["binding"]["device"]} == uplinks(home, nic.backend)
    assert devices(away, nic.backend) == uplinks(away, nic.backend)
    assert qemu_pids(away, nic.vm_id) == []
    for host in (home, away):
        report = host.call("POST", "/v1/reconcile", {"dry_run": True})
        assert report["changes"] == [] and report["errors"] == [], report


def devices(host: Hypervisor, backend: str) -> set[str]:
    """The names of what the host has of ports: OVS's rows, or the links on bridges."""
    if backend == OVS_BACKEND:
        return set(host.ovs.vsctl("--bare", "--columns=name", "find", "Interface", "type!=internal").split())
    try:
        shown = run(["ip", "-netns", str(host.ovs.netns), "-brief", "link", "show", "type", "tun"])
    except CommandError:
        return set()
    return {line.split()[0] for line in shown.splitlines()} - {"ovs-netdev", "br-phys1"}


def uplinks(host: Hypervisor, backend: str) -> set[str]:
    if backend != OVS_BACKEND:
        return set()
    return set(host.ovs.vsctl("--bare", "--columns=name", "find", "Interface", "type=dpdk").split())
