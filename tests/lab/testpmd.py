"""A guest without a VM: dpdk-testpmd as the VM's side of a `dpdkvhostuserclient` port."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.lab.namespaces import within
from tests.lab.processes import Argument, Daemon, LabError, Running

START_DEADLINE_S = 30.0
#: It polls: it leaves two thirds of its core to those who work, and still gets its turn in milliseconds.
#: Line-buffered, or the log lags behind by blocks.
POLITELY = ("nice", "-n5", "stdbuf", "-oL")
_LONGEST_PATH = 107  # unix(7): sun_path has 108 bytes, with the zero byte at its end


def check_path(socket: Path) -> None:
    """DPDK cuts a longer path short and says nothing, at both ends of it. Raises: LabError."""
    if len(os.fsencode(socket)) > _LONGEST_PATH:
        raise LabError(f"{socket}: too long for a socket, at most {_LONGEST_PATH} bytes")


class Forward(StrEnum):
    """What testpmd does with a packet."""

    ICMPECHO = "icmpecho"
    """Answers ARP requests and pings, for any address."""
    IO = "io"
    MAC = "mac"
    RXONLY = "rxonly"
    TXONLY = "txonly"


@dataclass(frozen=True, slots=True)
class TestpmdOptions:
    """How a testpmd runs."""

    __test__ = False  # the name looks like a test to pytest

    forward: Forward = Forward.ICMPECHO
    mac: str = "52:54:00:00:00:01"
    queues: int = 1
    ring_size: int = 256
    memory_mb: int = 64
    hugepages: bool = False
    """Without, its memory is ordinary pages, shared all the same."""
    core: int = 0
    """testpmd polls: keep it off the PMD's core."""
    wire: str | None = None
    """A kernel device that is joined to the port (with ``Forward.IO``)."""
    netns: str | None = None
    jumbo: bool = False
    """Whether packets of more than 1500 bytes pass."""
    to: str | None = None
    """The MAC it sends to (with ``Forward.TXONLY``): frames of ``frame_bytes``, as many as it can."""
    frame_bytes: int = 1414


class Testpmd(Running):
    """One testpmd that listens on a socket path, as QEMU does for a client port."""

    __test__ = False  # the name looks like a test to pytest

    def __init__(self, socket: Path, options: TestpmdOptions | None = None) -> None:
        check_path(socket)
        self.socket = socket
        self.options = options or TestpmdOptions()
        args = within(self.options.netns, [*POLITELY, *_arguments(socket, self.options)])
        self.daemon = Daemon("testpmd", args, socket.with_suffix(".testpmd.log"))

    def start(self) -> None:
        """Start it and wait until it listens; OVS connects by itself (see `wait_connected`)."""
        self.socket.unlink(missing_ok=True)
        self.daemon.start()
        self.daemon.wait_for(self._listens, START_DEADLINE_S, "testpmd listens")

    def stop(self) -> None:
        self.daemon.stop()
        self.socket.unlink(missing_ok=True)

    def kill(self) -> None:
        self.daemon.kill()

    def _listens(self) -> bool:
        return self.socket.exists() and stat.S_ISSOCK(self.socket.stat().st_mode)


def _arguments(socket: Path, options: TestpmdOptions) -> list[Argument]:
    vdev = f"net_virtio_user0,path={socket},server=1,queues={options.queues}"
    vdev += f",queue_size={options.ring_size},mac={options.mac}"
    vdevs = [f"--vdev={vdev}"]
    if options.wire and options.jumbo:
        # DPDK's af_packet driver takes no frame of more than 1518 bytes.
        vdevs.append(f"--vdev=net_pcap0,rx_iface_in={options.wire},tx_iface={options.wire}")
    elif options.wire:
        vdevs.append(f"--vdev=net_af_packet0,iface={options.wire},qdisc_bypass=1,framecnt=2048")
    stream = [f"--eth-peer=0,{options.to}", f"--txpkts={options.frame_bytes}"]
    size = ["--mbuf-size=10240", "--max-pkt-len=9600"] if options.jumbo else []
    memory = ["--in-memory"] if options.hugepages else ["--no-huge"]
    return [
        "dpdk-testpmd",
        "--lcores",
        f"0@{options.core},1@{options.core}",
        "-m",
        str(options.memory_mb),
        *memory,
        "--single-file-segments",
        "--no-pci",
        "--no-telemetry",
        f"--file-prefix={socket.stem}",
        *vdevs,
        "--",
        *size,
        *(stream if options.to else []),
        f"--forward-mode={options.forward}",
        f"--rxq={options.queues}",
        f"--txq={options.queues}",
        f"--rxd={options.ring_size}",
        f"--txd={options.ring_size}",
        "--total-num-mbufs=4096",
        "--nb-cores=1",
        "--stats-period=5",
        "--auto-start",
        "--no-lsc-interrupt",
    ]
