"""Whether the VM of the VNF has what the VNF needs, read over SSH before anything is sent."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from netplugin_zeroloss.matrix.findings import Finding
from netplugin_zeroloss.vm.image import BUILD
from netplugin_zeroloss.vnf.contract import SshMachine, VnfError, VppDescription
from netplugin_zeroloss.vnf.machine import Ssh

#: Seconds for SSH once its server answers.
_SSH_S = 10.0
#: Drivers with which VPP takes a NIC.
_DRIVERS = ("vfio-pci", "uio_pci_generic", "igb_uio")
#: Prints one line `name value` for each fact; a NIC that is not there has the driver that it will get.
_LOOK = """
echo program $(command -v -- {program})
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


def look_into(vnf: VppDescription, machine: SshMachine) -> Iterator[Finding]:
    """Yield the findings about a running VM."""
    where = f"ssh {machine.user}@{machine.host}"
    try:
        there = Ssh(machine, time.monotonic() + _SSH_S)
    except VnfError as error:
        yield _refused(machine, str(error))
        return
    try:
        nics = " ".join(map(shlex.quote, vnf.nics))
        printed = there.run(["sh", "-c", _LOOK.format(program=shlex.quote(vnf.binary), nics=nics)])
    except VnfError as error:
        yield Finding("ssh", str(error), f"try it by hand: {where} true")
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
    drivers = {nic: facts.get(nic, "") for nic in vnf.nics}
    for nic, driver in drivers.items():
        if driver not in _DRIVERS:
            yield Finding(
                "guest",
                f"NIC {nic} of the VM has the driver {driver or 'that the kernel takes'}, and VPP needs"
                f" {_DRIVERS[0]}",
                f"{where} driverctl set-override {nic} vfio-pci, or vfio-pci.ids=1af4:1041 in its kernel"
                " arguments",
            )
    if "vfio-pci" in drivers.values() and not facts.get("module"):
        yield Finding("guest", "the VM has no module vfio-pci", "install a whole kernel package there")
    elif "vfio-pci" in drivers.values() and not facts.get("iommu") and facts.get("unsafe") not in ("Y", "1"):
        yield Finding(
            "guest",
            "the VM has no IOMMU, and vfio-pci takes no NIC without one",
            f"{where} modprobe vfio enable_unsafe_noiommu_mode=1, and in /etc/modprobe.d for each boot",
        )


def _refused(machine: SshMachine, why: str) -> Finding:
    target = f"{machine.user}@{machine.host}"
    port = f" -p {machine.port}" if machine.port != 22 else ""
    file = machine.known_hosts or "~/.ssh/known_hosts"
    if "Host key verification failed" in why:
        fix = f"compare the VM's host key, then ssh-keyscan{port} {machine.host} >> {file}"
    elif "Permission denied" in why:
        key = f" -i {machine.key}.pub" if machine.key else ""
        fix = f"ssh-copy-id{key}{port} {target}"
    else:
        fix = f"start the VM, and try it by hand: ssh{port} {target} true"
    return Finding("ssh", f"{target} cannot be used: {why}", fix)
