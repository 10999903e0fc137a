"""Run a command in private namespaces that die with it: `python -m tests.lab.sandbox -- cmd`.

The outer process borrows hugepages, starts `unshare` and passes signals on. The inner one is
process 1 of the new pid namespace: it makes the mounts, runs the command and ends with it, and
the kernel then ends every process left and drops the mounts and the network with them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab import hugepages, kernel, machine_settings
from tests.lab.processes import LabError, run
from tests.lab.python27 import python27

HOSTNAME = "netplugin-lab"
MARKER = Path("/run/netplugin-lab-sandbox")
PRIVATE = (
    Path("/etc/openvswitch"),
    Path("/var/lib/libvirt"),
    Path("/var/lib/openvswitch"),
    Path("/var/cache/libvirt"),
    Path("/var/log/libvirt"),
    Path("/var/log/openvswitch"),
)
RUN_DIRECTORIES = ("lock", "openvswitch", "libvirt")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# As in `env` and `timeout`.
NOT_PREPARED = 125
NOT_STARTED = 127
OUTER_DIED = 255


def inside() -> bool:
    """Whether this process runs in a sandbox."""
    return MARKER.exists()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.inner is not None:
        return _Inner(options.inner, options.command).run()
    try:
        return _prepared(options)
    except LabError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return NOT_PREPARED


def _prepared(options: argparse.Namespace) -> int:
    if inside():
        raise LabError("this is a sandbox already; one in it could not borrow hugepages safely")
    machine_settings.release()
    if options.guests:
        kernel.fetch()
        # Its tests are skipped without it.
        with contextlib.suppress(LabError):
            python27()
    return _outer(options.hugepages, options.command)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.sandbox", description=__doc__)
    parser.add_argument("--hugepages", type=int, default=0, metavar="N", help="2 MB pages to add")
    parser.add_argument(
        "--guests", action="store_true", help="fetch the guests' kernel and Python 2.7 before"
    )
    parser.add_argument("--inner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def _outer(pages: int, command: Sequence[str]) -> int:
    # A signal is a byte in this pipe, from before the first page is borrowed: none is lost and
    # none interrupts the giving back. Its end of file tells the inner that the outer is gone.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number in FORWARDED:
        signal.signal(number, lambda got, _frame: _pass_on(writer, got))
    try:
        with hugepages.borrowed(pages):
            return _run_unshared(reader, command)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _pass_on(writer: int, number: int) -> None:
    try:
        os.write(writer, bytes([number]))
    except BlockingIOError:
        pass  # 64 KiB of unread signals: one more says nothing new


def _run_unshared(reader: int, command: Sequence[str]) -> int:
    inner = [sys.executable, "-m", "tests.lab.sandbox", "--inner", str(reader), "--", *command]
    unshare = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
    unshare += ["--kill-child=SIGKILL", "--mount-proc", "--propagation", "private"]
    # A session of its own: a Ctrl-C reaches the command once, through the pipe.
    child = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *unshare, "--", *inner],
        pass_fds=[reader],
        start_new_session=True,
    )
    status = child.wait()
    return status if status >= 0 else 128 - status


class _Inner:
    """Process 1 of the sandbox."""

    def __init__(self, control: int, command: Sequence[str]) -> None:
        self._control = control
        self._command = list(command)

    def run(self) -> int:
        make_private()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_inheritable(self._control, False)
        try:
            child = subprocess.Popen(self._command, start_new_session=True)
        except OSError as error:
            print(f"{self._command[0]}: {error.strerror}", file=sys.stderr)
            return NOT_STARTED
        return self._watch(child.pid, reader)

    def _watch(self, child: int, reader: int) -> int:
        with selectors.DefaultSelector() as events:
            events.register(self._control, selectors.EVENT_READ)
            events.register(reader, selectors.EVENT_READ)
            while True:
                status = _reap(child)
                if status is not None:
                    return status
                ready = {key.fd for key, _ in events.select()}
                if reader in ready:
                    os.read(reader, 4096)
                if self._control in ready and not self._forward(child):
                    return OUTER_DIED

    def _forward(self, child: int) -> bool:
        numbers = os.read(self._control, 64)
        for number in numbers:
            try:
                os.killpg(child, number)
            except ProcessLookupError:
                pass  # it ended; its status is reaped next
        return bool(numbers)


def _reap(child: int) -> int | None:
    """Collect every ended process (orphans come to process 1); the command's status if it did."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def make_private(own_kernel: bool = False) -> None:
    """Give this mount, network and UTS namespace everything the daemons write to.

    With an `own_kernel` (in a guest) /dev is that kernel's, and its devices come and go.
    """
    # `mount` would note its mounts under the machine's /run: it is covered first.
    _mount_tmpfs(Path("/run"))
    socket.sethostname(HOSTNAME)
    run(["ip", "link", "set", "lo", "up"])
    if own_kernel:
        _mount("devtmpfs", Path("/dev"))
    else:
        _copy_dev()
    _mount_in_dev()
    # sysfs shows the network namespace it was mounted from.
    _mount("sysfs", Path("/sys"))
    for directory in PRIVATE:
        if directory.is_dir():
            _mount_tmpfs(directory)
    _mount_copy(Path("/etc/libvirt"))
    for name in RUN_DIRECTORIES:
        (Path("/run") / name).mkdir()
    MARKER.touch()


def _mount(kind: str, target: Path, *options: str) -> None:
    # With its notes (mtab) `mount` would make a directory in the machine's own /run.
    choice = ["-o", ",".join(options)] if options else []
    run(["mount", "--no-mtab", "-t", kind, *choice, kind, target])


def _mount_tmpfs(directory: Path, mode: str = "0755") -> None:
    _mount("tmpfs", directory, f"mode={mode}")


def _mount_copy(directory: Path) -> None:
    """A private copy of a directory; the original stays reachable by its open descriptor."""
    if not directory.is_dir():
        return
    original = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _mount_tmpfs(directory)
        source = Path(f"/proc/self/fd/{original}")
        shutil.copytree(source, directory, symlinks=True, dirs_exist_ok=True)
    finally:
        os.close(original)


def _copy_dev() -> None:
    """A private /dev: mount points made in the real one would stay there."""
    original = os.open("/dev", os.O_RDONLY | os.O_DIRECTORY)
    try:
        _mount_tmpfs(Path("/dev"))
        _copy_nodes(Path(f"/proc/self/fd/{original}"), Path("/dev"))
    finally:
        os.close(original)


def _mount_in_dev() -> None:
    for name in ("pts", "shm", "hugepages"):
        (Path("/dev") / name).mkdir(exist_ok=True)
    _mount("devpts", Path("/dev/pts"), "newinstance", "ptmxmode=0666")
    _mount_tmpfs(Path("/dev/shm"), mode="1777")
    _mount("hugetlbfs", Path("/dev/hugepages"), "pagesize=2M")
    (Path("/dev") / "ptmx").unlink(missing_ok=True)
    (Path("/dev") / "ptmx").symlink_to("pts/ptmx")


def _copy_nodes(source: Path, target: Path) -> None:
    for entry in os.scandir(source):
        if entry.name in ("pts", "shm", "hugepages", "mqueue"):
            continue
        there = target / entry.name
        found = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            there.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            there.mkdir()
            _copy_nodes(Path(entry.path), there)
        elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            os.mknod(there, found.st_mode, found.st_rdev)
            os.chmod(there, stat.S_IMODE(found.st_mode))
            os.chown(there, found.st_uid, found.st_gid)


if __name__ == "__main__":
    sys.exit(main())
