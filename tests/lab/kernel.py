"""The guests' kernel: Debian's own cloud kernel, fetched by apt and unpacked, never installed.

`python -m tests.lab.kernel` fetches it; a sandbox has no network, so do that before.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.processes import LabError, run

METAPACKAGE = "linux-image-cloud-amd64"
CACHE = Path(__file__).resolve().parents[2] / ".lab"
FETCH_TIMEOUT_S = 600.0


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
        wanted = re.compile(name.replace("_", "[-_]") + r"\.ko(\.xz)?")
        for path in sorted(self.modules.rglob("*.ko*")):
            if wanted.fullmatch(path.name):
                return path
        raise LabError(f"{self.modules} has no module {name}")


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
    """The cached kernel, fetched first if there is none or the `newest` one is asked for."""
    with _locked():
        if not newest and any(CACHE.glob("kernel-*")):
            return cached()
        for unfinished in CACHE.glob("fetch-*"):  # of one that was killed: this one has the lock
            shutil.rmtree(unfinished)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as directory:
            return _fetch(Path(directory))


def _fetch(scratch: Path) -> Kernel:
    options = _private_apt(scratch)
    run(["apt-get", *options, "--quiet", "update"], FETCH_TIMEOUT_S)
    shown = run(["apt-cache", *options, "depends", METAPACKAGE])
    needed = re.search(r"Depends: (linux-image-\S+)", shown)
    if needed is None:
        raise LabError(f"{METAPACKAGE} depends on no kernel image:\n{shown}")
    policy = run(["apt-cache", *options, "policy", needed[1]])
    version = re.search(r"Candidate: (\S+)", policy)
    if version is None:
        raise LabError(f"apt has no candidate for {needed[1]}:\n{policy}")
    target = CACHE / f"kernel-{version[1]}"
    if target.exists():
        target.touch()
        return _open(target)
    return _download(needed[1], options, scratch, target)


def _download(package: str, options: list[str], scratch: Path, target: Path) -> Kernel:
    run(["apt-get", *options, "--quiet", "download", package], FETCH_TIMEOUT_S, cwd=scratch)
    (archive,) = scratch.glob("*.deb")
    unpacked = scratch / "unpacked"
    run(["dpkg", "-x", archive, unpacked], FETCH_TIMEOUT_S)
    shutil.rmtree(unpacked / "usr", ignore_errors=True)
    unpacked.rename(target)
    return _open(target)


def _private_apt(scratch: Path) -> list[str]:
    """apt with the machine's sources, but lists and archives of its own."""
    directories = {"Dir::State::lists": scratch / "lists", "Dir::Cache": scratch / "cache"}
    for directory in directories.values():
        (directory / "partial").mkdir(parents=True)
    settings = [f"{key}={value}" for key, value in directories.items()]
    # The `_apt` user may not be able to reach the cache; what is fetched is verified anyway.
    settings.append("APT::Sandbox::User=root")
    return [word for setting in settings for word in ("-o", setting)]


def _open(directory: Path) -> Kernel:
    (image,) = directory.glob("boot/vmlinuz-*")
    (modules,) = directory.glob("lib/modules/*")
    return Kernel(directory.name.removeprefix("kernel-"), image, modules)


@contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    # The cache keeps itself out of version control.
    (CACHE / ".gitignore").write_text("*\n")
    handle = os.open(CACHE, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


if __name__ == "__main__":
    print(fetch(newest=True).version)
    sys.exit(0)
