"""Counters of VFs: from bytes, of the VFs of claims, and in a scrape."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from agents.telemetry.vf_figures import PortCounters, VfFigures
from drivers.vf.backend import drops_of, of_vf
from drivers.vf.inventory import read_inventory
from drivers.vf.kernel import VfKernel
from drivers.vf.memory import new_claim
from drivers.vf.options import parse_devices
from netplugin.api.counter_models import Place, Traffic
from netplugin.api.errors import HostError
from netplugin.api.models import VfCounters
from netplugin.backend import Claim
from netplugin.counters import Reading
from netplugin.host.netlink import attribute
from netplugin.host.vf_messages import parse_counters
from netplugin.host.vfs import Vfs
from tests.unit.drivers.vf.trees import Nic, build, by_place
from tests.unit.kernel_answers import message

ICE = Nic(driver="ice", vf_driver="iavf", interface="ice0")
IGB = replace(Nic(), address="0000:81:00.0", vf_bus="81", interface="igb0", mac="52:54:00:00:aa:02")
COUNTED = VfCounters(rx_packets=1, tx_packets=2, rx_bytes=3, tx_bytes=4, rx_dropped=8, tx_dropped=9)


def test_statistics_are_read_by_number() -> None:
    """``rtnl_fill_vfinfo`` in net/core/rtnetlink.c, and IFLA_VF_STATS_* of if_link.h."""
    values = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 7: 8, 8: 9}
    statistics = (attribute(kind, struct.pack("=Q", value)) for kind, value in values.items())
    mac = attribute(1, struct.pack("=I32s", 130, bytes(6)))
    without = attribute(1, attribute(1, struct.pack("=I32s", 2, bytes(6))))
    listed = attribute(22, attribute(1, mac, attribute(8, *statistics)), without)
    link = message(16, struct.pack("=BxHiII", 0, 1, 7, 1, 0) + listed)
    assert parse_counters(link) == {130: COUNTED, 2: VfCounters()}


class Counting(Vfs):
    """Each NIC counts the same for its VFs 1 and 2; that of ``broken`` refuses to say."""

    def __init__(self, sys: Path) -> None:
        super().__init__(sys)
        self.asked: list[int] = []
        self.broken = False

    def counters(self, index: int) -> dict[int, VfCounters]:
        self.asked.append(index)
        if self.broken:
            raise HostError("Device or resource busy", step="count-vfs")
        return dict.fromkeys((1, 2), COUNTED)


@pytest.fixture
def claims(tmp_path: Path) -> dict[str, Claim]:
    """On VFs 1 and 5 of an ice and VF 1 of an igb."""
    build(tmp_path, ICE, IGB)
    links = {nic.interface: nic.link(number) for number, nic in enumerate((ICE, IGB), 2)}
    inventory = read_inventory(tmp_path, parse_devices(["net1:8086:10c9"]), links)
    places = {"a": (ICE, 1), "b": (ICE, 5), "c": (IGB, 1)}
    return {
        name: new_claim(
            inventory, by_place(inventory)[nic.address, number], "52:54:00:00:00:01", adopted=False
        )
        for name, (nic, number) in places.items()
    }


def test_the_vfs_of_claims_are_counted(tmp_path: Path, claims: dict[str, Claim]) -> None:
    vfs = Counting(tmp_path)
    kernel = VfKernel(parse_devices(["net1:8086:10c9"]), tmp_path, vfs)
    other = Claim("vlan", "7")
    assert kernel.counters([*claims.values(), other]) == {claims["a"]: COUNTED}
    assert vfs.asked == [2], "each NIC once, and not igb, which counts nothing"
    vfs.broken = True
    assert kernel.counters([*claims.values()]) == {}
    vfs.broken = False
    moved = Claim(claims["a"].kind, "0000:99:10.1", claims["a"].memory)
    assert kernel.counters([moved]) == {}, "another VF may be there now"


def test_the_most_queues_are_those_of_the_best_nic(tmp_path: Path, claims: dict[str, Claim]) -> None:
    assert VfKernel(parse_devices(["net1:8086:10c9"]), tmp_path).max_queues() == 16
    assert VfKernel(parse_devices([f"net1:{IGB.address}"]), tmp_path).max_queues() == 2
    assert VfKernel(parse_devices(["net1:none"]), tmp_path).max_queues() == 1


def test_a_scrape_has_them_and_survives_their_nic(tmp_path: Path) -> None:
    store = Store(tmp_path / "agent.db")
    metrics = Metrics(store)
    broken = False

    def read() -> Iterator[PortCounters]:
        if broken:
            raise RuntimeError("boom")
        yield PortCounters("nic1", "0000:03:10.1", COUNTED)

    metrics.watch_vfs(read)
    of = 'pci_address="0000:03:10.1",port="nic1"'
    text = metrics.render().decode()
    for name, rx, tx in (("packets", 1, 2), ("bytes", 3, 4), ("dropped", 8, 9)):
        assert f'netplugin_vf_{name}_total{{direction="rx",{of}}} {rx}.0' in text
        assert f'netplugin_vf_{name}_total{{direction="tx",{of}}} {tx}.0' in text
    broken = True
    text = metrics.render().decode()
    assert "netplugin_vf" not in text and "netplugin_ports" in text
    store.close()


def test_a_scrape_does_not_wait_for_a_nic_that_does_not_answer() -> None:
    """RTM_GETLINK waits in the kernel for RTNL, which a reset of a NIC may hold for long."""
    answers, begun = threading.Event(), threading.Semaphore(0)

    def read() -> Iterator[PortCounters]:
        begun.release()
        assert answers.wait(90)
        yield PortCounters("nic1", "0000:03:10.1", COUNTED)

    figures = VfFigures(read, wait_s=0.05)
    assert figures.collect() == [] and begun.acquire(timeout=90)
    assert figures.collect() == [] and not begun.acquire(blocking=False), "one asks, not each scrape"
    answers.set()
    later = VfFigures(read, wait_s=90).collect()
    assert [sample.value for family in later for sample in family.samples] == [1, 2, 3, 4, 8, 9]


def test_a_scrape_without_a_thread_to_be_had_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = VfFigures(lambda: [PortCounters("nic1", "0000:03:10.1", COUNTED)], wait_s=90)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        assert figures.collect() == []
    assert figures.collect()


def test_the_counters_of_a_port_on_a_vf_have_the_vocabulary_of_all() -> None:
    claim = Claim("vf", "0000:03:10.1")
    source = of_vf(claim, COUNTED)
    assert source.origin == claim.key
    assert source.values == {
        Traffic.PACKETS_FROM_VM: 2,
        Traffic.PACKETS_TO_VM: 1,
        Traffic.BYTES_FROM_VM: 4,
        Traffic.BYTES_TO_VM: 3,
        Place.VF_FROM_VM: 9,
        Place.VF_TO_VM: 8,
    }
    only_drops = drops_of(Reading({"vf": source}))
    assert only_drops["vf"].values == {Place.VF_FROM_VM: 9, Place.VF_TO_VM: 8} and drops_of(None) == {}
