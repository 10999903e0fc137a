"""What the guest is made of: QEMU 10 and Debian's 6.12 kernel, fetched by apt, never installed.

`python -m tests.nested.prepare` fetches the newest; the plugin takes what is in the cache, and
fetches only what is not.
"""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.lab import kernel
from tests.lab.apt import PrivateApt
from tests.lab.kernel import CACHE, Kernel
from tests.lab.processes import LabError, run

METAPACKAGE = "linux-image-6.12-amd64"
EMULATOR = "qemu-system-x86"
# It looks for its data under the prefix it was built for: these have to be of its own version.
WITH_EMULATOR = (EMULATOR, "qemu-system-common", "qemu-system-data", "seabios")
LIBRARIES = "usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True, slots=True)
class Emulator:
    """An unpacked QEMU, with the libraries that the machine lacks."""

    prefix: Path

    @property
    def program(self) -> Path:
        return self.prefix / "usr/bin/qemu-system-x86_64"

    @property
    def data(self) -> tuple[Path, ...]:
        return self.prefix / "usr/share/qemu", self.prefix / "usr/share/seabios"

    @property
    def environment(self) -> dict[str, str]:
        libraries = self.prefix / LIBRARIES
        return {"LD_LIBRARY_PATH": str(libraries), "QEMU_MODULE_DIR": str(libraries / "qemu")}


@dataclass(frozen=True, slots=True)
class Parts:
    """What the guest is made of."""

    emulator: Emulator
    kernel: Kernel


def fetch(newest: bool = False) -> Parts:
    """The cached parts, fetched first if there are none or the `newest` are requested."""
    if platform.machine() != "x86_64":
        raise LabError(f"the guest is an x86_64 machine, and this one is {platform.machine()}")
    # The guests in the guest, which has no network to fetch it from.
    kernel.fetch(newest)
    with kernel.locked("nested"):
        if not newest and _cached("qemu") and _cached("kernel"):
            return _parts()
        with kernel.scratch("nested") as scratch:
            apt = PrivateApt(scratch)
            apt.update()
            _fetch_kernel(apt, scratch)
            _fetch_emulator(apt, scratch)
        return _parts()


def _fetch_kernel(apt: PrivateApt, scratch: Path) -> None:
    package = apt.kernel_image(METAPACKAGE)
    target = CACHE / f"nested-kernel-{apt.candidate(package)}"
    if target.exists():
        target.touch()
        return
    # Under another name until all is there: what is in the cache is whole.
    draft = scratch / "kernel"
    kernel.unpack(apt, package, scratch, draft)
    run(["depmod", "--basedir", draft, kernel.opened(draft, "").modules.name], timeout=120)
    draft.rename(target)


def _fetch_emulator(apt: PrivateApt, scratch: Path) -> None:
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    suite = f"{release}-backports"
    apt.add_suite(release, suite)
    desired = {package.name: str(package) for package in apt.missing(EMULATOR, suite=suite)}
    # Those the machine has from there already are requested too.
    desired = {name: f"{name}/{suite}" for name in WITH_EMULATOR} | desired
    # Without its epoch: a colon separates directories in LD_LIBRARY_PATH.
    version = apt.candidate(EMULATOR, suite).rpartition(":")[2]
    target = CACHE / f"nested-qemu-{version}"
    if target.exists():
        target.touch()
        return
    draft = scratch / "qemu"
    apt.unpack(desired.values(), draft)
    shutil.rmtree(draft / "usr/share/doc", ignore_errors=True)
    draft.rename(target)


def _cached(part: str) -> Path | None:
    found = sorted(CACHE.glob(f"nested-{part}-*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _parts() -> Parts:
    qemu, image = _cached("qemu"), _cached("kernel")
    if qemu is None or image is None:
        raise LabError(f"{CACHE} has no QEMU or no kernel for nested tests")
    return Parts(Emulator(qemu), kernel.opened(image, image.name.removeprefix("nested-kernel-")))


if __name__ == "__main__":
    parts = fetch(newest=True)
    print(parts.emulator.prefix.name, parts.kernel.version)
    sys.exit(0)
