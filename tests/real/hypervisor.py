"""The hypervisor of ``test_all_backends``, in the guest of ``tests.nested``: it runs the command on itself.

Each of its two NICs with VFs is the end of a wire, whose other end has a port of the TRex outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from netplugin_zeroloss.cli.main import main as zeroloss

import tests.lab.agent
from tests.lab.agent import PrivateAgent
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.wires import NETWORKS, Wires
from tests.nested import machine, nics
from tests.nested.machine import NICS, OUT_MAC
from tests.nested.rebooted import say
from tests.real import vm

#: The backends of each run, and whether VPP is in a VM. Here it takes VFs, and nothing of the others.
RUNS = ((("sriov",), False), (("linuxbridge", "dpdkvhostuser", "vdpa"), True))
#: Of the wire to the generator.
HOST, GENERATOR = "192.0.2.1", "192.0.2.2"
#: Below none of /run and /dev, as the VM is to see it.
FOLDER = Path("/var/tmp/real")
#: Of the VM: with all else that the hypervisor has. Without 1 GB for its heap VPP does not start.
VM_MB, OVS_MB = 1280, 128
#: Of what takes a second or two where nothing is emulated: the VM is emulated twice.
PATIENT_S, TIMEOUT_S = 1800.0, 5400.0
SEARCH = {
    "final_duration": 1,
    "initial_duration": 0.5,
    "precision": 0.5,
    "max_trials": 4,
    "line_rate_pps": 400,
}


def main() -> None:
    tests.lab.agent.READY_DEADLINE_S = PATIENT_S
    FOLDER.mkdir()
    with open(int(os.environ[machine.CHANNEL]), "wb") as channel, ExitStack() as parts:
        sections = parts.enter_context(_sections())
        files = parts.enter_context(vm.vm_files(FOLDER, 1, VM_MB, hugepages=48, in_hugepages=True))
        for backends, in_vm in RUNS:
            folder = FOLDER / backends[0]
            _measured(sections | _vnf(files if in_vm else None, backends), folder)
            say(channel, event="journal", backends=backends, text=(folder / "journal.jsonl").read_text())


@contextmanager
def _sections() -> Iterator[dict[str, Any]]:
    """A run description but for its VNF and backends, on a host that has all backends.

    Each network has a NIC: the kernel's for Linux bridges, by DPDK's af_packet for OVS, and with a VF.
    """
    nics.modprobe("virtio_net", "igbvf", "vfio-pci")
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
        backends = ",".join(backend for backends, _ in RUNS for backend in backends)
        vfs = ",".join(f"{network}:{nic.pci}" for network, nic in zip(wired.networks, NICS, strict=True))
        options |= {
            "agent": {"enabled_backends": backends, "operation_timeout": "600"},
            "sriov": {"devices": vfs},
            "vdpa": {"guest_hugepages": "false"},
        }
        config = {"dpdk-extra": "-a 0000:00:00.0 --in-memory"}
        ovs = parts.enter_context(PrivateOvs(Path("/run/np-ovs"), socket_mem_mb=OVS_MB, other_config=config))
        parts.enter_context(PrivateLibvirt(Path("/run/np-libvirt")))
        agent = parts.enter_context(PrivateAgent(Path("/run/np-agent"), ovs, options))
        sections = wired.described("all-real", agent.url, ovs.rundir)
        del sections["overrides"]
        generator = {
            "type": "trex-stl",
            "trex_dir": os.environ["NETPLUGIN_TREX_DIR"],
            "server": GENERATOR,
            "paths": [{"send": 0, "receive": 1}, {"send": 1, "receive": 0}],
        }
        timeouts = dict.fromkeys(("agent", "active", "counters", "boot", "forwarding"), PATIENT_S)
        yield {**sections, "generator": generator, "search": SEARCH, "timeouts": {**timeouts, "shutdown": 1}}


def _interfaces() -> dict[str, str]:
    """Their names by their MAC addresses."""
    return {(path / "address").read_text().strip(): path.name for path in Path("/sys/class/net").iterdir()}


def _vnf(files: vm.VmFiles | None, backends: Sequence[str]) -> dict[str, Any]:
    """VPP, of one thread that sleeps between polls, in a VM or here."""
    tree = Path(os.environ["NETPLUGIN_VPP_DIR"])
    (plugins,) = (path for path in tree.rglob("vpp_plugins") if path.is_dir())
    vnf = {
        "type": "vpp",
        "binary": str(tree / "bin/vpp"),
        "plugin_path": str(plugins),
        "start_s": PATIENT_S,
        "poll_sleep_us": 1000,
    }
    matrix = {"backends": list(backends), "pmd_cores": ["1"], "flows": [16]}
    sections: dict[str, Any] = {"vnf": vnf, "vnf_cores": {"main": 0}, "matrix": matrix}
    if files is not None:
        vnf |= {"machine": files.ssh.machine(vm.ADDRESS), "nics": list(vm.NICS)}
        sections["vm"] = {"domain": str(files.domain)}
    return sections


def _measured(sections: dict[str, Any], folder: Path) -> None:
    path = FOLDER / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    # The command without the time it takes to start.
    assert zeroloss(["matrix", str(path), "--folder", str(folder)]) in (0, 1)


if __name__ == "__main__":
    main()
