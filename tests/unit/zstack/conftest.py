"""The plug-in in a stand-in for kvmagent under Python 2.7, and the options, sysfs and agent that it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.processes import LabError
from tests.lab.python27 import python27
from tests.unit.zstack.agent import StubAgent, stub_agent
from tests.unit.zstack.kvmagent import Kvmagent

PLUGINS = Path(__file__).resolve().parents[3] / "tools/zstack"


@dataclass(frozen=True)
class Host:
    """What the plug-in finds on a host; `options` is its file."""

    options: Path
    socket: Path
    sysfs: Path
    kvmagent: Kvmagent

    def configure(self, text: str = "", deadline: float = 60) -> None:
        self.options.write_text(
            f"[zstack]\nsocket = {self.socket}\ndeadline = {deadline}\nsync_deadline = {deadline}\n{text}"
        )

    def netdev(self, name: str, pci: str, driver: str = "ice", netdev: bool = True) -> None:
        add_nic(self.sysfs, name, pci, driver, netdev)


def add_nic(sysfs: Path, name: str, pci: str, driver: str = "ice", netdev: bool = True) -> None:
    """A NIC of the host; without netdev DPDK has it."""
    device = sysfs / "devices/pci0000:00" / pci
    link(sysfs / "bus/pci/devices" / pci, device)
    link(device / "driver", sysfs / "bus/pci/drivers" / driver)
    if netdev:
        link(device / "net" / name / "device", device)
        link(sysfs / "class/net" / name, device / "net" / name)


def link(path: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.fixture(scope="session")
def python_27() -> Path:
    try:
        return python27()
    except LabError as error:
        pytest.skip(f"Debian 11's Python 2.7 cannot be fetched: {error}")


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of plug-ins as kvmagent has it: with the plug-in alone, not the installer."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "netplugin_zstack.py").write_bytes((PLUGINS / "netplugin_zstack.py").read_bytes())
    return folder


@pytest.fixture(scope="session")
def kvmagent(tmp_path_factory: pytest.TempPathFactory, python_27: Path, plugins: Path) -> Iterator[Kvmagent]:
    """One process for all tests; each loads the plug-in anew."""
    running = Kvmagent(python_27, tmp_path_factory.mktemp("kvmagent"), plugins)
    yield running
    running.close()


@pytest.fixture
def host(tmp_path: Path, kvmagent: Kvmagent) -> Host:
    host = Host(tmp_path / "zstack.conf", tmp_path / "agent.sock", tmp_path / "sys", kvmagent)
    host.configure()
    host.netdev("enp3s0f0", "0000:03:00.0")
    address = host.sysfs / "class/net/outer3/address"
    address.parent.mkdir()
    address.write_text("52:54:00:00:00:03\n")
    kvmagent.load(host.options, host.sysfs)
    return host


@pytest.fixture
def agent(host: Host) -> Iterator[StubAgent]:
    with stub_agent(host.socket) as running:
        yield running


@pytest.fixture
def network(agent: StubAgent) -> StubAgent:
    """An agent that has the bridge of enp3s0f0."""
    agent.networks["br_enp3s0f0"] = {
        "name": "br_enp3s0f0",
        "bridge": "br_enp3s0f0",
        "mtu": 1500,
        "keep": True,
        "ovs": {"devices": ["0000:03:00.0"], "bond": None},
        "origin": "api",
        "ports": 0,
    }
    return agent
