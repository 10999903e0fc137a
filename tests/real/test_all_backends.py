"""TRex sends and VPP routes on all four backends of a hypervisor with VFs: a guest of ``tests.nested``.

TRex runs outside of it, natively. The rates are those of emulated parts and say nothing of a backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from netplugin_zeroloss.journal import CellRecord, read_run

from tests.lab.processes import run
from tests.nested import machine, plugin
from tests.nested.machine import Job, Needs
from tests.real import needs
from tests.real.hypervisor import BACKENDS, GENERATOR
from tests.real.test_trex import server, trex_configuration

NEEDS = Needs(cpus=2, memory_mb=2560, hugepages=224)
#: The ends of the wires to the two NICs with VFs, and of the one by which TRex is asked.
TAPS = ("zltrex0", "zltrex1", "zlask")
DEADLINE_S = 1500.0
WITH_PMD = ("dpdkvhostuser", "vdpa")


@contextmanager
def netdevs() -> Iterator[list[str]]:
    """The wires, as QEMU's -netdev. The kernel says nothing on them by itself."""
    with ExitStack() as made:
        for name in TAPS:
            run(["ip", "tuntap", "add", name, "mode", "tap"])
            made.callback(run, ["ip", "link", "delete", name])
            run(["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1"])
            run(["ip", "link", "set", name, "up"])
        run(["ip", "address", "add", f"{GENERATOR}/30", "dev", TAPS[2]])
        yield [f"tap,ifname={name},script=no,downscript=no" for name in TAPS]


def test_each_backend_has_a_verdict(vpp: Path, trex: Path, tmp_path: Path) -> None:
    if why := needs.lacks_vfs():
        pytest.skip(why)
    parts = plugin.available()
    command = [sys.executable, "-W", "ignore", "-m", "tests.real.hypervisor"]
    job = Job(command, str(machine.CHECKOUT), plugin.inner_environment(os.environ), str(parts.kernel.modules))
    configuration = tmp_path / "trex_cfg.yaml"
    configuration.write_text(trex_configuration(TAPS[:2]))
    with ExitStack() as running:
        wires = running.enter_context(netdevs())
        running.enter_context(server(None, trex, configuration, tmp_path / "trex.log"))
        guest = running.enter_context(machine.started(NEEDS, parts, job, netdevs=wires))
        for event in ("up", "measured", "ended"):
            message = guest.receive(DEADLINE_S)
            assert message is not None and message["event"] == event, f"{message}\n{guest.tail()}"
            if event == "measured":
                (tmp_path / "journal.jsonl").write_text(message["journal"])
        print(guest.tail())
        assert message is not None and message["status"] == 0
    records = read_run(tmp_path).records
    assert [record.cell.backend for record in records] == list(BACKENDS)
    for record in records:
        check(record)


def check(record: CellRecord) -> None:
    """A verdict, each lost frame at its place, and VPP as the one that forwarded the others."""
    result = record.result
    assert result is not None and record.verdict in ("ndr", "floor"), record.error
    assert record.setup["vnf"]["name"] == "vpp"
    assert record.setup["generator"]["type"] == "trex-stl"
    assert record.cell.pmd_cores == (1 if record.cell.backend in WITH_PMD else None)
    for trial in result["trial_log"]:
        measured = trial["measured"]
        read, received = measured["readings"], measured["rx_packets"]
        assert read.get("ovs.pmd_cores") == record.cell.pmd_cores
        assert read["vnf.port0.tx_packets"] + read["vnf.port1.tx_packets"] >= received > 0
        assert measured["evidence"]["unexplained"] == 0, measured
