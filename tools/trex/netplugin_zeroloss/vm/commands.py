"""The commands that make an image (pure), and what they need of this host."""

from __future__ import annotations

import json
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
#: Arguments: offset and size of the file system in bytes, image, mount point, folder that gets its files.
COPY = (
    'mount -o "ro,norecovery,loop,offset=$1,sizelimit=$2" "$3" "$4"'
    ' && cp --archive --one-file-system "$4/." "$5"'
)
#: Arguments: root file system; packages, as names or as paths of .deb files in it. Names are resolved as on
#: this host. The folders that are mounted on or written in are no links: the caller has looked.
#: invoke-rc.d(8): 101 means that an action is not allowed, so no daemon is started.
INSTALL = """
set -e
root=$1; shift
mount -t proc proc "$root/proc"; mount -t sysfs sysfs "$root/sys"; mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"; mount -t tmpfs tmpfs "$root/run"
rm -f "$root/etc/resolv.conf" "$root/usr/sbin/policy-rc.d"
[ ! -e /etc/resolv.conf ] || cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
printf '#!/bin/sh\\nexit 101\\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
chroot "$root" apt-get update -q
chroot "$root" apt-get install -q -y --no-install-recommends -o Dpkg::Options::=--force-confold "$@"
chroot "$root" update-initramfs -u -k all
rm "$root/usr/sbin/policy-rc.d"
"""
#: Folders of a root file system on which its installation mounts something, or in which it writes.
INSTALLS_IN = ("proc", "sys", "tmp", "run", "dev", "etc", "usr/sbin")


def contained(*arguments: str | Path) -> list[str]:
    """Return a command whose mounts and processes end with it."""
    return [*_CONTAINED, *map(str, arguments)]


def mmdebstrap(
    spec: VmSpec, packages: Sequence[str], early: Path, sources: Sequence[Path], tree: Path
) -> list[str]:
    """Return the command that makes the root file system; ``early``: folder with files of /etc.

    ``sources``: files with apt's sources; none: those that mmdebstrap has for the suite.
    """
    return contained(
        *("mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"),
        f"--include={','.join(packages)}",
        '--aptopt=APT::Install-Recommends "false"',
        f"--essential-hook=copy-in {early}/etc/initramfs-tools /etc",
        spec.suite,
        tree,
        *sources,
    )


def format_of(printed: str) -> str | None:
    """Return the format of a disk, as qemu-img has printed it; None if it can lead to other files.

    A disk of QEMU's can name a backing file and a data file, those of other programs name extents: each may
    be any file of this host.
    """
    found = json.loads(printed or "{}")
    refers = "backing-filename" in found or "data-file" in found.get("format-specific", {}).get("data", {})
    return found["format"] if found.get("format") in ("raw", "qcow2") and not refers else None


def root_partition(printed: str, size: int) -> tuple[int, int]:
    """Return offset and size in bytes of the largest Linux partition; without one, of the whole image.

    ``printed``: start, sectors and type of each, by partx.
    """
    rows = [line.split() for line in printed.splitlines()]
    linux = [row for row in rows if len(row) > 2 and row[2].lower() in _LINUX]
    length, offset = max(((int(row[1]), int(row[0])) for row in linux), default=(0, 0))
    return (offset * _SECTOR, length * _SECTOR) if linux else (0, size)


def script(text: str, program: str, *arguments: str | Path) -> list[str]:
    """Return the command that runs a script; ``program``: the one that it is for."""
    return contained("sh", "-c", text, program, *arguments)


def file_system(tree: Path, target: Path, key: str, size_mb: int) -> list[str]:
    """Return the command that makes the disk; its ids follow from the key of the image."""
    name = str(uuid.uuid5(uuid.NAMESPACE_OID, key))
    options = ("-L", "zeroloss", "-U", name, "-E", f"hash_seed={name}", "-m", "0")
    return contained("mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, *options, target, f"{size_mb}M")


def program(command: Sequence[str]) -> str:
    """Return the program that a contained command runs; of a script, the one that it is for."""
    words = command[len(_CONTAINED) :]
    return words[3] if words[0] == "sh" else words[0]


def programs(spec: VmSpec) -> Iterator[tuple[str, str]]:
    """Yield the programs of a build, each with its Debian package."""
    yield from (("qemu-img", "qemu-utils"), ("mke2fs", "e2fsprogs"), ("unshare", "util-linux"))
    yield "ssh-keygen", "openssh-client"
    yield from ((("partx", "util-linux"), ("tar", "tar")) if spec.base else (("mmdebstrap", "mmdebstrap"),))
