"""VNFs on taps of Linux bridges: they forward, and each lost frame is found where it was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from netplugin_zeroloss.loss.contract import UNEXPLAINED
from netplugin_zeroloss.loss.host import HostCounters
from netplugin_zeroloss.loss.links import DriverCounters, LinkCounters
from netplugin_zeroloss.vnf import choose
from netplugin_zeroloss.vnf.contract import Attachment, TapsDescription, VnfCores, VnfPort

from netplugin.host.links import Links as KernelLinks
from tests.functional.acceptance_stream import (
    CORES,
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
from tests.lab.processes import run, wait_for

#: Of the same stream; one of them has no reason to lose anything.
TRIALS = 3


@pytest.fixture
def bridges(request: pytest.FixtureRequest) -> Iterator[list[VnfPort]]:
    """``gen0`` - bridge - tap, and ``gen1`` - bridge - tap, as the backend linuxbridge makes them."""
    kernel = KernelLinks()
    with ExitStack() as stack:
        stack.enter_context(wires())
        ports = []
        for n in range(PORTS):
            tap, bridge = f"tap{n}", f"lb{n}"
            kernel.create_tap(
                tap, f"vm {n}", address=f"fe:54:00:00:0a:0{n}", multi_queue=request.param, mtu=1500
            )
            stack.callback(kernel.delete, tap)
            # One that looks into multicast sends an IGMP report when it comes up.
            run(
                [
                    "ip",
                    "link",
                    "add",
                    bridge,
                    "address",
                    f"02:00:00:00:0c:0{n}",
                    "type",
                    "bridge",
                    "mcast_snooping",
                    "0",
                ]
            )
            stack.callback(kernel.delete, bridge)
            # The kernel sends nothing of its own by them: every frame that they drop is one of the trial's.
            for device in (bridge, tap, f"dut{n}"):
                Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6").write_text("1")
            for device in (tap, f"dut{n}"):
                run(["ip", "link", "set", device, "master", bridge, "up"])
            run(["ip", "link", "set", bridge, "up"])
            ports.append(VnfPort(Attachment.TAP, tap, MACS[n], PEERS[n]))
        yield ports


@pytest.mark.parametrize("bridges", [False], indirect=True)
def test_the_forwarder_on_taps(bridges: list[VnfPort]) -> None:
    with choose.make(TapsDescription(type="taps"), bridges, VnfCores()) as vnf:
        assert vnf.start().rx_queues == (1, 1)
        _wait_forwarding()
        links = LinkCounters(["lb0", "lb1"])
        measured = trial(vnf, Stream(), links, HostCounters(), DriverCounters({"dut0": ()}))
        assert lost(measured) == {UNEXPLAINED: 0}
        assert measured.readings["host.softirq_cpus"] >= 0
        # Its ring is the tap's queue: what does not fit while it sleeps is lost there.
        measured = trial(vnf, Asleep(process("tap_forwarder"), _came), links)
    assert 0 < measured.rx_packets < MANY
    assert lost(measured) == {
        "links.tap0.tx_dropped": MANY - measured.rx_packets,
        UNEXPLAINED: 0,
    }


@pytest.mark.parametrize("bridges", [True], indirect=True)
def test_testpmd_on_taps(bridges: list[VnfPort]) -> None:
    addresses = [Path(f"/sys/class/net/tap{n}/address").read_text() for n in range(PORTS)]
    with choose.make(TESTPMD, bridges, CORES) as vnf:
        vnf.start()
        _wait_forwarding()
        # DPDK gives a tap its own MAC address; the bridge would keep frames to it for itself.
        now = [Path(f"/sys/class/net/tap{n}/address").read_text() for n in range(PORTS)]
        assert now == addresses
        measured = trial(vnf, Stream(), LinkCounters(["lb0", "lb1"]))
        assert lost(measured) == {UNEXPLAINED: 0}


def _came() -> int:
    """Frames that came to the bridge; what the tap has not taken yet is not counted there."""
    return int(Path("/sys/class/net/dut0/statistics/rx_packets").read_text())


def _wait_forwarding() -> None:
    """A bridge port forwards a moment after its carrier is there."""
    for n in range(PORTS):
        for device in (f"tap{n}", f"dut{n}"):
            state = Path(f"/sys/class/net/{device}/brport/state")
            wait_for(partial(_forwards, state), 40, f"{device} forwards")


def _forwards(state: Path) -> bool:
    return state.read_text().strip() == "3"


def test_testpmd_on_kernel_devices() -> None:
    """As in a control without a backend."""
    with wires():
        ports = [VnfPort(Attachment.NETDEV, f"dut{n}", MACS[n], PEERS[n]) for n in range(PORTS)]
        with choose.make(TESTPMD, ports, CORES) as vnf:
            vnf.start()
            # On a busy machine testpmd may find no room for a burst: it is reported each time.
            trials = [lost(trial(vnf, Stream())) for _ in range(TRIALS)]
            assert all(found[UNEXPLAINED] == 0 for found in trials)
            assert {UNEXPLAINED: 0} in trials
