"""DPDK device arguments of VNF ports, for testpmd and VPP."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from netplugin.host import cpus
from netplugin_zeroloss.machines.contract import Machine
from netplugin_zeroloss.vnf.contract import Attachment, VnfCores, VnfError, VnfPort

VHOST_NET = Path("/dev/vhost-net")
_NET = Path("/sys/class/net")
_PCI = Path("/sys/bus/pci/devices")
#: Maximum MTU of DPDK's AF_PACKET driver (its frames are half a page).
_AF_PACKET_MTU = 1500
#: Flag of a listening socket (__SO_ACCEPTCON in linux/net.h).
_LISTENS = 0x10000


@dataclass(frozen=True, slots=True)
class DpdkDevice:
    """A DPDK device: numbered virtual device or PCI address, with its arguments."""

    name: str
    arguments: str = ""
    virtual: bool = True

    @property
    def text(self) -> str:
        """The value for ``--vdev``."""
        return f"{self.name},{self.arguments}" if self.arguments else self.name


def device_of(port: VnfPort, number: int, vhost_net: bool) -> DpdkDevice:
    """Return the DPDK device of a port (pure). ``vhost_net``: /dev/vhost-net is available for taps.

    Raises: VnfError if DPDK does not support the port.
    """
    if "," in port.device:
        raise VnfError(f"{port.device}: DPDK takes no name with a comma")
    virtio = f"queues={port.queues},queue_size={port.ring},mac={port.mac}"
    match port.attachment:
        case Attachment.VHOST_USER:
            return DpdkDevice(f"net_virtio_user{number}", f"path={port.device},server=1,{virtio}")
        case Attachment.VHOST_VDPA:
            return DpdkDevice(f"net_virtio_user{number}", f"path={port.device},{virtio}")
        case Attachment.TAP if vhost_net:
            path = f"path={VHOST_NET},iface={port.device}"
            return DpdkDevice(f"net_virtio_user{number}", f"{path},{virtio}")
        case Attachment.TAP:
            return DpdkDevice(f"net_tap{number}", f"iface={port.device},mac={port.mac}")
        case Attachment.NETDEV:
            if port.mtu > _AF_PACKET_MTU:
                raise VnfError(f"{port.device}: DPDK's AF_PACKET driver takes no MTU of {port.mtu}")
            ring = f"framesz=2048,framecnt={max(512, 8 * port.ring)},blocksz=16384"
            queues = f"qpairs={port.queues},qdisc_bypass=1"
            return DpdkDevice(f"net_af_packet{number}", f"iface={port.device},{queues},{ring}")
        case Attachment.VHOST_BACKEND:
            return DpdkDevice(f"net_vhost{number}", f"iface={port.device},queues={port.queues}")
        case Attachment.VFIO:
            return DpdkDevice(port.device, virtual=False)


def devices_of(ports: Sequence[VnfPort]) -> tuple[DpdkDevice, ...]:
    """Check the ports on this machine and return their DPDK devices. Raises: VnfError with a fix."""
    vhost_net = VHOST_NET.exists()
    for port in ports:
        _check(port, vhost_net)
    return tuple(device_of(port, number, vhost_net) for number, port in enumerate(ports))


def _check(port: VnfPort, vhost_net: bool) -> None:
    match port.attachment:
        case Attachment.VHOST_USER | Attachment.VHOST_BACKEND:
            free_socket(port.device)
        case Attachment.VHOST_VDPA:
            _free_device(port.device)
        case Attachment.VFIO:
            driver = _PCI / port.device / "driver"
            if not driver.exists() or driver.resolve().name != "vfio-pci":
                raise VnfError(f"{port.device} is not bound to vfio-pci: dpdk-devbind.py -b vfio-pci")
        case Attachment.TAP | Attachment.NETDEV:
            check_there(port.device)
            if port.attachment is Attachment.TAP and not vhost_net and not _many(port.device):
                raise VnfError(
                    f"{port.device} is a tap of one queue, which DPDK opens through vhost_net alone:"
                    " modprobe vhost_net, plug the port with 2 queues, or use the VNF 'taps'"
                )


def check_there(device: str) -> None:
    """Check that this network namespace has a device. Raises: VnfError."""
    if not (_NET / device).exists():
        raise VnfError(f"{device}: there is no such device in this network namespace")


def free_socket(path: str) -> None:
    """Remove a stale socket, so that the VNF can create its own.

    Raises: VnfError if a process listens on it, or it is not a socket.
    """
    place = Path(path)
    if not place.parent.is_dir():
        raise VnfError(f"{place.parent}: there is no such directory for the socket of a port")
    if not place.exists():
        return
    if not place.is_socket():
        raise VnfError(f"{path} is no socket")
    if path in _listening(Path("/proc/net/unix").read_text()):
        raise VnfError(f"{path} is taken: another program (a VM?) listens there; stop it")
    place.unlink(missing_ok=True)


def _listening(table: str) -> set[str]:
    """Parse ``/proc/net/unix`` for listening sockets: a test connection would disturb a VM."""
    rows = (line.split(maxsplit=7) for line in table.splitlines()[1:])
    return {row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS}


def _free_device(path: str) -> None:
    """Check that a vDPA device is there and nobody has it open. Raises: VnfError."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise VnfError(f"{path} is taken: another program (a VM?) has it open; stop it") from error
        raise VnfError(f"{path}: {error.strerror}") from error


def _many(tap: str) -> bool:
    """Whether a tap has several queues (IFF_MULTI_QUEUE in linux/if_tun.h)."""
    try:
        return bool(int((_NET / tap / "tun_flags").read_text(), 16) & 0x0100)
    except (OSError, ValueError) as error:
        raise VnfError(f"{tap} is no tap") from error


def check_cores(cores: VnfCores, online: Collection[int] | None = None) -> None:
    """Check that the CPUs are online and not used twice. ``online``: those of a VM; None: of this machine.

    Raises: VnfError.
    """
    named = [*cores.workers, *(() if cores.main is None else (cores.main,))]
    there = cpus.online() if online is None else online
    missing = sorted(set(named) - set(there))
    if missing:
        has = "" if online is None else f": the VM has {cpus.format_list(there) or 'no CPU that is known'}"
        raise VnfError(f"CPU {cpus.format_list(missing)} of the VNF is not on line{has}")
    if len(set(cores.workers)) < len(cores.workers):
        raise VnfError(f"a CPU occurs twice among the VNF's workers: {cores.workers}")


def addresses_of_taps(ports: Sequence[VnfPort]) -> dict[str, str]:
    """Return the MAC address of each tap. DPDK replaces it with that of the VM.

    A bridge treats a frame for a port's own address as local, so it would not reach the VM.
    """
    taps = [port.device for port in ports if port.attachment is Attachment.TAP]
    return {tap: (_NET / tap / "address").read_text().strip() for tap in taps}


def set_addresses(machine: Machine, addresses: Mapping[str, str]) -> None:
    """Set the addresses of taps. Raises: MachineError."""
    for tap, address in addresses.items():
        machine.run(["ip", "link", "set", "dev", tap, "address", address])
