"""What a VM has for a VNF: read there by one script, and what the VNF lacks of it, each with a fix."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from netplugin.host.cpus import parse_list
from netplugin.host.vfs import VFIO, in_user_space
from netplugin_zeroloss.machines import LocalMachine, Machine, MachineError, SshMachine
from netplugin_zeroloss.vnf.contract import PlacedDescription, VnfCores, VnfError, VnfPort
from netplugin_zeroloss.vnf.dpdk import check_cores

#: Prints one line `name value` for each fact; a NIC that is not there has the driver that it will get.
_LOOK = """
echo program $(command -v -- {program})
echo python $(command -v python3)
echo memory $(awk '/^MemAvailable/ {{print int($2 / 1024)}}' /proc/meminfo)
echo pages $(awk '/^HugePages_Total/ {{print $2}}' /proc/meminfo)
for pool in /sys/kernel/mm/hugepages/hugepages-*kB; do
  size=${{pool##*-}}; echo $(cat $pool/free_hugepages) ${{size%kB}}
done | awk '{{mb += int($1 * $2 / 1024)}} END {{print "free", mb}}'
echo online $(cat /sys/devices/system/cpu/online)
echo isolated $(cat /sys/devices/system/cpu/isolated)
echo module $(modprobe -n vfio-pci 2> /dev/null && echo yes)
echo iommu $(ls /sys/kernel/iommu_groups 2> /dev/null | head -n 1)
echo unsafe $(cat /sys/module/vfio/parameters/enable_unsafe_noiommu_mode 2> /dev/null)
for nic in {nics}; do
  at=/sys/bus/pci/devices/$nic
  if [ -e "$at" ]; then echo there $nic; echo "$nic" $(basename "$(readlink "$at/driver")")
  elif grep -qs 'vfio-pci.ids=' /proc/cmdline || grep -Eqs 'vfio-pci.* ids=' /etc/modprobe.d/*; then
    echo "$nic" vfio-pci
  else echo "$nic" $(cat /etc/driverctl.d/*"$nic" 2> /dev/null); fi
done
"""


def _number(printed: object) -> int | None:
    text = str(printed)
    return int(text) if text.isdecimal() and len(text) < 16 else None


def _cpus(printed: object) -> tuple[int, ...]:
    with suppress(ValueError):
        return parse_list(str(printed))
    return ()


_Number = Annotated[int | None, BeforeValidator(_number)]
_Cpus = Annotated[tuple[int, ...], BeforeValidator(_cpus)]


class GuestFacts(BaseModel, frozen=True):
    """What was read in the VM, by the names of ``_LOOK``; empty or None: not known there.

    ``drivers``: of each NIC of the VNF, or the one that a NIC will get that is not in ``there``.
    """

    program: str
    python: str = ""
    #: MB that are available besides hugepages; number of hugepages; MB of free ones.
    memory: _Number = None
    pages: _Number = None
    free: _Number = None
    online: _Cpus = ()
    isolated: _Cpus = ()
    module: str = ""
    iommu: str = ""
    unsafe: str = ""
    drivers: Mapping[str, str]
    there: frozenset[str]


def read_guest(machine: Machine, vnf: PlacedDescription) -> GuestFacts:
    """Read the facts in a running VM. Raises: MachineError, also if what answers is no shell."""
    nics = " ".join(map(shlex.quote, vnf.nics))
    script = _LOOK.format(program=shlex.quote(vnf.binary), nics=nics)
    printed = machine.run(["sh", "-c", script])
    lines = [line.strip().partition(" ") for line in printed.splitlines()]
    facts = {name: value for name, _, value in lines}
    if "program" not in facts:
        raise MachineError(
            f"the VM printed {printed[:200]!r} in place of what it has: it needs a shell (sh) and coreutils"
        )
    of_nics = {
        "drivers": {nic: facts.get(nic, "") for nic in vnf.nics},
        "there": {value for name, _, value in lines if name == "there"},
    }
    return GuestFacts.model_validate(facts | of_nics)


def where(machine: SshMachine | LocalMachine) -> str:
    """Return the words before a command for the VM."""
    return f"ssh {machine.user}@{machine.host}" if isinstance(machine, SshMachine) else "in the VM:"


def lacks(vnf: PlacedDescription, facts: GuestFacts, ports: int = 2) -> Iterator[tuple[str, str]]:
    """Yield what a VNF of so many ports lacks in its VM, with its fixes; its NICs need not be there yet."""
    there = where(vnf.machine)
    if not facts.program:
        whose, packages = vnf.packages
        by_hand = f"in a VM of your own install {whose}: {there} apt-get install {packages}"
        yield f"the VM has no program {vnf.binary}", f"netplugin-zeroloss vm build {vnf.vm_build}; {by_hand}"
    if vnf.needs_python and not facts.python:
        found = f"the VM has no python3, which reads {vnf.type}'s counters there"
        yield found, f"{there} apt-get install python3"
    fix = f"{there} sysctl -w vm.nr_hugepages=1024, and in its kernel arguments: netplugin guest plan"
    needed = vnf.needs_mb(ports)
    if vnf.hugepages and not facts.pages:
        yield "the VM has no hugepages", fix
    elif vnf.hugepages and facts.free is not None and facts.free < needed:
        found = f"the VM has {facts.free} MB of free hugepages, and {vnf.type} needs {needed} MB"
        yield found, f"{fix}; or a smaller memory_mb of the VNF"
    if facts.memory is not None and facts.memory < vnf.heap_mb:
        found = f"the VM has {facts.memory} MB free besides its hugepages"
        needs = f"the heap of {vnf.type} takes {vnf.heap_mb} MB"
        yield f"{found}, and {needs}", "give the VM more memory, or fewer hugepages"
    for nic, driver in facts.drivers.items():
        if not in_user_space(driver) and driver not in vnf.shared_drivers:
            found = f"NIC {nic} of the VM has the driver {driver or 'that the kernel takes'}"
            fix = f"{there} driverctl set-override {nic} vfio-pci, or vfio-pci.ids=1af4:1041 in its kernel"
            fix += " arguments; without an IOMMU: driverctl set-override .. uio_pci_generic"
            yield f"{found}, and {vnf.type} needs {VFIO}", fix
    if "vfio-pci" in facts.drivers.values() and not facts.module:
        yield "the VM has no module vfio-pci", "install a whole kernel package there"
    elif "vfio-pci" in facts.drivers.values() and not facts.iommu and facts.unsafe not in ("Y", "1"):
        fix = f"{there} modprobe vfio enable_unsafe_noiommu_mode=1, and in /etc/modprobe.d for each boot"
        yield "the VM has no IOMMU, and vfio-pci takes no NIC without one", fix


# -- Before the VNF is started, with the NICs there. ----------------------------------------------


def require_guest(vnf: PlacedDescription, facts: GuestFacts, ports: int) -> None:
    """Raises: VnfError with all that the VNF lacks in its VM, each with its fix."""
    fix = f"{where(vnf.machine)} lspci -D; name the addresses that the test NICs have there in `nics`"
    missing = [(f"the VM has no NIC at {nic}", fix) for nic in vnf.nics if nic not in facts.there]
    missing += lacks(vnf, facts, ports)
    if missing:
        raise VnfError("\n".join(f"{found}\n  fix: {fix}" for found, fix in missing))


def guest_cores(given: VnfCores, facts: GuestFacts) -> VnfCores:
    """Return the VM's CPUs for a VNF: as given, else those that the plan of the guest isolates, and the first
    of the others as main.

    Raises: VnfError if the VM does not have them.
    """
    cores = given
    if facts.isolated and not given.workers:
        others = sorted(set(facts.online) - set(facts.isolated))
        main = given.main if given.main is not None or not others else others[0]
        cores = VnfCores(main, tuple(cpu for cpu in facts.isolated if cpu != main))
    check_cores(cores, facts.online)
    return cores


def check_nics(name: str, vnf: PlacedDescription, ports: Sequence[VnfPort]) -> None:
    """Check that a VNF in a VM knows the NIC of each port, and one on this machine names none.

    Raises: VnfError.
    """
    local = isinstance(vnf.machine, LocalMachine)
    if local and vnf.nics:
        raise VnfError(f"{name} on this machine takes the ports themselves: nics are those of a VM (machine)")
    if not local and len(vnf.nics) != len(ports):
        counts = f"{len(vnf.nics)} nics for {len(ports)} ports"
        raise VnfError(f"{name} in a VM: say in `nics` which PCI addresses its ports have there: {counts}")
