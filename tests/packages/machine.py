"""A host with Debian and systemd in namespaces of this machine, in which packages are installed.

It is a root of mmdebstrap under an overlay, booted by systemd-nspawn: process 1, units, dpkg and all daemons
are Debian's own and as fast as here; the kernel is this machine's, whose settings it cannot change. A reboot
ends all processes, the network and /run; it is not one of the kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.lab import kernel
from tests.lab.apt import SOURCE_PARTS
from tests.lab.hugepages import borrowed
from tests.lab.kernel import CACHE
from tests.lab.processes import Argument, CommandError, Daemon, run, tail_of, wait_for
from tests.nested.machine import CHECKOUT, shared_directory

#: What a host has whose VMs get their NICs from here, and what the tests look with.
PACKAGES = (
    *("systemd-sysv", "dbus", "udev", "kmod", "iproute2", "openvswitch-switch", "openvswitch-switch-dpdk"),
    *("libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-daemon-system", "libvirt-clients", "dpdk-dev"),
    *("python3", "python3-libvirt", "nftables", "ethtool", "iputils-ping", "logrotate", "procps", "man-db"),
)
#: They would set up this machine and not the host.
MASKED = (
    *("systemd-udevd.service", "systemd-udev-trigger.service", "systemd-sysctl.service", "dpdk.service"),
    *("systemd-modules-load.service", "apt-daily.timer", "apt-daily-upgrade.timer", "man-db.timer"),
)
HUGEPAGES = 256
BOOT_S, COMMAND_S, BUILD_S = 60.0, 300.0, 1200.0
#: Of the host: what it shares with the test.
SHARE = Path("/srv/share")
_MODULES = Path(sysconfig.get_paths()["purelib"]).resolve()
_ENVIRONMENT = (
    *("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive"),
    *(f"PYTHONPATH={CHECKOUT}:{CHECKOUT}/tools/trex:{_MODULES}", "PYTHONDONTWRITEBYTECODE=1"),
)
_CALLS = "@default @system-service @mount bpf perf_event_open"


def base(suite: str = "bookworm") -> Path:
    """The root, from the cache if nothing has changed. apt's sources are those of this machine."""
    given = SOURCE_PARTS / "debian.sources"
    sources = [given] if suite == "bookworm" and given.exists() else []
    inputs = [suite, *PACKAGES, *(source.read_text() for source in sources)]
    target = CACHE / f"packages-{suite}-{hashlib.sha256(' '.join(inputs).encode()).hexdigest()[:16]}"
    with kernel.locked("packages"):
        if not target.exists():
            with kernel.scratch("packages") as scratch:
                scratch.chmod(0o755)  # apt's user downloads below it
                command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
                command += [f"--include={','.join(PACKAGES)}", '--aptopt=APT::Install-Recommends "false"']
                run([*command, suite, scratch / "root", *sources], BUILD_S)
                (scratch / "root").rename(target)
    return target


class Host:
    """One that runs."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.directory, self.share = directory, directory / "share"
        self.share.mkdir()
        words = [sys.executable, "-m", "tests.packages.machine", str(root), str(directory)]
        alone = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child=SIGKILL"]
        self.daemon = Daemon("nspawn", [*alone, "--mount-proc", "--", *words], directory / "console")

    def run(self, *words: Argument, timeout: float = COMMAND_S) -> str:
        """What a command prints. Raises: CommandError, LabTimeout."""
        entered = ["nsenter", f"--target={self._first()}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return run([*entered, "--root", "--wd", "--", "env", "-i", *_ENVIRONMENT, *words], timeout)

    def _first(self) -> str:
        """Its process 1: what nspawn runs, below ``unshare``."""
        pid = str(self.daemon.pid)
        for _ in range(2):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not children:
                raise CommandError(["nsenter"], 1, "", "it does not run yet")
            pid = children[0]
        return pid

    def succeeds(self, *words: Argument) -> bool:
        with suppress(CommandError):
            self.run(*words)
            return True
        return False

    def tried(self, *words: Argument, timeout: float = COMMAND_S) -> tuple[int, str]:
        """Exit status, and all that a command prints."""
        try:
            return 0, self.run("sh", "-c", 'exec "$@" 2>&1', "sh", *words, timeout=timeout)
        except CommandError as failed:
            return failed.status, failed.stdout + failed.stderr

    def lab(self, *words: Argument) -> Any:
        """What a command of `tests.packages.inside` prints as JSON."""
        return json.loads(self.run("python3", "-m", "tests.packages.inside", *words).splitlines()[-1])

    def start(self, unit: str, *words: Argument) -> None:
        """Run a command as a unit, which it does not wait for."""
        options = [word for each in _ENVIRONMENT for word in ("--setenv", each)]
        self.run("systemd-run", "--quiet", "--collect", f"--unit={unit}", *options, "--", *words)

    def stop(self, unit: str) -> None:
        self.run("systemctl", "stop", unit)

    def write(self, path: str, text: str) -> None:
        (self.share / "written").write_text(text)
        self.run("install", "-D", "-m", "644", SHARE / "written", path)

    def boot_id(self) -> str:
        return self.run("cat", "/proc/sys/kernel/random/boot_id").strip()

    def wait_up(self, other_than: str = "") -> None:
        def up() -> bool:
            with suppress(CommandError, OSError):
                state = self.tried("systemctl", "is-system-running")[1].strip()
                return state in ("running", "degraded") and self.boot_id() != other_than
            return False

        wait_for(up, BOOT_S, "the host is up", lambda: tail_of(self.directory / "console"))

    def reboot(self) -> None:
        before = self.boot_id()
        self.run("systemctl", "reboot")
        # With --keep-unit nspawn leaves it to who has started it: it ends with status 133.
        wait_for(lambda: not self.daemon.running, BOOT_S, "the host goes down")
        self.daemon.start()
        self.wait_up(before)


@contextmanager
def booted(root: Path) -> Iterator[Host]:
    with borrowed(HUGEPAGES), shared_directory() as directory:
        host = Host(root, directory)
        try:
            host.daemon.start()
            host.wait_up()
            yield host
        finally:
            host.daemon.kill()


def main(root: Path, directory: Path) -> None:
    """In a mount namespace of its own: what nspawn notes and mounts ends with it."""
    run(["mount", "--no-mtab", "-t", "tmpfs", "tmpfs", "/run"])
    upper, work, merged = (directory / name for name in ("upper", "work", "root"))
    for each in (upper, work, merged):
        each.mkdir(mode=0o755, exist_ok=True)
    layers = f"lowerdir={root},upperdir={upper},workdir={work}"
    run(["mount", "--no-mtab", "-t", "overlay", "overlay", "-o", layers, merged])
    (merged / "etc/hostname").write_text("lab\n")
    for mask in (merged / "etc/systemd/system" / unit for unit in MASKED):
        if not mask.is_symlink():  # it boots again
            mask.symlink_to("/dev/null")
    environment = {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
    command = ["systemd-nspawn", f"--directory={merged}", "--boot", "--register=no", "--keep-unit"]
    command += ["--private-network", "--capability=all", f"--system-call-filter={_CALLS}", "--console=pipe"]
    command += ["--machine=lab", "--bind=/dev/net/tun", "--bind-ro=/sys/module", f"--bind-ro={CHECKOUT}"]
    command += [f"--bind-ro={_MODULES}", f"--bind={directory / 'share'}:{SHARE}"]
    os.execvpe(command[0], command, os.environ | environment)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
