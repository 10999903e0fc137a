"""Machines as data, and trees of files to read them from: in memory for most tests, on a disk for some."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from netplugin.host.cpus import parse_list
from netplugin.tuning.root import Root

DATA = Path(__file__).parents[2] / "data" / "machines"
NAMES = ("published", "amd-4-nodes", "intel-snc", "amd-nps4", "arm", "edge", "small")
NAMES += ("one-socket-memory", "hbm", "power9", "hybrid", "big-little")


@dataclass(frozen=True)
class Machine:
    """The defaults are those of a kernel after boot. A node without a ``number`` has its position."""

    nodes: list[dict[str, Any]]
    vendor: str = "GenuineIntel"
    model: str = "some CPU"
    release: str = "6.1.0"
    version: str = "Linux version 6.1.0 #1 SMP PREEMPT_DYNAMIC"
    cmdline: str = "ro quiet"
    threads: int = 1
    #: CPUs of some cores, if the kernel numbers them in another way; capacities of slow cores by first CPU.
    cores: list[str] = field(default_factory=list)
    capacities: dict[int, int] = field(default_factory=dict)
    #: CPUs of each PMU of an x86 CPU with two kinds of cores.
    pmus: dict[str, str] = field(default_factory=dict)
    #: Files of control groups, by their path.
    cgroups: dict[str, str] = field(default_factory=dict)
    offline: str = ""
    isolated: str = ""
    caches: list[list[Any]] = field(default_factory=list)
    cpufreq: dict[str, str] | None = None
    intel_pstate: str | None = None
    amd_pstate: str | None = None
    no_turbo: int | None = None
    boost: int | None = None
    idle: dict[str, Any] | None = None
    iommu_groups: int = 0
    iommu_type: str = "DMA"
    nics: list[dict[str, Any]] = field(default_factory=list)
    bonds: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Interfaces of default routes.
    routes: list[str] = field(default_factory=list)
    routes6: list[str] = field(default_factory=list)
    irqs: dict[int, list[str]] = field(default_factory=dict)
    tuned: dict[str, Any] | None = None
    swaps: list[str] = field(default_factory=list)
    sysctls: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, dict[str, str]] = field(default_factory=dict)
    #: A row for each node.
    distances: list[list[int]] = field(default_factory=list)
    irqbalance: dict[str, str] = field(default_factory=dict)
    system_conf: dict[str, str] = field(default_factory=dict)
    halt_poll_ns: int | None = None
    #: Threads of each CPU.
    kernel_threads: list[str] = field(default_factory=lambda: ["ksoftirqd"])

    @property
    def arm(self) -> bool:
        return self.vendor.startswith("0x")

    @cached_property
    def numbers(self) -> list[int]:
        return [node.get("number", position) for position, node in enumerate(self.nodes)]

    @cached_property
    def present(self) -> frozenset[int]:
        return frozenset(cpu for node in self.nodes for cpu in parse_list(node["cpus"]))

    @cached_property
    def online(self) -> frozenset[int]:
        return self.present - set(parse_list(self.offline))


def load(name: str) -> Machine:
    return Machine(**yaml.safe_load((DATA / f"{name}.yaml").read_text()))


@dataclass
class Tree:
    """Files by path, and links by path with their targets."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> None:
        for path, text in self.files.items():
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for path, target in self.links.items():
            link = root / path.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)


class MemoryRoot(Root):
    """A tree without a disk. ``refused``: paths, and the numbers of the errors that reading them and
    what is below them has."""

    def __init__(self, tree: Tree, refused: Mapping[str, int] | None = None) -> None:
        super().__init__(Path("/nowhere"))
        self.tree, self.refused = tree, refused or {}
        self._folders: dict[str, set[str]] = {}
        for path in (*tree.files, *tree.links):
            while path != "/":
                path, name = posixpath.split(path)
                known = path in self._folders
                self._folders.setdefault(path, set()).add(name)
                if known:
                    break  # and so are the folders above it

    def _bytes(self, path: str) -> bytes:
        path = self._real(path)
        if path not in self.tree.files:
            raise _error(errno.EISDIR if path in self._folders else errno.ENOENT)
        return self.tree.files[path].encode()

    def _list(self, path: str) -> list[str]:
        path = self._real(path)
        if path not in self._folders:
            raise _error(errno.ENOTDIR if path in self.tree.files else errno.ENOENT)
        return list(self._folders[path])

    def _target(self, path: str) -> str:
        folder, name = posixpath.split(path)
        path = posixpath.join(self._real(folder), name)
        if path not in self.tree.links:
            raise _error(errno.EINVAL)
        return self.tree.links[path]

    def _real(self, path: str) -> str:
        real = self._followed(path)
        for refused, error in self.refused.items():
            if any(p == refused or p.startswith(f"{refused}/") for p in (path, real)):
                raise _error(error)
        return real

    def _followed(self, path: str) -> str:
        if path in self.tree.files or path in self._folders:
            return path
        real = "/"
        for name in path.strip("/").split("/"):
            real = posixpath.join(real, name)
            if real in self.tree.links:
                target = posixpath.join(posixpath.dirname(real), self.tree.links[real])
                real = posixpath.normpath(target)
        return real


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
