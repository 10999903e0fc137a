"""The command line of OpenSSH's client for one machine, which never asks a question."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SshTarget:
    """``key`` and ``known_hosts`` are files; None: those of the user."""

    host: str
    port: int
    user: str
    key: str | None = None
    known_hosts: str | None = None

    @property
    def login(self) -> str:
        return f"{self.user}@{self.host}"

    def words(self, *options: str) -> list[str]:
        """Return the client with its options, without the machine.

        A machine that is silent for 15 s counts as gone (three times ServerAliveInterval).
        """
        words = ["ssh", "-p", str(self.port), "-o", "BatchMode=yes", *options]
        words += ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"]
        words += ["-o", "StrictHostKeyChecking=yes"]
        if self.key is not None:
            words += ["-o", "IdentitiesOnly=yes", "-i", self.key]
        if self.known_hosts is not None:
            words += ["-o", f"UserKnownHostsFile={self.known_hosts}"]
        return words

    def command(self, arguments: Sequence[str], *options: str) -> list[str]:
        """Return the command that runs a program on the machine, quoted for the shell there."""
        return [*self.words(*options), self.login, shlex.join(arguments)]
