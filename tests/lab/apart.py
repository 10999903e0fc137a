"""A hypervisor beside others: a network namespace, a host name, and its own /run and libvirt directories.

python -m tests.lab.apart ROOT HOSTNAME COMMAND..., in namespaces that `Apart.command` makes.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.namespaces import within
from tests.lab.processes import Argument, run

RUN = Path("/run")
CONFIG = Path("/etc/libvirt")
DIRECTORIES = (
    RUN,
    CONFIG,
    Path("/var/lib/libvirt"),
    Path("/var/cache/libvirt"),
    Path("/var/log/libvirt"),
)
# Of the whole sandbox: what one hypervisor and the lab, or two hypervisors, have in common.
SHARED = RUN / "np"


@dataclass(frozen=True, slots=True)
class Apart:
    """One of several hypervisors in a sandbox.

    Each command has a mount namespace of its own, in which the fixed directories of daemons are those
    below ``root``: daemons of one hypervisor meet there, and the lab reaches them by their outer path.
    """

    name: str
    """Its network namespace, which must be there, and its host name."""
    root: Path
    """Below /run/np."""

    def outer(self, fixed: Path) -> Path:
        """Where the lab finds a file that the hypervisor's daemons have at a fixed path."""
        return self.root / fixed.relative_to("/")

    def make(self) -> None:
        for directory in DIRECTORIES:
            self.outer(directory).mkdir(parents=True, exist_ok=True)
        (self.outer(RUN) / "lock").mkdir(exist_ok=True)
        self.outer(SHARED).mkdir(exist_ok=True)
        shutil.copytree(CONFIG, self.outer(CONFIG), symlinks=True, dirs_exist_ok=True)

    def command(self, command: Sequence[Argument]) -> list[Argument]:
        """The command as it is run on this hypervisor; its process is the one that is started."""
        private = ["unshare", "--mount", "--uts", "--propagation", "private", "--"]
        inner = [sys.executable, "-m", "tests.lab.apart", self.root, self.name, *command]
        return within(self.name, [*private, *inner])


def main(root: str, hostname: str, *command: str) -> None:
    here = Apart(hostname, Path(root))
    socket.sethostname(hostname)
    run(["mount", "--no-mtab", "--bind", SHARED, here.outer(SHARED)])
    for directory in reversed(DIRECTORIES):
        run(["mount", "--no-mtab", "--rbind", here.outer(directory), directory])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
