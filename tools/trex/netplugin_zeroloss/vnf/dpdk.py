"""DPDK device arguments of VNF ports, for testpmd and VPP."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from netplugin.host import cpus
from netplugin.host.link_values import Link
from netplugin_zeroloss.vnf.contract import Attachment, VnfCores, VnfError, VnfPort

VHOST_NET = Path("/dev/vhost-net")
_PCI = Path("/sys/bus/pci/devices")
#: Maximum MTU of DPDK's AF_PACKET driver (its frames are half a page).
_AF_PACKET_MTU = 1500
#: Flag of a listening socket (__SO_ACCEPTCON in linux/net.h).
_LISTENS = 0x10000


def device_of(port: VnfPort, number: int, vhost_net: bool) -> list[str]:
    """Return the options of DPDK for a port (pure). ``vhost_net``: /dev/vhost-net is available for taps.

    Raises: VnfError if DPDK does not support the port.
    """
    device, virtio = port.device, f"queues={port.queues},queue_size={port.ring},mac={port.mac}"
    match port.attachment:
        case Attachment.VFIO:
            return ["-a", device]
        case Attachment.VHOST_USER:
            driver, arguments = "virtio_user", f"path={device},server=1,{virtio}"
        case Attachment.VHOST_VDPA:
            driver, arguments = "virtio_user", f"path={device},{virtio}"
        case Attachment.TAP if vhost_net:
            driver, arguments = "virtio_user", f"path={VHOST_NET},iface={device},{virtio}"
        case Attachment.TAP:
            driver, arguments = "tap", f"iface={device},mac={port.mac}"
        case Attachment.VHOST_BACKEND:
            driver, arguments = "vhost", f"iface={device},queues={port.queues}"
        case Attachment.NETDEV:
            if port.mtu > _AF_PACKET_MTU:
                raise VnfError(f"{device}: DPDK's AF_PACKET driver takes no MTU of {port.mtu}")
            ring = f"framesz=2048,framecnt={max(512, 8 * port.ring)},blocksz=16384"
            driver, arguments = "af_packet", f"iface={device},qpairs={port.queues},qdisc_bypass=1,{ring}"
    return [f"--vdev=net_{driver}{number},{arguments}"]


def devices_of(ports: Sequence[VnfPort]) -> list[str]:
    """Check the ports on this machine and return DPDK's options for them. Raises: VnfError with a fix."""
    vhost_net = VHOST_NET.exists()
    for port in ports:
        _check(port, vhost_net)
    return [word for number, port in enumerate(ports) for word in device_of(port, number, vhost_net)]


def _check(port: VnfPort, vhost_net: bool) -> None:
    device = port.device
    match port.attachment:
        case Attachment.VHOST_USER | Attachment.VHOST_BACKEND:
            free_socket(device)
        case Attachment.VHOST_VDPA:
            _free_device(device)
        case Attachment.VFIO if (_PCI / device / "driver").resolve().name != "vfio-pci":
            raise VnfError(f"{device} is not bound to vfio-pci: dpdk-devbind.py -b vfio-pci")
        case Attachment.TAP | Attachment.NETDEV:
            link = device_there(device)
            if port.attachment is Attachment.TAP and not vhost_net and not link.multi_queue:
                raise VnfError(
                    f"{device} is no tap of several queues, and DPDK opens others through vhost_net alone:"
                    " modprobe vhost_net, plug the port with 2 queues, or use the VNF 'taps'"
                )


def device_there(name: str) -> Link:
    """Return a device of this network namespace. Raises: VnfError."""
    from netplugin.host.links import Links  # slow to import

    if (link := Links().get(name)) is None:
        raise VnfError(f"{name}: there is no such device in this network namespace")
    return link


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


def check_cores(cores: VnfCores, online: Collection[int] | None = None) -> None:
    """Check that the CPUs are online and not used twice. ``online``: those of a VM; None: of this machine.

    Raises: VnfError.
    """
    named = {*cores.workers, *(() if cores.main is None else (cores.main,))}
    if missing := named - set(cpus.online() if online is None else online):
        has = "" if online is None else f": the VM has {cpus.format_list(online) or 'no CPU that is known'}"
        raise VnfError(f"CPU {cpus.format_list(missing)} of the VNF is not on line{has}")
    if len(set(cores.workers)) < len(cores.workers):
        raise VnfError(f"a CPU occurs twice among the VNF's workers: {cores.workers}")


def addresses_of_taps(ports: Sequence[VnfPort]) -> dict[str, str]:
    """Return the MAC address of each tap. DPDK replaces it with that of the VM.

    A bridge treats a frame for a port's own address as local, so it would not reach the VM.
    """
    taps = [port.device for port in ports if port.attachment is Attachment.TAP]
    return {tap: device_there(tap).address or "" for tap in taps}
