"""Axes of a matrix on real parts: modes of testpmd on OVS-DPDK, and two pairs of ends on Linux bridges."""

from __future__ import annotations

import csv
import io
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.journal import read_run
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import csv_text

from tests.functional.conftest import BASE
from tests.lab.agent import PrivateAgent
from tests.lab.matrix import check_trials, write, zeroloss
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run
from tests.lab.wires import Wires, wires

pytestmark = pytest.mark.long

#: asm-generic/socket.h, linux/if_ether.h
_SO_TIMESTAMPNS, _ETH_P_IP = 35, 0x0800

#: As few frames and trials as tell something, on a machine that has more to do.
SEARCH = {
    "final_duration": 1.0,
    "initial_duration": 1.0,
    "precision": 0.5,
    "max_trials": 3,
    "line_rate_pps": 2000,
}


@contextmanager
def agent_on(wired: Wires, backend: str, ovs: PrivateOvs | None = None) -> Iterator[PrivateAgent]:
    options = {**wired.agent_options(), "agent": {"enabled_backends": backend}}
    try:
        with PrivateAgent(BASE / "agent", ovs, options) as private:
            yield private
    finally:
        shutil.rmtree(BASE / "agent", ignore_errors=True)


def matrix(folder: Path, description: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        zeroloss(write(folder, description), "--folder", folder / "run", "--quiet"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_testpmd_runs_in_each_mode_behind_ovs(ovs: PrivateOvs, tmp_path: Path) -> None:
    """testpmd says its mode when it starts, or the cell fails; its counters have each frame of a trial."""
    modes = ["io", "macswap", "noisy"]
    with wires() as wired, agent_on(wired, "dpdkvhostuser", ovs) as agent:
        sections = wired.described("modes", agent.url, ovs.rundir)
        del sections["overrides"]
        for end in sections["ends"]:
            end["port_security"] = False
        sections["vnf"] |= {"noisy": {"memory_mb": 16, "reads": 4, "writes": 4}}
        axes = {"backends": ["dpdkvhostuser"], "flows": [16], "vnf_modes": modes}
        done = matrix(tmp_path / "modes", {**sections, "search": SEARCH, "matrix": axes})
    assert done.returncode in (0, 1), done.stderr
    found = read_run(tmp_path / "modes" / "run")
    assert [record.cell.vnf_mode for record in found.records] == modes, done.stderr
    for record in found.records:
        check_trials(record)
        command = record.setup["vnf"]["configuration"]["command"]
        assert f"--forward-mode={record.cell.vnf_mode} " in command
        assert ("--noisy-lkup-memory=16" in command) == (record.cell.vnf_mode == "noisy")
        assert record.result is not None
        passed = [trial for trial in record.result["trial_log"] if trial["verdict"] == "passed"]
        assert passed, "2,000 frames a second are few"
        for trial in passed:
            counted = trial["measured"]["readings"]
            for number, way in enumerate(trial["measured"]["directions"]):
                assert counted[f"vnf.port{number}.rx_packets"] == way["tx_packets"]
                assert counted[f"vnf.port{number ^ 1}.tx_packets"] == way["rx_packets"]


def test_frames_go_through_ovs_in_bursts(ovs: PrivateOvs, tmp_path: Path) -> None:
    """The generator is a program that sends them so; what arrives at the NIC is seen by its time stamps."""
    with wires() as wired, agent_on(wired, "dpdkvhostuser", ovs) as agent:
        sections = wired.described("bursts", agent.url, ovs.rundir)
        del sections["overrides"]
        ways = [
            f"{send},{receive},52:54:00:5a:01:0{n},52:54:00:5a:00:0{n}"
            for n, (send, receive) in enumerate((wired.ends, wired.ends[::-1]), 1)
        ]
        sender = [sys.executable, "-m", "tests.lab.burst_sender", wired.netns, *ways]
        sections |= {
            "generator": {"type": "exec", "command": shlex.join(sender)},
            "search": SEARCH,
            "matrix": {"backends": ["dpdkvhostuser"], "flows": [4], "bursts": [1, 64]},
        }
        with arrivals(wired.nics[0]) as seen:
            done = matrix(tmp_path / "bursts", sections)
    assert done.returncode in (0, 1), done.stderr
    found = read_run(tmp_path / "bursts" / "run")
    assert [record.cell.burst for record in found.records] == [1, 64], done.stderr
    for record in found.records:
        check_trials(record)
        assert record.result is not None
        assert {trial["burst"] for trial in record.result["trial_log"]} == {record.cell.burst}
        assert any(trial["verdict"] == "passed" for trial in record.result["trial_log"]), "few frames"
    assert longest_train(seen) >= 64


@contextmanager
def arrivals(nic: str) -> Iterator[list[float]]:
    """The times in seconds at which UDP frames arrive at a NIC."""
    seen: list[float] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as ear:
        ear.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        ear.bind((nic, _ETH_P_IP))
        ear.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    _, [(_, _, at)], _, (_, _, kind, _, _) = ear.recvmsg(64, 64)
                    if kind != socket.PACKET_OUTGOING:
                        seconds, nanoseconds = struct.unpack("qq", at)
                        seen.append(seconds + nanoseconds / 1e9)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield seen
        finally:
            over.set()
            listener.join()


def longest_train(seen: list[float]) -> int:
    """The most frames within 10 ms; evenly spaced, 1,000 a second are 10."""
    return max(sum(1 for at in seen[n : n + 400] if at - first < 0.01) for n, first in enumerate(seen))


@pytest.fixture
def pairs() -> Iterator[tuple[Wires, dict[str, Any]]]:
    """A description with four ends on Linux bridges, which need no OVS."""
    with wires(pairs=2) as wired, agent_on(wired, "linuxbridge") as agent:
        sections = wired.described("pairs", agent.url, BASE)
        del sections["overrides"]
        sections |= {
            "vnf": {"type": "taps"},
            "evidence": {"ovs_rundir": None, "devices": list(wired.nics)},
            "search": SEARCH,
            "matrix": {"backends": ["linuxbridge"], "flows": [4]},
        }
        yield wired, sections


def test_two_pairs_of_ends_have_traffic_at_once(pairs: tuple[Wires, dict[str, Any]], tmp_path: Path) -> None:
    wired, sections = pairs
    done = matrix(tmp_path / "pairs", sections)
    assert done.returncode in (0, 1), done.stderr
    found = read_run(tmp_path / "pairs" / "run")
    [record] = found.records
    check_trials(record, directions=4)
    assert [port["port_id"] for port in record.setup["ports"]] == record.setup["ends"]
    assert len(record.setup["ends"]) == len(wired.ends) == 4
    [row] = csv.DictReader(io.StringIO(csv_text(report_of(found))))
    assert row["paths"] in ("4", ""), "empty if no trial lost a frame"


def test_a_path_that_is_cut_is_named(pairs: tuple[Wires, dict[str, Any]], tmp_path: Path) -> None:
    """Frames into the fourth NIC are dropped, so that its path is dead in one direction."""
    wired, sections = pairs
    cut = "table netdev zlcut { chain c { type filter hook ingress device %s priority 0; policy drop; }; }"
    run(["nft", cut % wired.nics[3]])
    try:
        done = matrix(tmp_path / "cut", {**sections, "timeouts": {"forwarding": 10}})
    finally:
        run(["nft", "delete table netdev zlcut"])
    assert done.returncode == 1, done.stderr
    [record] = read_run(tmp_path / "cut" / "run").records
    assert record.result is None and record.error is not None
    assert "path 3 (zeroloss-4 to zeroloss-3)" in record.error
    assert "on 3 of 4 paths some did" in record.error
