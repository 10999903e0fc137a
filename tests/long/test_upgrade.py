"""The agent of a release is replaced by a newer one under live ports, and the other way round."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.ovs_rows import HOLDER_MARK
from tests.functional.conftest import BASE
from tests.lab import other_release
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import entered, within
from tests.lab.other_release import OtherRelease
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, run, wait_for
from tests.lab.steps import host_state
from tests.lab.switch import switch
from tests.lab.traffic_hosts import bare_machine
from tests.lab.traffic_taps import TapVm
from tests.lab.vm import Vm

pytestmark = pytest.mark.long

ADDRESSES = ("10.0.0.1", "10.0.0.2")
SOON_S, PORT, GAP_S = 60.0, 5201, 0.005
_SO_NO_CHECK = 11  # include/uapi/asm-generic/socket.h
#: What vswitchd itself writes into the database, by table.
_OWN = {
    "Interface": {
        "statistics", "status", "admin_state", "duplex", "ifindex", "link_resets", "link_speed", "link_state",
        "mac_in_use", "mtu", "ofport", "error",
    },
    "Port": {"statistics", "status", "rstp_status", "rstp_statistics"},
    "Bridge": {"status", "rstp_status", "datapath_id", "datapath_version"},
    "Open_vSwitch": {"statistics", "cur_cfg"},
}  # fmt: skip


@pytest.fixture(scope="module")
def other() -> Iterator[OtherRelease]:
    directory = BASE / "other-release"
    directory.mkdir(parents=True)
    yield other_release.unpacked(directory)
    shutil.rmtree(directory)


# -- datagrams between two VMs ----------------------------------------------------------------------


@dataclass
class Datagrams:
    """Numbered, from one VM to the other, all the time."""

    sent: int = 0
    received: set[int] = field(default_factory=set)

    def wait_more(self, count: int = 100) -> None:
        """Until so many more have arrived of those that are sent from now on."""
        start = self.sent
        wait_for(
            lambda: sum(each >= start for each in list(self.received)) >= count, SOON_S, "datagrams arrive"
        )

    @property
    def lost(self) -> list[int]:
        """Since the first that arrived: before it, the VMs' links may not have been up."""
        return sorted(set(range(min(self.received), self.sent)) - self.received)


@contextmanager
def stream(sender: str, receiver: str, to: str) -> Iterator[Datagrams]:
    """From a namespace to another; after the block, all that will ever arrive has arrived."""
    counted, over, received = Datagrams(), threading.Event(), threading.Event()
    with ExitStack() as stack:
        with entered(receiver):
            inbox = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with entered(sender):
            outbox = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        # A veth leaves the checksum to a NIC, and behind some of the VMs' there is none.
        outbox.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
        inbox.bind((to, PORT))
        inbox.settimeout(0.1)

        def listen() -> None:
            while not received.is_set():
                with suppress(TimeoutError):
                    counted.received.add(int(inbox.recv(64)))

        def send() -> None:
            while not over.wait(GAP_S):
                outbox.sendto(b"%d" % counted.sent, (to, PORT))
                counted.sent += 1

        def last_arrives() -> bool:
            outbox.sendto(b"%d" % counted.sent, (to, PORT))
            return counted.sent in counted.received

        threads = [threading.Thread(target=each, daemon=True) for each in (listen, send)]
        for each in threads:
            each.start()
        try:
            yield counted
            over.set()
            threads[1].join()
            # One path leads there: what was sent before one that has arrived has arrived too, or is lost.
            wait_for(last_arrives, SOON_S, "a datagram arrives in the end")
        finally:
            over.set()
            received.set()
            for each in threads:
                each.join()


# -- hosts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A host with ports, two of which VMs use, and what tells whether anybody has written to it."""

    agent: Callable[[Mapping[str, str] | None], PrivateAgent]
    """The agent of this host; started as it is installed with an environment, or None: this version's."""
    vm: Callable[[dict[str, Any], str], Any]
    specs: Mapping[str, dict[str, Any]]
    state: Callable[[], host_state.State]
    watched: Callable[[], AbstractContextManager[Callable[[], list[str]]]]
    """Gives what tells all that was written to the host since, by others than vswitchd."""


@pytest.fixture(params=["dpdkvhostuser", "linuxbridge"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with {"dpdkvhostuser": on_ovs, "linuxbridge": on_bridges}[request.param]() as made:
        yield made


def specs(backend: str, network: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Two VMs that are filtered and hear each other, and ports of other kinds."""

    def spec(number: int, **fields: Any) -> dict[str, Any]:
        mac = f"52:54:00:00:00:{number:02x}"
        return {"vm_id": f"vm{number}", "mac": mac, "backend": backend, "network": network, **fields}

    own = [{"allowed_addresses": [{"ip": address}]} for address in ADDRESSES]
    return {
        "p1": spec(1, port_security=own[0]),
        "p2": spec(2, port_security=own[1], qos={"egress_kbps": 50_000, "ingress_kbps": 50_000}),
        "p3": spec(3, port_security={"enabled": False}),
        "p4": spec(4, network={"type": "vxlan", "network_id": "blue"}),
    }


@contextmanager
def on_ovs() -> Iterator[Site]:
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, BASE / "upgrade", ignore_errors=True)
        ovs = stack.enter_context(PrivateOvs(BASE / "upgrade" / "ovs"))
        ovs.vsctl(*"add-br br-underlay -- set Bridge br-underlay datapath_type=netdev".split())
        run("ip address add 10.9.0.1/24 dev br-underlay".split())
        run("ip link set br-underlay up".split())
        options = {"ovs": {"local_ip": "10.9.0.1"}}

        @contextmanager
        def vm(body: dict[str, Any], address: str) -> Iterator[str]:
            binding, name = body["binding"], f"vm-{body['port_id']}"
            with Vm(name, binding["socket_path"], body["spec"]["mac"], address):
                ovs.wait_connected(binding["device"])
                yield name

        yield Site(
            lambda env: PrivateAgent(
                BASE / "upgrade" / "agent", ovs, options, as_installed=env is not None, env=env
            ),
            vm,
            specs("dpdkvhostuser", {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100}),
            lambda: host_state.compared(host_state.of_ovs(ovs)),
            lambda: watched_ovs(ovs),
        )


@contextmanager
def watched_ovs(ovs: PrivateOvs) -> Iterator[Callable[[], list[str]]]:
    known = set(commits(ovs.database))
    bridges = ovs.vsctl("list-br").split()
    flows = [["ovs-ofctl", "-O", "OpenFlow14", "monitor", name, "watch:!initial"] for name in bridges]
    with listening(None, ovs.directory, ovs.env, *flows) as received:
        yield (
            lambda: (
                [each for each in commits(ovs.database) if each not in known]
                + [line for line in received() if "event=" in line]
            )
        )


def commits(database: Path) -> Iterator[str]:
    """What ovsdb-server has committed, from its file (ovsdb(5), "File Formats").

    Of each agent its name is left out, by which it says that it manages this database.
    """
    for line in database.read_text().splitlines():
        if line.startswith("OVSDB "):
            continue
        record = json.loads(line)
        for table in record.keys() - {"_date", "_comment", "_is_diff", "name", "version", "cksum", "tables"}:
            for uuid, row in record[table].items():
                written = {name: row[name] for name in set(row or ()) - _OWN.get(table, set())}
                ids = dict(written.get("external_ids", [None, []])[1])
                if row is None or written.keys() - {"external_ids"} or ids.keys() - {HOLDER_MARK}:
                    yield f"{record.get('_date')} {table} {uuid} {written}"


@contextmanager
def on_bridges() -> Iterator[Site]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        name, address = stack.enter_context(bare_machine(1))
        stack.callback(shutil.rmtree, BASE / name, ignore_errors=True)
        options = {"linuxbridge": {"physical_interfaces": "physnet1:", "local_ip": address}}

        @contextmanager
        def vm(body: dict[str, Any], address: str) -> Iterator[str]:
            with TapVm(
                f"vm-{body['port_id']}", name, body["binding"]["device"], body["spec"]["mac"], address
            ) as made:
                yield made.name

        kinds = (["nft", "monitor"], ["ip", "monitor", "link"], ["tc", "monitor"])
        yield Site(
            lambda env: PrivateAgent(
                BASE / name, options=options, netns=name, as_installed=env is not None, env=env
            ),
            vm,
            specs("linuxbridge", {"type": "flat", "physical_network": "physnet1"}),
            lambda: host_state.compared(host_state.of_links(name), host_state.of_bridges(name)),
            lambda: listening(name, BASE / name, {}, *kinds),
        )


@contextmanager
def listening(
    netns: str | None, directory: Path, env: Mapping[str, str], *commands: list[str]
) -> Iterator[Callable[[], list[str]]]:
    """What these print, which tell of each change."""
    with ExitStack() as stack:
        logs = [directory / f"monitor-{number}.log" for number in range(len(commands))]
        for log, command in zip(logs, commands, strict=True):
            unbuffered = within(netns, ["stdbuf", "-oL", *command])
            stack.enter_context(Daemon(command[0], unbuffered, log, env))
        yield lambda: [line for log in logs for line in log.read_text().splitlines()]


# -- the tests --------------------------------------------------------------------------------------


def plug_all(agent: PrivateAgent, site: Site) -> dict[str, dict[str, Any]]:
    network = {"type": "vxlan", "vni": 5001, "peers": ["10.9.0.7"]}
    assert agent.call("PUT", "/v1/networks/blue", network)[0] == 200
    bodies = {}
    for port_id, spec in site.specs.items():
        status, bodies[port_id] = agent.call("PUT", f"/v1/ports/{port_id}", spec)
        assert status == 200, bodies[port_id]
    return bodies


def as_before(agent: PrivateAgent, bodies: Mapping[str, dict[str, Any]]) -> bool:
    """All ports are active, with the binding that their VMs have, and nothing is to be done."""
    found = {port["port_id"]: port for port in agent.get("/v1/ports")[1]}
    assert found.keys() == bodies.keys()
    for port_id, port in found.items():
        assert port["binding"] == bodies[port_id]["binding"]
    status, report = agent.call("POST", "/v1/reconcile", {"dry_run": True})
    states = {port["state"] for port in found.values()}
    return status == 200 and not report["errors"] and not report["changes"] and states == {"active"}


def version(agent: PrivateAgent) -> int:
    """Of the store."""
    with closing(sqlite3.connect(agent.directory / "state" / "agent.db")) as store:
        return int(store.execute("PRAGMA user_version").fetchone()[0])


def restore(agent: PrivateAgent, older: Mapping[str, str]) -> None:
    """As docs/operating/install.md says: the copy that the newer agent made at its first start."""
    state = agent.directory / "state"
    copy = max((state / "backups").iterdir())
    words = ["-m", "netplugin.cli.main", "store", "restore"]
    run([sys.executable, *words, "--state-path", state, copy], env=older)


def test_an_upgrade_and_a_downgrade_under_live_ports(other: OtherRelease, site: Site) -> None:
    """No datagram is lost, bindings stay, and what the newer agent adds to the host it writes once."""
    older, newer = ({}, other.env) if other.is_newer else (other.env, None)
    with ExitStack() as stack:
        old = stack.enter_context(site.agent(older))
        bodies = plug_all(old, site)
        known = version(old)
        names = [
            stack.enter_context(site.vm(bodies[port_id], address))
            for port_id, address in zip(("p1", "p2"), ADDRESSES, strict=True)
        ]
        counted = stack.enter_context(stream(names[0], names[1], ADDRESSES[1]))
        counted.wait_more()
        host = site.state()
        writes = stack.enter_context(site.watched())

        old.stop()
        counted.wait_more()
        new = stack.enter_context(site.agent(newer))
        wait_for(lambda: as_before(new, bodies), SOON_S, "all is as before the upgrade")
        counted.wait_more()
        print(f"\nwith {other.name}, store {known} to {version(new)}, and back", end="")
        changed = host_state.differences(host, site.state()) or "  nothing"
        print(f"\nDatagrams {counted.lost} are lost or on their way. The upgrade changed:\n{changed}")
        host, before_restart = site.state(), len(writes())
        new.stop()
        new.start()
        wait_for(lambda: as_before(new, bodies), SOON_S, "all is as before the restart")
        counted.wait_more()
        assert not host_state.differences(host, site.state())
        assert writes()[before_restart:] == []

        new.stop()
        if version(new) != known:
            old.daemon.start()
            wait_for(lambda: not old.daemon.running, SOON_S, "the older agent refuses the newer store")
            printed = old.daemon.tail()
            assert f"written by a newer netplugin (version {version(new)}" in printed, printed
            assert "netplugin store restore" in printed
            restore(new, older)
        old.start()
        wait_for(lambda: as_before(old, bodies), SOON_S, "all is as before, with the older agent")
        counted.wait_more()
        changed = host_state.differences(host, site.state()) or "  nothing"
        print(f"Lost or on their way: {counted.lost}. Back again, of that:\n{changed}")
    print(f"{counted.sent} datagrams, {len(counted.lost)} lost")
    assert counted.sent > 0 and counted.lost == []
