"""A VNF on real OVS-DPDK: it forwards, and each lost frame is found where it was lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from netplugin_zeroloss.loss.contract import UNEXPLAINED
from netplugin_zeroloss.loss.host import HostCounters
from netplugin_zeroloss.loss.ovs import OvsCounters, parse_ports
from netplugin_zeroloss.vnf import choose
from netplugin_zeroloss.vnf.contract import Attachment, Vnf, VnfPort

from netplugin.programs.program import ProgramError
from tests.functional.acceptance_stream import (
    CORES,
    FEW,
    MACS,
    MANY,
    PEERS,
    PORTS,
    TESTPMD,
    Asleep,
    Stream,
    lost,
    process,
    trial,
    wires,
)
from tests.functional.conftest import BASE
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

DPDK_NIC = "net_af_packet{n},iface={device},qdisc_bypass=1,framesz=2048,framecnt=4096,blocksz=16384"


@pytest.fixture(scope="module")
def chain() -> Iterator[tuple[PrivateOvs, Vnf]]:
    """``gen0`` - OVS - testpmd - OVS - ``gen1``: one OVS, one VNF for all the tests."""
    directory = BASE / "ovs"
    with ExitStack() as stack:
        stack.enter_context(wires())
        stack.callback(shutil.rmtree, directory, True)
        ovs = stack.enter_context(PrivateOvs(directory))
        ports = []
        for n in range(PORTS):
            path = BASE / f"v{n}.sock"
            vm = ["type=dpdkvhostuserclient", f"options:vhost-server-path={path}"]
            nic = ["type=dpdk", f"options:dpdk-devargs={DPDK_NIC.format(n=n, device=f'dut{n}')}"]
            ovs.vsctl("add-br", f"br{n}", "--", "set", "Bridge", f"br{n}", "datapath_type=netdev")
            stack.callback(ovs.vsctl, "del-br", f"br{n}")
            for name, what in ((f"vm{n}", vm), (f"nic{n}", nic)):
                ovs.vsctl("add-port", f"br{n}", name, "--", "set", "Interface", name, *what)
            ports.append(VnfPort(Attachment.VHOST_USER, str(path), MACS[n], PEERS[n]))
        vnf = stack.enter_context(choose.make(TESTPMD, ports, CORES))
        info = vnf.start()
        assert info.version.startswith("DPDK") and info.rx_queues == (1, 1)
        for n in range(PORTS):
            ovs.wait_connected(f"vm{n}")
        yield ovs, vnf


def _ovs(ovs: PrivateOvs) -> OvsCounters:
    bridges, ports = ([f"{kind}{n}" for n in range(PORTS)] for kind in ("br", "vm"))
    return OvsCounters(ovs.rundir, bridges, ports, 10.0)


def test_nothing_is_lost_and_nothing_unexplained(chain: tuple[PrivateOvs, Vnf]) -> None:
    ovs, vnf = chain
    vnf.check()
    measured = trial(vnf, Stream(), _ovs(ovs), HostCounters())
    assert lost(measured) == {UNEXPLAINED: 0}
    readings = measured.readings
    assert readings["vnf.port0.rx_packets"] == readings["vnf.port1.tx_packets"] == FEW
    assert readings["ovs.nic0.rxq0.packets"] == readings["vnf.port0.rxq0.packets"] == FEW
    # Once on the way to the VNF and once on the way back.
    assert readings["ovs.pmd_packets"] == 2 * FEW
    assert 0 < readings["ovs.pmd_busy_share"] < 1
    assert readings["ovs.pmd_cycles_per_packet"] > 0
    assert readings["ovs.pmd_cores"] == 1 and readings["ovs.vm0.rxq0.pmd"] == 1
    assert readings["host.vswitchd_cpus"] > 0


def test_a_port_that_takes_no_such_frame(chain: tuple[PrivateOvs, Vnf]) -> None:
    ovs, vnf = chain
    ovs.vsctl("set", "Interface", "vm0", "mtu_request=600")
    try:
        wait_for(lambda: ovs.get("Interface", "vm0", "mtu") == "600", 30, "the MTU is set")
        measured = trial(vnf, Stream(frame_bytes=1000), _ovs(ovs))
    finally:
        ovs.vsctl("set", "Interface", "vm0", "mtu_request=1500")
        wait_for(lambda: ovs.get("Interface", "vm0", "mtu") == "1500", 30, "the MTU is back")
    assert lost(measured) == {"ovs.vm0.ovs_tx_mtu_exceeded_drops": FEW, UNEXPLAINED: 0}


def test_a_policer(chain: tuple[PrivateOvs, Vnf]) -> None:
    ovs, vnf = chain
    # A bucket of 62 frames into which next to nothing flows, however long the 400 take.
    limit = ["ingress_policing_rate=10", "ingress_policing_burst=500"]
    ovs.vsctl("set", "Interface", "vm1", *limit)
    try:
        measured = trial(vnf, Stream(frame_bytes=1000), _ovs(ovs))
    finally:
        ovs.vsctl("set", "Interface", "vm1", "ingress_policing_rate=0", "ingress_policing_burst=0")
    found = lost(measured)
    assert 0 < measured.rx_packets < FEW
    assert found == {
        "ovs.vm1.ovs_rx_qos_drops": FEW - measured.rx_packets,
        UNEXPLAINED: 0,
    }


def test_a_ring_that_is_not_emptied(chain: tuple[PrivateOvs, Vnf]) -> None:
    """The VNF sleeps while frames are sent: what its ring holds it forwards later, the rest is lost."""
    ovs, vnf = chain

    def came() -> int:
        ports = parse_ports(ovs.ofctl("-O", "OpenFlow14", "--names", "dump-ports", "br0"))
        return ports["vm0"].tx["pkts"] + ports["vm0"].tx["drop"]

    measured = trial(vnf, Asleep(process("--file-prefix=vnf"), came), _ovs(ovs))
    assert 0 < measured.rx_packets <= 1024
    assert lost(measured) == {
        "ovs.vm0.ovs_tx_failure_drops": MANY - measured.rx_packets,
        UNEXPLAINED: 0,
    }


def test_a_flow_that_drops(chain: tuple[PrivateOvs, Vnf]) -> None:
    """Threads of OVS add these up late: the sum closes all the same."""
    ovs, vnf = chain
    ovs.ofctl("add-flow", "br0", f"priority=9,in_port=nic0,dl_dst={MACS[0]},actions=drop")
    try:
        measured = trial(vnf, Stream(), _ovs(ovs))
    finally:
        ovs.ofctl("--strict", "del-flows", "br0", f"priority=9,in_port=nic0,dl_dst={MACS[0]}")
    assert lost(measured) == {"ovs.drop_action_of_pipeline": FEW, UNEXPLAINED: 0}


def test_a_socket_that_is_taken(chain: tuple[PrivateOvs, Vnf]) -> None:
    ports = [
        VnfPort(Attachment.VHOST_USER, str(BASE / f"v{n}.sock"), MACS[n], PEERS[n]) for n in range(PORTS)
    ]
    with (
        choose.make(TESTPMD, ports, CORES) as second,
        pytest.raises(ProgramError, match="is taken"),
    ):
        second.start()
    chain[1].check()
