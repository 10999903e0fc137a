"""VPP as a VNF: its configuration, what is asked of it, and what its counters say.

The VPP here is a stand-in at the edge of its API: it keeps what it is given and answers as the real one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from netplugin_zeroloss import machines
from netplugin_zeroloss.loss.contract import AttributionError
from netplugin_zeroloss.machines import Local, MachineError, Ssh, SshMachine
from netplugin_zeroloss.vnf import vpp_api
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    VnfCores,
    VnfError,
    VnfPort,
    VppDescription,
)
from netplugin_zeroloss.vnf.vpp import Vpp, startup_conf
from netplugin_zeroloss.vnf.vpp_api import Api

from netplugin.programs.program import ProgramError
from netplugin.programs.ssh import SshTarget
from tests.unit.zeroloss.stand_ins import SSH, VPP, install

TEMPLATE = Path(__file__).resolve().parents[3] / "tools/trex/startup.conf"
NICS = ("0000:00:05.0", "0000:00:06.0")
PORTS = tuple(
    VnfPort(Attachment.VHOST_USER, f"/run/{n}", f"52:54:00:00:0a:0{n}", f"52:54:00:00:0b:0{n}", 8)
    for n in range(2)
)
CORES = VnfCores(0, tuple(range(1, 8)))

# -- startup.conf --------------------------------------------------------------------------------


def _settings(text: str) -> list[str]:
    """The lines without comments, blank lines and indentation."""
    stripped = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line]


def _conf(
    cores: VnfCores, attachment: Attachment = Attachment.VFIO, queues: int = 1, mtu: int = 1500, **fields: Any
) -> str:
    ports = [replace(PORTS[n], attachment=attachment, device=NICS[n], mtu=mtu) for n in range(2)]
    return startup_conf("/run/vpp", VppDescription(type="vpp", **fields), ports, cores, queues)


def test_the_template_is_what_vpp_is_given() -> None:
    assert _settings(TEMPLATE.read_text()) == _settings(_conf(CORES, queues=8))


def test_what_is_not_asked_is_not_in_startup_conf() -> None:
    text = _conf(VnfCores(), Attachment.NETDEV, hugepages=False)
    assert "cpu" not in text and "dpdk" not in text
    assert "plugin af_packet_plugin.so { enable }" in text and "page-size default" in text
    jumbo = _conf(VnfCores(3), mtu=9000, hugepages=False)
    assert "no-multi-seg" not in jumbo and "no-hugetlb" in jumbo
    assert "main-core 3" in jumbo and "corelist-workers" not in jumbo


def test_a_vpp_that_sleeps() -> None:
    assert "poll-sleep" not in _conf(VnfCores(0))
    text = _conf(VnfCores(0), poll_sleep_us=200)
    (unix,) = [section for section in text.split("}\n") if section.startswith("unix {")]
    assert "  poll-sleep-usec 200\n" in unix


# -- what is asked of it -------------------------------------------------------------------------


class Stand(Api):
    """A VPP with as many receive queues as it is given; keeps each message that it was sent."""

    def __init__(self, queues: int = 8, interfaces: int = 2) -> None:
        self.queues, self.interfaces = queues, interfaces
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.link, self.closed = 3, 0

    def call(self, message: str, **fields: Any) -> Any:
        self.sent.append((message, fields))
        return SimpleNamespace(version="26.06", reply=f"<{fields.get('cmd')}>", sw_if_index=7)

    def dump(self, message: str, **fields: Any) -> list[Any]:
        if message == "sw_interface_dump":
            return [
                SimpleNamespace(interface_name=f"port{n}", sw_if_index=n + 1, flags=self.link)
                for n in range(self.interfaces)
            ]
        index = fields["sw_if_index"]
        return [
            SimpleNamespace(sw_if_index=index, queue_id=queue, worker_id=queue % 7)
            for queue in range(self.queues)
        ]

    def close(self) -> None:
        self.closed += 1

    def fields(self, message: str) -> list[dict[str, Any]]:
        return [fields for sent, fields in self.sent if sent == message]


@pytest.fixture
def vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Programs that replace ssh and vpp; what ssh was called with is in ``log``."""
    yield install(tmp_path, monkeypatch, ssh=SSH, vpp=VPP)


def _in_a_vm(**fields: Any) -> VppDescription:
    machine = {"type": "ssh", "host": "10.0.0.9", "port": 2222, "key": "/k"}
    return VppDescription.model_validate({"type": "vpp", "machine": machine, "nics": NICS} | fields)


def test_vpp_in_a_vm_routes_each_port_to_its_partner(vm: Path) -> None:
    stand = Stand()
    with Vpp(_in_a_vm(), PORTS, CORES, lambda path: stand) as vnf:
        info = vnf.start()
        vnf.check()
        assert (info.name, info.version, info.rx_queues) == ("vpp", "26.06", (8, 8))
        conf = info.configuration["startup.conf"]
        assert "dev 0000:00:06.0 { name port1 }" in conf and "corelist-workers 1-7" in conf
        for read_back in ("show threads", "show interface rx-placement"):
            assert info.configuration[read_back] == f"<{read_back}>"
    assert stand.closed == 1
    neighbours = [each["neighbor"] for each in stand.fields("ip_neighbor_add_del")]
    assert [n["mac_address"] for n in neighbours] == [port.peer_mac for port in PORTS]
    assert all(n["flags"] == 1 for n in neighbours), "static: nothing is asked of ARP"
    routes = [each["route"] for each in stand.fields("ip_route_add_del")]
    for number, route in enumerate(routes):
        (path,) = route["paths"]
        partner = neighbours[number ^ 1]
        assert route["prefix"] == "0.0.0.0/0" and route["table_id"] == number + 1
        assert path["sw_if_index"] == partner["sw_if_index"]
        assert path["nh"]["address"]["ip4"] == partner["ip_address"]
    tables = [(f["sw_if_index"], f["vrf_id"]) for f in stand.fields("sw_interface_set_table")]
    assert tables == [(1, 1), (2, 2)]
    macs = [f["mac_address"] for f in stand.fields("sw_interface_set_mac_address")]
    assert macs == [port.mac for port in PORTS]
    called = vm.read_text()
    assert "-p 2222 " in called and " root@10.0.0.9 " in called
    assert "StrictHostKeyChecking=yes" in called and "BatchMode=yes" in called


def test_fewer_queues_than_were_asked_are_noticed(vm: Path) -> None:
    """VPP takes one queue, without a word, of a device that has not as many as it wants."""
    with Vpp(_in_a_vm(), PORTS, CORES, lambda path: Stand(queues=1)) as vnf:
        with pytest.raises(VnfError, match=r"polls 1 receive queues of 0000:00:05\.0, not the 8"):
            vnf.start()
    assert Vpp(_in_a_vm(rx_queues=2), PORTS, CORES)._queues == 2


def test_a_nic_that_vpp_has_not(vm: Path) -> None:
    with Vpp(_in_a_vm(), PORTS, CORES, lambda path: Stand(interfaces=1)) as vnf:
        with pytest.raises(VnfError, match=r"no interface for 0000:00:06\.0: is it bound"):
            vnf.start()


def test_a_link_that_stays_or_goes_down(vm: Path) -> None:
    stand = Stand()
    stand.link = 1
    with Vpp(_in_a_vm(start_s=1.5), PORTS, CORES, lambda path: stand) as vnf:
        with pytest.raises(VnfError, match="not in time"):
            vnf.start()
    stand.link = 3
    with Vpp(_in_a_vm(), PORTS, CORES, lambda path: stand) as vnf:
        vnf.start()
        stand.link = 1
        with pytest.raises(VnfError, match=r"the link of 0000:00:05\.0 is down"):
            vnf.check()


def test_vpp_on_this_machine_makes_its_interfaces(
    vm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand()
    # Both would be interface 7: as many links and queues as are requested of it.
    monkeypatch.setattr(stand, "dump", lambda message, **fields: _details(fields.get("sw_if_index", 7)))
    ports = (
        VnfPort(Attachment.VHOST_BACKEND, str(tmp_path / "v.sock"), PORTS[0].mac, PORTS[0].peer_mac, 2),
        VnfPort(Attachment.NETDEV, "lo", PORTS[1].mac, PORTS[1].peer_mac, 2),
    )
    local = VppDescription(type="vpp", hugepages=False)
    with Vpp(local, ports, VnfCores(), lambda path: stand) as vnf:
        info = vnf.start()
        assert vnf.place.name == "vnf"
    (vhost,), (netdev,) = (
        stand.fields(message) for message in ("create_vhost_user_if_v2", "af_packet_create_v3")
    )
    assert vhost["is_server"] and vhost["sock_filename"] == ports[0].device
    assert netdev["host_if_name"] == "lo" and netdev["num_rx_queues"] == 2
    conf = info.configuration["startup.conf"]
    assert "vhost_plugin.so" in conf and "af_packet_plugin.so" in conf and "dpdk" not in conf
    assert info.rx_queues == (2, 2)


def _details(index: int) -> list[Any]:
    return [SimpleNamespace(sw_if_index=index, flags=3, queue_id=n) for n in range(2)]


def test_ports_that_vpp_cannot_have() -> None:
    for attachment in (Attachment.VHOST_USER, Attachment.VHOST_VDPA, Attachment.TAP):
        ports = tuple(replace(port, attachment=attachment) for port in PORTS)
        with pytest.raises(VnfError, match="Put it into a VM"):
            Vpp(VppDescription(type="vpp"), ports, CORES)
    with pytest.raises(VnfError, match="1 nics for 2 ports"):
        Vpp(_in_a_vm(nics=NICS[:1]), PORTS, CORES)
    with pytest.raises(VnfError, match="say in `nics`"):
        Vpp(_in_a_vm(nics=()), PORTS, CORES)


def test_without_its_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vpp_papi", None)
    with pytest.raises(VnfError, match=r"pip install '\./tools/trex\[vpp\]'"):
        Api(Path("/run/none"))


# -- the VM --------------------------------------------------------------------------------------


def test_what_is_sent_to_the_vm_arrives_unchanged(vm: Path, tmp_path: Path) -> None:
    assert SshTarget("vm", 22, "root").command(["a b", "$(c)", "d'e"])[-1] == "'a b' '$(c)' 'd'\"'\"'e'"
    machine = Ssh(SshMachine(type="ssh", host="10.0.0.9"), time.monotonic() + 60)
    try:
        directory = Path(machine.directory)
        assert directory.is_dir()
        odd = str(directory / "a b; touch $HOME")
        machine.write(odd, "line 1\n'2'\n")
        assert Path(odd).read_text() == "line 1\n'2'\n"
        with pytest.raises(MachineError, match="No such file"):
            machine.run(["cat", "/no/such/file"])
        program = machine.program("it", ["sleep", "60"])
        program.start()
        program.check()
        program.stop()
    finally:
        machine.close()
    assert not directory.exists()


def test_a_vm_that_still_boots(vm: Path) -> None:
    """The first log-in is refused, the next is not; one that never answers is given up."""
    ssh = vm.parent / "ssh"
    works = ssh.read_text()
    ssh.write_text(f"#!/bin/sh\nmv {vm.parent}/later {ssh}\necho refused >&2\nexit 255\n")
    later = vm.parent / "later"
    later.write_text(works)
    later.chmod(0o755)
    machine = Ssh(SshMachine(type="ssh", host="10.0.0.9"), time.monotonic() + 60)
    machine.close()
    ssh.write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    with pytest.raises(MachineError, match="no route to host"):
        Ssh(SshMachine(type="ssh", host="10.0.0.9"), time.monotonic())


def test_a_tunnel_that_does_not_come(vm: Path) -> None:
    machine = Ssh(SshMachine(type="ssh", host="10.0.0.9"), time.monotonic() + 60)
    try:
        with pytest.raises(ProgramError, match="the tunnel is there: not in time"):
            machine.socket("/run/no/such.sock", time.monotonic() + 0.5)
    finally:
        machine.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("while True: os.write(1, b'x' * 65536)", "python3 prints more than"),
        ("while True: os.write(2, b'x' * 65536)", "python3 prints more than"),
        ("os.write(2, b'\\xff'); sys.exit(3)", "\ufffd"),
        ("os.close(1); os.close(2); time.sleep(60)", "did not end within 1 s"),
        ("while True: os.write(1, b'x'); time.sleep(0.01)", "did not end within 1 s"),
    ],
)
def test_a_command_that_prints_or_runs_without_end(
    monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr(machines, "COMMAND_S", 1.0 if "did not end" in words else 60.0)
    with pytest.raises(MachineError, match=words):
        Local().run(["python3", "-c", f"import os, sys, time\n{program}"])


# -- counters ------------------------------------------------------------------------------------

DATA = Path(__file__).resolve().parents[2] / "data/vpp-26.06"
#: In the columns of VPP's own formats (vnet/interface_format.c, vlib/error.c).
_HEAD = "%-32s%3s  %10s%21s"
INTERFACES = "\n".join(
    (
        (_HEAD + "%-16s%16d") % ("port0", 1, "up    ", "1500/0/0/0     ", "rx packets", 1500),
        *(f"{'':66}{name:16}{count:16}" for name, count in (("rx bytes", 96000), ("rx-miss", 10))),
        (_HEAD + "%-16s%16d") % ("port1", 2, "up    ", "1500/0/0/0     ", "tx packets", 1400),
        *(f"{'':66}{name:16}{count:16}" for name, count in (("tx bytes", 89600), ("drops", 90))),
        _HEAD % ("local0", 0, "down   ", "0/0/0/0       "),
    )
)
ERRORS = "\n".join(
    (
        f"{'Count':^10}{'Node':^35}{'Reason':^35}{'Severity':^10}",
        f"{90:10}{'port1-tx':^35}{'no free tx slots':^35}{'error':^10}",
        f"{3:10}{'port1-tx':^35}{'no free tx slots':^35}{'error':^10}",
        f"{7:10}{'a-node-whose-name-is-longer-than-its-column':^35}{'a reason':^35}{'info':^10}",
    )
)
#: Of a real one: a worker routed 2,000 frames in 69 calls.
RUNTIME = (DATA / "show-runtime.txt").read_text()
#: As of a second worker.
WORKER = """Thread 2 vpp_wk_1 (lcore 2)
ip4-lookup      active     11      2000      0      1.43e2      181.82
"""


def test_counters_of_interfaces_and_nodes() -> None:
    assert vpp_api.parse_interfaces((DATA / "show-interface.txt").read_text()) == {1: {}, 0: {}}
    assert vpp_api.parse_interfaces(INTERFACES) == {
        1: {"rx packets": 1500, "rx bytes": 96000, "rx-miss": 10},
        2: {"tx packets": 1400, "tx bytes": 89600, "drops": 90},
        0: {},
    }
    first = {"vpp_wk_0": (69, 2000)}
    assert vpp_api.parse_runtime(RUNTIME) == first, "the main thread does not route"
    assert vpp_api.parse_runtime(RUNTIME + WORKER) == first | {"vpp_wk_1": (11, 2000)}
    idle = vpp_api.parse_runtime(RUNTIME + WORKER.splitlines()[0])
    assert idle == first | {"vpp_wk_1": (0, 0)}, "a worker without a frame has no such node"
    alone = vpp_api.parse_runtime(f"Thread 0 vpp_main (lcore 0)\n{WORKER.splitlines()[1]}")
    assert alone == {"vpp_main": (11, 2000)}
    found = vpp_api.reading([1, 2], INTERFACES, ERRORS, RUNTIME)
    assert {name: count for name, count in found.lost.items() if count} == {
        "port0.rx-miss": 10,
        "port1.drops": 90,
    }
    assert found.counters["port0.rx_packets"] == 1500 and found.counters["port1.rx_packets"] == 0
    assert found.counters["port1-tx/no free tx slots"] == 93, "why, and not once more; over the threads"
    assert found.counters["a-node-whose-name-is-longer-than-its-column/a reason"] == 7
    with pytest.raises(VnfError, match="no interface 3"):
        vpp_api.reading([3], INTERFACES, ERRORS, RUNTIME)


def test_the_place_of_vpp() -> None:
    nothing = (DATA / "show-interface.txt").read_text() + "port1  2  up  1500/0/0/0\n"
    texts = [nothing, "", "", INTERFACES, ERRORS, RUNTIME + WORKER]

    def printed(command: str) -> str:
        if not texts:
            raise VnfError("it has ended")
        return texts.pop(0)

    place = vpp_api.VppPlace(printed, [1, 2])
    before, after = place.read(), place.read()
    found = place.between(before, after, 1.0)
    assert found.lost["port1.drops"] == 90 and found.lost["port0.drops"] == 0
    assert found.readings["vectors_per_call"] == 50
    assert found.readings["vpp_wk_0.vectors_per_call"] == pytest.approx(2000 / 69)
    assert found.readings["vpp_wk_1.vectors_per_call"] == pytest.approx(2000 / 11)
    assert found.readings["port1-tx/no free tx slots"] == 93
    with pytest.raises(AttributionError, match="it has ended"):
        place.read()
