"""What a sandbox could leave on the machine: its state before and after, compared."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.demo_steps import FILE
from tests.lab import hugepages, in_memory, sandbox
from tests.lab.inmates import Inmates, open_namespace
from tests.lab.ovs import DATAPATH_TAP
from tests.lab.processes import LabTimeout, wait_for

# Here the sandbox hands over its PID namespace.
NAMESPACE_SOCKET = "namespace"
WATCHED = ("/run", "/dev", "/etc/libvirt", *map(str, sandbox.PRIVATE))
# Where others than a sandbox come and go all the time: sessions, terminals, the journal.
BUSY = ("/run/systemd", "/run/user", "/run/log", "/run/udev", "/dev/pts", str(hugepages.LEDGER))
#: Of programs that others measure with and of unit tests, beside: a sandbox has its own /run and /dev/shm.
OF_OTHERS = ("/run/netplugin-vnf-", f"{in_memory.PLACE}/{in_memory.PREFIX}")
#: Links of the demo's OVS. Those of its agent have an alias that begins with MARK.
OVS_LINKS = (DATAPATH_TAP, "br-phys1")
MARK = "netplugin-"
# Something else on the machine may come and go in this time.
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Traces:
    """The machine, as far as a sandbox could change it."""

    pages: int
    mounts: frozenset[str]
    links: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        return cls(
            hugepages.own_pages(),
            frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
            frozenset(own_links()),
            frozenset(_files()),
        )


class Sandboxed:
    """The processes of a sandbox, which hands over its PID namespace in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._held = ExitStack()
        self._socket = self._held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.bind(str(directory / NAMESPACE_SOCKET))
        self._socket.setblocking(False)
        self._inmates: Inmates | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def pids(self) -> list[int]:
        """Those that run now; none if the sandbox was not started."""
        if self._inmates is None:
            with suppress(BlockingIOError):
                [namespace] = socket.recv_fds(self._socket, 1, 1)[1]
                self._inmates = self._held.enter_context(Inmates(namespace))
        return self._inmates.pids() if self._inmates else []


def hand_over_namespace(directory: Path) -> None:
    """Called in the sandbox: in its namespace no process may be once it has ended."""
    namespace = open_namespace()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(directory / NAMESPACE_SOCKET))
            socket.send_fds(sender, [b"."], [namespace])
    finally:
        os.close(namespace)


def left_behind(before: Traces, directory: Path, sandboxed: Sandboxed) -> list[str]:
    """Describe each process, page, mount, link and file that the demo left; temporary files too."""
    try:
        wait_for(lambda: not _differences(before, directory, sandboxed), SETTLE_S, "nothing is left")
    except LabTimeout:
        return _differences(before, directory, sandboxed)
    return []


def _differences(before: Traces, directory: Path, sandboxed: Sandboxed) -> list[str]:
    now = Traces.now()
    found = [f"process {pid} in the PID namespace of the sandbox" for pid in sandboxed.pids()]
    if now.pages > before.pages:
        found.append(f"{now.pages - before.pages} hugepages")
    found += [f"mount {line}" for line in sorted(now.mounts - before.mounts)]
    found += [f"network link {name}" for name in sorted(now.links - before.links)]
    found += [f"file {path}" for path in sorted(now.files - before.files)]
    known = (FILE, NAMESPACE_SOCKET)
    found += [f"file {path}" for path in sorted(directory.iterdir()) if path.name not in known]
    return found


def own_links(directory: Path = Path("/sys/class/net")) -> Iterator[str]:
    """The links that a demo may have made; others on the machine make links meanwhile."""
    for link in directory.iterdir():
        with suppress(OSError):  # it has gone
            if link.name in OVS_LINKS or (link / "ifalias").read_text().startswith(MARK):
                yield link.name


def _files() -> Iterator[str]:
    for top in WATCHED:
        for parent, directories, files in os.walk(top):
            directories[:] = [name for name in directories if f"{parent}/{name}" not in BUSY]
            found = (f"{parent}/{name}" for name in (*directories, *files))
            yield from (path for path in found if not path.startswith(OF_OTHERS))
