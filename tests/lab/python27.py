"""Python 2.7 of Debian 11, unpacked into the cache and never installed: what ZStack's host agent runs.

`python -m tests.lab.python27` fetches it.
"""

from __future__ import annotations

from pathlib import Path

from tests.lab import kernel
from tests.lab.apt import PrivateApt

RELEASE, SUITE = "bookworm", "bullseye"
PACKAGES = ("python2.7-minimal", "libpython2.7-minimal", "libpython2.7-stdlib")


def python27() -> Path:
    """The interpreter in the cache, fetched first if there is none.

    Raises:
        LabError: apt cannot fetch it.
    """
    target = kernel.CACHE / "python2.7"
    with kernel.locked("python"):
        if not target.exists():
            with kernel.scratch("python") as directory:
                apt = PrivateApt(directory)
                apt.update()
                apt.add_suite(RELEASE, SUITE)
                apt.unpack([f"{package}/{SUITE}" for package in PACKAGES], directory / "unpacked")
                (directory / "unpacked").rename(target)
    return target / "usr/bin/python2.7"


if __name__ == "__main__":
    print(python27())
