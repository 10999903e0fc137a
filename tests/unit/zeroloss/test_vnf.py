"""VNFs without their programs: what a binding means, the arguments of DPDK, what counters mean."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.loss.contract import AttributionError
from netplugin_zeroloss.vnf import choose, dpdk, testpmd
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    Description,
    ExternalDescription,
    Forwarded,
    ForwardMode,
    PortCounts,
    TestpmdDescription,
    VnfCores,
    VnfError,
    VnfPort,
    VppDescription,
)
from pydantic import TypeAdapter, ValidationError

from netplugin.api.models import Binding, PortSpec
from netplugin.data_path import NoDataPath, data_path
from netplugin.programs.program import Program, ProgramError, Telemetry, own_directory

MAC, PEER = "52:54:00:00:0a:01", "52:54:00:00:0b:01"
NETWORK = {"type": "flat", "physical_network": "physnet1", "mtu": 1500}
SPEC = PortSpec.model_validate(
    {
        "vm_id": "vm",
        "mac": MAC,
        "backend": "b",
        "network": NETWORK,
        "queues": 4,
        "tx_queue_size": 512,
    }
)


def _described(**fields: Any) -> Any:
    return TypeAdapter(Description).validate_python(fields)


def _binding(vif_type: str, **fields: str) -> Binding:
    return Binding.model_validate({"vif_type": vif_type, "interface_xml": "<interface/>", **fields})


def _port(attachment: Attachment, device: str, **fields: Any) -> VnfPort:
    return VnfPort(attachment, device, MAC, PEER, **fields)


# -- descriptions and bindings -------------------------------------------------------------------


def test_descriptions_by_their_type() -> None:
    vpp = _described(
        type="vpp", machine={"type": "ssh", "host": "10.0.0.9"}, nics=["0000:00:05.0"], rx_queues=8
    )
    assert isinstance(vpp, VppDescription) and vpp.nics == ("0000:00:05.0",)
    assert isinstance(_described(type="testpmd"), TestpmdDescription)
    for wrong in (
        {"type": "dpdk"},
        {"type": "testpmd", "hugepage": True},
        {"type": "testpmd", "memory_mb": 1},
        {"type": "vpp", "machine": {"type": "ssh", "host": "-oProxyCommand=x"}},
        {"type": "vpp", "machine": {"type": "ssh", "host": "vm", "user": "-l"}},
        {"type": "testpmd", "binary": "--help"},
    ):
        with pytest.raises(ValidationError):
            _described(**wrong)


def test_what_a_binding_means_to_a_vnf() -> None:
    def port(backend: str, binding: Binding) -> VnfPort:
        return choose.vnf_port(data_path(backend, binding.vif_type), binding, SPEC, PEER)

    vhost = port("dpdkvhostuser", _binding("vhostuser", socket_path="/run/x", device="v"))
    assert vhost == VnfPort(Attachment.VHOST_USER, "/run/x", MAC, PEER, 4, 512, 1500)
    tap = port("linuxbridge", _binding("tap", device="tap0", bridge="br0"))
    assert (tap.attachment, tap.device) == (Attachment.TAP, "tap0")
    vf = port("sriov", _binding("hostdev", pci_address="0000:01:10.0"))
    assert (vf.attachment, vf.device) == (Attachment.VFIO, "0000:01:10.0")
    vdpa = port("vdpa", _binding("vhost_vdpa", vhost_vdpa_device="/dev/vhost-vdpa-3", device="v"))
    assert vdpa == VnfPort(Attachment.VHOST_VDPA, "/dev/vhost-vdpa-3", MAC, PEER, 4, 256, 1500), "as a VM"
    relayed = port("vdpa", _binding("vhostuser", socket_path="/run/x", device="v"))
    assert (relayed.attachment, relayed.ring) == (Attachment.VHOST_USER, 512)
    with pytest.raises(
        VnfError, match="/run/a,b: no VNF can have this port: must be a device without commas"
    ):
        port("dpdkvhostuser", _binding("vhostuser", socket_path="/run/a,b", device="v"))
    with pytest.raises(VnfError, match="no socket_path"):
        port("vdpa", _binding("vhostuser"))
    with pytest.raises(NoDataPath, match="vif_type virtio_vdpa has no data_path; vhost_vdpa, vhostuser has"):
        port("vdpa", _binding("virtio_vdpa", interface="eth0"))


def test_ports_come_in_pairs() -> None:
    for count in (0, 1, 3):
        with pytest.raises(VnfError, match=f"there are {count}"):
            choose.make(_described(type="testpmd"), [_port(Attachment.TAP, "t")] * count, VnfCores())


def test_the_operators_own_vnf_is_used_as_it_is() -> None:
    ports = [_port(Attachment.TAP, "t", queues=2)] * 2
    with choose.make(ExternalDescription(type="external", name="router"), ports, VnfCores()) as vnf:
        info = vnf.start()
        vnf.check()
        assert (info.name, info.version, info.rx_queues) == ("router", "unknown", (2, 2))
        assert vnf.place.read().lost == {}


def test_a_forwarder_of_taps_takes_nothing_else() -> None:
    ports = [_port(Attachment.VHOST_USER, "/run/x")] * 2
    with pytest.raises(VnfError, match="is no tap"):
        choose.make(_described(type="taps"), ports, VnfCores())


# -- arguments of DPDK ---------------------------------------------------------------------------


def test_devices() -> None:
    def text(port: VnfPort, vhost_net: bool = False) -> str:
        (word,) = dpdk.device_of(port, 1, vhost_net)
        return word.removeprefix("--vdev=")

    vhost = _port(Attachment.VHOST_USER, "/run/s", queues=2, ring=256)
    virtio = f"queues=2,queue_size=256,mac={MAC}"
    assert text(vhost) == f"net_virtio_user1,path=/run/s,server=1,{virtio}"
    vdpa = _port(Attachment.VHOST_VDPA, "/dev/vhost-vdpa-0", ring=256)
    assert text(vdpa) == f"net_virtio_user1,path=/dev/vhost-vdpa-0,queues=1,queue_size=256,mac={MAC}"
    tap = _port(Attachment.TAP, "tap0", queues=2, ring=256)
    assert text(tap, True) == f"net_virtio_user1,path=/dev/vhost-net,iface=tap0,{virtio}"
    assert text(tap) == f"net_tap1,iface=tap0,mac={MAC}"
    assert text(_port(Attachment.NETDEV, "eth0")).startswith("net_af_packet1,iface=eth0,qpairs=1,")
    assert dpdk.device_of(_port(Attachment.VFIO, "0000:01:10.0"), 0, False) == ["-a", "0000:01:10.0"]
    with pytest.raises(VnfError, match="no MTU of 9000"):
        text(_port(Attachment.NETDEV, "eth0", mtu=9000))


def test_arguments_of_testpmd() -> None:
    ports = [_port(Attachment.VHOST_USER, f"/run/{n}", queues=2, ring=512) for n in range(2)]
    devices = [word for n, port in enumerate(ports) for word in dpdk.device_of(port, n, False)]
    description = TestpmdDescription(type="testpmd", hugepages=False)
    words = testpmd.arguments(description, ports, VnfCores(2, (3, 5)), devices, {0, 1})
    assert words[words.index("--lcores") + 1] == "0@2,1@3,2@5"
    for word in (
        "--no-huge",
        "--no-pci",
        "--nb-cores=2",
        "--rxq=2",
        "--txd=512",
        f"--eth-peer=1,{PEER}",
        "--forward-mode=mac",
    ):
        assert word in words
    vfs = [_port(Attachment.VFIO, f"0000:01:10.{n}", mtu=9000) for n in (0, 2)]
    devices = [word for n, port in enumerate(vfs) for word in dpdk.device_of(port, n, False)]
    words = testpmd.arguments(TestpmdDescription(type="testpmd"), vfs, VnfCores(), devices, {0, 1})
    assert words.count("-a") == 2 and "0000:01:10.2" in words and "--no-pci" not in words
    assert "--max-pkt-len=9022" in words and "--in-memory" in words
    with pytest.raises(VnfError, match="same number of queues"):
        testpmd.arguments(description, [ports[0], vfs[0]], VnfCores(), devices, {0, 1})


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_mode_of_testpmd(mode: ForwardMode) -> None:
    ports = [_port(Attachment.VHOST_USER, f"/run/{n}") for n in range(2)]
    devices = [word for n, port in enumerate(ports) for word in dpdk.device_of(port, n, False)]
    work = {"memory_mb": 100, "reads": 3, "writes": 0}
    words = testpmd.arguments(
        _described(type="testpmd", forward_mode=mode, noisy=work), ports, VnfCores(), devices, {0}
    )
    assert f"--forward-mode={mode}" in words
    noisy = [word for word in words if word.startswith("--noisy")]
    memory = words[words.index("-m") + 1]
    if mode is ForwardMode.NOISY:
        # Each of the two ports has its own.
        assert memory == str(256 + 2 * 100)
        assert noisy == ["--noisy-lkup-memory=100", "--noisy-lkup-num-reads=3", "--noisy-lkup-num-writes=0"]
    else:
        assert (memory, noisy) == ("256", [])


def test_cores_and_programs_that_are_not_there() -> None:
    with pytest.raises(VnfError, match="CPU 4000 of the VNF is not on line"):
        dpdk.check_cores(VnfCores(0, (4000,)))
    with pytest.raises(VnfError, match="occurs twice"):
        dpdk.check_cores(VnfCores(0, (0, 0)))
    ports = [_port(Attachment.TAP, "t")] * 2
    with choose.make(_described(type="testpmd", binary="no-such"), ports, VnfCores()) as vnf:
        with pytest.raises(ProgramError, match="no-such: there is no such program"):
            vnf.start()
        with pytest.raises(ProgramError, match="not been started"):
            vnf.check()


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    for port, word in (
        (_port(Attachment.TAP, "nonesuch"), "no such device"),
        (_port(Attachment.VFIO, "0000:ff:10.0"), "not bound to vfio-pci"),
        (_port(Attachment.VHOST_USER, str(tmp_path / "none/s")), "no such directory"),
    ):
        with pytest.raises(ProgramError, match=word):
            dpdk.devices_of([port, port])


def test_a_vdpa_device_is_there_and_nobody_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = _port(Attachment.VHOST_VDPA, str(tmp_path / "vhost-vdpa-0"), ring=256)
    with pytest.raises(VnfError, match="vhost-vdpa-0: No such file"):
        dpdk.devices_of([port])
    (tmp_path / "vhost-vdpa-0").touch()
    assert [word.partition(",")[0] for word in dpdk.devices_of([port])] == ["--vdev=net_virtio_user0"]

    def taken(path: str, flags: int) -> int:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(dpdk.os, "open", taken)
    with pytest.raises(VnfError, match="vhost-vdpa-0 is taken"):
        dpdk.devices_of([port])


# -- sockets and processes -----------------------------------------------------------------------


def test_only_a_socket_that_nobody_has_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    dpdk.free_socket(str(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ProgramError, match="is taken"):
            dpdk.free_socket(str(path))
    dpdk.free_socket(str(path))
    assert not path.exists(), "what a program left that has ended"
    path.write_text("something else")
    with pytest.raises(ProgramError, match="no socket"):
        dpdk.free_socket(str(path))
    assert path.exists()


def test_a_program_that_ends_is_noticed_with_its_words(tmp_path: Path) -> None:
    program = Program("it", ["sh", "-c", "echo no memory; exit 3"], tmp_path / "log")
    program.start()
    with pytest.raises(ProgramError, match=r"it has ended with status 3\n  no memory"):
        program.wait_for(lambda: False, time.monotonic() + 30, "it is ready")
    program.stop()
    sleeper = Program("it", ["sleep", "60"], tmp_path / "log")
    sleeper.start()
    with pytest.raises(ProgramError, match="it: it is ready: not in time"):
        sleeper.wait_for(lambda: False, time.monotonic() + 0.1, "it is ready")
    pid = sleeper.pid
    sleeper.stop()
    sleeper.stop()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ProgramError, match="not been started"):
        sleeper.check()


def test_directories_of_vnfs_are_their_own() -> None:
    one, other = own_directory(), own_directory()
    assert one != other and len(str(one)) < 60, "a socket's path has 108 bytes"
    for path in (one, other):
        path.rmdir()


# -- counters ------------------------------------------------------------------------------------


@contextmanager
def _reported(path: Path, answers: dict[str, Any]) -> Iterator[Telemetry]:
    """DPDK's end of a telemetry socket, for one client: a stand-in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.send(b'{"version":"DPDK 22.11.11","pid":1,"max_output_len":16384}')
                while question := client.recv(1024).decode():
                    name = question.partition(",")[0]
                    client.send(json.dumps({name: answers.get(question)}).encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        telemetry = Telemetry(path, answer_s=60.0)
        try:
            yield telemetry
        finally:
            telemetry.close()
            thread.join(60)


def test_telemetry(tmp_path: Path) -> None:
    stats = {"ipackets": 3024, "opackets": 0, "imissed": 0, "ierrors": 0}
    with _reported(tmp_path / "t", {"/ethdev/stats,1": stats}) as telemetry:
        assert telemetry.there
        assert telemetry.ask("/ethdev/stats", 1) == stats
        assert telemetry.version == "DPDK 22.11.11"
        assert telemetry.ask("/nonsense") is None, "DPDK's answer to what it does not know"
    with pytest.raises(ProgramError, match="no answer to /ethdev/list"):
        Telemetry(tmp_path / "none").ask("/ethdev/list")


def test_what_came_in_and_did_not_go_out() -> None:
    counts = [
        [PortCounts(100, 50, queues=(100, 0)), PortCounts(50, 100)],
        [PortCounts(900, 350, 7, queues=(895, 5)), PortCounts(350, 880)],
    ]
    place = Forwarded(lambda: counts.pop(0))
    before, after = place.read(), place.read()
    found = place.between(before, after, 1.0)
    assert {n: c for n, c in found.lost.items() if c} == {
        "port0.rx_missed": 7,
        "port1.not_sent": 20,
    }
    assert found.readings["port0.rx_packets"] == 800
    assert (found.readings["port0.rxq0.packets"], found.readings["port0.rxq1.packets"]) == (795, 5)
    with pytest.raises(AttributionError, match="went back"):
        place.between(after, before, 1.0)


def test_a_vnf_that_cannot_be_queried_attributes_nothing() -> None:
    def gone() -> list[PortCounts]:
        raise VnfError("it has ended")

    with pytest.raises(AttributionError, match="vnf: it has ended"):
        Forwarded(gone).read()
