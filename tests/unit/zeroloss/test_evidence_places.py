"""What OVS and the kernel print (tests/data/ovs-3.1 was recorded), read into losses and readings."""

from __future__ import annotations

from pathlib import Path

import pytest
from netplugin_zeroloss.loss import host, links, ovs
from netplugin_zeroloss.loss.choose import LossDescription, NicCounters, make
from netplugin_zeroloss.loss.contract import AttributionError, CounterReading
from netplugin_zeroloss.loss.ovs import (
    OvsPortCounts,
    lost_at,
    parse_drops,
    parse_ports,
    parse_upcalls_lost,
)

from netplugin.api.models import Binding
from netplugin.data_path import data_path
from netplugin.pmd.read import PmdCounters

DATA = Path(__file__).resolve().parents[2] / "data" / "ovs-3.1"


def _recorded(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def _reading(when: str) -> CounterReading:
    ports = parse_ports(_recorded(f"{when}-ports0")) | parse_ports(_recorded(f"{when}-ports1"))
    del ports["LOCAL"]
    texts = [_recorded(f"{when}-{name}") for name in ("coverage", "dpctl", "pmd", "rxq")]
    return ovs.reading(ports, *texts)


# -- OVS -----------------------------------------------------------------------------------------


def test_ports_of_a_real_ovs() -> None:
    """4,000 frames went in; the VNF slept for the second half, and a policer stood at its way back."""
    ports = parse_ports(_recorded("after-ports0"))
    assert sorted(ports) == ["LOCAL", "idle", "nic0", "vm0"]
    assert ports["nic0"].rx["pkts"] == 4000
    assert ports["vm0"].tx == {"pkts": 3024, "bytes": 2192704, "drop": 976}
    assert ports["idle"].rx == {}, "what OVS does not know is no 0"
    lost = {name: count for name, count in lost_at(ports["vm0"]).items() if count}
    assert lost == {"ovs_tx_failure_drops": 976}, "counted once, though drop has it too"
    police = parse_ports(_recorded("after-ports1"))["vm1"]
    assert {n: c for n, c in lost_at(police).items() if c} == {"ovs_rx_qos_drops": 2590}


def test_a_nics_drops_are_counted_once_each() -> None:
    nic = OvsPortCounts(
        rx={"pkts": 100, "drop": 60, "errs": 3},
        tx={"pkts": 100, "drop": 9, "errs": 1},
        custom={
            "rx_missed_errors": 40,
            "ovs_rx_qos_drops": 12,
            "rx_mbuf_allocation_errors": 5,
            "ovs_tx_failure_drops": 4,
            "ovs_tx_mtu_exceeded_drops": 2,
        },
    )
    assert {n: c for n, c in lost_at(nic).items() if c} == {
        "rx_missed_errors": 40,
        "ovs_rx_qos_drops": 12,
        "rx_dropped": 3,
        "rx_errors": 3,
        "ovs_tx_failure_drops": 4,
        "ovs_tx_mtu_exceeded_drops": 2,
        "tx_dropped": 3,
        "tx_errors": 1,
    }


def test_pmd_threads_and_drops_of_the_datapath() -> None:
    threads = _reading("after").details
    assert threads.pmds == {1: PmdCounters(4434, 88946845 + 45143749, 45143749, upcalls=2)}, (
        "the main thread is none"
    )
    drops = "drop_action_of_pipeline    0.0/sec     0.000/sec        0.0000/sec   total: 17\n"
    assert parse_drops(_recorded("after-coverage") + drops) == {"drop_action_of_pipeline": 17}
    assert parse_upcalls_lost(_recorded("after-dpctl")) == 0
    assert parse_upcalls_lost("netdev@ovs-netdev:\n  lookups: hit:5 missed:2 lost:3\n") == 3


def test_two_readings_of_a_real_ovs() -> None:
    place = ovs.OvsCounters(Path("/nowhere"), ["br0", "br1"], [], 10.0)
    before, after = _reading("before"), _reading("after")
    found = place.between(before, after, 1.0)
    lost = {name: count for name, count in found.lost.items() if count}
    assert lost == {"vm0.ovs_tx_failure_drops": 976, "vm1.ovs_rx_qos_drops": 2590}
    assert 4000 - 434 == sum(lost.values()), "434 came back"
    readings = found.readings
    assert readings["pmd_cores"] == 1 and readings["vm0.rxq0.pmd"] == 1
    assert readings["pmd_packets"] == readings["pmd1.packets"] == 4434
    assert 0 < readings["pmd_busy_share"] == readings["pmd1.busy_share"] < 1
    assert "pmd1.busy_cycles" not in readings
    assert readings["nic0.rxq0.packets"] == 4000 and readings["vm0.rxq0.packets"] == 0
    with pytest.raises(AttributionError, match="went back"):
        place.between(after, before, 1.0)


def _printed_by_3(packets: int, idle: int, busy: int) -> ovs.CounterReading:
    load = (
        f"pmd thread numa_id 0 core_id 1:\n  packets received: {packets}\n"
        f"  idle cycles: {idle} (90.00%)\n  processing cycles: {busy} (10.00%)\n"
    )
    return ovs.reading({}, "", "", load, "")


def test_a_thread_whose_tsc_went_back_as_it_started() -> None:
    place = ovs.OvsCounters(Path("/nowhere"), [], [], 10.0)
    before = _printed_by_3(10, 1_000_000, 2**64 - 70_000)
    readings = place.between(before, _printed_by_3(110, 1_900_000, 30_000), 1.0).readings
    assert readings["pmd_busy_share"] == 0.1 and readings["pmd_cycles_per_packet"] == 1000
    with pytest.raises(AttributionError, match="busy_cycles went back by 70000 "):
        place.between(_printed_by_3(10, 1_000_000, 0), before, 1.0)


def _printed_by_4(packets: int, cycles: int, cycles_per_packet: int) -> ovs.CounterReading:
    """A reading of an OVS 4.0, whose pmd-stats-show prints what pmd-perf-show does."""
    load = (
        f"pmd thread numa_id 0 core_id 1:\n\n  - Used TSC cycles:  {cycles}  (100.0 % of total cycles)\n"
        f"  - busy iterations:  5  ( {100 * packets * cycles_per_packet / cycles:.1f} % of used cycles)\n"
        f"  Rx packets:  {packets}  (4212 Kpps, {cycles_per_packet} cycles/pkt)\n"
    )
    return ovs.reading({}, "", "", load, "")


def test_the_rounded_cycles_of_ovs_4() -> None:
    place = ovs.OvsCounters(Path("/nowhere"), [], [], 10.0)
    before = _printed_by_4(1_000, 1_000_000, 200)
    grown = place.between(before, _printed_by_4(101_000, 101_000_000, 200), 1.0).readings
    assert grown == {
        "pmd1.packets": 100_000,
        "pmd1.busy_share": 0.2,
        "pmd1.cycles_per_packet": 200,
        "pmd_packets": 100_000,
        "pmd_busy_share": 0.2,
        "pmd_cycles_per_packet": 200,
        "pmd_cores": 1,
    }
    # Few frames after many: the share is lost in the rounding, which may even take cycles back.
    many = _printed_by_4(1_000_000, 1_000_000_000, 200)
    few = place.between(many, _printed_by_4(1_000_100, 1_001_000_000, 199), 1.0).readings
    assert few == {"pmd1.packets": 100, "pmd_packets": 100, "pmd_cores": 1}
    with pytest.raises(AttributionError, match="went back"):
        place.between(many, before, 1.0)


def test_shares_of_several_pmd_threads() -> None:
    place = ovs.OvsCounters(Path("/nowhere"), ["br0"], [], 10.0)
    nothing = ovs.OvsThreads({2: PmdCounters(), 3: PmdCounters()}, {"vm0.rxq0.pmd": 3.0})
    threads = {2: PmdCounters(100, 400, 300), 3: PmdCounters(0, 600, 0)}
    later = ovs.OvsThreads(threads, {"vm0.rxq0.pmd": 2.0})
    moved = place.between(CounterReading(details=nothing), CounterReading(details=later), 1.0)
    assert moved.readings == {
        "pmd2.packets": 100,
        "pmd2.busy_share": 0.75,
        "pmd2.cycles_per_packet": 3,
        "pmd3.packets": 0,
        "pmd3.busy_share": 0,
        "pmd_packets": 100,
        "pmd_busy_share": 0.3,
        "pmd_cycles_per_packet": 3,
        "pmd_cores": 2,
        "vm0.rxq0.pmd": 2,
    }
    # vswitchd was started again with other threads: the trial has no figures of them.
    with pytest.raises(AttributionError, match="not counted any more"):
        other = ovs.OvsThreads({5: PmdCounters(1)})
        place.between(CounterReading(details=later), CounterReading(details=other), 1.0)


# -- host ----------------------------------------------------------------------------------------

STAT = """cpu  500 0 300 9000 0 0 100 0 0 0
cpu0 200 0 100 4000 0 0 {softirq0} 0 0 0
cpu1 300 0 {system1} 5000 0 2 40 0 0 0
intr 12345
"""
SOFTNET = "000186a0 {dropped:08x} 00000003 0 0 0 0 0 0 0 0 0 0\n" * 2


def _proc(root: Path, vswitchd: int, **counts: int) -> Path:
    (root / "net").mkdir(parents=True, exist_ok=True)
    values = {"softirq0": 60, "system1": 200, "dropped": 7} | counts
    (root / "stat").write_text(STAT.format(**values))
    (root / "net/softnet_stat").write_text(SOFTNET.format(**values))
    for pid, name, ticks in ((70, "ovs-vswitchd", vswitchd), (71, "a (b) c", 900)):
        (root / str(pid)).mkdir(exist_ok=True)
        line = f"{pid} ({name}) S 1 1 1 0 -1 4194560 0 0 0 0 {ticks} 25 0 0 20 0 1 0 5 0 0\n"
        (root / str(pid) / "stat").write_text(line)
    return root


def test_cpus_that_a_trial_took(tmp_path: Path) -> None:
    place = host.HostCounters(_proc(tmp_path, 1000))
    tick = place._tick_s
    before = place.read()
    _proc(tmp_path, 1150, softirq0=160, system1=300, dropped=9)
    after = place.read()
    before.counters["clock_s"], after.counters["clock_s"] = 50.0, 50.0 + 300 * tick  # type: ignore[index]
    found = place.between(before, after, elapsed_s=200 * tick)
    assert found.lost == {}, "a frame that a backlog had no room for is counted at its device"
    assert found.readings["softirq_cpus"] == pytest.approx(0.5)
    assert found.readings["softirq_busiest_share"] == pytest.approx(0.5)
    assert (
        found.readings["cpu0.softirq_share"] == pytest.approx(0.5)
        and found.readings["cpu1.softirq_share"] == 0
    )
    assert found.readings["system_cpus"] == pytest.approx(0.5)
    assert found.readings["user_cpus"] == 0
    assert found.readings["vswitchd_cpus"] == pytest.approx(0.5), "it polls between trials too"
    assert found.readings["softnet_dropped"] == 4
    assert "qemu_cpus" not in found.readings, "there is none"


def test_the_kernel_work_of_a_cpu_counts_as_one_cpu_at_most(tmp_path: Path) -> None:
    """Programs that poll by system calls do so too while the generator starts and drains."""
    place = host.HostCounters(_proc(tmp_path, 1000))
    before = place.read()
    _proc(tmp_path, 1150, softirq0=260, system1=900)
    found = place.between(before, place.read(), elapsed_s=100 * place._tick_s)
    assert found.readings["system_cpus"] == pytest.approx(1), "7 CPU seconds for each second of traffic"
    assert found.readings["softirq_cpus"] == pytest.approx(1) == found.readings["softirq_busiest_share"]


def test_processes_come_and_go(tmp_path: Path) -> None:
    place = host.HostCounters(_proc(tmp_path, 1000), {"any": "a"})
    before = place.read()
    (tmp_path / "71/stat").unlink()
    assert "any_cpus" not in place.between(before, place.read(), 1.0).readings
    (tmp_path / "stat").write_text("cpu0 nonsense\n")
    with pytest.raises(AttributionError, match="host"):
        place.read()


# -- kernel devices ------------------------------------------------------------------------------


class Message(dict):  # type: ignore[type-arg]
    """A netlink message as pyroute2 has them."""

    def get_attr(self, name: str) -> object:
        return dict(self["attrs"]).get(name)


def _link(index: int, name: str, master: int | None = None, **counts: int) -> Message:
    attrs = [("IFLA_IFNAME", name), ("IFLA_STATS64", counts), ("IFLA_MASTER", master)]
    return Message(index=index, attrs=attrs)


def _qdisc(index: int, parent: int, drops: int) -> Message:
    queue = Message(attrs=[("TCA_STATS_QUEUE", {"drops": drops})])
    return Message(index=index, parent=parent, attrs=[("TCA_STATS2", queue)])


LINKS = [
    _link(1, "br0"),
    _link(2, "tap0", 1, tx_dropped=5, rx_errors=1),
    _link(3, "eth0", 1, rx_missed_errors=4),
    _link(4, "other", rx_dropped=9),
]


def test_drops_of_devices_and_of_their_queues() -> None:
    qdiscs = [
        _qdisc(2, 0xFFFFFFFF, 11),
        _qdisc(2, 0x10001, 11),
        _qdisc(3, 0xFFFFFFF1, 2),
        _qdisc(4, 0xFFFFFFFF, 99),
    ]
    lost = links.lost_at(["br0", "tap0", "eth0"], LINKS, qdiscs)
    assert {name: count for name, count in lost.items() if count} == {
        "tap0.tx_dropped": 5,
        "tap0.rx_errors": 1,
        "tap0.qdisc_drops": 11,
        "eth0.rx_missed_errors": 4,
        "eth0.ingress_drops": 2,
    }
    with pytest.raises(AttributionError, match="no device gone"):
        links.lost_at(["br0", "gone"], LINKS, [])


def test_a_bridge_means_its_members_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_dump", lambda: (LINKS, []))
    counted = links.LinkCounters(["br0"]).read().lost
    assert {name.partition(".")[0] for name in counted} == {"br0", "tap0", "eth0"}


# -- driver counters of a NIC ---------------------------------------------------------------------


def _driver(monkeypatch: pytest.MonkeyPatch, *counts: dict[str, int]) -> links.DriverCounters:
    """A NIC with these counters in one reading after the other."""
    following = iter(counts)
    monkeypatch.setattr(links, "_statistics", lambda device: next(following))
    return links.DriverCounters({"eth0": ("rx_discards",)})


def test_a_gauge_of_a_driver_that_falls_is_not_usable_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nic = _driver(
        monkeypatch,
        {
            "rx_discards": 5,
            "tx_fifo": 9,
            "rx_full": 3,
            "q7_drops": 4,
            "rx_miss": 1,
            "rx_packets": 8,
        },
        {"rx_discards": 7, "tx_fifo": 2, "rx_full": 3, "rx_miss": 5, "new_err": 6, "rx_packets": 2},
    )
    found = nic.between(nic.read(), nic.read(), 1.0)
    assert found.lost == {"eth0.rx_discards": 2}
    assert found.readings == {
        "eth0.rx_miss": 4,
        "eth0.new_err": 6,
        "eth0.tx_fifo.unusable": 7,
        "eth0.q7_drops.unusable": 4,
    }


def test_a_counter_of_lost_frames_that_falls_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    nic = _driver(monkeypatch, {"rx_discards": 5}, {"rx_discards": 4})
    with pytest.raises(AttributionError, match=r"eth0.rx_discards went back by 1"):
        nic.between(nic.read(), nic.read(), 1.0)


# -- which places --------------------------------------------------------------------------------


def _binding(vif_type: str, **fields: str) -> Binding:
    return Binding.model_validate({"vif_type": vif_type, "interface_xml": "<interface/>", **fields})


def test_the_bindings_say_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_dump", lambda: (LINKS, []))
    vhost = (
        data_path("dpdkvhostuser", "vhostuser"),
        _binding("vhostuser", bridge="br-phys1", device="vm0", socket_path="/run/x"),
    )
    tap = data_path("linuxbridge", "tap"), _binding("tap", bridge="br0", device="tap0")
    nics = (NicCounters(device="eth0", lost=("rx_discards",)),)
    assert [place.name for place in make(LossDescription(), [vhost])] == ["host", "ovs"]
    [_, counters] = make(LossDescription(), [vhost], 77.0)
    assert isinstance(counters, ovs.OvsCounters) and counters._timeout_s == 77.0
    assert [place.name for place in make(LossDescription(ovs_rundir=None), [vhost])] == ["host"]
    assert [place.name for place in make(LossDescription(nics=nics), [tap])] == [
        "host",
        "links",
        "nic",
    ]
