"""What vswitchd prints of its PMD threads, and what is made of two looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.pmd_models import PmdState
from netplugin.host.ovs_rows import OvsInterface
from netplugin.pmd.read import (
    PmdCounters,
    PmdReading,
    between,
    parse_counters,
    parse_threads,
    state_of,
)
from netplugin.pmd.settings import affinity_text, read_affinity, read_settings

DATA = Path(__file__).parents[2] / "data" / "pmd"
OLD, NEW = DATA / "ovs-3.1", DATA / "ovs-4.0"
WAIT = """Displaying last 60 seconds pmd usage %
pmd thread numa_id 0 core_id 2:
  isolated : true
  port: npv1              queue-id:  0 (enabled)   pmd usage: NOT AVAIL
  overhead: NOT AVAIL
"""


def interface(name: str, node: int | None = None, **columns: Any) -> OvsInterface:
    return OvsInterface(
        name=name,
        type="dpdk",
        options=columns.pop("options", {}),
        external_ids={},
        mtu_request=None,
        mtu=1500,
        ofport=1,
        error=None,
        link_state="up",
        numa_node=node,
        **columns,
    )


def state(folder: Path, rows: Mapping[str, OvsInterface], rxq: str = "rxq-show.txt") -> PmdState:
    shown = parse_threads((folder / rxq).read_text())
    counters = parse_counters((folder / "stats-show.txt").read_text())
    return state_of({"pmd-cpu-mask": "0x3"}, shown, counters, rows)


def test_threads_and_queues_of_3_1() -> None:
    found = state(OLD, {"null0": interface("null0", 1, other_config={"pmd-rxq-affinity": "1:1,0:9"})})
    assert (found.cpus, found.usage_seconds, found.interval_s) == ("0-1", 60, None)
    first, second = found.cores
    assert (first.cpu, first.numa_node, first.isolated, first.overhead_percent) == (0, 0, False, 0)
    assert (first.busy_percent, first.packets) == (100.0, 170894080)
    assert (first.cycles_per_packet, first.processing_cycles_per_packet) == (186.1, 186.1)
    assert (first.upcalls, first.lost_upcalls) == (2, 21130)
    assert (second.cpu, second.cycles_per_packet) == (1, 120.7)
    queues = [(q.port, q.queue, q.enabled, q.usage_percent) for q in first.queues]
    assert queues == [("null0", 0, True, 7), ("null1", 1, True, 8)]
    [away, home] = first.queues
    assert (away.pinned_to, away.port_numa_node, away.numa_mismatch) == (9, 1, True)
    assert (home.pinned_to, home.port_numa_node, home.numa_mismatch) == (None, None, False)


def test_both_commands_count_alike() -> None:
    """Of 3.1 the one was printed just after the other."""
    stats = parse_counters((OLD / "stats-show.txt").read_text())
    perf = parse_counters((OLD / "perf-show.txt").read_text())
    assert stats.keys() == perf.keys() == {0, 1}, "the main thread is none"
    for cpu in stats:
        assert perf[cpu].cycles == pytest.approx(stats[cpu].cycles, rel=0.005)
        assert perf[cpu].busy_cycles == pytest.approx(stats[cpu].busy_cycles, rel=0.005)
        assert perf[cpu].packets == pytest.approx(stats[cpu].packets, rel=0.005)
        assert (perf[cpu].upcalls, perf[cpu].lost_upcalls) == (
            stats[cpu].upcalls,
            stats[cpu].lost_upcalls,
        )
        assert stats[cpu].busy_error == 0 < perf[cpu].busy_error


def test_threads_and_queues_of_4_0() -> None:
    first, second = state(NEW, {}).cores
    assert (first.cpu, first.busy_percent, first.packets, first.overhead_percent) == (
        2,
        33.7,
        421250000,
        3,
    )
    assert (first.cycles_per_packet, first.processing_cycles_per_packet) == (593.5, 200.0)
    assert (first.upcalls, first.lost_upcalls) == (80, 20)
    assert [(q.port, q.queue, q.enabled) for q in first.queues] == [
        ("dpdk0", 0, True),
        ("vhost-long-name.0", 11, False),
    ]
    assert (second.isolated, second.busy_percent, second.packets) == (True, 0.0, 0)
    assert second.cycles_per_packet is None, "nothing to divide by"


def test_what_is_not_measured_is_not_zero() -> None:
    [core] = state_of({}, parse_threads(WAIT), parse_counters(""), {}).cores
    assert (core.busy_percent, core.packets, core.overhead_percent) == (None, None, None)
    assert core.queues[0].usage_percent is None and core.queues[0].enabled
    assert parse_threads("").threads == () and parse_threads("").seconds is None


def test_a_thread_whose_tsc_went_back_has_no_share() -> None:
    """OVS adds up in 64 bits without a sign."""
    for busy, idle, share in (
        (2**64 - 500, 2_000, 0.0),
        (2**64 - 5_000, 2_000, None),
        (2_000, 2**64 - 500, 100.0),
    ):
        text = f"  packets received: 4\n  idle cycles: {idle} (1.00%)\n  processing cycles: {busy} (1.00%)\n"
        [found] = parse_counters(f"pmd thread numa_id 0 core_id 1:\n{text}").values()
        assert found.busy_percent == share
        assert found.cycles == (busy + idle + 2**63) % 2**64 - 2**63


# -- queues that nobody polls --------------------------------------------------------------------


def test_unpolled_queues_are_found_when_all_threads_are_isolated() -> None:
    rows = {name: interface(name, options={"n_rxq": "2"}) for name in ("null0", "null1")}
    found = state(OLD, rows, "rxq-show-unpolled.txt")
    assert [(q.port, q.queue) for q in found.unpolled] == [("null1", 1)]
    # What was requested of a NIC may be more than it has: OVS polls all, as long as a thread is open.
    more = {"null0": interface("null0", options={"n_rxq": "8"})}
    assert state(OLD, more).unpolled == ()


def test_a_device_that_does_not_work_has_no_queues() -> None:
    rows = {
        "broken": OvsInterface("broken", "dpdk", {}, {}, None, None, -1, "no such device", None),
        "br0": OvsInterface("br0", "internal", {}, {}, None, None, 65534, None, None),
        "vm": interface("vm", queues=3),
    }
    found = state(OLD, rows, "rxq-show-unpolled.txt").unpolled
    assert [(q.port, q.queue) for q in found] == [("vm", 0), ("vm", 1), ("vm", 2)]


# -- two looks -----------------------------------------------------------------------------------


def reading(counters: Mapping[int, PmdCounters]) -> PmdReading:
    shown = parse_threads((NEW / "rxq-show.txt").read_text())
    return PmdReading(state_of({}, shown, counters, {}), counters)


def test_a_window_has_what_was_counted_in_it() -> None:
    before = reading({2: PmdCounters(100, 1000, 500, 0, 7, 1), 18: PmdCounters(5, 5, 5)})
    after = reading({2: PmdCounters(140, 3000, 1000, 0, 9, 1), 18: PmdCounters(4, 9, 9)})
    first, second = between(before, after, 2.5).cores
    assert (first.packets, first.busy_percent, first.upcalls, first.lost_upcalls) == (
        40,
        25.0,
        2,
        0,
    )
    assert (first.cycles_per_packet, first.processing_cycles_per_packet) == (50.0, 12.5)
    assert (second.packets, second.busy_percent) == (None, None), "it was cleared in between"
    assert between(before, after, 2.5).interval_s == 2.5
    new = between(reading({}), after, 1.0).cores[0]
    assert new.packets is None, "the thread is new"


def test_a_window_too_short_for_rounded_shares_has_the_queues_own() -> None:
    """OVS 4.0 after a long time: the shares are of far more cycles than the window has."""
    before = reading({2: PmdCounters(100, 10**12, 10**11, 10**9)})
    after = reading({2: PmdCounters(300, 10**12 + 10**6, 10**11, 10**9)})
    core = between(before, after, 1.0).cores[0]
    assert core.busy_percent == 31 + 0 + 3
    assert (core.packets, core.cycles_per_packet) == (200, 5000.0), "these are exact"
    assert core.processing_cycles_per_packet is None


def test_rounded_cycles_of_packets_are_no_more_than_all_cycles() -> None:
    """OVS 4.0, which rounds them up, on a thread that is always busy."""
    before = reading({2: PmdCounters()})
    after = reading({2: PmdCounters(1000, 1_011_400, 1_012_000, 500)})
    core = between(before, after, 1.0).cores[0]
    assert core.cycles_per_packet == core.processing_cycles_per_packet == 1011.4
    assert core.busy_percent == 100.0


# -- settings ------------------------------------------------------------------------------------


def test_settings_are_as_ovs_takes_them() -> None:
    default = read_settings({})
    assert (default.rxq_assign, default.rxq_isolate, default.sleep_max) == ("cycles", True, None)
    assert default.auto_load_balance.model_dump() == {
        "enabled": False,
        "load_threshold": 95,
        "improvement_threshold": 25,
        "interval_minutes": 1,
    }
    found = read_settings(
        {
            "pmd-rxq-assign": "group",
            "pmd-rxq-isolate": "false",
            "pmd-auto-lb": "true",
            "pmd-auto-lb-load-threshold": "70",
            "pmd-auto-lb-improvement-threshold": "101",
            "pmd-auto-lb-rebal-interval": "0",
            "pmd-maxsleep": "50",
            "pmd-cpu-mask": "0x6",
        }
    )
    assert (found.rxq_assign, found.rxq_isolate, found.mask) == ("group", False, "0x6")
    balance = found.auto_load_balance
    assert (balance.enabled, balance.load_threshold) == (True, 70)
    assert (balance.improvement_threshold, balance.interval_minutes) == (25, 1)
    assert found.sleep_max == "50"
    assert read_settings({"pmd-rxq-isolate": "false"}).rxq_isolate, "only group can share"
    assert read_settings({"pmd-rxq-assign": "best"}).rxq_assign == "cycles"


def test_affinities_are_read_and_written() -> None:
    assert read_affinity("0:3,1:7 , 3:8") == {0: 3, 1: 7, 3: 8}
    for nothing in (None, "", "0:3,x:1", "3"):
        assert read_affinity(nothing) == {}, nothing
    assert affinity_text({3: 8, 0: 3}) == "0:3,3:8"
    assert affinity_text({}) is None
