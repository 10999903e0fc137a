"""Machines on which programs of a run are started: this one, and a VM or another host over SSH."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from netplugin.api.fields import Value, worded
from netplugin.programs.program import Program, ProgramError, own_directory
from netplugin.programs.ssh import SshTarget

#: Seconds for a short command, on a VM that may be slow.
COMMAND_S = 60.0
#: Bytes that it may print, to each of its streams.
MOST_OUTPUT = 4 << 20
_HOST = worded(r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$", "must be the name or address of a host")
_USER = worded(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "must be the name of a user")
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


class MachineError(ProgramError):
    """The machine cannot be reached, or a command on it failed."""


class LocalMachine(Value):
    """This machine."""

    type: Literal["local"] = "local"


class SshMachine(Value):
    """A VM or another host. Authentication is by key only (BatchMode)."""

    type: Literal["ssh"]
    host: Annotated[str, StringConstraints(pattern=_HOST, max_length=255, strict=True)]
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    user: Annotated[str, StringConstraints(pattern=_USER)] = "root"
    #: Private key file; null: ssh's default.
    key: str | None = None
    #: File with the machine's host key; null: ssh's default. Unknown keys are rejected.
    known_hosts: str | None = None

    def fix(self, why: str) -> str:
        """Return what mends a refused connection, from the words of ssh."""
        target = f"{self.user}@{self.host}"
        port = f" -p {self.port}" if self.port != 22 else ""
        if "Host key verification failed" in why:
            file = self.known_hosts or "~/.ssh/known_hosts"
            return f"compare the machine's host key, then ssh-keyscan{port} {self.host} >> {file}"
        if "Permission denied" in why:
            key = f" -i {self.key}.pub" if self.key else ""
            return f"ssh-copy-id{key}{port} {target}"
        return f"start the machine, and try it by hand: ssh{port} {target} true"


Description = Annotated[LocalMachine | SshMachine, Field(discriminator="type")]


def connect(description: LocalMachine | SshMachine, deadline: float) -> Machine:
    """Raises: MachineError if the machine is unreachable at the deadline."""
    return Ssh(description, deadline) if isinstance(description, SshMachine) else Local()


class Machine(ABC):
    """A machine that runs commands given as argument lists. The caller closes it."""

    #: New directory on the machine, for sockets and files of its user.
    directory: str
    #: A Python 3 of the machine.
    python = "python3"

    def run(self, arguments: Sequence[str], stdin: str = "") -> str:
        """Run a short command and return its output. Raises: MachineError with the error text."""
        words = self.command(arguments)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    ["prlimit", f"--fsize={MOST_OUTPUT}", "--", *words],
                    input=stdin.encode(),
                    stdout=output,
                    stderr=errors,
                    timeout=COMMAND_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as late:
                raise MachineError(f"{words[0]} did not end within {COMMAND_S:g} s") from late
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
                if file.tell() >= MOST_OUTPUT:
                    raise MachineError(f"{words[0]} prints more than {MOST_OUTPUT} bytes")
        if done.returncode:
            why = texts[1].strip() or texts[0].strip() or f"exit status {done.returncode}"
            raise MachineError(f"{shlex.join(words)}: {why}")
        return texts[0]

    def has(self, kind: str, path: str | Path) -> bool:
        """Whether the machine has a file of this kind: ``-f`` or ``-S``, as of test(1)."""
        try:
            self.run(["test", kind, str(path)])
        except MachineError:
            return False
        return True

    def write(self, path: str, text: str) -> None:
        """Write a file. Raises: MachineError."""
        self.run(["tee", path], stdin=text)

    @abstractmethod
    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the local argument list that runs a command there, with the standard streams of here."""

    @abstractmethod
    def program(self, name: str, arguments: Sequence[str]) -> Program:
        """Return a long-running program on the machine, not yet started."""

    @abstractmethod
    def socket(self, path: str, deadline: float) -> Path:
        """Return a local path to a UNIX stream socket of the machine. Raises: MachineError."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything created on the machine. Idempotent."""


class Local(Machine):
    """This machine."""

    python = sys.executable

    def __init__(self) -> None:
        self._path = own_directory()
        self.directory = str(self._path)

    def command(self, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        return Program(name, arguments, self._path / "log")

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
        self._target = SshTarget(**description.model_dump(exclude={"type"}))
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

    def command(self, arguments: Sequence[str]) -> list[str]:
        return self._target.command(arguments)

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        pid_file = f"{self.directory}/{name}.pid"
        words = self._target.command(["sh", "-c", _START, pid_file, *arguments], "-tt")
        return _SshProgram(f"{name} on {self._target.host}", words, self._path / "log", self, pid_file)

    def socket(self, path: str, deadline: float) -> Path:
        here = self._path / f"{len(self._tunnels)}.sock"
        options = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{here}:{path}"]
        words = [*self._target.words(*options), self._target.login]
        tunnel = Program(f"ssh to {path}", words, self._path / "ssh")
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
