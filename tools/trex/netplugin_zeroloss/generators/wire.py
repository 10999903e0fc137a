"""Network interfaces, and exact counters of the test frames that leave or arrive.

A counter is a packet socket with a filter that is never read: the kernel counts what the filter accepts
(``PACKET_STATISTICS``), queued or not. It costs one filter run per frame, ignores other traffic (ARP,
router solicitations, LLDP), leaves no state behind, and ends with the process. Interface counters
include other traffic.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from netplugin.host.cbpf import Assembler, BpfProgram
from netplugin.host.link_values import Link
from netplugin.programs.polling import polled
from netplugin_zeroloss.generators.frames import HEADER_BYTES
from netplugin_zeroloss.values import GeneratorError, UnusableInput

T = TypeVar("T")

#: Length of a marker in bytes. All frames counted together begin their payload with it.
MARKER_BYTES: Final = 8

#: Seconds to wait for the carrier of a link.
_CARRIER_S: Final = 5.0
_LOOK_S: Final = 0.05

# Constants of <linux/if_ether.h> and <linux/if_packet.h>.
_ETH_P_ALL: Final = 3
_SOL_PACKET: Final = 263
_PACKET_ADD_MEMBERSHIP: Final = 1
_PACKET_STATISTICS: Final = 6
_PACKET_MR_PROMISC: Final = 1
#: Offset of the packet type for the filter (SKF_AD_OFF + SKF_AD_PKTTYPE).
_FRAME_TYPE: Final = (-0x1000 + 4) & 0xFFFFFFFF
#: Received frames that the kernel, the NIC or its queue dropped (Documentation/networking/statistics.rst).
_DROPS: Final = ("rx_dropped", "rx_missed_errors", "rx_fifo_errors")


class FrameCount:
    """Counts frames with a marker that left or reached an interface. The caller closes it."""

    def __init__(self, interface: Link, marker: bytes, outgoing: bool) -> None:
        """Raises: OSError."""
        self._count = 0
        # Protocol 0: the socket receives nothing until the filter is attached.
        self._socket = counter = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            _filter(marker, outgoing).attach(counter)
            # With the minimum buffer full, the kernel only counts.
            counter.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
            counter.bind((interface.name, _ETH_P_ALL))
            if not outgoing:
                member = struct.pack("iHH8s", interface.index, _PACKET_MR_PROMISC, 0, b"")
                counter.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, member)
        except BaseException:
            counter.close()
            raise

    def read(self) -> int:
        """Return the number of frames since construction."""
        # Reading resets the kernel counter; tp_packets includes frames dropped for lack of buffer.
        seen = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._count += struct.unpack("II", seen)[0]
        return self._count

    def close(self) -> None:
        self._socket.close()


class Wire:
    """The interfaces of a network namespace (None: that of this process). The caller closes it."""

    def __init__(self, netns: str | None = None) -> None:
        """Raises: UnusableInput if the namespace does not exist or cannot be entered."""
        self.netns_path = netns and (netns if "/" in netns else f"/run/netns/{netns}")
        # setns() applies to one thread; sockets opened there stay in the namespace.
        from netplugin.host.links import Links  # slow to import

        self._thread, self._links = ThreadPoolExecutor(1, "wire"), Links()
        self._taken: list[socket.socket] = []
        if self.netns_path:
            from pyroute2 import netns as namespaces  # slow to import

            try:
                self._inside(lambda: namespaces.setns(self.netns_path, 0))
            except OSError as error:
                self.close()
                why = f"{self.netns_path}: {os.strerror(error.errno or 0)}"
                raise UnusableInput("network namespace", why) from error

    def interface(self, name: str) -> Link:
        """Return a usable interface. Raises: UnusableInput if it is absent, down or without carrier."""
        link = polled(
            lambda: self._inside(lambda: self._links.get(name)),
            lambda found: found is None or not found.up or found.carrier,
            _CARRIER_S,
            _LOOK_S,
        )
        if link is None:
            where = f" in {self.netns_path}" if self.netns_path else ""
            raise UnusableInput("interface", f"{name}: No such device{where}")
        if not link.up:
            raise UnusableInput("interface", f"{name} is down: try `ip link set {name} up`")
        if not link.carrier:
            raise UnusableInput("interface", f"{name} has no carrier: is its far end up?")
        return link

    def take(self, interface: Link) -> None:
        """Take an interface for this process, until ``close``: the frames of two runs would add up.

        Abstract addresses are of a network namespace, as interfaces are (unix(7)).
        Raises: UnusableInput if another run has it.
        """
        mine = self._inside(lambda: socket.socket(socket.AF_UNIX))
        self._taken.append(mine)
        try:
            mine.bind(f"\0netplugin-zeroloss/{interface.index}")
        except OSError as error:
            why = f"{interface.name} is that of another run, which has not ended"
            raise UnusableInput("interface", why) from error

    def count(self, interface: Link, marker: bytes, *, outgoing: bool) -> FrameCount:
        """Start counting. Raises: GeneratorError."""
        try:
            return self._inside(lambda: FrameCount(interface, marker, outgoing))
        except PermissionError as error:
            raise GeneratorError("counting frames needs root (CAP_NET_RAW)") from error
        except OSError as error:
            raise GeneratorError(f"{interface.name}: {error.strerror}") from error

    def dropped(self, interface: Link) -> int:
        """Return the received frames that the kernel or the NIC dropped, since the interface exists."""
        from pyroute2 import IPRoute, NetlinkError  # slow to import

        def counts() -> Any:
            with IPRoute() as kernel:
                return kernel.get_links(interface.index)[0].get_attr("IFLA_STATS64")

        try:
            found = self._inside(counts)
        except NetlinkError as error:
            raise GeneratorError(f"{interface.name} is gone") from error
        return sum(int(found[name]) for name in _DROPS)

    def close(self) -> None:
        for taken in self._taken:
            taken.close()
        self._thread.shutdown()

    def _inside(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()


def _filter(marker: bytes, outgoing: bool) -> BpfProgram:
    """Build the program that takes frames with the marker in one direction."""
    code = Assembler()
    for number, word in enumerate(struct.unpack(">II", marker)):
        code.load(HEADER_BYTES + 4 * number, 4)
        code.unequal(word, "other")
    code.load(_FRAME_TYPE, 4)
    (code.unequal if outgoing else code.equal)(socket.PACKET_OUTGOING, "other")
    code.end(1)
    code.label("other")
    code.end(0)
    return code.program()
