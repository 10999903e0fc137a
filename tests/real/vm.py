"""The VM of a VNF: a TCG guest whose root is this machine's, read-only, under a tmpfs.

Programs are found in it where they are here. It has a management NIC (e1000) with an SSH server. NICs with
virtio are bound to uio_pci_generic: Debian's kernels have no VFIO without an IOMMU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab import initramfs
from tests.lab.accelerator import COMMAND_LINE, EMULATOR
from tests.lab.kernel import Kernel
from tests.lab.processes import run
from tests.nested import prepare
from tests.real.remote import SshFiles

ROOT_MODULES = ("9p", "9pnet_virtio", "overlay")
#: Of the NIC for SSH.
TAP, HOST, ADDRESS = "zlmgmt", "192.0.2.129", "192.0.2.130"
MAC = "52:54:00:5a:02:01"
#: Where the agent's two NICs appear: behind the root ports that the domain has for them.
NICS = ("0000:01:00.0", "0000:02:00.0")

_INIT = """#!/bin/busybox sh
set -e
/bin/busybox mkdir -p /sbin /usr/bin /usr/sbin /lower /upper /root
/bin/busybox --install -s
mount -t devtmpfs devtmpfs /dev
for module in {modules}; do insmod /modules/$module.ko; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose root /lower
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
umount /dev
exec switch_root -c /dev/console /root /bin/sh {boot}
"""
_BOOT = """
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm /dev/hugepages
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t hugetlbfs hugetlbfs /dev/hugepages
mkdir -p /run/sshd /lib/modules
ln -sfn {modules} /lib/modules/$(uname -r)
modprobe -a e1000 uio_pci_generic
mkdir -p /etc/driverctl.d
for nic in {nics}; do
  echo uio_pci_generic > /etc/driverctl.d/pci-$nic
  at=/sys/bus/pci/devices/$nic
  [ -e $at ] || continue
  echo $nic > $at/driver/unbind
  echo uio_pci_generic > $at/driver_override
  echo $nic > /sys/bus/pci/drivers_probe
done
ip link set lo up
for nic in /sys/class/net/*; do
  grep -q {mac} $nic/address || continue
  ip address add {address}/24 dev ${{nic##*/}}
  ip link set ${{nic##*/}} up
done
while :; do {sshd}; done
"""


@dataclass(frozen=True, slots=True)
class VmFiles:
    """What the VM is started with, and how it is reached."""

    domain: Path
    ssh: SshFiles


@contextmanager
def vm_files(directory: Path, vcpus: int, memory_mb: int, hugepages: int) -> Iterator[VmFiles]:
    """A domain for a run description. ``directory`` is one that the VM sees: below none of /run and /dev."""
    parts = prepare.fetch()
    ssh = SshFiles(directory / "ssh")
    ssh.make(ADDRESS)
    boot = directory / "boot"
    boot.write_text(
        _BOOT.format(
            modules=parts.kernel.modules,
            nics=" ".join(NICS),
            mac=MAC,
            address=ADDRESS,
            sshd=" ".join(ssh.command(ADDRESS)),
        )
    )
    modules = parts.kernel.load_order(ROOT_MODULES)
    init = _INIT.format(modules=" ".join(modules), boot=boot)
    initrd = directory / "initrd"
    initrd.write_bytes(initramfs.build(parts.kernel, modules, init))
    domain = directory / "domain.xml"
    domain.write_text(_domain(parts.kernel, initrd, directory, vcpus, memory_mb, hugepages))
    run(["ip", "tuntap", "add", TAP, "mode", "tap"])
    try:
        run(["ip", "address", "add", f"{HOST}/24", "dev", TAP])
        run(["ip", "link", "set", TAP, "up"])
        yield VmFiles(domain, ssh)
    finally:
        run(["ip", "link", "delete", TAP])


def _domain(kernel: Kernel, initrd: Path, directory: Path, vcpus: int, memory_mb: int, hugepages: int) -> str:
    ports = "".join(
        f"<controller type='pci' model='pcie-root-port' index='{n}'/>" for n in range(1, len(NICS) + 1)
    )
    return f"""<domain type='qemu'>
  <name>zeroloss</name>
  <memory unit='MiB'>{memory_mb}</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel.image}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{COMMAND_LINE} hugepages={hugepages}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='maximum'/>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>{EMULATOR}</emulator>
    <controller type='usb' model='none'/>
    <controller type='pci' model='pcie-root'/>{ports}
    <filesystem type='mount' accessmode='passthrough' multidevs='remap'>
      <source dir='/'/><target dir='root'/><readonly/>
      <address type='pci' bus='0' slot='16'/>
    </filesystem>
    <interface type='ethernet'>
      <mac address='{MAC}'/><target dev='{TAP}' managed='no'/><model type='e1000'/>
      <address type='pci' bus='0' slot='17'/>
    </interface>
    <serial type='file'><source path='{directory / "kernel.log"}'/><target port='0'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"""
