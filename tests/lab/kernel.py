"""The guests' kernel: Debian's own cloud kernel, fetched by apt and unpacked, never installed.

`python -m tests.lab.kernel` fetches it; a sandbox has no network, so do that before.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.apt import PrivateApt
from tests.lab.processes import LabError

METAPACKAGE = "linux-image-cloud-amd64"
CACHE = Path(__file__).resolve().parents[2] / ".lab"
PART = "kernel"
# Arguments of a kernel in a guest, so that it boots quickly, and ends the guest if it cannot go on.
QUICK_BOOT = (
    "quiet panic=-1 nokaslr mitigations=off random.trust_cpu=on audit=0"
    " no_timer_check cryptomgr.notests i8042.noaux i8042.nokbd rcupdate.rcu_expedited=1"
    # A tick that repeats by itself: of one that is set again each time, QEMU's emulation loses one once in
    # many runs on a busy machine, and that CPU then sleeps without end.
    " nohz=off highres=off"
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel package."""

    version: str
    """The package's version, as in 6.1.192-2."""
    image: Path
    modules: Path
    """The directory with modules.dep."""

    def module(self, name: str) -> Path:
        """A module's file by its name, whose dashes and underscores mean the same."""
        file_name = re.compile(name.replace("_", "[-_]") + r"\.ko(\.xz)?")
        for path in sorted(self.modules.rglob("*.ko*")):
            if file_name.fullmatch(path.name):
                return path
        raise LabError(f"{self.modules} has no module {name}")

    def load_order(self, names: Iterable[str]) -> list[str]:
        """Some modules and what they need, each after what it needs; wants depmod's modules.dep."""
        return parse_load_order((self.modules / "modules.dep").read_text(), names)


def cached() -> Kernel:
    """The newest kernel in the cache."""
    found = sorted(CACHE.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise LabError(
            f"no guest kernel in {CACHE}: run `python -m tests.lab.kernel` outside the sandbox,"
            " or the sandbox with --guests"
        )
    return _open(found[-1])


def fetch(newest: bool = False) -> Kernel:
    """The cached kernel, fetched first if there is none or the `newest` one is requested."""
    with locked(PART):
        if not newest and any(CACHE.glob("kernel-*")):
            return cached()
        with scratch(PART) as directory:
            return _fetch(directory)


def parse_load_order(dependencies: str, names: Iterable[str]) -> list[str]:
    """From lines `module: needs ...`, where what is needed first stands last."""
    needs: dict[str, list[str]] = {}
    for line in dependencies.splitlines():
        module, _, others = line.partition(":")
        needs[_module_name(module)] = [_module_name(other) for other in others.split()]
    order: dict[str, None] = {}
    for name in names:
        if name not in needs:
            raise LabError(f"modules.dep has no module {name}")
        order.update(dict.fromkeys([*reversed(needs[name]), name]))
    return list(order)


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0].replace("-", "_")


def _fetch(directory: Path) -> Kernel:
    apt = PrivateApt(directory)
    apt.update()
    package = apt.kernel_image(METAPACKAGE)
    target = CACHE / f"kernel-{apt.candidate(package)}"
    if target.exists():
        target.touch()
    else:
        unpack(apt, package, directory, target)
    return _open(target)


def unpack(apt: PrivateApt, package: str, directory: Path, target: Path) -> None:
    """Fetch a kernel's package and keep what boots of it."""
    unpacked = directory / "unpacked"
    apt.unpack([package], unpacked)
    shutil.rmtree(unpacked / "usr", ignore_errors=True)
    unpacked.rename(target)


def _open(directory: Path) -> Kernel:
    return opened(directory, directory.name.removeprefix("kernel-"))


def opened(directory: Path, version: str) -> Kernel:
    """The kernel that was unpacked into a directory."""
    (image,) = directory.glob("boot/vmlinuz-*")
    (modules,) = directory.glob("lib/modules/*")
    return Kernel(version, image, modules)


@contextmanager
def locked(part: str) -> Iterator[None]:
    """Be the only one that makes this part of the cache. Other parts may take minutes: each has its lock."""
    CACHE.mkdir(exist_ok=True)
    # The cache keeps itself out of version control.
    (CACHE / ".gitignore").write_text("*\n")
    with (CACHE / f"{part}.lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch(part: str) -> Iterator[Path]:
    """A directory in the cache to fetch a part into, for the time of the block; for who has its lock."""
    for unfinished in CACHE.glob(f"fetch-{part}-*"):  # of one that was killed
        shutil.rmtree(unfinished)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"fetch-{part}-") as directory:
        yield Path(directory)


if __name__ == "__main__":
    print(fetch(newest=True).version)
    sys.exit(0)
