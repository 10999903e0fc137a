"""Steps for VFs of QEMU's emulated 82576: they come, stay while one is used, and go again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from netplugin_zeroloss.matrix.nics import NicNeed, Nics

from netplugin.tuning.applying.apply import StepOutcome
from tests.lab.namespaces import namespace
from tests.lab.processes import run, wait_for
from tests.nested import nics
from tests.nested.host_apply import Host
from tests.nested.nics import PF
from tests.nested.vfs import DEADLINE_S, driver

pytestmark = [pytest.mark.nested, pytest.mark.timeout(600)]

NUMVFS = nics.device(PF.pci) / "sriov_numvfs"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Without virtual functions, before and after."""
    nics.modprobe("igbvf", "vfio-pci")
    # Only a PF that is up gives its VFs addresses.
    run(["ip", "link", "set", nics.interface(PF.pci), "up"])
    assert NUMVFS.read_text() == "0\n"
    yield Host(tmp_path / "journal")
    NUMVFS.write_text("0")


def vf(index: int) -> str:
    """Its address, once the host's driver has it."""
    address = (nics.device(PF.pci) / f"virtfn{index}").resolve().name
    wait_for(lambda: driver(address) == "igbvf", DEADLINE_S, f"igbvf has {address}")
    return address


def test_virtual_functions_come_and_go(host: Host) -> None:
    result = host.apply(nics.interface(PF.pci), 4)
    assert result and (result.outcome, result.old, result.new) == (StepOutcome.SET, "0", "4")
    assert NUMVFS.read_text() == "4\n"
    last = vf(3)
    assert host.apply(PF.pci, 4) is None and nics.device(last).exists()
    host.apply(PF.pci, 2)
    assert NUMVFS.read_text() == "2\n" and not nics.device(last).exists()
    [undone] = host.undo()
    assert (undone.outcome, undone.old, undone.new) == (StepOutcome.RESTORED, "2", "0")
    assert NUMVFS.read_text() == "0\n" and host.journal.read_bytes() == b""


@contextmanager
def bridge(name: str) -> Iterator[None]:
    run(["ip", "link", "add", name, "type", "bridge"])
    try:
        yield
    finally:
        run(["ip", "link", "del", name])


def refused(host: Host, *words: str) -> None:
    """Neither another number nor an undo, as long as one is in use."""
    result, [undone] = host.apply(PF.pci, 3), host.undo()
    for each in (result, undone):
        assert each and each.outcome is StepOutcome.FAILED and each.fix
        assert all(word in str(each.reason) for word in words), each
    assert NUMVFS.read_text() == "2\n"


def test_they_stay_as_long_as_one_is_in_use(host: Host) -> None:
    host.apply(PF.pci, 2)
    address = vf(1)
    name = nics.interface(address)
    run(["ip", "link", "set", name, "up"])
    refused(host, address, f"{name} is up")
    run(["ip", "link", "set", name, "down"])

    with bridge("br7"):
        run(["ip", "link", "set", name, "master", "br7"])
        refused(host, address, f"{name} is enslaved")

    with namespace("elsewhere"):
        run(["ip", "link", "set", name, "netns", "elsewhere"])
        refused(host, address, "in another network namespace")
        run(["ip", "-n", "elsewhere", "link", "set", name, "netns", "1"])

    device = nics.device(address)
    (device / "driver" / "unbind").write_text(address)
    (device / "driver_override").write_text("vfio-pci")
    Path("/sys/bus/pci/drivers_probe").write_text(address)
    assert driver(address) == "vfio-pci"
    refused(host, address, "bound to vfio-pci")
    (device / "driver" / "unbind").write_text(address)

    [undone] = host.undo()
    assert undone.outcome is StepOutcome.RESTORED and NUMVFS.read_text() == "0\n"


def test_a_nic_is_bound_to_vfio_for_a_cell_and_back_with_its_functions(host: Host) -> None:
    NUMVFS.write_text("2")
    assert [vf(0), vf(1)]
    rebound = Nics(Path("/"), dict)
    before = rebound.state(PF.pci)
    assert (before.driver, before.vfs, before.up) == ("igb", 2, True)
    need = NicNeed(PF.pci, "dpdkvhostuser", dpdk=True)
    rebound.note([need])
    rebound.bind(need)
    assert driver(PF.pci) == "vfio-pci" and not (nics.device(PF.pci) / "net").exists()
    resumed = Nics(Path("/"), dict, {PF.pci: asdict(before)})
    assert resumed.put_back() == [] and resumed.state(PF.pci) == before
    assert resumed.put_back() == []
