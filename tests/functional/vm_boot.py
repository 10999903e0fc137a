"""``python -m tests.functional.vm_boot IMAGE``, in a sandbox: runs a VM on an image as a cell does, with two
NICs, and prints as JSON what was seen inside it and of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from netplugin_zeroloss.machines import Ssh, SshMachine
from netplugin_zeroloss.matrix.description import Vm
from netplugin_zeroloss.matrix.domain import DomainRunner

from netplugin.libvirt.image_domain import HOST, NICS, SSH_PORT, USER
from netplugin.libvirt.vm_image import KEY, KNOWN_HOSTS
from tests.lab.libvirtd import PrivateLibvirt

NAME = "zeroloss-boot"
MACS = ("52:54:00:5a:00:01", "52:54:00:5a:00:02")
BOOT_S, SHUTDOWN_S = 420.0, 120.0
#: Prints one line `name value` for each fact.
LOOK = f"""
echo arguments $(cat /proc/cmdline)
echo hugepages $(awk '/^HugePages_Total/ {{print $2}}' /proc/meminfo)
echo hostname $(hostname)
echo machine $(cat /etc/machine-id)
echo stat_interval $(cat /proc/sys/vm/stat_interval)
for nic in {" ".join(NICS[:2])}; do
  echo $nic $(basename $(readlink /sys/bus/pci/devices/$nic/driver))
done
echo failed $(systemctl --failed --plain --no-legend | cut -d' ' -f1)
echo hosts $(ls /etc/ssh/ssh_host_*)
touch /written
"""


def with_nics(xml: str) -> str:
    """A domain with two NICs of QEMU's own network, as libvirt would have them anywhere on the bus: virtio as
    most backends have it, and in place of a VF one that is not virtio."""
    nics = "".join(
        f"<interface type='user'><mac address='{mac}'/><model type='{model}'/></interface>"
        for mac, model in zip(reversed(MACS), ("e1000e", "virtio"), strict=True)
    )
    return xml.replace("</devices>", f"{nics}</devices>")


def boot(folder: Path) -> dict[str, Any]:
    machine = SshMachine(
        type="ssh",
        host=HOST,
        port=SSH_PORT,
        user=USER,
        key=str(folder / KEY),
        known_hosts=str(folder / KNOWN_HOSTS),
    )
    with PrivateLibvirt() as libvirt:
        vm = Vm(image=folder, uri=libvirt.uri, ssh_port=SSH_PORT, emulate=True)
        domain = DomainRunner(vm, NAME, SHUTDOWN_S)
        missing = [each.found for each in domain.findings(Path("/")) if each.missing]
        assert missing == [], missing
        with domain.running(domain.addressed(with_nics(domain.template), MACS)):
            domain.wait_for(machine, BOOT_S)
            there = Ssh(machine, time.monotonic() + BOOT_S)
            printed = there.run(["sh", "-c", LOOK])
            there.close()
            written = domain.source.image.overlay(NAME).stat().st_size  # type: ignore[attr-defined]
        log = libvirt.qemu_log(NAME).read_text()
    facts = {name: value for name, _, value in (line.partition(" ") for line in printed.splitlines())}
    return {**facts, "overlay": written, "shutdown": "reason=shutdown" in log, "log": log[-300:]}


if __name__ == "__main__":
    print(json.dumps(boot(Path(sys.argv[1]))))
