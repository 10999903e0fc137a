"""A port as DPDK is told of it: the same devices for testpmd and for VPP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netplugin.acceptance.vnf.contract import Attachment, VnfCores, VnfError, VnfPort
from netplugin.acceptance.vnf.process import free_socket
from netplugin.host import cpus

VHOST_NET = Path("/dev/vhost-net")
_NET = Path("/sys/class/net")
_PCI = Path("/sys/bus/pci/devices")
#: What DPDK's AF_PACKET driver takes at most (its frames are half a page).
_AF_PACKET_MTU = 1500


@dataclass(frozen=True, slots=True)
class Device:
    """``name`` is a virtual device's with its number, or a PCI address; ``arguments`` follow it."""

    name: str
    arguments: str = ""
    virtual: bool = True

    @property
    def text(self) -> str:
        """As in DPDK's ``--vdev``."""
        return f"{self.name},{self.arguments}" if self.arguments else self.name


def device_of(port: VnfPort, number: int, vhost_net: bool) -> Device:
    """What DPDK is to open (pure). ``vhost_net``: whether the kernel has it, as QEMU uses it for taps.

    Raises: VnfError if DPDK cannot have this port.
    """
    if "," in port.device:
        raise VnfError(f"{port.device}: DPDK takes no name with a comma")
    virtio = f"queues={port.queues},queue_size={port.ring},mac={port.mac}"
    match port.attachment:
        case Attachment.VHOST_USER:
            return Device(f"net_virtio_user{number}", f"path={port.device},server=1,{virtio}")
        case Attachment.TAP if vhost_net:
            path = f"path={VHOST_NET},iface={port.device}"
            return Device(f"net_virtio_user{number}", f"{path},{virtio}")
        case Attachment.TAP:
            return Device(f"net_tap{number}", f"iface={port.device},mac={port.mac}")
        case Attachment.NETDEV:
            if port.mtu > _AF_PACKET_MTU:
                raise VnfError(f"{port.device}: DPDK's AF_PACKET driver takes no MTU of {port.mtu}")
            ring = f"framesz=2048,framecnt={max(512, 8 * port.ring)},blocksz=16384"
            queues = f"qpairs={port.queues},qdisc_bypass=1"
            return Device(f"net_af_packet{number}", f"iface={port.device},{queues},{ring}")
        case Attachment.VHOST_BACKEND:
            return Device(f"net_vhost{number}", f"iface={port.device},queues={port.queues}")
        case Attachment.VFIO:
            return Device(port.device, virtual=False)


def devices_of(ports: Sequence[VnfPort]) -> tuple[Device, ...]:
    """All of them, after a look at this machine. Raises: VnfError with what would be right."""
    vhost_net = VHOST_NET.exists()
    for port in ports:
        _check(port, vhost_net)
    return tuple(device_of(port, number, vhost_net) for number, port in enumerate(ports))


def _check(port: VnfPort, vhost_net: bool) -> None:
    match port.attachment:
        case Attachment.VHOST_USER | Attachment.VHOST_BACKEND:
            free_socket(port.device)
        case Attachment.VFIO:
            driver = _PCI / port.device / "driver"
            if not driver.exists() or driver.resolve().name != "vfio-pci":
                raise VnfError(
                    f"{port.device} is not bound to vfio-pci: dpdk-devbind.py -b vfio-pci"
                )
        case Attachment.TAP | Attachment.NETDEV:
            if not (_NET / port.device).exists():
                raise VnfError(f"{port.device}: there is no such device in this network namespace")
            if port.attachment is Attachment.TAP and not vhost_net and not _many(port.device):
                raise VnfError(
                    f"{port.device} is a tap of one queue, which DPDK opens through vhost_net alone:"
                    " modprobe vhost_net, plug the port with 2 queues, or use the VNF 'taps'"
                )


def _many(tap: str) -> bool:
    """Whether it is a tap of several queues (IFF_MULTI_QUEUE in linux/if_tun.h)."""
    try:
        return bool(int((_NET / tap / "tun_flags").read_text(), 16) & 0x0100)
    except (OSError, ValueError) as error:
        raise VnfError(f"{tap} is no tap") from error


def check_cores(cores: VnfCores) -> None:
    """Raises: VnfError for a CPU that is not there, or that is to do two things."""
    named = [*cores.workers, *(() if cores.main is None else (cores.main,))]
    missing = sorted(set(named) - set(cpus.online()))
    if missing:
        raise VnfError(f"CPU {cpus.format_list(missing)} of the VNF is not on line")
    if len(set(cores.workers)) < len(cores.workers):
        raise VnfError(f"a CPU stands twice among the VNF's workers: {cores.workers}")


class KeptAddresses:
    """The taps' own MAC addresses, put back after DPDK gave them those of the VM.

    A bridge takes a frame to a port's own address for itself: it would not reach the VM.
    """

    def __init__(self, ports: Sequence[VnfPort]) -> None:
        taps = [port.device for port in ports if port.attachment is Attachment.TAP]
        self._before = {tap: (_NET / tap / "address").read_text().strip() for tap in taps}

    def put_back(self) -> None:
        """Raises: VnfError."""
        if not self._before:
            return
        from pyroute2 import IPRoute, NetlinkError  # it is large, and only taps need it

        with IPRoute() as kernel:
            for tap, address in self._before.items():
                try:
                    index = kernel.link_lookup(ifname=tap)[0]
                    kernel.link("set", index=index, address=address)
                except (IndexError, NetlinkError) as error:
                    raise VnfError(f"{tap}: its MAC address cannot be set back: {error}") from error
