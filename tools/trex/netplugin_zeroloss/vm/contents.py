"""What an image of the VM contains: packages, files, links, kernel command line, and the hash of it all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netplugin.libvirt.image_domain import MANAGEMENT, NICS, domain
from netplugin.tuning.guest.plan import GuestPlan, plan_guest
from netplugin.tuning.guest.settings import UIO, VFIO
from netplugin.tuning.steps import File, KernelArgument, Sysctl
from netplugin_zeroloss.vm.spec import LAYOUT, VmSpec, digests

#: Packages of every image: systemd, the network of the management NIC, SSH, drivers of NICs.
PACKAGES = (
    *("systemd-sysv", "udev", "dbus", "kmod", "iproute2", "pciutils", "openssh-server", "driverctl"),
    "initramfs-tools",
)
#: testpmd, DPDK's drivers, and what `testpmd` finds its cores with.
TESTPMD = ("dpdk-dev", "librte-meta-net", "librte-meta-bus", "librte-meta-mempool")
#: Where a tree of VPP is put.
VPP = "/opt/vpp"

#: Vendors of PCI devices: of NICs whose DPDK driver uses the kernel's driver, and of virtio.
_MELLANOX, _VIRTIO = "0x15b3", "0x1af4"
#: Service that binds a NIC to VFIO.
_BIND = "netplugin-vfio"
_MARK = "# Made by netplugin-zeroloss vm build.\n"
#: Modules that the initial RAM disk needs to mount the disk.
_BOOT_MODULES = ("virtio_pci", "virtio_blk", "ext4")
#: Services that a measurement does without.
_MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "systemd-networkd-wait-online.service"),
    *("systemd-timesyncd.service", "unattended-upgrades.service"),
    "vpp.service",  # zeroloss starts VPP itself
)
_ENABLED = ("ssh.service", "systemd-networkd.service")
_UNITS = "etc/systemd/system"


@dataclass(frozen=True, slots=True)
class Identity:
    """``login``: the public key that may log in. The host key is the VM's, so that callers know the VM."""

    login: str
    host_key: str
    host_public: str


#: What each file of an image has, by its path relative to the root.
Texts = Mapping[str, str]
#: Modes of files that are not 0644.
MODES = {
    "etc/initramfs-tools/hooks/netplugin": 0o755,
    "etc/machine-id": 0o444,
    "etc/ssh/ssh_host_ed25519_key": 0o600,
    "root/.ssh/authorized_keys": 0o600,
}


VPP_LIBRARIES = {"etc/ld.so.conf.d/netplugin-vpp.conf": f"{VPP}/lib\n{VPP}/lib/x86_64-linux-gnu\n"}


@dataclass(frozen=True, slots=True)
class Contents:
    """``early``: files that must be there before packages are installed. ``links``: target by path.

    ``notes``: what the guest plan warns of. ``iommu``: NICs that are not virtio need an emulated IOMMU.
    """

    packages: tuple[str, ...]
    early: Texts
    files: Texts
    links: Texts
    arguments: str
    driver: str
    iommu: bool
    notes: tuple[str, ...]


def contents_of(spec: VmSpec, identity: Identity) -> Contents:
    """Return what an image has.

    Without a driver in the options virtio NICs get ``uio_pci_generic`` and others ``vfio-pci`` with an
    emulated IOMMU: VFIO of Debian's kernels takes no NIC without one, and ``uio_pci_generic`` takes no VF.

    Raises: InvalidRequest if the guest cannot be tuned so, naming the option; UnusableInput.
    """
    options, vpp = spec.guest, spec.vpp_tree is not None
    iommu = "driver" not in options.model_fields_set
    if iommu:
        options = options.model_copy(update={"driver": UIO})
    plan = plan_guest(_planned_domain(spec.vcpus, spec.memory_mb, iommu), options)
    asked = [(s.target, s.desired) for s in plan.steps if isinstance(s.target, KernelArgument)]
    arguments = [f"{target.name}={desired}" for target, desired in asked if desired is not None]
    packages = (*PACKAGES, spec.kernel, *(TESTPMD if spec.testpmd else ()), *spec.packages)
    return Contents(
        packages=tuple(dict.fromkeys(packages)),
        early=_early(),
        files=_system(identity) | _tuning(plan) | _binding(plan, iommu) | (VPP_LIBRARIES if vpp else {}),
        links=_links() | ({"usr/local/bin/vpp": f"{VPP}/bin/vpp"} if vpp else {}),
        arguments=" ".join(("root=/dev/vda", "rw", "console=tty0", "console=ttyS0", *arguments)),
        driver=f"{UIO} (virtio), {VFIO}" if iommu else options.driver,
        iommu=iommu,
        notes=plan.doubts,
    )


def key_of(spec: VmSpec, made: Contents) -> str:
    """Return the hash of all inputs: the options, the files that they name, what goes into the image.

    Packages of the mirror are not an input: their versions are known only after a build.

    Raises: UnusableInput if a file cannot be read.
    """
    inputs: dict[str, Any] = {
        "layout": LAYOUT,
        "spec": spec.model_dump(mode="json", exclude={"base", "vpp", "epoch"}),
        "sources": spec.apt_sources() if spec.base is None else "",
        "time": spec.time,
        "base": dict(digests(spec.base)) if spec.base else None,
        "vpp": dict(digests(spec.vpp)) if spec.vpp else None,
        "contents": asdict(made),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _planned_domain(vcpus: int, memory_mb: int, iommu: bool) -> str:
    """Return the domain for which the guest is planned: with NICs as OVS-DPDK's ports are."""
    here = Path("/")
    bare = domain("zeroloss", here, vcpus, memory_mb, "", here, here)
    nics = "".join(
        f"<interface type='vhostuser'><mac address='52:54:00:5a:00:{number:02x}'/>"
        "<source type='unix' path='/' mode='server'/><model type='virtio'/></interface>"
        for number in (1, 2)
    )
    model = "<iommu model='intel'/>" if iommu else ""
    return bare.replace("</devices>", f"{nics}{model}</devices>")


def _early() -> dict[str, str]:
    """Return the settings of the initial RAM disk, which the kernel's package makes."""
    return {
        "etc/initramfs-tools/conf.d/netplugin": f"{_MARK}MODULES=list\nCOMPRESS=gzip\n",
        "etc/initramfs-tools/hooks/netplugin": (
            f'#!/bin/sh\n{_MARK}[ "$1" = prereqs ] && exit 0\n. /usr/share/initramfs-tools/hook-functions\n'
            f"manual_add_modules {' '.join(_BOOT_MODULES)}\n"
        ),
    }


def _system(identity: Identity) -> dict[str, str]:
    network = f"[Match]\nPath=pci-{MANAGEMENT}\n\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\n"
    network += "\n[DHCPv4]\nClientIdentifier=mac\n"
    ssh = "HostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nUseDNS no\n"
    return {
        "etc/hostname": "zeroloss\n",
        "etc/hosts": "127.0.0.1 localhost zeroloss\n::1 localhost\n",
        "etc/resolv.conf": "",
        "etc/fstab": "/dev/vda / ext4 noatime 0 1\n",
        "etc/systemd/network/10-netplugin-management.network": _MARK + network,
        "etc/ssh/ssh_host_ed25519_key": identity.host_key,
        "etc/ssh/ssh_host_ed25519_key.pub": identity.host_public,
        "etc/ssh/sshd_config.d/10-netplugin.conf": _MARK + ssh,
        "etc/cloud/cloud-init.disabled": "",
        # Empty: each VM makes one of its own.
        "etc/machine-id": "",
        "root/.ssh/authorized_keys": identity.login,
    }


def _tuning(plan: GuestPlan) -> dict[str, str]:
    """Return the settings of the plan that are no kernel arguments."""
    sysctls = [f"{s.target.name} = {s.desired}\n" for s in plan.steps if isinstance(s.target, Sysctl)]
    files = [f"w- {s.target.path} - - - - {s.desired}\n" for s in plan.steps if isinstance(s.target, File)]
    parts = {"etc/sysctl.d/90-netplugin-guest.conf": sysctls, "etc/tmpfiles.d/netplugin-guest.conf": files}
    return {path: _MARK + "".join(lines) for path, lines in parts.items() if lines}


def _binding(plan: GuestPlan, iommu: bool) -> dict[str, str]:
    """Return what binds the NICs under test to the driver of DPDK when they appear."""
    driver = plan.options.driver
    modules = f"{driver}\n{VFIO}\n" if iommu else f"{driver}\n"
    files = {f"etc/driverctl.d/pci-{nic}": f"{driver}\n" for nic in NICS}
    files["etc/modules-load.d/netplugin-guest.conf"] = _MARK + modules
    if plan.noiommu:
        option = "options vfio enable_unsafe_noiommu_mode=1\n"
        files["etc/modprobe.d/netplugin-guest.conf"] = _MARK + option
    # After driverctl's rule 05, which has a service bind the NIC.
    tested = f'ACTION=="add", SUBSYSTEM=="pci", KERNEL=="{"|".join(NICS)}"'
    wants = 'ENV{SYSTEMD_WANTS}="%s"\n'
    rules = ""
    if iommu:
        rules += f'{tested}, ATTR{{vendor}}!="{_VIRTIO}", {wants % f"{_BIND}@$kernel.service"}'
        unit = f"[Unit]\nDescription=Bind %I to {VFIO}\nDefaultDependencies=no\nBefore=basic.target\n\n"
        unit += f"[Service]\nType=oneshot\nExecStart=/usr/sbin/driverctl --nosave set-override %I {VFIO}\n"
        files[f"{_UNITS}/{_BIND}@.service"] = _MARK + unit
    rules += f'{tested}, ATTR{{vendor}}=="{_MELLANOX}", {wants % ""}'
    return files | {"etc/udev/rules.d/06-netplugin-guest.rules": _MARK + rules}


def _links() -> dict[str, str]:
    enabled = {f"{_UNITS}/multi-user.target.wants/{unit}": f"/lib/systemd/system/{unit}" for unit in _ENABLED}
    return enabled | {f"{_UNITS}/{unit}": "/dev/null" for unit in _MASKED}
