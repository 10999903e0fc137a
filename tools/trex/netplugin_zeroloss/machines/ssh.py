"""This machine, and machines over SSH."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from netplugin.programs.program import Program, ProgramError, own_directory
from netplugin.programs.ssh import SshTarget
from netplugin_zeroloss.machines.contract import LocalMachine, Machine, MachineError, SshMachine

_AGAIN_S = 1.0
#: Exit status of ssh for an error of its own (ssh(1)).
_SSH_FAILED = 255
_DIRECTORY = re.compile(r"/run/netplugin-vnf-[A-Za-z0-9]{6}")
#: Becomes the program, whose pid is in the file then.
_START = 'echo $$ > "$0" && exec "$@"'
#: Ends the program of this file, and waits until it has ended, reaped or not: 10 s, then it is killed.
_END = (
    'p=$(cat "$0") || exit 0; rm -f "$0"; kill -TERM "$p"; i=0;'
    ' while grep -qs "^State:[[:space:]]*[^XZ]" "/proc/$p/status" && [ $i -lt 150 ]'
    '; do [ $i -ne 100 ] || kill -KILL "$p"; i=$((i+1)); sleep 0.1; done'
)


def make(description: LocalMachine | SshMachine, deadline: float) -> Machine:
    """Connect to a machine. Raises: MachineError if it is unreachable at the deadline."""
    return Ssh(description, deadline) if isinstance(description, SshMachine) else Local()


class Local(Machine):
    """This machine."""

    python = sys.executable

    def __init__(self) -> None:
        self._path = own_directory()
        self.directory = str(self._path)

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        return Program(name, arguments, self._path / "log")

    def command(self, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def socket(self, path: str, deadline: float) -> Path:
        return Path(path)

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class Ssh(Machine):
    """A VM or another host, through the OpenSSH client.

    ``stop`` ends a program there. If this process dies, the program ends with the connection (SIGHUP).
    """

    def __init__(self, description: SshMachine, deadline: float) -> None:
        """Connect; the machine may still be booting. Raises: MachineError if unreachable at the deadline."""
        self._description = description
        self._target = SshTarget(
            description.host, description.port, description.user, description.key, description.known_hosts
        )
        self._path = own_directory()
        self._tunnels: list[Program] = []
        try:
            self.directory = self._first_directory(deadline)
        except BaseException:
            shutil.rmtree(self._path, ignore_errors=True)
            raise

    def _first_directory(self, deadline: float) -> str:
        while True:
            try:
                printed = self.run(["mktemp", "-d", "/run/netplugin-vnf-XXXXXX"]).strip()
                break
            except ProgramError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)  # no notification of a booted VM
        if _DIRECTORY.fullmatch(printed):
            return printed
        raise MachineError(
            f"{self._target}: it prints {printed[:200]!r} in place of the name of a new directory: its shell"
            " must print nothing for commands over SSH (~/.bashrc), and mktemp must be that of GNU or busybox"
        )

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        pid_file = f"{self.directory}/{name}.pid"
        words = self._target.command(["sh", "-c", _START, pid_file, *arguments], "-tt")
        return _SshProgram(f"{name} on {self._description.host}", words, self._path / "log", self, pid_file)

    def command(self, arguments: Sequence[str]) -> list[str]:
        return self._target.command(arguments)

    def socket(self, path: str, deadline: float) -> Path:
        here = self._path / f"{len(self._tunnels)}.sock"
        options = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{here}:{path}"]
        tunnel = Program(
            f"ssh to {path}", [*self._target.words(*options), self._target.login], self._path / "ssh"
        )
        self._tunnels.append(tunnel)
        tunnel.start()
        tunnel.wait_for(here.is_socket, deadline, "the tunnel is there")
        return here

    def close(self) -> None:
        for tunnel in self._tunnels:
            tunnel.stop()
        self._tunnels.clear()
        if self.directory:
            with suppress(ProgramError):  # the VM may be gone
                self.run(["rm", "-rf", self.directory])
            self.directory = ""
        shutil.rmtree(self._path, ignore_errors=True)


class _SshProgram(Program):
    """The local end of a program on a machine: the connection that it ends with."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, machine: Ssh, pid_file: str) -> None:
        super().__init__(name, arguments, log)
        self._machine, self._pid_file = machine, pid_file

    def check(self) -> None:
        try:
            super().check()
        except ProgramError as error:
            if self._process is None or self._process.returncode != _SSH_FAILED:
                raise
            raise MachineError(
                f"{error}\nthe connection was lost: does the machine still run, and answer? its console, and"
                " `journalctl -u ssh` there, say why"
            ) from error

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProgramError):  # the machine may be gone
                self._machine.run(["sh", "-c", _END, self._pid_file])
        super().stop()


def ssh_fix(machine: SshMachine, why: str) -> str:
    """Return what mends a refused connection, from the words of ssh."""
    target = f"{machine.user}@{machine.host}"
    port = f" -p {machine.port}" if machine.port != 22 else ""
    if "Host key verification failed" in why:
        file = machine.known_hosts or "~/.ssh/known_hosts"
        return f"compare the machine's host key, then ssh-keyscan{port} {machine.host} >> {file}"
    if "Permission denied" in why:
        key = f" -i {machine.key}.pub" if machine.key else ""
        return f"ssh-copy-id{key}{port} {target}"
    return f"start the machine, and try it by hand: ssh{port} {target} true"
