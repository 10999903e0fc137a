"""The commands that make an image (pure), and what they need of this host."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from netplugin_zeroloss.vm.spec import VmSpec

#: Partition types with a root file system: GPT's Linux root (x86-64) and Linux data, MBR's Linux.
_LINUX = ("4f68bce3-e8cd-4db1-96e7-fbcaf984b709", "0fc63daf-8483-4772-8e79-3d69d8477de4", "0x83")
_SECTOR = 512
#: Mounts disappear with the process, whatever ends it.
_CONTAINED = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--"),
)
_CHILD = Path(__file__).with_name("contained_child.py")
#: Folders of a root file system on which its ``install`` mounts something, or in which it writes.
INSTALLS_IN = ("proc", "sys", "tmp", "run", "dev", "etc", "usr/sbin")


def contained(*arguments: str | Path) -> list[str]:
    """Return a command whose mounts and processes end with it."""
    return [*_CONTAINED, *map(str, arguments)]


def _step(name: str, *arguments: str | Path) -> list[str]:
    return contained(sys.executable, "-P", _CHILD, "--", name, *arguments)


def mmdebstrap(
    spec: VmSpec, packages: Sequence[str], early: Path, sources: Path | None, tree: Path
) -> list[str]:
    """Return the command that makes the root file system; ``early``: folder with files of /etc.

    ``sources``: file with apt's sources; None: those that mmdebstrap has for the suite.
    """
    return contained(
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        "--format=directory",
        f"--include={','.join(packages)}",
        '--aptopt=APT::Install-Recommends "false"',
        f"--essential-hook=copy-in {early}/etc/initramfs-tools /etc",
        spec.suite,
        tree,
        *([] if sources is None else [sources]),
    )


def unpack(archive: Path, tree: Path) -> list[str]:
    names = ("--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls")
    return contained("tar", "--extract", *names, "--file", archive, "--directory", tree)


def about_disk(base: Path) -> list[str]:
    return ["qemu-img", "info", "--output=json", str(base)]


def format_of(printed: str) -> str | None:
    """Return the format of a disk, as qemu-img has printed it; None if it can lead to other files.

    A disk of QEMU's can name a backing file and a data file, those of other programs name extents: each may
    be any file of this host.
    """
    found = json.loads(printed or "{}")
    refers = "backing-filename" in found or "data-file" in found.get("format-specific", {}).get("data", {})
    return found["format"] if found.get("format") in ("raw", "qcow2") and not refers else None


def raw(base: Path, disk_format: str, target: Path) -> list[str]:
    return contained("qemu-img", "convert", "-f", disk_format, "-O", "raw", base, target)


def partitions(image: Path) -> list[str]:
    return ["partx", "--raw", "--noheadings", "--output", "START,SECTORS,TYPE", str(image)]


def root_partition(printed: str, size: int) -> tuple[int, int]:
    """Return offset and size in bytes of the largest Linux partition; without one, of the whole image."""
    found = []
    for line in printed.splitlines():
        start, sectors, kind = (*line.split(), "", "")[:3]
        if kind.lower() in _LINUX:
            found.append((int(sectors) * _SECTOR, int(start) * _SECTOR))
    length, offset = max(found, default=(size, 0))
    return offset, length


def copy_base(image: Path, offset: int, size: int, mount_point: Path, tree: Path) -> list[str]:
    return _step("copy", image, str(offset), str(size), mount_point, tree)


def install(tree: Path, packages: Sequence[str]) -> list[str]:
    return _step("install", tree, *packages)


def file_system(tree: Path, target: Path, key: str, size_mb: int) -> list[str]:
    """Return the command that makes the disk; its ids follow from the key of the image."""
    name = str(uuid.uuid5(uuid.NAMESPACE_OID, key))
    options = ("-L", "zeroloss", "-U", name, "-E", f"hash_seed={name}", "-m", "0")
    return contained("mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, *options, target, f"{size_mb}M")


def qcow2(disk: Path, target: Path) -> list[str]:
    return contained("qemu-img", "convert", "-f", "raw", "-O", "qcow2", disk, target)


def programs(spec: VmSpec) -> Iterator[tuple[str, str]]:
    """Yield the programs of a build, each with its Debian package."""
    yield "qemu-img", "qemu-utils"
    yield "mke2fs", "e2fsprogs"
    yield "unshare", "util-linux"
    yield "ssh-keygen", "openssh-client"
    if spec.base is None:
        yield "mmdebstrap", "mmdebstrap"
    else:
        yield "partx", "util-linux"
        yield "tar", "tar"
