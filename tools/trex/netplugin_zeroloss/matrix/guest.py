"""Whether the VM of the VNF has what the VNF needs, read before anything is sent."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from netplugin_zeroloss.machines import choose as machines
from netplugin_zeroloss.machines.contract import ConsoleMachine, MachineError, SshMachine
from netplugin_zeroloss.machines.ssh import ssh_fix
from netplugin_zeroloss.matrix.findings import Finding
from netplugin_zeroloss.vm.image import BUILD
from netplugin_zeroloss.vnf.contract import VppDescription

#: Seconds to log in once the VM answers.
_LOG_IN_S = 10.0
#: Drivers with which VPP takes a NIC.
_DRIVERS = ("vfio-pci", "uio_pci_generic", "igb_uio")
#: VPP's default main-heap-size; without it VPP ends with a segmentation fault.
_HEAP_MB = 1024
#: Prints one line `name value` for each fact; a NIC that is not there has the driver that it will get.
_LOOK = """
echo program $(command -v -- {program})
echo memory $(awk '/^MemAvailable/ {{print int($2 / 1024)}}' /proc/meminfo)
echo pages $(awk '/^HugePages_Total/ {{print $2}}' /proc/meminfo)
echo module $(modprobe -n vfio-pci 2> /dev/null && echo yes)
echo iommu $(ls /sys/kernel/iommu_groups 2> /dev/null | head -n 1)
echo unsafe $(cat /sys/module/vfio/parameters/enable_unsafe_noiommu_mode 2> /dev/null)
for nic in {nics}; do
  at=/sys/bus/pci/devices/$nic
  if [ -e "$at" ]; then echo "$nic" $(basename "$(readlink "$at/driver")")
  elif grep -qs 'vfio-pci.ids=' /proc/cmdline || grep -Eqs 'vfio-pci.* ids=' /etc/modprobe.d/*; then
    echo "$nic" vfio-pci
  else echo "$nic" $(cat /etc/driverctl.d/*"$nic" 2> /dev/null); fi
done
"""


def look_into(vnf: VppDescription, machine: SshMachine | ConsoleMachine) -> Iterator[Finding]:
    """Yield the findings about a running VM."""
    where = f"ssh {machine.user}@{machine.host}" if isinstance(machine, SshMachine) else "in the VM:"
    try:
        there = machines.make(machine, time.monotonic() + _LOG_IN_S)
    except MachineError as error:
        yield _refused(machine, str(error))
        return
    try:
        nics = " ".join(map(shlex.quote, vnf.nics))
        printed = there.run(["sh", "-c", _LOOK.format(program=shlex.quote(vnf.binary), nics=nics)])
    except MachineError as error:
        yield Finding(machine.type, str(error), f"try it by hand: {where} true")
        return
    finally:
        there.close()
    facts = {name: value for name, _, value in (line.partition(" ") for line in printed.splitlines())}
    yield from _about(vnf, facts, where)


def _about(vnf: VppDescription, facts: dict[str, str], where: str) -> Iterator[Finding]:
    if not facts.get("program"):
        fix = (
            f"{BUILD} --vpp FOLDER; in a VM of your own install FD.io's packages:"
            f" {where} apt-get install vpp vpp-plugin-dpdk"
        )
        yield Finding("guest", f"the VM has no program {vnf.binary}", fix)
    if vnf.hugepages and facts.get("pages", "") in ("", "0"):
        fix = f"{where} sysctl -w vm.nr_hugepages=1024, and in its kernel arguments: netplugin guest plan"
        yield Finding("guest", "the VM has no hugepages", fix)
    if (memory := facts.get("memory", "")).isdecimal() and int(memory) < _HEAP_MB:
        found = f"the VM has {memory} MB free besides its hugepages, and VPP's heap takes {_HEAP_MB} MB"
        yield Finding("guest", found, "give the VM more memory, or fewer hugepages")
    drivers = {nic: facts.get(nic, "") for nic in vnf.nics}
    for nic, driver in drivers.items():
        if driver not in _DRIVERS:
            yield Finding(
                "guest",
                f"NIC {nic} of the VM has the driver {driver or 'that the kernel takes'}, and VPP needs"
                f" {_DRIVERS[0]}",
                f"{where} driverctl set-override {nic} vfio-pci, or vfio-pci.ids=1af4:1041 in its kernel"
                " arguments; without an IOMMU: driverctl set-override .. uio_pci_generic",
            )
    if "vfio-pci" in drivers.values() and not facts.get("module"):
        yield Finding("guest", "the VM has no module vfio-pci", "install a whole kernel package there")
    elif "vfio-pci" in drivers.values() and not facts.get("iommu") and facts.get("unsafe") not in ("Y", "1"):
        yield Finding(
            "guest",
            "the VM has no IOMMU, and vfio-pci takes no NIC without one",
            f"{where} modprobe vfio enable_unsafe_noiommu_mode=1, and in /etc/modprobe.d for each boot",
        )


def _refused(machine: SshMachine | ConsoleMachine, why: str) -> Finding:
    if isinstance(machine, ConsoleMachine):
        return Finding("console", why, "start the VM with a shell, or a log-in prompt, on this serial port")
    return Finding("ssh", f"{machine.user}@{machine.host} cannot be used: {why}", ssh_fix(machine, why))
