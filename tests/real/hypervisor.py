"""The hypervisor of ``test_all_backends``, in the guest of ``tests.nested``: it runs the command on itself.

Each of its two NICs with VFs is the end of a wire, whose other end has a port of the TRex outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from netplugin_zeroloss.cli.main import main as zeroloss
from netplugin_zeroloss.vnf.contract import (
    Attachment,
    ForwardMode,
    TestpmdDescription,
    VnfCores,
    VnfInfo,
    VnfPort,
    VppDescription,
)
from netplugin_zeroloss.vnf.testpmd import Testpmd
from netplugin_zeroloss.vnf.vpp import Vpp

from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.wires import NETWORKS, Wires
from tests.nested import machine, nics
from tests.nested.machine import NICS, OUT_MAC
from tests.nested.rebooted import say

BACKENDS = ("linuxbridge", "dpdkvhostuser", "vdpa", "sriov")
#: Of the wire to the generator.
HOST, GENERATOR = "192.0.2.1", "192.0.2.2"
FOLDER, CGROUPS = Path("/run/np-table"), Path("/sys/fs/cgroup")
#: Of what takes a second or two where nothing is emulated.
PATIENT_S = 300.0
SEARCH = {
    "final_duration": 1,
    "initial_duration": 0.5,
    "precision": 0.5,
    "max_trials": 4,
    "line_rate_pps": 400,
}


def main() -> None:
    FOLDER.mkdir()
    with (
        open(int(os.environ[machine.CHANNEL]), "wb") as channel,
        pytest.MonkeyPatch.context() as patch,
        _sections() as sections,
    ):
        patch.setattr("netplugin_zeroloss.vnf.choose.Vpp", _vpp)
        path = FOLDER / "run.yaml"
        path.write_text(yaml.safe_dump(sections))
        # The command without the time it takes to start.
        status = zeroloss(["matrix", str(path), "--folder", str(FOLDER / "run")])
        journal = (FOLDER / "run/journal.jsonl").read_text()
        say(channel, event="measured", status=status, journal=journal)


def _vpp(description: VppDescription, ports: tuple[VnfPort, ...], cores: VnfCores) -> Vpp:
    of_vf = ports[0].attachment is Attachment.VFIO
    return (Vpp if of_vf else Behind)(description, ports, cores)


class Behind(Vpp):
    """VPP where it has no driver of a port: testpmd, as the virtio NIC of a VM, joins it to a veth pair.

    VPP has the other end. Nothing is counted of testpmd: what is lost in it is unexplained.
    """

    def __init__(self, description: VppDescription, ports: tuple[VnfPort, ...], cores: VnfCores) -> None:
        self._joined = ports
        veths = (
            replace(port, attachment=Attachment.NETDEV, device=f"vpp{n}") for n, port in enumerate(ports)
        )
        super().__init__(description, tuple(veths), cores)

    def start(self) -> VnfInfo:
        pairs = []
        for number, port in enumerate(self._joined):
            one, other = self._ports[number].device, f"joined{number}"
            run(["ip", "link", "add", one, "type", "veth", "peer", "name", other])
            self._parts.callback(run, ["ip", "link", "delete", one])
            for name in (one, other):
                run(["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1"])
                run(["ip", "link", "set", name, "up"])
            pairs += [port, replace(port, attachment=Attachment.NETDEV, device=other)]
        self._testpmd = self._parts.enter_context(_Polite(tuple(pairs)))
        self._testpmd.start()
        return super().start()

    def check(self) -> None:
        self._testpmd.check()
        super().check()


class _Polite(Testpmd):
    """testpmd polls: while frames are forwarded it has a tenth of a CPU, and the others the rest."""

    def __init__(self, ports: tuple[VnfPort, ...]) -> None:
        (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
        self._cgroup = CGROUPS / "polite"
        self._cgroup.mkdir(exist_ok=True)
        program = FOLDER / "testpmd"
        program.write_text(f'#!/bin/sh\necho $$ > {self._cgroup}/cgroup.procs\nexec dpdk-testpmd "$@"\n')
        program.chmod(0o755)
        description = TestpmdDescription(
            type="testpmd",
            binary=str(program),
            hugepages=False,
            memory_mb=128,
            start_s=PATIENT_S,
            forward_mode=ForwardMode.IO,
        )
        super().__init__(description, ports, VnfCores(0, (0,)))

    def start(self) -> VnfInfo:
        (self._cgroup / "cpu.max").write_text("max 100000")
        started = super().start()
        (self._cgroup / "cpu.max").write_text("10000 100000")
        return started


@contextmanager
def _sections() -> Iterator[dict[str, Any]]:
    """A run description, on a host that has all backends.

    Each network has a NIC: the kernel's for Linux bridges, by DPDK's af_packet for OVS, and with a VF.
    VPP has one thread, which sleeps between polls.
    """
    nics.modprobe("virtio_net", "igbvf", "vfio-pci", "veth")
    with ExitStack() as parts:
        wait_for(lambda: OUT_MAC in _interfaces(), PATIENT_S, "the wire to the generator is there")
        run(["ip", "address", "add", f"{HOST}/30", "dev", _interfaces()[OUT_MAC]])
        run(["ip", "link", "set", _interfaces()[OUT_MAC], "up"])
        names = [nics.interface(nic.pci) for nic in NICS]
        for nic, name in zip(NICS, names, strict=True):
            run(["sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1"])
            run(["ip", "link", "set", name, "up"])
            parts.enter_context(nics.virtual_functions(nic, 1, autoprobe=True))
        wired = Wires("", NETWORKS[: len(NICS)], tuple(names), ())
        options = wired.agent_options()
        options["ovs"]["timeout"] = "60"
        vfs = ",".join(f"{network}:{nic.pci}" for network, nic in zip(wired.networks, NICS, strict=True))
        options |= {
            "agent": {"enabled_backends": ",".join(BACKENDS), "operation_timeout": str(round(PATIENT_S))},
            "sriov": {"devices": vfs},
            "vdpa": {"guest_hugepages": "false"},
        }
        config = {"dpdk-extra": "-a 0000:00:00.0 --in-memory"}
        ovs = parts.enter_context(PrivateOvs(Path("/run/np-ovs"), other_config=config))
        parts.enter_context(pytest.MonkeyPatch.context()).setattr(
            "tests.lab.agent.READY_DEADLINE_S", PATIENT_S
        )
        agent = parts.enter_context(PrivateAgent(Path("/run/np-agent"), ovs, options))
        sections = wired.described("all-four-real", agent.url, ovs.rundir)
        del sections["overrides"]
        generator = {
            "type": "trex-stl",
            "trex_dir": os.environ["NETPLUGIN_TREX_DIR"],
            "server": GENERATOR,
            "paths": [{"send": 0, "receive": 1}, {"send": 1, "receive": 0}],
        }
        tree = Path(os.environ["NETPLUGIN_VPP_DIR"])
        (plugins,) = (path for path in tree.rglob("vpp_plugins") if path.is_dir())
        vnf = {
            "type": "vpp",
            "binary": str(tree / "bin/vpp"),
            "plugin_path": str(plugins),
            "start_s": PATIENT_S,
            "poll_sleep_us": 1000,
        }
        yield sections | {
            "generator": generator,
            "vnf": vnf,
            "vnf_cores": {"main": 0},
            "search": SEARCH,
            "matrix": {"backends": list(BACKENDS), "pmd_cores": ["1"], "flows": [16]},
            "timeouts": dict.fromkeys(("agent", "active", "counters", "forwarding"), PATIENT_S),
        }


def _interfaces() -> dict[str, str]:
    """Their names by their MAC addresses."""
    return {(path / "address").read_text().strip(): path.name for path in Path("/sys/class/net").iterdir()}


if __name__ == "__main__":
    main()
