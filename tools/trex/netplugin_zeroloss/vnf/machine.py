"""The machine of a VNF: this one, or a VM over SSH."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from netplugin.host.processes import remaining
from netplugin.host.program import Program, ProgramError, own_directory
from netplugin_zeroloss.vnf.contract import LocalMachine, SshMachine, VnfError

_COMMAND_S = 20.0
_AGAIN_S = 1.0


class VnfMachine(ABC):
    """A machine that runs commands given as argument lists. The caller closes it."""

    #: New directory on the machine for sockets and files of this VNF.
    directory: str

    @abstractmethod
    def run(self, arguments: Sequence[str], stdin: str | None = None) -> str:
        """Run a short command and return its output. Raises: VnfError with the error text."""

    @abstractmethod
    def write(self, path: str, text: str) -> None:
        """Write a file. Raises: VnfError."""

    @abstractmethod
    def program(self, name: str, arguments: Sequence[str]) -> Program:
        """Return a long-running program on the machine, not yet started."""

    @abstractmethod
    def socket(self, path: str, deadline: float) -> Path:
        """Return a local path to a UNIX stream socket of the machine. Raises: VnfError."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything created on the machine. Idempotent."""


class Local(VnfMachine):
    """This machine."""

    def __init__(self) -> None:
        self._path = own_directory()
        self.directory = str(self._path)

    def run(self, arguments: Sequence[str], stdin: str | None = None) -> str:
        return _run(arguments, stdin)

    def write(self, path: str, text: str) -> None:
        try:
            Path(path).write_text(text)
        except OSError as error:
            raise VnfError(f"{path}: {error.strerror}") from error

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        return Program(name, arguments, self._path / "log")

    def socket(self, path: str, deadline: float) -> Path:
        return Path(path)

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class Ssh(VnfMachine):
    """A VM reached with the OpenSSH client. Its programs end with the connection (SIGHUP from the tty)."""

    def __init__(self, description: SshMachine, deadline: float) -> None:
        """Connect; the VM may still be booting. Raises: VnfError if unreachable at the deadline."""
        self._description = description
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
                return self.run(["mktemp", "-d", "/run/netplugin-vnf-XXXXXX"]).strip()
            except ProgramError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN_S)  # no notification of a booted VM

    def run(self, arguments: Sequence[str], stdin: str | None = None) -> str:
        return _run([*self._ssh(), self._target, quoted(arguments)], stdin)

    def write(self, path: str, text: str) -> None:
        self.run(["tee", path], stdin=text)

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        words = [*self._ssh("-tt"), self._target, quoted(arguments)]
        return Program(f"{name} on {self._description.host}", words, self._path / "log")

    def socket(self, path: str, deadline: float) -> Path:
        here = self._path / f"{len(self._tunnels)}.sock"
        options = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{here}:{path}"]
        tunnel = Program(f"ssh to {path}", [*self._ssh(*options), self._target], self._path / "ssh")
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

    @property
    def _target(self) -> str:
        return f"{self._description.user}@{self._description.host}"

    def _ssh(self, *options: str) -> list[str]:
        machine = self._description
        words = ["ssh", "-p", str(machine.port), "-o", "BatchMode=yes", *options]
        words += ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"]
        words += ["-o", "StrictHostKeyChecking=yes"]
        if machine.key is not None:
            words += ["-o", "IdentitiesOnly=yes", "-i", machine.key]
        if machine.known_hosts is not None:
            words += ["-o", f"UserKnownHostsFile={machine.known_hosts}"]
        return words


def machine_of(description: LocalMachine | SshMachine, deadline: float) -> VnfMachine:
    """Return the machine of a description. Raises: VnfError if unreachable at the deadline."""
    return Ssh(description, deadline) if isinstance(description, SshMachine) else Local()


def quoted(arguments: Sequence[str]) -> str:
    """Quote an argument list for the remote shell, which parses the command."""
    return shlex.join(arguments)


def _run(arguments: Sequence[str], stdin: str | None) -> str:
    deadline = time.monotonic() + _COMMAND_S
    try:
        done = subprocess.run(
            list(arguments),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=remaining(deadline),
            check=False,
        )
    except OSError as error:
        raise VnfError(f"{arguments[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as late:
        raise VnfError(f"{arguments[0]} did not end within {_COMMAND_S:g} s") from late
    if done.returncode:
        words = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise VnfError(f"{shlex.join(arguments)}: {words}")
    return done.stdout
