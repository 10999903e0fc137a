"""What a sandbox could leave on the machine: its state before and after, compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.demo_steps import FILE
from tests.lab import hugepages, sandbox
from tests.lab.ovs import DATAPATH_TAP
from tests.lab.processes import LabTimeout, wait_for

NAMESPACES = ("mnt", "net", "pid", "ipc", "uts")
NAMESPACES_FILE = "namespaces"
WATCHED = ("/run", "/dev", "/etc/libvirt", *map(str, sandbox.PRIVATE))
# Where others than a sandbox come and go all the time: sessions, terminals, the journal.
BUSY = ("/run/systemd", "/run/user", "/run/log", "/run/udev", "/dev/pts", str(hugepages.LEDGER))
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


def note_namespaces(directory: Path) -> None:
    """Called in the sandbox: what no process may be in once it has ended."""
    names = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    (directory / NAMESPACES_FILE).write_text("\n".join(names))


def left_behind(before: Traces, directory: Path) -> list[str]:
    """Describe each process, page, mount, link and file that the demo left; temporary files too."""
    try:
        wait_for(lambda: not _differences(before, directory), SETTLE_S, "nothing is left")
    except LabTimeout:
        return _differences(before, directory)
    return []


def _differences(before: Traces, directory: Path) -> list[str]:
    now = Traces.now()
    found = [f"process {pid} in a namespace of the sandbox" for pid in _inmates(directory)]
    if now.pages > before.pages:
        found.append(f"{now.pages - before.pages} hugepages")
    found += [f"mount {line}" for line in sorted(now.mounts - before.mounts)]
    found += [f"network link {name}" for name in sorted(now.links - before.links)]
    found += [f"file {path}" for path in sorted(now.files - before.files)]
    known = (FILE, NAMESPACES_FILE)
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
            yield from (f"{parent}/{name}" for name in (*directories, *files))


def _inmates(directory: Path) -> list[int]:
    file = directory / NAMESPACES_FILE
    if not file.exists():
        return []  # it was not started
    ours = set(file.read_text().split())
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if ours & _namespaces(pid)]


def _namespaces(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES}
    except OSError:
        return set()  # it has ended
