"""The contract of a VNF: attaches to the VM side of ports, forwards between them, and counts frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from netplugin.acceptance.evidence.contract import Place


class Attachment(StrEnum):
    """Kind of the VM side of a port, from the agent's binding."""

    #: vhost-user socket on which the VNF listens, as QEMU does for ``dpdkvhostuserclient``.
    VHOST_USER = "vhostuser"
    #: Persistent tap device, opened by name.
    TAP = "tap"
    #: A VF bound to vfio-pci.
    VFIO = "vfio"
    #: Kernel device through AF_PACKET, for a control without a backend.
    NETDEV = "netdev"
    #: vhost-user socket on which the VNF is the backend (device) side, as OVS is for a VM; OVS uses
    #: DPDK's ``net_virtio_user``.
    VHOST_BACKEND = "vhostbackend"


@dataclass(frozen=True, slots=True)
class VnfPort:
    """A port of the VNF. ``device`` is a socket path, a device name or a PCI address."""

    attachment: Attachment
    device: str
    #: MAC address of the port, and of the far end, the destination of its frames.
    mac: str
    peer_mac: str
    queues: int = 1
    #: Ring size in descriptors.
    ring: int = 1024
    mtu: int = 1500


@dataclass(frozen=True, slots=True)
class VnfCores:
    """CPUs of the VNF on its machine; ``main`` handles no packets. Empty: no pinning."""

    main: int | None = None
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VnfInfo:
    """Name, version and actual configuration of a VNF, for the report."""

    name: str
    version: str
    #: Actual receive queues per port.
    rx_queues: tuple[int, ...]
    #: Configuration: file name to text.
    configuration: Mapping[str, str]


class Vnf(ABC):
    """Forwards frames between paired ports (0-1, 2-3, ...)."""

    @abstractmethod
    def start(self) -> VnfInfo:
        """Start the VNF and wait until it forwards.

        Raises: VnfError if something is missing or silently differs from the request: fewer receive
        queues, an absent CPU.
        """

    @abstractmethod
    def check(self) -> None:
        """Check that the VNF still runs as started. Raises: VnfError."""

    @property
    @abstractmethod
    def place(self) -> Place:
        """The counters of the VNF."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to release
        """Stop and release all resources. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class VnfError(Exception):
    """The VNF cannot be started, has ended, or does not run as requested."""
