"""Where the daemons of an Open vSwitch listen: the database, vswitchd's control socket, its bridges."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from netplugin.api.errors import BackendUnavailable
from netplugin.host.safe_files import open_file_within

#: The database of an installed OVS.
DEFAULT_CONNECTION = "unix:/run/openvswitch/db.sock"
_INSTALLED = Path("/var/run/openvswitch")
_PROGRAM = "ovs-vswitchd"
_PID_BYTES = 20
_STEP = "vswitchd"
_PEER = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


@dataclass(frozen=True)
class OvsSockets:
    """The sockets of an Open vSwitch: those that are configured, and otherwise those that are found.

    vswitchd is looked for at each call, because it may be started or restarted at any time.
    """

    connection: str = DEFAULT_CONNECTION
    #: The run directory of vswitchd; None: the directory of the database's socket, or the one of
    #: an installed OVS.
    rundir: Path | None = None
    #: The control socket of vswitchd; None: found in the run directory.
    control_socket: Path | None = None

    @staticmethod
    def read(conf: Any) -> OvsSockets:
        """As the ``[ovs]`` options say."""
        rundir, control = conf.ovs.rundir, conf.ovs.control_socket
        directory, socket_path = (Path(each) if each else None for each in (rundir, control))
        return OvsSockets(conf.ovs.connection, directory, socket_path)

    @staticmethod
    def below(rundir: Path) -> OvsSockets:
        """The OVS that has its database socket and those of vswitchd in this directory."""
        return OvsSockets(f"unix:{rundir / 'db.sock'}", rundir)

    @property
    def database(self) -> Path | None:
        """The socket of the database; None if it is not a UNIX socket of this host."""
        kind, _, path = self.connection.partition(":")
        return Path(path) if kind == "unix" else None

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where vswitchd is looked for, in this order."""
        if self.rundir is not None:
            return (self.rundir,)
        if self.database is None:
            return (_INSTALLED,)
        directory = self.database.parent
        is_installed = os.path.realpath(directory) == os.path.realpath(_INSTALLED)
        return (directory,) if is_installed else (directory, _INSTALLED)

    def control(self) -> Path:
        """The control socket of vswitchd.

        Raises: BackendUnavailable if vswitchd is not found, or if several are.
        """
        if self.control_socket is not None:
            return self.control_socket
        for directory in self.directories:
            found = _by_pid_file(directory) or _only(directory)
            if found is not None and (directory == self.directories[0] or self._is_user(found)):
                return found
        where = " and ".join(map(str, self.directories))
        fix = (
            "start ovs-vswitchd, or name its directory in [ovs] rundir or its socket in [ovs] control_socket"
        )
        raise BackendUnavailable(f"ovs-vswitchd does not run (looked in {where})", step=_STEP, fix=fix)

    def management(self, bridge: str) -> Path:
        """The socket at which vswitchd takes the OpenFlow messages of a bridge."""
        directory = self.directories[0]
        if self.rundir is None:
            try:
                directory = self.control().parent
            except BackendUnavailable:
                pass  # whoever connects there reports it
        return directory / f"{bridge}.mgmt"

    def _is_user(self, control: Path) -> bool:
        """Whether the vswitchd with this control socket uses our database, by its command line.

        Asked only of one that is not next to the database: it may be that of another Open vSwitch.
        """
        if self.database is None:
            return True
        try:
            words = Path(f"/proc/{_owner(control)}/cmdline").read_text(errors="replace").split("\0")
        except OSError:
            return False
        named = [word.removeprefix("unix:") for word in words if word.startswith("unix:")]
        theirs = named[0] if named else control.parent / "db.sock"
        return os.path.realpath(theirs) == os.path.realpath(self.database)


def _by_pid_file(directory: Path) -> Path | None:
    """The control socket that the pid file names, if a process listens there."""
    try:
        # The directory may be that of OVS's own user.
        with open_file_within(Path("/"), f"{directory}/{_PROGRAM}.pid") as file:
            pid = int(file.read(_PID_BYTES))
    except (OSError, ValueError):
        return None
    named = directory / f"{_PROGRAM}.{pid}.ctl"
    return named if _listens(named) else None


def _only(directory: Path) -> Path | None:
    """The control socket of the one vswitchd in the directory, whatever its name; None if there is none.

    Raises: BackendUnavailable if there are several.
    """
    found = list(_of_vswitchds(directory))
    if len(found) > 1:
        what = f"{len(found)} ovs-vswitchds run in {directory}: {', '.join(path.name for path in found)}"
        fix = f"name one of them in [ovs] control_socket, such as {found[0]}"
        raise BackendUnavailable(what, step=_STEP, fix=fix)
    return found[0] if found else None


def _of_vswitchds(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.glob("*.ctl")):
        try:
            file = path.stat()
            is_one = _is_of_vswitchd((path, file.st_ino, file.st_ctime_ns))
        except OSError:
            continue  # nobody listens, or not yet
        if is_one and _listens(path):
            yield path


#: A socket as one process has bound it: its path, inode and time of change. The next process at the
#: same path has another inode.
_Bound: TypeAlias = tuple[Path, int, int]


@lru_cache(maxsize=256)
def _is_of_vswitchd(bound: _Bound) -> bool:
    """Whether the process that listens there is a vswitchd; asked once for each. Raises: OSError."""
    path, *_ = bound
    pid = _owner(path)
    try:
        program = Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        program = path.name  # a process of another pid namespace
    return program.startswith(_PROGRAM)


def _owner(path: Path) -> int:
    """The process that listens at a UNIX socket; 0 if it is in another pid namespace. Raises: OSError."""
    with _connected(path) as connection:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[0])


def _listens(path: Path) -> bool:
    try:
        _connected(path).close()
    except BlockingIOError:
        return True  # its queue is full
    except OSError:
        return False
    return True


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection
