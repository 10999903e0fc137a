"""The guests' initramfs: busybox, the virtio modules and an init that obeys a serial port."""

from __future__ import annotations

import lzma
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.kernel import Kernel
from tests.lab.processes import LabError

BUSYBOX = Path("/usr/bin/busybox")
# In the order they are loaded: each needs the ones before it.
MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
)
READY = "lab-ready"

# A command comes as a line `lab <number> <seconds> <base64>` and is answered by a line
# `lab <number> <status> <base64>`: whatever a command prints, a line ends where it should.
# READY is repeated until the first line comes, so that it does not matter who was first.
# A process of its own repeats it, and lives until that line is read: busybox's `read` forgets what it has
# of a line when its time is up, and when a child ends.
OBEY = f"""
( while echo {READY}; do sleep 1; done ) & ready=$!
read -r word number seconds command
kill $ready
wait $ready
while true; do
  if [ "$word" = lab ]; then
    echo "$command" | base64 -d >/tmp/command
    timeout -s KILL "$seconds" sh /tmp/command </dev/null >/tmp/output 2>&1
    status=$?
    printf 'lab %s %s %s\\n' "$number" "$status" "$(base64 -w 0 </tmp/output)"
  fi
  read -r word number seconds command
done
"""
# A shell of its own obeys: the orphans of commands go to process 1, whose children they become.
INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in $(cat /modules/order); do insmod /modules/$module.ko || poweroff -f; done
ip link set lo up
exec </dev/ttyS1 >/dev/ttyS1
stty raw -echo
({OBEY})
"""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def build(
    kernel: Kernel,
    modules: Iterable[str] = MODULES,
    init: str = INIT,
    programs: Mapping[str, bytes] | None = None,
) -> bytes:
    """An initramfs as a cpio archive; not compressed, as unpacking is slow without KVM.

    ``programs`` are files in /bin besides busybox, by name.
    """
    return b"".join(_pack(_entries(kernel, modules, init, programs or {})))


def _entries(
    kernel: Kernel, modules: Iterable[str], init: str, programs: Mapping[str, bytes]
) -> Iterator[_Entry]:
    if not BUSYBOX.exists():
        raise LabError(f"{BUSYBOX} is missing: install busybox-static")
    for name in ("bin", "dev", "modules"):
        yield _Entry(name, stat.S_IFDIR | 0o755)
    # The kernel opens it for init before init has mounted /dev.
    yield _Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    yield _Entry("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes())
    for name, program in programs.items():
        yield _Entry(f"bin/{name}", stat.S_IFREG | 0o755, program)
    order = tuple(modules)
    for name in order:
        yield _Entry(f"modules/{name}.ko", stat.S_IFREG | 0o644, _content(kernel.module(name)))
    yield _Entry("modules/order", stat.S_IFREG | 0o644, " ".join(order).encode())
    yield _Entry("init", stat.S_IFREG | 0o755, init.encode())


def _content(module: Path) -> bytes:
    packed = module.read_bytes()
    return lzma.decompress(packed) if module.suffix == ".xz" else packed


def _pack(entries: Iterator[_Entry]) -> Iterator[bytes]:
    for number, entry in enumerate(entries, start=1):
        yield _record(number, entry)
    yield _record(0, _Entry("TRAILER!!!", 0))


def _record(number: int, entry: _Entry) -> bytes:
    """One file in cpio's "newc" format: a header of hex fields, the name, the content."""
    name = entry.name.encode() + b"\0"
    owner, links, mtime = 0, 1, 0
    fields = (
        *(number, entry.mode, owner, owner, links, mtime, len(entry.content)),
        *(0, 0, *entry.device, len(name), 0),
    )
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + name) + _padded(entry.content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
