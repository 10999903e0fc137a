"""The deb is upgraded, taken back, killed in the middle and removed under VMs that exchange 1,000 datagrams a
second each way, on a host with Debian's systemd, OVS-DPDK, Linux bridges and libvirt.

The tests are in the order of an operator's life with it: each has the host as the one before has left it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lab import sequenced
from tests.lab.processes import run, wait_for
from tests.lab.steps.host_state import differences
from tests.long.test_upgrade import commits
from tests.packages import debs, inside, machine
from tests.packages.machine import SHARE, Host

pytestmark = [pytest.mark.outside, pytest.mark.long, pytest.mark.timeout(7200)]

UNIT, CONF = "netplugin-agent", "/etc/netplugin/netplugin.conf"
STORE = "/var/lib/netplugin/agent.db"
VSWITCHD = "/usr/lib/openvswitch-switch-dpdk"
READY_S = 60.0
#: Upgrades, each to a version of its own.
REPEATS = 5
OVS_OPTIONS = {
    "dpdk-init": "true",
    "per-port-memory": "true",
    "dpdk-extra": '"-a 0000:00:00.0"',
    "dpdk-socket-mem": "256",
    "dpdk-socket-limit": "256",
    "pmd-cpu-mask": "0x2",
    "pmd-maxsleep": "500",
}
OPTIONS = """\
[agent]
enabled_backends = dpdkvhostuser,linuxbridge
[dpdkvhostuser]
guest_hugepages = false
[ovs]
bridge_mappings = physnet1:br-phys1
[linuxbridge]
physical_interfaces = physnet2:
"""
NETWORKS = {
    "dpdkvhostuser": ("--physical-network", "physnet1", "--vlan-id", "100"),
    "linuxbridge": ("--physical-network", "physnet2"),
}


@dataclass
class Site:
    """The host, and what the tests know of it."""

    host: Host
    original: Path
    #: What there was before the package was installed.
    files: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()
    bindings: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: What apt has installed last.
    newest: Path = Path()

    def install(self, package: Path, *options: str, umask: str = "022") -> tuple[int, str]:
        script = f'umask {umask}; exec apt-get install -y "$@"'
        status, printed = self.host.tried("sh", "-c", script, "sh", *options, self.shared(package))
        self.newest = self.newest if status else package
        return status, printed

    def shared(self, package: Path) -> Path:
        """Its path on the host."""
        there = self.host.share / package.name
        if not there.exists():
            shutil.copyfile(package, there)
        return SHARE / package.name

    def call(self, *words: str) -> Any:
        return json.loads(self.host.run("netplugin", *words, "-f", "json"))

    def ready(self) -> bool:
        return self.host.lab("ready") is True

    def wait_ready(self) -> None:
        wait_for(self.ready, READY_S, "the agent is ready", lambda: self.journal())

    def journal(self) -> str:
        return self.host.run("journalctl", "--no-pager", "-n", "30", "-u", UNIT)

    def main_pid(self) -> str:
        return self.host.run("systemctl", "show", "-P", "MainPID", UNIT).strip()

    def version(self) -> str:
        return self.host.run("dpkg-query", "-W", "-f", "${Version} ${db:Status-Abbrev}", "netplugin").strip()

    def schema(self) -> int:
        read = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1])"
        read += "; print(c.execute('PRAGMA user_version').fetchone()[0])"
        return int(self.host.run("python3", "-c", read, STORE))

    def seen(self) -> frozenset[str]:
        return frozenset(self.host.lab("state"))

    def as_before(self) -> None:
        """All ports are active, with their bindings, and the agent finds nothing to do."""
        self.wait_ready()
        assert {port["port_id"]: port["state"] for port in self.call("port", "list")} == dict.fromkeys(
            self.bindings, "active"
        )
        for port_id, binding in self.bindings.items():
            assert self.call("port", "show", port_id)["binding"] == binding

    def plug(self) -> None:
        for backend, network in NETWORKS.items():
            for port_id, number in inside.PAIRS[backend].items():
                given = ("--vm-id", f"vm-{port_id}", "--mac", inside.mac(number), "--backend", backend)
                own = ("--allowed-address", inside.address(number))
                self.bindings[port_id] = self.call("port", "put", port_id, *given, *network, *own)["binding"]

    def start_vms(self, **more: Mapping[str, Any]) -> None:
        (self.host.share / "bindings.json").write_text(json.dumps({**self.bindings, **more}))
        self.host.start("lab-vms", "python3", "-m", "tests.packages.inside", "vms")
        wait_for(
            lambda: self.host.succeeds("test", "-e", inside.VMS / "ready"),
            READY_S,
            "the VMs are there",
            lambda: self.host.tried("journalctl", "-n", "30", "-u", "lab-vms")[1],
        )
        self.flowing()

    def stop_vms(self) -> None:
        self.host.stop("lab-vms")
        self.host.run("rm", "-rf", inside.VMS)

    def counts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.host.lab("counts")
        return found

    def flowing(self) -> None:
        """Until each has received more of its peer."""
        before = self.counts()

        def arrived() -> bool:
            now = self.counts()
            return all(now[name]["received"] > before[name]["received"] + 100 for name in now)

        wait_for(arrived, READY_S, "datagrams arrive")

    @contextmanager
    def stretch(self) -> Iterator[Stretch]:
        """Count what is lost of that which is sent in the block."""
        made, start, began = Stretch(), self.counts(), time.monotonic()
        yield made
        end, made.seconds = self.counts(), time.monotonic() - began
        for backend, pair in inside.PAIRS.items():
            ends = tuple(pair)
            if ends[0] not in end:
                continue
            for receiver, sender in (ends, ends[::-1]):
                window = range(start[sender]["sent"], end[sender]["sent"])
                made.sent[backend] = made.sent.get(backend, 0) + len(window)
                made.lost[backend] = made.lost.get(backend, 0) + self._lost(receiver, window)

    def _lost(self, receiver: str, window: range) -> int:
        found: dict[str, Any] = {}

        def passed() -> bool:
            found.update(self.counts()[receiver])
            return int(found["highest"]) >= window.stop

        wait_for(passed, READY_S, f"{receiver} receives what was sent later")
        return sum(
            max(0, min(last + 1, window.stop) - max(first, window.start)) for first, last in found["missing"]
        )

    @contextmanager
    def watched(self) -> Iterator[Callable[[], list[str]]]:
        """Gives what tells all that was written to OVSDB, links, queues, rules and flows in the block."""

        def committed() -> list[str]:
            self.host.run("cp", "/etc/openvswitch/conf.db", SHARE / "conf.db")
            return list(commits(self.host.share / "conf.db"))

        known = set(committed())
        self.host.run("rm", "-rf", inside.WATCHED)
        self.host.start("lab-watch", "python3", "-m", "tests.packages.inside", "watch")
        wait_for(lambda: self.host.succeeds("test", "-e", inside.WATCHED / "ready"), READY_S, "it watches")
        logs = f"cat {inside.WATCHED}/*.log"

        def written() -> list[str]:
            lines = [line for line in self.host.run("sh", "-c", logs).splitlines() if line.strip()]
            # ovs-ofctl(8): `event=ABBREV` tells of what the monitor's own connection has caused.
            seen = [each for each in lines if not re.match(r"NXST|OFPST|OFPT|\s*event=ABBREV", each)]
            return [each for each in committed() if each not in known] + seen

        try:
            yield written
        finally:
            self.host.stop("lab-watch")


@dataclass
class Stretch:
    """Datagrams by backend."""

    seconds: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (f"{backend} {self.lost[backend]} of {sent}" for backend, sent in self.sent.items())
        return f"{self.seconds:.0f} s, lost: {', '.join(parts)}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with machine.booted(machine.base()) as host:
        program = host.share / sequenced.PROGRAM
        program.write_bytes(sequenced.program())
        program.chmod(0o755)
        yield Site(host, debs.deb(tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def packages(site: Site, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Newer ones, each with a migration of the store more."""
    directory = site.host.directory / "packages"
    directory.mkdir()
    return [debs.newer(site.original, number, directory) for number in range(1, REPEATS + 1)]


def test_installing_starts_nothing_and_changes_no_bridge(site: Site) -> None:
    host = site.host
    host.run(
        "update-alternatives", "--set", "ovs-vswitchd", "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"
    )
    given = [f"other_config:{name}={value}" for name, value in OVS_OPTIONS.items()]
    host.run("ovs-vsctl", "--no-wait", "set", "Open_vSwitch", ".", *given)
    host.run("systemctl", "restart", "openvswitch-switch")
    site.files, site.state = frozenset(host.lab("files")), site.seen()
    status, printed = site.install(site.original)
    assert status == 0, printed
    assert not differences(
        site.state, frozenset(each for each in site.seen() if "/run/netplugin" not in each)
    )
    assert host.tried("systemctl", "is-active", UNIT)[1].strip() == "inactive"
    assert host.tried("systemctl", "is-enabled", UNIT)[1].strip() == "disabled"


def test_an_upgrade_adds_no_loss_and_writes_nothing(site: Site, packages: list[Path]) -> None:
    host = site.host
    host.write(CONF, OPTIONS)
    host.run("systemctl", "enable", "--now", UNIT)
    site.wait_ready()
    site.plug()
    site.start_vms()
    site.as_before()
    known, rows = site.schema(), []
    for number, package in enumerate(packages[:REPEATS], 1):
        before, agent = site.seen(), site.main_pid()
        with site.watched() as written:
            with site.stretch() as upgraded:
                status, printed = site.install(package)
                assert status == 0, printed
                site.wait_ready()
            site.as_before()
            assert site.main_pid() != agent and site.schema() == known + number
            assert written() == []
        assert not differences(before, site.seen())
        with site.stretch() as quiet:
            time.sleep(upgraded.seconds)
        rows.append((upgraded, quiet))
        print(f"\n{number}: upgrade {upgraded}; without {quiet}", end="")
    for backend in NETWORKS:
        with_one, without = (sum(row[side].lost[backend] for row in rows) for side in (0, 1))
        assert with_one <= without, backend


def test_a_downgrade_is_refused_until_its_store_is_restored(site: Site) -> None:
    """The refusal says what to do, and that is done."""
    host, known, version, agent = site.host, site.schema(), site.version(), site.main_pid()
    with site.stretch() as refused:
        status, printed = site.install(site.original, "--allow-downgrades")
        assert status != 0 and "written by a newer netplugin" in printed, printed
        assert "netplugin store restore" in printed, printed
        site.as_before()
        assert site.schema() == known and site.version() == version and site.main_pid() == agent
        host.run("systemctl", "stop", UNIT)
        copies = host.run("sh", "-c", "ls -v /var/lib/netplugin/backups").split()
        oldest = f"/var/lib/netplugin/backups/{copies[0]}"
        host.run("netplugin", "store", "restore", "--state-path", "/var/lib/netplugin", oldest)
        status, printed = site.install(site.original, "--allow-downgrades")
        assert status == 0, printed
        host.run("systemctl", "start", UNIT)
        site.as_before()
    print(f"\ndowngrade: {refused}", end="")
    assert site.schema() < known


#: When dpkg is killed: what it prints just before.
MOMENTS = ("Unpacking netplugin", "Setting up netplugin")


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_upgrade_that_is_killed_is_completed_by_the_next(
    site: Site, packages: list[Path], moment: str
) -> None:
    host, package = site.host, packages[MOMENTS.index(moment)]
    with site.stretch() as cut:
        log = host.share / f"killed-{package.name}.log"
        install = f"exec dpkg -i {site.shared(package)} > {SHARE / log.name} 2>&1"
        host.start("lab-upgrade", "stdbuf", "-oL", "sh", "-c", install)
        wait_for(lambda: log.exists() and moment in log.read_text(), READY_S, f"dpkg says {moment}")
        time.sleep(KILL_AFTER_S)
        host.run("systemctl", "kill", "--signal=KILL", "lab-upgrade")
        wait_for(lambda: not host.succeeds("systemctl", "is-active", "lab-upgrade"), READY_S, "it has ended")
        assert not site.version().endswith("ii"), "it was killed too late"
        site.as_before()
        status, printed = host.tried("dpkg", "--configure", "-a")
        if not site.version().endswith("ii"):
            status, printed = site.install(package)
        assert status == 0, printed
        site.as_before()
    print(f"\nkilled at {moment!r}: {cut}", end="")
    assert site.version().endswith("ii")


def test_a_full_disk_stops_an_upgrade_and_not_the_agent(site: Site, packages: list[Path]) -> None:
    """`/opt` is a file system of its own, and there is room for one version only."""
    host, version, package = site.host, site.version(), packages[2]
    used = int(host.run("du", "-sm", "/opt/netplugin").split()[0])
    mount = f"mount -t tmpfs -o size={used + ROOM_MB}m,mode=755 tmpfs"
    host.run("sh", "-uc", ON_OPT, "sh", mount)
    host.run("systemctl", "restart", UNIT)
    site.as_before()
    agent = site.main_pid()
    with site.stretch() as full:
        status, printed = site.install(package)
        assert status != 0 and "No space left" in printed, printed
        assert site.version().split()[0] == version.split()[0] and site.call("port", "list")
        assert site.main_pid() == agent
        host.run("mount", "-o", "remount,size=1g", "/opt")
        status, printed = site.install(package)
        assert status == 0, printed
        site.as_before()
    print(f"\nfull disk, and again with room: {full}", end="")
    host.run("sh", "-uc", ON_OPT, "sh", "umount --lazy")
    host.run("systemctl", "restart", UNIT)
    site.as_before()


#: Arguments: what follows ``mount``; the files stay.
ON_OPT = """
rm -rf /var/tmp/opt; mkdir /var/tmp/opt; cp -a /opt/netplugin /var/tmp/opt/
$1 /opt
[ -e /opt/netplugin ] && rm -r /opt/netplugin
cp -a /var/tmp/opt/netplugin /opt/
"""
KILL_AFTER_S, ROOM_MB = 1.0, 16


def test_what_the_operator_has_set_stays(site: Site, packages: list[Path]) -> None:
    """A drop-in and the options outlive an upgrade under root's umask 077, and users can run the command."""
    host = site.host
    host.write(f"/etc/systemd/system/{UNIT}.service.d/own.conf", "[Service]\nEnvironment=LAB_DROPPED_IN=1\n")
    with site.stretch() as strict:
        status, printed = site.install(packages[3], umask="077")
        assert status == 0, printed
        site.as_before()
    assert b"LAB_DROPPED_IN=1" in (host.run("cat", f"/proc/{site.main_pid()}/environ").encode())
    assert host.run("cat", CONF) == OPTIONS
    host.run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "netplugin", "--version")
    print(f"\nwith umask 077 and a drop-in: {strict}", end="")


def test_ovs_restarts_during_an_upgrade(site: Site, packages: list[Path]) -> None:
    """Nothing is left to do afterwards. What is lost is lost by the restart of OVS."""
    host = site.host
    with site.stretch() as both:
        host.start("lab-restart", "sh", "-c", "sleep 2; exec systemctl restart openvswitch-switch")
        status, printed = site.install(packages[4])
        assert status == 0, printed
        site.as_before()
        site.flowing()
    print(f"\nOVS restarted during an upgrade: {both}", end="")


def ovs_package(host: Host) -> Path:
    """The same version again, from this machine's apt."""
    version = host.run("dpkg-query", "-W", "-f", "${Version}", "openvswitch-switch")
    run(["apt-get", "download", f"openvswitch-switch={version}"], READY_S, cwd=host.share)
    (found,) = host.share.glob("openvswitch-switch_*.deb")
    return SHARE / found.name


@pytest.mark.parametrize("how", ["its package is installed again", "its unit is restarted"])
def test_the_gap_of_a_restart_of_ovs_and_of_one_without_us(site: Site, how: str) -> None:
    """Two more VMs are on a bridge without the agent, of the same OVS."""
    host = site.host
    site.stop_vms()
    plain = {}
    bridge = "add-br br-plain -- set Bridge br-plain datapath_type=netdev"
    host.run("ovs-vsctl", *bridge.split())
    host.run("mkdir", "-p", "/run/lab-plain")
    for name in inside.PAIRS["plain"]:
        path = f"/run/lab-plain/{name}"
        add = f"add-port br-plain {name} -- set Interface {name} type=dpdkvhostuserclient"
        host.run("ovs-vsctl", *add.split(), f"options:vhost-server-path={path}")
        plain[name] = {"device": name, "socket_path": path}
    site.start_vms(**plain)
    with site.stretch() as gap:
        if how == "its unit is restarted":
            host.run("systemctl", "restart", "openvswitch-switch")
        else:
            again = ovs_package(host)
            status, printed = host.tried("apt-get", "install", "-y", "--reinstall", again)
            assert status == 0, printed
        site.as_before()
        site.flowing()
    site.stop_vms()
    host.run("ovs-vsctl", "del-br", "br-plain")
    site.start_vms()
    print(f"\nOVS, {how}: {gap}", end="")


def test_ports_are_there_before_libvirt_starts_after_a_reboot(site: Site) -> None:
    host = site.host
    before = site.seen()
    site.stop_vms()
    looks = "ip -o link; ovs-vsctl list-ports br-phys1; systemctl is-active netplugin-agent"
    look = f"[Service]\nExecStartPre=/bin/sh -c '({looks}) > /run/lab-before-libvirt 2>&1'\n"
    host.write("/etc/systemd/system/libvirtd.service.d/look.conf", look)
    host.reboot()
    site.as_before()
    host.run("systemctl", "start", "libvirtd")
    seen = host.run("cat", "/run/lab-before-libvirt")
    for binding in site.bindings.values():
        assert binding["device"] in seen, seen
    assert seen.splitlines()[-1] == "active"
    stamps = {}
    for unit in (UNIT, "libvirtd", "libvirt-guests"):
        shown = host.run("systemctl", "show", "-P", "ActiveEnterTimestampMonotonic", unit)
        stamps[unit] = int(shown) / 1e6
    assert stamps[UNIT] < stamps["libvirtd"] and stamps[UNIT] < stamps["libvirt-guests"], stamps
    first = min(stamps.values())
    after = ", ".join(f"{unit} {each - first:.2f} s" for unit, each in stamps.items())
    print(f"\nreboot, active after the first: {after}", end="")
    site.start_vms()
    assert not differences(before, site.seen())


def test_ports_of_running_vms_outlive_the_package(site: Site) -> None:
    """It is removed while the agent is down; installed again, it goes on with them."""
    host = site.host
    host.run("systemctl", "stop", UNIT)
    before = site.seen()
    with site.stretch() as removed:
        status, printed = host.tried("apt-get", "remove", "-y", "netplugin")
        assert status == 0, printed
        for port_id in site.bindings:
            assert f"{port_id} of VM vm-{port_id}" in printed, printed
        assert "netplugin port delete" in printed, printed
        assert not differences(before, site.seen())
        assert host.succeeds("test", "-s", STORE) and host.succeeds("test", "-s", CONF)
        site.flowing()
        status, printed = site.install(site.newest)
        assert status == 0, printed
        host.run("systemctl", "enable", "--now", UNIT)
        site.as_before()
    print(f"\nremoved and installed again: {removed}", end="")


def test_after_the_vms_are_gone_a_purge_leaves_the_host_as_it_was(site: Site) -> None:
    host = site.host
    site.stop_vms()
    host.run("netplugin", "port", "delete", *site.bindings)
    host.run("rm", "-rf", f"/etc/systemd/system/{UNIT}.service.d", "/etc/systemd/system/libvirtd.service.d")
    status, printed = host.tried("apt-get", "purge", "-y", "netplugin")
    assert status == 0, printed
    assert not differences(site.state, site.seen())
    assert not differences(site.files, frozenset(host.lab("files")))
