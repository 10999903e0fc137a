"""A private libvirt: virtlogd and libvirtd, at the fixed paths of a sandbox or of a hypervisor in it."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from contextlib import suppress
from pathlib import Path

import libvirt  # type: ignore[import-untyped]

from tests.lab import sandbox
from tests.lab.apart import CONFIG, Apart
from tests.lab.processes import (
    Argument,
    CommandError,
    Daemon,
    LabError,
    LabTimeout,
    Running,
    run,
    wait_for,
)

URI = "qemu:///system"
STATE = Path("/run/libvirt")
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
# Nothing confines QEMU in here: the sandbox does.
QEMU_CONF = """
security_driver = "none"
user = "root"
group = "root"
namespaces = []
cgroup_controllers = []
remember_owner = 0
hugetlbfs_mount = "/dev/hugepages"
"""


class PrivateLibvirt(Running):
    """libvirtd and virtlogd. Every domain is destroyed when it stops."""

    def __init__(self, directory: Path = Path("/run/lab-libvirt"), apart: Apart | None = None) -> None:
        """``apart`` is the hypervisor it belongs to, if there are several in the sandbox."""
        self._apart = apart
        self.state, self.config = (self._outer(path) for path in (STATE, CONFIG))
        self.uri = URI if apart is None else f"qemu+unix:///system?socket={self.state / 'libvirt-sock'}"
        self.directory = directory
        self.host_uuid = str(uuid.uuid4())
        self.virtlogd = Daemon("virtlogd", self._command("virtlogd"), directory / "virtlogd.log")
        self.libvirtd = Daemon("libvirtd", self._command("libvirtd"), directory / "libvirtd.log")
        self._connection: libvirt.virConnect | None = None

    def start(self) -> None:
        if not sandbox.inside():
            raise LabError("libvirtd has fixed paths: run this in `python -m tests.lab.sandbox`")
        # The binding prints every error it also raises.
        libvirt.registerErrorHandler(lambda *_: None, None)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._configure()
        self.virtlogd.start()
        self.virtlogd.wait_for((self.state / "virtlogd-sock").exists, START_DEADLINE_S, "virtlogd listens")
        self.start_libvirtd()

    def stop(self) -> None:
        try:
            self._destroy_domains()
        finally:
            self._close()
            self.libvirtd.stop(STOP_DEADLINE_S)
            self._kill_orphans()
            self.virtlogd.stop(STOP_DEADLINE_S)

    def start_libvirtd(self) -> None:
        """Start it and wait until its QEMU driver answers."""
        # A socket file of a killed libvirtd answers nobody.
        (self.state / "libvirt-sock").unlink(missing_ok=True)
        self.libvirtd.start()
        self.libvirtd.wait_for((self.state / "libvirt-sock").exists, START_DEADLINE_S, "libvirtd listens")
        self._virsh("version")

    def kill_libvirtd(self) -> None:
        """Domains live on, as they do when libvirtd crashes."""
        self.libvirtd.kill()
        self._close()

    def connect(self) -> libvirt.virConnect:
        """The connection, opened if there is none that works; closed when this libvirt stops."""
        if self._connection is None or not self._connection.isAlive():
            self._close()
            self._connection = libvirt.open(self.uri)
        return self._connection

    def destroy_domain(self, name: str) -> None:
        """Destroy a domain if it runs; needs no connection of the test."""
        if name in self._domains():
            self._virsh("destroy", name)

    def qemu_log(self, domain: str) -> Path:
        """The log of QEMU, and the command line it was started with."""
        return self._outer(Path(f"/var/log/libvirt/qemu/{domain}.log"))

    def _outer(self, fixed: Path) -> Path:
        return fixed if self._apart is None else self._apart.outer(fixed)

    def _command(self, name: str) -> list[Argument]:
        return [name] if self._apart is None else self._apart.command([name])

    def _virsh(self, *args: str) -> str:
        try:
            return run(["virsh", "--quiet", "--connect", self.uri, *args], START_DEADLINE_S)
        except (CommandError, LabTimeout) as error:
            raise LabError(f"libvirtd: {error}\n{self.libvirtd.tail()}") from error

    def _configure(self) -> None:
        # Networks of the machine would start with this libvirtd.
        shutil.rmtree(self.config / "qemu" / "networks", ignore_errors=True)
        (self.config / "qemu.conf").write_text(QEMU_CONF)
        (self.config / "libvirtd.conf").write_text(
            f'host_uuid = "{self.host_uuid}"\nauth_unix_rw = "none"\nauth_unix_ro = "none"\n'
        )

    def _domains(self) -> list[str]:
        return self._virsh("list", "--name").split()

    def _destroy_domains(self) -> None:
        if not self.libvirtd.running:
            return
        for name in self._domains():
            self._virsh("destroy", name)

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(libvirt.libvirtError):  # its libvirtd is gone
                self._connection.close()
            self._connection = None

    def _kill_orphans(self) -> None:
        """Domains of a libvirtd that was killed: their QEMU runs on without it."""
        pids = [int(path.read_text()) for path in (self.state / "qemu").glob("*.pid")]
        for pid in pids:
            if _is_qemu(pid):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(_is_qemu, pids)), STOP_DEADLINE_S, "QEMU has ended")


def _is_qemu(pid: int) -> bool:
    try:
        return "qemu" in os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False  # ended; a zombie has no program either
