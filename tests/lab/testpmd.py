"""A guest without a VM: dpdk-testpmd on the VM's side of a `dpdkvhostuserclient` port or a vDPA device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.lab.namespaces import within
from tests.lab.processes import Argument, Daemon, LabError, Running, opened_files

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
    reconnects: bool = False
    """It listens again when OVS has gone: DPDK looks for that when the link's state changes."""


class Testpmd(Running):
    """One testpmd that does as QEMU does: it listens on a client port's socket, or opens a vDPA device."""

    __test__ = False  # the name looks like a test to pytest

    def __init__(self, path: Path, options: TestpmdOptions | None = None, log: Path | None = None) -> None:
        """``path`` is the socket's, or that of a device of ``vhost_vdpa``, which is there already. The
        ``log`` is beside the socket unless it is given."""
        check_path(path)
        self.path = path
        self.options = options or TestpmdOptions()
        self._opens = path.is_char_device()
        args = within(self.options.netns, [*POLITELY, *_arguments(path, self._opens, self.options)])
        self.daemon = Daemon("testpmd", args, log or path.with_suffix(".testpmd.log"))

    def start(self) -> None:
        """Start it and wait until it listens or has the device; OVS connects by itself (`wait_connected`)."""
        self._unlink()
        self.daemon.start()
        self.daemon.wait_for(self._is_there, START_DEADLINE_S, f"testpmd has {self.path}")

    def stop(self) -> None:
        self.daemon.stop()
        self._unlink()

    def kill(self) -> None:
        self.daemon.kill()

    def _unlink(self) -> None:
        if not self._opens:
            self.path.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        if self._opens:
            return str(self.path) in opened_files(self.daemon.pid)
        return self.path.is_socket()


def _arguments(path: Path, opens: bool, options: TestpmdOptions) -> list[Argument]:
    vdev = f"net_virtio_user0,path={path},queues={options.queues}"
    vdev += f",queue_size={options.ring_size},mac={options.mac}{'' if opens else ',server=1'}"
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
        f"--file-prefix={path.stem}",
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
        *([] if options.reconnects else ["--no-lsc-interrupt"]),
    ]
