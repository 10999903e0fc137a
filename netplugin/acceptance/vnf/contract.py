"""The contract of a VNF: it takes the VM's side of ports, forwards between them, is checked and counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from netplugin.acceptance.evidence.contract import Place


class Attachment(StrEnum):
    """What the VM's side of a port is: the binding that the agent gave says which."""

    #: A socket on which the VNF listens, as QEMU does for ``dpdkvhostuserclient``.
    VHOST_USER = "vhostuser"
    #: A persistent tap device, opened by its name.
    TAP = "tap"
    #: A VF bound to vfio-pci.
    VFIO = "vfio"
    #: A kernel device through AF_PACKET: for a control without a backend.
    NETDEV = "netdev"
    #: A socket on which the VNF listens as OVS does for a VM: OVS's side is DPDK's ``net_virtio_user``.
    VHOST_BACKEND = "vhostbackend"


@dataclass(frozen=True, slots=True)
class VnfPort:
    """One side of the VNF. ``device`` is a socket's path, a device's name or a PCI address."""

    attachment: Attachment
    device: str
    #: Its own MAC address, and that of the far end, to which it sends.
    mac: str
    peer_mac: str
    queues: int = 1
    #: Ring size in descriptors.
    ring: int = 1024
    mtu: int = 1500


@dataclass(frozen=True, slots=True)
class VnfCores:
    """CPUs of the machine that the VNF runs on: ``main`` does no packets. Empty: wherever it may."""

    main: int | None = None
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VnfInfo:
    """What it is and how it really runs, for the report."""

    name: str
    version: str
    #: Receive queues that each port really has, in the order of the ports.
    rx_queues: tuple[int, ...]
    #: Configuration as it was given to it: file name to text.
    configuration: Mapping[str, str]


class Vnf(ABC):
    """Forwards between its ports: frames that come in on one go out on its partner (0-1, 2-3, ...)."""

    @abstractmethod
    def start(self) -> VnfInfo:
        """Start, and wait until it forwards.

        Raises: VnfError naming what is missing, or what it silently does otherwise than asked: fewer
        receive queues, a core that is not there.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises: VnfError if it does not run any more, or not as at the start."""

    @property
    @abstractmethod
    def place(self) -> Place:
        """Its counters."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to give back
        """Stop and give everything back; may be called twice."""

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
    """The VNF cannot be started, has ended, or does not do what was asked."""
