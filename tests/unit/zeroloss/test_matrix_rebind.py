"""NICs are bound between cells as the backends need them, and back: at the end, and after a kill."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.journal import Cell, Part
from netplugin_zeroloss.loss.choose import LossDescription, NicCounters
from netplugin_zeroloss.matrix.agent_bench import AgentBench
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.matrix.nics import NicNeed, Nics, NicState
from netplugin_zeroloss.values import UnusableInput

from netplugin.api.client import Readiness
from netplugin.api.errors import Conflict, HostError
from netplugin.host.links import Links
from netplugin.host.vfs import Vfs, read_text
from tests.unit.tuning.machines import load
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.published_host import NICS, PublishedHost, with_pages

_KERNEL, _NAMES = "ixgbe", dict(zip(NICS, ("ens1f0np0", "ens1f1np1"), strict=True))


class FakeVfs(Vfs):
    """Does what the kernel does when a driver is bound: interfaces come and go. ``crash_at`` counts calls."""

    def __init__(self, sys: Path) -> None:
        super().__init__(sys)
        self.open: set[str] = set()
        self.refused: set[str] = set()
        self.steps: list[str] = []
        self.crash_at = 0

    def _step(self, what: str, address: str) -> None:
        self.steps.append(f"{what} {address}")
        if len(self.steps) == self.crash_at:
            raise KeyboardInterrupt

    def is_open(self, address: str) -> bool:
        return address in self.open

    def override(self, address: str, driver: str | None) -> None:
        self._step(f"override {driver}", address)
        (self._device(address) / "driver_override").write_text(driver or "(null)")

    def unbind(self, address: str) -> None:
        self._step("unbind", address)
        (self._device(address) / "driver").unlink(missing_ok=True)
        shutil.rmtree(self._device(address) / "net", ignore_errors=True)
        assert read_text(self._device(address) / "sriov_numvfs") == "0", "its VFs would go with the driver"

    def probe(self, address: str) -> None:
        self._step("probe", address)
        device = self._device(address)
        override = read_text(device / "driver_override")
        driver = _KERNEL if override == "(null)" else override
        if driver in self.refused:
            return
        (device / "driver").symlink_to(f"/drivers/{driver}")
        if driver == _KERNEL:
            interface(device, _NAMES[address], up=False)


class FakeLinks(Links):
    """The addresses that a test gives the host, and a flag for each interface."""

    def __init__(self, sys: Path) -> None:
        super().__init__()
        self.sys, self.given = sys, dict[str, tuple[str, ...]]()

    def addresses(self) -> dict[str, tuple[str, ...]]:
        return self.given

    def set(self, name: str, *, mtu: int | None = None, up: bool | None = None, **_: Any) -> None:
        [device] = self.sys.glob(f"bus/pci/devices/*/net/{name}")
        (device / "flags").write_text("0x1003" if up else "0x1002")
        (device / "mtu").write_text(str(mtu))


def interface(device: Path, name: str, up: bool) -> None:
    at = device / "net" / name
    at.mkdir(parents=True, exist_ok=True)
    (at / "flags").write_text("0x1003" if up else "0x1002")
    (at / "mtu").write_text("9000" if up else "1500")


class IntelHost(PublishedHost):
    """The published host with NICs whose kernel driver is none that DPDK works beside."""

    def __init__(self, folder: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, agent, monkeypatch)
        shutil.rmtree(self.root / "sys")
        nics = [nic | {"driver": _KERNEL} for nic in load("published").nics]
        self.machine(with_pages(replace(load("published"), nics=nics), 16), _KERNEL)
        (self.sys / "bus/pci/drivers/vfio-pci").mkdir(parents=True)
        for nic in NICS:
            (self.device(nic) / "iommu_group").touch()
            (self.device(nic) / "driver_override").write_text("(null)")
            (self.device(nic) / "sriov_numvfs").write_text("4")
            interface(self.device(nic), _NAMES[nic], up=True)
        self.vfs, self.links = FakeVfs(self.sys), FakeLinks(self.sys)
        self.backends(vf_driver=_KERNEL)

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    def device(self, address: str) -> Path:
        return (self.sys / "bus/pci/devices" / address).resolve()

    def nics(self, found: Any = None) -> Nics:
        return Nics(self.root, dict, found, vfs=self.vfs, links=self.links)

    def run(self) -> RunDescription:
        return self.description(("# rebind: true", "rebind: true"))

    def started(self, run: RunDescription, found: Any = None) -> AgentBench:
        bench = self.bench(run, nics=found)
        bench._host.nics = self.nics(found)
        return bench

    def drivers(self) -> list[str | None]:
        return [self.nics().driver(nic) for nic in NICS]


@pytest.fixture
def host(tmp_path: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch) -> IntelHost:
    return IntelHost(tmp_path, agent, monkeypatch)


def _task(backend: str) -> CellTask:
    return CellTask(Cell(backend, queues=8), Part.SEARCH)


def _bound_for(bench: AgentBench, backend: str) -> None:
    bench._bind_nics(Cell(backend))


def test_each_cell_has_the_drivers_that_it_needs_and_the_end_those_from_before(host: IntelHost) -> None:
    run = host.run()
    bench = host.started(run)
    before = [host.nics().state(nic) for nic in NICS]
    noted = bench.check(host.tasks(run))["nics"]
    assert noted == {nic: vars_of(state) for nic, state in zip(NICS, before, strict=True)}
    assert host.vfs.steps == [], "a check changes nothing"
    seen = {}
    for backend in ("linuxbridge", "dpdkvhostuser", "sriov", "dpdkvhostuser", "vdpa", "dpdkvhostuser"):
        _bound_for(bench, backend)
        seen[backend] = host.drivers()
        vfs = [read_text(host.device(nic) / "sriov_numvfs") for nic in NICS]
        assert vfs == (["0", "0"] if backend == "dpdkvhostuser" else ["4", "4"])
    assert seen.pop("dpdkvhostuser") == ["vfio-pci", "vfio-pci"]
    assert set(map(tuple, seen.values())) == {(_KERNEL, _KERNEL)}
    assert bench.restore() == [] and [host.nics().state(nic) for nic in NICS] == before
    steps = len(host.vfs.steps)
    assert bench.restore() == [] and len(host.vfs.steps) == steps, "what is right is left alone"


def vars_of(state: NicState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in NicState.__dataclass_fields__}


@pytest.mark.parametrize("step", range(1, 9))
def test_a_kill_at_each_step_is_put_back_by_the_resume(host: IntelHost, step: int) -> None:
    run = host.run()
    bench = host.started(run)
    before = [host.nics().state(nic) for nic in NICS]
    found = bench.check(host.tasks(run))["nics"]
    host.vfs.crash_at = step
    with pytest.raises(KeyboardInterrupt):
        _bound_for(bench, "dpdkvhostuser")
    again = host.started(run, found)
    assert again.check(host.tasks(run))["nics"] == found, "what was found first is what is put back"
    again.recover()
    assert [host.nics().state(nic) for nic in NICS] == before


def test_a_backend_may_wait_for_a_nic_that_the_run_or_its_resume_binds(
    host: IntelHost, agent: MadeUpAgent
) -> None:
    """After a kill in a cell of OVS-DPDK, the agent is not ready: VFs went with the kernel's driver."""
    run = host.run()
    bench = host.started(run)
    found = bench.check(host.tasks(run))["nics"]
    _bound_for(bench, "dpdkvhostuser")
    no_vfs = [f"{name}: NIC {NICS[0]} has no VFs (sriov_numvfs is 0)" for name in ("sriov", "vdpa")]
    agent.readiness = Readiness(ready=False, reasons=no_vfs)
    again = host.started(run, found)
    assert again.check(host.tasks(run))["nics"] == found
    agent.readiness = Readiness(ready=False, reasons=[*no_vfs, "the store is read-only"])
    with pytest.raises(UnusableInput, match="the store is read-only") as refused:
        again.check(host.tasks(run))
    assert "has no VFs" not in str(refused.value)
    again.recover()
    agent.readiness = Readiness(ready=False, reasons=no_vfs)
    with pytest.raises(UnusableInput, match="has no VFs"):
        again.check(host.tasks(run))


def test_a_nic_that_dpdk_had_goes_back_to_dpdk(host: IntelHost) -> None:
    for nic in NICS:
        (host.device(nic) / "sriov_numvfs").write_text("0")
        host.vfs.override(nic, "vfio-pci")
        host.vfs.unbind(nic)
        host.vfs.probe(nic)
        (host.sys / "class/net" / _NAMES[nic]).unlink()
    host.networks()
    run = host.run()
    bench = host.started(run)
    bench.check(host.tasks(run))
    _bound_for(bench, "linuxbridge")
    assert host.drivers() == [_KERNEL, _KERNEL]
    assert bench.restore() == [] and host.drivers() == ["vfio-pci", "vfio-pci"]
    assert read_text(host.device(NICS[0]) / "driver_override") == "vfio-pci"


def test_counters_of_a_nic_are_read_in_the_cells_in_which_the_kernel_has_it(host: IntelHost) -> None:
    named, other = _NAMES[NICS[0]], "eth9"
    described = LossDescription(devices=(named, other), nics=(NicCounters(device=named),))
    run = host.run()
    bench = host.started(run)
    bench.check(host.tasks(run))
    assert described.without(bench._host.nics.hides) == described
    _bound_for(bench, "dpdkvhostuser")
    assert described.without(bench._host.nics.hides) == LossDescription(devices=(other,)), (
        "a wrong name stays"
    )
    _bound_for(bench, "sriov")
    assert described.without(bench._host.nics.hides) == described


def _address(host: IntelHost) -> None:
    host.links.given = {_NAMES[NICS[1]]: ("10.0.0.1/24",)}


def _member(host: IntelHost) -> None:
    (host.device(NICS[1]) / "net" / _NAMES[NICS[1]] / "master").symlink_to("/br0")


def _no_iommu(host: IntelHost) -> None:
    (host.device(NICS[1]) / "iommu_group").unlink()


def _no_module(host: IntelHost) -> None:
    (host.sys / "bus/pci/drivers/vfio-pci").rmdir()


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (_address, r"ens1f1np1 has the address 10\.0\.0\.1/24\n  fix: take another NIC"),
        (_member, "ens1f1np1 is in a bridge or bond\n  fix: take another NIC"),
        (_no_iommu, "0000:3b:00.1 has no IOMMU group.*\n  fix: "),
        (_no_module, "vfio-pci is not loaded\n  fix: modprobe vfio-pci"),
    ],
)
def test_what_is_in_the_way_is_found_before_and_nothing_is_rebound(
    host: IntelHost, breaks: Any, words: str
) -> None:
    breaks(host)
    run = host.run()
    bench = host.started(run)
    with pytest.raises(UnusableInput, match=words):
        bench.check(host.tasks(run))
    bench._host.nics.note([NicNeed(NICS[1], "dpdkvhostuser", dpdk=True)])
    with pytest.raises(Conflict):
        bench._host.nics.bind(NicNeed(NICS[1], "dpdkvhostuser", dpdk=True))
    assert host.vfs.steps == [] and host.drivers() == [_KERNEL, _KERNEL]


def test_without_leave_nothing_is_rebound(host: IntelHost) -> None:
    run = host.description()
    bench = host.started(run)
    with pytest.raises(UnusableInput, match=r"driverctl set-override 0000:3b:00.0 vfio-pci; or rebind: true"):
        bench.check(host.tasks(run))
    _bound_for(bench, "dpdkvhostuser")
    assert host.vfs.steps == []


def test_vfs_that_a_port_has_are_not_taken_away(host: IntelHost) -> None:
    vf = host.device(NICS[0]).parent / "0000:3b:00.2"
    vf.mkdir()
    (host.device(NICS[0]) / "virtfn0").symlink_to(vf)
    nics = Nics(host.root, lambda: {"0000:3b:00.2": "mine"}, vfs=host.vfs, links=host.links)
    need = NicNeed(NICS[0], "dpdkvhostuser", dpdk=True)
    nics.note([need])
    with pytest.raises(Conflict, match="port mine has it"):
        nics.bind(need)
    assert host.vfs.steps == [] and read_text(host.device(NICS[0]) / "sriov_numvfs") == "4"


def test_a_nic_that_cannot_be_put_back_is_reported_and_the_others_are(
    host: IntelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netplugin_zeroloss.matrix.nics._WAIT_S", 0.0)
    run = host.run()
    bench = host.started(run)
    bench.check(host.tasks(run))
    _bound_for(bench, "dpdkvhostuser")
    host.vfs.open.add(NICS[0])
    left = bench.restore()
    assert len(left) == 1 and "--resume" in left[0], left
    assert left[0].startswith(f"NIC {NICS[0]} is not bound to ixgbe as before the run")
    assert host.drivers() == ["vfio-pci", _KERNEL]
    with pytest.raises(UnusableInput, match="is not bound to ixgbe"):
        bench.recover()
    host.vfs.open.clear()
    assert bench.restore() == [] and host.drivers() == [_KERNEL, _KERNEL]


def test_a_driver_that_does_not_take_the_nic_fails_the_cell(host: IntelHost) -> None:
    run = host.run()
    bench = host.started(run)
    bench.check(host.tasks(run))
    host.vfs.refused.add("vfio-pci")
    with pytest.raises(HostError, match="is bound to no driver and not as dpdkvhostuser needs it"):
        with bench.stand(_task("dpdkvhostuser")):
            pass
    host.vfs.refused.clear()
    assert host.agent.ports == {} and bench.restore() == [] and host.drivers() == [_KERNEL, _KERNEL]
