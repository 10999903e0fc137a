"""The contract of a machine that runs programs of a run, and the descriptions of machines."""

from __future__ import annotations

import os
import selectors
import shlex
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from netplugin.api.fields import Value, worded
from netplugin.host.processes import remaining
from netplugin.programs.program import Program, ProgramError

#: Seconds for a short command, on a VM that may be slow.
COMMAND_S = 60.0
#: Bytes that it may print.
MOST_OUTPUT = 4 << 20
_PIECE = 1 << 16
_HostName = Annotated[
    str,
    StringConstraints(
        pattern=worded(r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$", "must be the name or address of a host"),
        max_length=255,
        strict=True,
    ),
]
_USER = worded(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "must be the name of a user")
_User = Annotated[str, StringConstraints(pattern=_USER)]


class MachineError(ProgramError):
    """The machine cannot be reached, or a command on it failed."""


# -- Descriptions. --------------------------------------------------------------------------------


class LocalMachine(Value):
    """This machine."""

    type: Literal["local"] = "local"


class SshMachine(Value):
    """A VM or another host. Authentication is by key only (BatchMode)."""

    type: Literal["ssh"]
    host: _HostName
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    user: _User = "root"
    #: Private key file; null: ssh's default.
    key: str | None = None
    #: File with the machine's host key; null: ssh's default. Unknown keys are rejected.
    known_hosts: str | None = None


class ConsoleMachine(Value):
    """A VM with a shell, or a log-in prompt, on a serial port."""

    type: Literal["console"]
    #: UNIX socket (``<serial type='unix'>`` of libvirt), or a tty (``virsh ttyconsole DOMAIN``).
    path: Annotated[
        str,
        StringConstraints(
            pattern=worded(r"^/[^\n]*$", "must be an absolute path"), max_length=107, strict=True
        ),
    ]
    #: For a log-in prompt.
    user: _User = "root"
    #: File with the password, if the VM asks for one.
    password_file: Path | None = None


# -- Machines. ------------------------------------------------------------------------------------


class Machine(ABC):
    """A machine that runs commands given as argument lists. The caller closes it."""

    #: New directory on the machine, for sockets and files of its user.
    directory: str

    @abstractmethod
    def run(self, arguments: Sequence[str], stdin: str | None = None) -> str:
        """Run a short command and return its output. Raises: MachineError with the error text."""

    @abstractmethod
    def write(self, path: str, text: str) -> None:
        """Write a file. Raises: MachineError."""

    @abstractmethod
    def program(self, name: str, arguments: Sequence[str]) -> Program:
        """Return a long-running program on the machine, not yet started."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything created on the machine. Idempotent."""


class Connected(Machine):
    """A machine with which byte streams are exchanged."""

    @abstractmethod
    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the local argument list that runs a command there, with the standard streams of here."""

    @abstractmethod
    def socket(self, path: str, deadline: float) -> Path:
        """Return a local path to a UNIX stream socket of the machine. Raises: MachineError."""


def run_here(arguments: Sequence[str], stdin: str | None) -> str:
    """Run a short command on this machine and return its output. Raises: MachineError."""
    deadline = time.monotonic() + COMMAND_S
    with tempfile.TemporaryFile() as given, ExitStack() as opened:
        given.write((stdin or "").encode())
        given.seek(0)
        try:
            process = opened.enter_context(
                subprocess.Popen(list(arguments), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        except OSError as error:
            raise MachineError(f"{arguments[0]}: {error.strerror}") from error
        opened.callback(process.kill)
        try:
            printed = _printed(process, deadline)
            status = process.wait(remaining(deadline))
        except (TimeoutError, subprocess.TimeoutExpired) as late:
            raise MachineError(f"{arguments[0]} did not end within {COMMAND_S:g} s") from late
        except OverflowError as error:
            raise MachineError(f"{arguments[0]} prints more than {MOST_OUTPUT} bytes") from error
    output, errors = (text.decode(errors="replace") for text in printed)
    return checked(arguments, status, output, errors)


def _printed(process: subprocess.Popen[bytes], deadline: float) -> list[bytearray]:
    """Return what a program prints to its standard output and error. Raises: TimeoutError, OverflowError."""
    texts: dict[int, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            selector.register(stream.fileno(), selectors.EVENT_READ)
            texts[stream.fileno()] = bytearray()
        while selector.get_map():
            if not (left := remaining(deadline)):
                raise TimeoutError
            for key, _ in selector.select(left):
                piece = os.read(key.fd, _PIECE)
                texts[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
                if len(texts[key.fd]) > MOST_OUTPUT:
                    raise OverflowError
    return list(texts.values())


def checked(arguments: Sequence[str], status: int, output: str, errors: str) -> str:
    """Return the output of a command that succeeded. Raises: MachineError with what it printed."""
    if status:
        words = errors.strip() or output.strip() or f"exit status {status}"
        raise MachineError(f"{shlex.join(arguments)}: {words}")
    return output
