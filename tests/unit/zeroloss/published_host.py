"""The published host as files and an agent on it, and what the shipped run needs beside them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.sim import sim_generator
from netplugin_zeroloss.matrix import cells, checks, findings, host
from netplugin_zeroloss.matrix.agent_bench import AgentBench
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription, read

from drivers.dpdkvhostuser.driver import DpdkVhostUser
from drivers.linuxbridge.driver import LinuxBridge
from drivers.sriov.driver import Sriov
from drivers.vdpa.driver import Vdpa
from netplugin import options
from netplugin.api.models import BackendInfo, VfInfo
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.host import uplink_devices
from netplugin.tuning.facts import Facts
from netplugin.tuning.read import read_facts
from tests.unit.drivers.sriov.model import Model, ModelPf
from tests.unit.tuning.machines import Machine, MemoryRoot, Tree, load
from tests.unit.tuning.trees import tree
from tests.unit.zeroloss.images import made_up_image
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.matrix_runs import ROOT

NICS = ("0000:3b:00.0", "0000:3b:00.1")
#: Answers to the only thing that is asked of the VM, from a file; refuses as ssh does if there is one.
_SSH = """#!/bin/sh
[ ! -e {0}/refused ] || {{ cat {0}/refused >&2; exit 255; }}
case "$*" in *mktemp*) echo /run/netplugin-vnf-aaaaaa ;; *HugePages*) cat {0}/guest ;; esac
"""
_VIRSH = """#!/bin/sh
shift 2
echo "$1 $2" >> {0}/calls
case "$1" in
  list) cat {0}/running 2> /dev/null ;;
  create) [ -e {0}/image-lock ] && {{ echo "Failed to get write lock" >&2; exit 1; }}
          sed -n 's,.*<name>\\(.*\\)</name>.*,\\1,p' > {0}/running ;;
  shutdown | destroy) rm {0}/running ;;
esac
true
"""
_QEMU_IMG = """#!/bin/sh
for last; do :; done
: > "$last"
"""
GUEST = {
    "program": "/usr/bin/vpp",
    "pages": "1024",
    "module": "yes",
    "iommu": "",
    "unsafe": "Y",
    "0000:01:00.0": "vfio-pci",
    "0000:02:00.0": "vfio-pci",
}


class PublishedHost:
    """``root`` has /sys and /proc; the rest of the folder is what the description names."""

    def __init__(self, folder: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.agent, self.monkeypatch = folder, agent, monkeypatch
        self.root = folder / "root"
        self.machine(with_pages(load("published"), 16))
        self.programs = {"ssh", "virsh", "qemu-img"}
        self.packages = {"vpp_papi"}
        monkeypatch.setattr(findings.shutil, "which", lambda name: name if name in self.programs else None)
        monkeypatch.setattr(checks, "find_spec", lambda name: name if name in self.packages else None)
        monkeypatch.setattr(generators, "make", lambda description: sim_generator("clean", "1"))
        for name, text in (("ssh", _SSH), ("virsh", _VIRSH), ("qemu-img", _QEMU_IMG)):
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text.format(folder))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        monkeypatch.setattr("netplugin_zeroloss.matrix.domain.wait_for_ssh", lambda *_: None)
        self.key = folder / "key"
        self.key.touch(0o600)
        self.image = folder / "latest"
        made_up_image(self.image, self.key)
        self.kvm = self.root / "dev/kvm"
        self.kvm.parent.mkdir(parents=True)
        self.kvm.touch()
        self.guest(GUEST)
        self.backends()

    def machine(self, machine: Machine, driver: str = "mlx5_core") -> None:
        """The files of a machine's NICs, with their drivers, and the facts of all of it."""
        made, facts = _tree_and_facts(yaml.safe_dump(vars(machine)))
        self.monkeypatch.setattr(host, "read_facts", lambda root: facts)
        on_disk = ("/sys/bus/", "/sys/class/net/", "/sys/devices/pci")
        Tree(
            *({p: v for p, v in part.items() if p.startswith(on_disk)} for part in (made.files, made.links))
        ).write(self.root)
        for nic in machine.nics:
            device = self.root / "sys/bus/pci/devices" / nic["address"]
            (device / "driver").symlink_to(f"/drivers/{driver if nic['address'] in NICS else nic['driver']}")

    def backends(self, vf_driver: str = "mlx5_core") -> None:
        """What the agent says there of its backends, with the VFs of NICs with this driver."""
        self.agent.infos = [
            BackendInfo(name=each.name, usable=True, features=each.features)
            for each in (DpdkVhostUser, LinuxBridge, Vdpa)
        ]
        sriov = Sriov(options.load([]), None, kernel=Model(ModelPf(NICS[0], "ens1f0np0", driver=vf_driver)))
        offered = sriov.offered()
        self.agent.infos.append(BackendInfo(name="sriov", usable=True, features=offered))
        self.agent.vfs = [
            VfInfo(
                pci_address=f"{nic[:-1]}{vf + 2}",
                physical_network=f"physnet{number}",
                state="available",
                max_queues=offered.max_queues,
            )
            for number, nic in enumerate(NICS, 1)
            for vf in range(2)
        ]
        self.networks()

    def networks(self) -> None:
        """The physical networks, with what the agent finds of their NICs."""
        interfaces = ("ens1f0np0", "ens1f1np1")
        self.monkeypatch.setattr(
            uplink_devices, "has_interface", lambda name: (self.root / "sys/class/net" / name).exists()
        )
        self.agent.networks = []
        for number, (nic, interface) in enumerate(zip(NICS, interfaces, strict=True), 1):
            name = f"physnet{number}"
            parts = {
                "ovs": {"devices": [nic]},
                "linuxbridge": {"interface": interface},
                "sriov": {"devices": [nic]},
            }
            spec = PhysicalNetworkSpec.model_validate(parts)
            findings = uplink_devices.device_findings(name, spec, self.root / "sys")
            self.agent.networks.append(
                PhysicalNetworkInfo(name=name, origin="config", findings=tuple(findings), **parts)
            )

    def guest(self, facts: dict[str, str]) -> None:
        (self.folder / "guest").write_text("".join(f"{name} {value}\n" for name, value in facts.items()))

    def description(self, *more: tuple[str, str]) -> RunDescription:
        """The shipped one, with the paths of this folder."""
        text = (ROOT / "tools/trex/matrix.yaml").read_text()
        for old, new in (("/var/lib/netplugin-zeroloss/latest", str(self.image)), *more):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return read(text, "matrix.yaml")

    def check(self, run: RunDescription) -> dict[str, Any]:
        return dict(self.bench(run).check(self.tasks(run)))

    def bench(self, run: RunDescription, **more: Any) -> AgentBench:
        return AgentBench(run, "id", None, root=self.root, **more)

    def tasks(self, run: RunDescription) -> tuple[CellTask, ...]:
        return cells.tasks(run)


@cache
def _tree_and_facts(described: str) -> tuple[Tree, Facts]:
    made = tree(Machine(**yaml.safe_load(described)))
    return made, read_facts(MemoryRoot(made))


def with_pages(machine: Machine, count: int) -> Machine:
    """Free hugepages of 1 GB on the first node."""
    first, *others = machine.nodes
    return replace(machine, nodes=[{**first, "hugepages": {2048: 0, 1048576: count}}, *others])
