"""SSH servers of the tests: one in a network namespace, which is then another host, and one in a VM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.namespaces import within
from tests.lab.processes import Daemon, run


@dataclass(frozen=True, slots=True)
class SshFiles:
    """Keys of a server and of the one who may log in, and what the server is started with."""

    directory: Path

    @property
    def key(self) -> Path:
        return self.directory / "client"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    def make(self, address: str) -> None:
        """Write them; files that others may write are refused by sshd."""
        self.directory.mkdir(mode=0o700)
        for name in ("client", "server"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / name])
        public = (self.directory / "server.pub").read_text()
        self.known_hosts.write_text(f"{address} {public}")

    def command(self, address: str) -> list[str]:
        """The server, in the foreground. Its log goes to standard error."""
        options = {
            "ListenAddress": address,
            "HostKey": self.directory / "server",
            "AuthorizedKeysFile": self.directory / "client.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
        }
        return [
            "/usr/sbin/sshd",
            *("-D", "-e", "-f", "/dev/null"),
            *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
        ]

    def machine(self, address: str) -> dict[str, str]:
        """It as the machine of a run description."""
        return {
            "type": "ssh",
            "host": address,
            "key": str(self.key),
            "known_hosts": str(self.known_hosts),
        }


@contextmanager
def sshd(netns: str, address: str, directory: Path) -> Iterator[SshFiles]:
    """A server in a namespace, which has the address already."""
    files = SshFiles(directory)
    files.make(address)
    Path("/run/sshd").mkdir(exist_ok=True)
    with Daemon("sshd", within(netns, files.command(address)), directory / "log") as server:
        server.wait_for(lambda: "Server listening" in server.tail(), 20, "it listens")
        yield files
