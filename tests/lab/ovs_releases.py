"""Newer Open vSwitches beside the machine's own: fetched from newer Debians, unpacked, never installed.

`python -m tests.lab.ovs_releases trixie forky` fetches what the cache lacks; a sandbox has no network, so
do that before. Their programs run as they are: each has the path of its own dynamic loader and libraries.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.apt import Missing, PrivateApt
from tests.lab.kernel import CACHE, locked, scratch
from tests.lab.processes import LabError, run

MACHINES_OWN = "own"
#: Of which Debian: trixie has 3.5, forky (which is still being made) 4.0.
RELEASES = ("trixie", "forky")
OVS_DPDK = "openvswitch-switch-dpdk"
# DPDK's drivers for what the tests plug, which are no dependencies.
DRIVERS = (
    *("bus-vdev", "mempool-ring"),
    *("net-af-packet", "net-e1000", "net-null", "net-pcap", "net-tap", "net-vhost", "net-virtio"),
)
LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"
PROGRAMS = ("usr/bin/*", "usr/sbin/*", "usr/lib/openvswitch-switch*/*")
ELF = b"\x7fELF"


@dataclass(frozen=True, slots=True)
class OvsPrograms:
    """An Open vSwitch with its tools, below a prefix."""

    prefix: Path

    @classmethod
    def in_path(cls) -> OvsPrograms:
        """Those that PATH has first: with its tools one has its daemons."""
        tool = shutil.which("ovs-vsctl")
        if tool is None:
            raise LabError("there is no ovs-vsctl: install openvswitch-switch-dpdk")
        return cls(Path(os.path.realpath(tool)).parents[1])

    @property
    def schema(self) -> Path:
        return self.prefix / "share/openvswitch/vswitch.ovsschema"

    @property
    def vswitchd(self) -> Path:
        return self.prefix / "lib/openvswitch-switch/ovs-vswitchd"

    @property
    def vswitchd_dpdk(self) -> Path:
        return self.prefix / "lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"

    @property
    def version(self) -> tuple[int, ...]:
        shown = run([self.prefix / "bin/ovs-vsctl", "--version"]).splitlines()[0]
        return tuple(int(number) for number in shown.split()[-1].split("."))

    def path(self, rest: str) -> str:
        """PATH with its tools first."""
        return os.pathsep.join((str(self.prefix / "bin"), str(self.prefix / "sbin"), rest))


def chosen(release: str, fetched: bool) -> OvsPrograms:
    """The programs of a release, from the cache alone if they have to be ``fetched`` already."""
    if release == MACHINES_OWN:
        return OvsPrograms.in_path()
    if not fetched:
        return fetch(release)
    found = _cached(release)
    if found is None:
        raise LabError(f"{CACHE} has no Open vSwitch: `python -m tests.lab.ovs_releases {release}` before")
    return OvsPrograms(found / "usr")


def fetch(release: str, newest: bool = False) -> OvsPrograms:
    """The cached programs, fetched first if there are none or the ``newest`` are requested."""
    if platform.machine() != "x86_64":
        raise LabError(f"what is unpacked runs on x86_64, and this machine is {platform.machine()}")
    part = f"ovs-{release}"
    with locked(part):
        found = None if newest else _cached(release)
        if found is None:
            with scratch(part) as directory:
                found = _fetch(release, directory)
        return OvsPrograms(found / "usr")


def _fetch(release: str, directory: Path) -> Path:
    apt = PrivateApt(directory)
    apt.update()
    apt = apt.alone(platform.freedesktop_os_release().get("VERSION_CODENAME", ""), release)
    target = CACHE / f"ovs-{release}-{apt.candidate(OVS_DPDK).rpartition(':')[2]}"
    if target.exists():
        target.touch()
        return target
    drivers = driver_packages(apt.missing(OVS_DPDK, suite=release))
    draft = directory / "ovs"
    draft.mkdir()
    needed = apt.missing(OVS_DPDK, *drivers, "patchelf", suite=release)
    apt.unpack(map(str, unpacked(needed)), draft)
    _bind(draft, target)
    shutil.rmtree(draft / "usr/share/doc", ignore_errors=True)
    draft.rename(target)
    return target


def driver_packages(needed: Iterable[Missing]) -> list[str]:
    """The packages of DPDK's drivers, whose names end in the version of its ABI."""
    for package in needed:
        if abi := re.fullmatch(r"librte-eal(\d+)", package.name):
            return [f"librte-{name}{'-' if name[-1].isdigit() else ''}{abi[1]}" for name in DRIVERS]
    raise LabError(f"{OVS_DPDK} comes without DPDK")


def unpacked(needed: Iterable[Missing]) -> list[Missing]:
    """Libraries and Open vSwitch; programs of others are the machine's own."""
    prefixes = ("lib", "zlib", "openvswitch", "patchelf")
    return [one for one in needed if one.name.startswith(prefixes) and not one.name.startswith("libpython")]


def _bind(draft: Path, target: Path) -> None:
    """Name the loader and libraries in the programs by where they will be; remove all other programs."""
    own, then = draft / LIBRARIES, target / LIBRARIES
    drivers = sorted({path.name for path in own.glob("dpdk/pmds-*/*.so.*") if path.suffix[1:].isdigit()})
    patch: Sequence[Path | str] = (own / LOADER, "--library-path", own, draft / "usr/bin/patchelf")
    kept, others = [], []
    for path in (path for pattern in PROGRAMS for path in draft.glob(pattern)):
        # Scripts go too: the machine need not have the Python modules that they import.
        own_program = path.name.startswith("ovs") and not path.is_symlink() and path.read_bytes()[:4] == ELF
        (kept if own_program else others).append(path)
    for path in kept:
        run([*patch, "--set-interpreter", then / LOADER, "--force-rpath", "--set-rpath", then, path])
        if path.parent.name == OVS_DPDK:
            # Where DPDK looks for drivers there are none of its version.
            run([*patch, *(word for name in drivers for word in ("--add-needed", name)), path])
    for path in others:
        path.unlink()


def _cached(release: str) -> Path | None:
    found = sorted(CACHE.glob(f"ovs-{release}-*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(fetch(name).prefix.parent.name)
    sys.exit(0)
