"""The contract of a machine that runs programs of a run, and the descriptions of machines."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from netplugin.api.fields import Value, worded
from netplugin.programs.program import Program, ProgramError

#: Seconds for a short command, on a VM that may be slow.
COMMAND_S = 60.0
#: Bytes that it may print, to each of its streams.
MOST_OUTPUT = 4 << 20
_HOST = worded(r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$", "must be the name or address of a host")
_USER = worded(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "must be the name of a user")


class MachineError(ProgramError):
    """The machine cannot be reached, or a command on it failed."""


# -- Descriptions. --------------------------------------------------------------------------------


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


Description = Annotated[LocalMachine | SshMachine, Field(discriminator="type")]


# -- Machines. ------------------------------------------------------------------------------------


class Machine(ABC):
    """A machine that runs commands given as argument lists. The caller closes it."""

    #: New directory on the machine, for sockets and files of its user.
    directory: str
    #: A Python 3 of the machine.
    python = "python3"

    def run(self, arguments: Sequence[str], stdin: str | None = None) -> str:
        """Run a short command and return its output. Raises: MachineError with the error text."""
        words = self.command(arguments)
        limited = ["prlimit", f"--fsize={MOST_OUTPUT}", "--", *words]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                status = subprocess.run(
                    limited,
                    input=(stdin or "").encode(),
                    stdout=output,
                    stderr=errors,
                    timeout=COMMAND_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as late:
                raise MachineError(f"{words[0]} did not end within {COMMAND_S:g} s") from late
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
                if file.tell() >= MOST_OUTPUT:
                    raise MachineError(f"{words[0]} prints more than {MOST_OUTPUT} bytes")
        if status:
            why = texts[1].strip() or texts[0].strip() or f"exit status {status}"
            raise MachineError(f"{shlex.join(words)}: {why}")
        return texts[0]

    @abstractmethod
    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the local argument list that runs a command there, with the standard streams of here."""

    def write(self, path: str, text: str) -> None:
        """Write a file. Raises: MachineError."""
        self.run(["tee", path], stdin=text)

    @abstractmethod
    def program(self, name: str, arguments: Sequence[str]) -> Program:
        """Return a long-running program on the machine, not yet started."""

    @abstractmethod
    def socket(self, path: str, deadline: float) -> Path:
        """Return a local path to a UNIX stream socket of the machine. Raises: MachineError."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything created on the machine. Idempotent."""
