"""A kernel's files in memory, which take what is written to them as the real ones do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping

from netplugin.tuning.applying.accessor import WritableRoot
from tests.unit.tuning.machines import MemoryRoot, Tree

NIC, IFACE = "0000:05:00.0", "ens5"
PAGES = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
MANAGED, MOVED, LATER = (f"/proc/irq/{number}/smp_affinity_list" for number in (26, 24, 25))
THP, KSM = "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/ksm/run"
SWAPS, PROFILE = "/proc/swaps", "/etc/tuned/active_profile"
VARIABLES = "/etc/tuned/realtime-virtual-host-variables.conf"
WORKQUEUES = "/sys/devices/virtual/workqueue/cpumask"
NUMVFS = f"/sys/bus/pci/devices/{NIC}/sriov_numvfs"


def no_crash(what: str) -> None:
    pass


class Kernel(MemoryRoot, WritableRoot):
    """``refusing`` has the errors that writing to a file has; ``pages`` is the most the kernel gives."""

    def __init__(self, made: Tree) -> None:
        super().__init__(made)
        self.refusing: dict[str, int] = {}
        self.pages = 1 << 20
        self.point: Callable[[str], None] = no_crash

    def change(self, files: Mapping[str, str | None], links: Mapping[str, str | None] = {}) -> None:
        """None takes a file or a link away."""
        for there, changes in ((self.tree.files, files), (self.tree.links, links)):
            for path, text in changes.items():
                folder, name = os.path.split(path)
                if text is None:
                    del there[path]
                    self._folders[folder].discard(name)
                    continue
                there[path] = text
                while name not in self._folders.setdefault(folder, set()):
                    self._folders[folder].add(name)
                    folder, name = os.path.split(folder)

    def remove(self, path: str) -> None:
        self.point(f"before {path} goes")
        self.change({path: None})
        self.point(f"after {path} went")

    def _write(self, path: str, data: bytes) -> None:
        if path in self.refusing:
            raise OSError(self.refusing[path], os.strerror(self.refusing[path]))
        if path not in self.tree.files and self._real(path) not in self.tree.files:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        text = data.decode().strip()
        self.point(f"before {path}")
        if path == NUMVFS:
            self._enable(int(text))
        elif path == THP:
            words = self.tree.files[path].replace("[", "").replace("]", "").split()
            self.change({path: " ".join(f"[{w}]" if w == text else w for w in words) + "\n"})
        elif path == PAGES:
            self.change({path: f"{min(int(text), self.pages)}\n"})
        else:
            self.change({path: f"{text}\n"})
        self.point(f"after {path}")

    def _replace(self, path: str, data: bytes) -> None:
        if path in self.refusing:
            raise OSError(self.refusing[path], os.strerror(self.refusing[path]))
        self.point(f"before {path}")
        self.change({path: data.decode()})
        self.point(f"after {path}")

    def _enable(self, number: int) -> None:
        """As ``sriov_numvfs_store`` in drivers/pci/pci-sysfs.c."""
        real = self._real(NUMVFS)
        now = int(self.tree.files[real])
        if now and number and now != number:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        device = os.path.dirname(real)
        files: dict[str, str | None] = {real: f"{number}\n"}
        links: dict[str, str | None] = {}
        for index in range(min(now, number), max(now, number)):
            there = index < number
            at = f"{device[:-1]}{index + 1}"
            name = os.path.basename(at)
            files[f"{at}/class"] = "0x020000\n" if there else None
            links[f"{device}/virtfn{index}"] = f"../{name}" if there else None
            up = f"../../..{at.removeprefix('/sys')}"
            links[f"/sys/bus/pci/devices/{name}"] = up if there else None
        self.change(files, links)
