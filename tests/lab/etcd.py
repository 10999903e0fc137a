"""A private etcd: one member or several on loopback, in one directory, with TLS and client certificates.

``NETPLUGIN_ETCD_DIR`` is a directory with the programs of another release than the one in the PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from netplugin.fleet.access import ROOT, Access
from netplugin.fleet.etcd import Credentials, Etcd
from tests.lab.certificates import Pki
from tests.lab.processes import CommandError, Daemon, Running, run, wait_for

START_DEADLINE_S = 30.0
_PROGRAMS = Path(os.environ.get("NETPLUGIN_ETCD_DIR") or "")
_ETCD, _CTL, _UTL = (_PROGRAMS / name for name in ("etcd", "etcdctl", "etcdutl"))
# Before 3.4 etcdctl's default was the API before v3.
_API = {"ETCDCTL_API": "3"}
# Of member 0: by its group a filter tells what a member sends from what the others do.
_GROUP = 61_000


class PrivateEtcd(Running):
    """Members may be killed, paused and started again one by one; the data is kept until the directory goes.

    ``options``: more of etcd's own, without the dashes. ``address``: where clients reach it.
    """

    def __init__(
        self,
        directory: Path,
        members: int = 1,
        options: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.pki = Pki(directory)
        self._address = address
        self._ports = _free_ports(2 * members)
        self._options = dict(options or {})
        self._epoch = 0
        self.members = [
            Daemon(name, self._command(number), directory / f"{name}.log", {"GOMAXPROCS": "1"})
            for number, name in enumerate(f"m{n}" for n in range(members))
        ]

    @property
    def endpoints(self) -> list[str]:
        return [f"{self._address}:{port}" for port in self._ports[::2]]

    def start(self) -> None:
        for member in self.members:
            if not member.running:
                member.start()
        wait_for(self.is_healthy, START_DEADLINE_S, "etcd has a leader", self.members[0].tail)

    def stop(self) -> None:
        for member in self.members:
            member.kill()  # nothing of it is needed any more, and a leader would look for another first

    def kill(self) -> None:
        self.stop()

    def is_healthy(self) -> bool:
        try:
            self.ctl("endpoint", "health")
        except CommandError:
            return False
        return True

    # -- clients ---------------------------------------------------------------------------------

    def credentials(self, user: str = "root", authority: str = "ca") -> Credentials:
        """Those of a user, from the CA that etcd trusts or from the ``other`` one."""
        cert, key = self.pki.certificate(user, authority)
        return Credentials(self.pki.ca, cert, key)

    def client(self, user: str = "root", *, quiet_s: float = 20.0) -> Etcd:
        return Etcd(self.endpoints, self.credentials(user), quiet_s)

    def ctl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """What ``etcdctl`` prints, as the user root."""
        return self._ctl(self.endpoints, *arguments, stdin=stdin)

    def _ctl(self, endpoints: Sequence[str], *arguments: str | Path, stdin: str | None = None) -> str:
        tls = ["--cacert", self.pki.ca, "--cert", self.pki.agent, "--key", self.pki.agent_key]
        where = ["--endpoints", ",".join(endpoints), "--command-timeout", "10s"]
        words: list[str | Path] = [_CTL, *tls, *where, *arguments]
        return run(words, env=_API, stdin=stdin)

    def put(self, key: str, value: Any) -> int:
        """Returns the revision."""
        text = value if isinstance(value, str) else json.dumps(value)
        return int(json.loads(self.ctl("put", key, "--write-out", "json", stdin=text))["header"]["revision"])

    def get(self, key: str) -> Any:
        """The value of a key, from JSON; None if there is none."""
        printed = self.ctl("get", key, "--print-value-only").strip()
        return json.loads(printed) if printed else None

    def keys(self, prefix: str) -> list[str]:
        return self.ctl("get", prefix, "--prefix", "--keys-only").split()

    def revision(self) -> int:
        status = json.loads(self.ctl("endpoint", "status", "--write-out", "json"))
        return max(int(each["Status"]["header"]["revision"]) for each in status)

    def leader(self) -> int:
        """The number of the member that leads: ``endpoint status`` has one entry for each, in their order."""
        found = json.loads(self.ctl("endpoint", "status", "--write-out", "json"))
        ids = [each["Status"]["header"]["member_id"] for each in found]
        return ids.index(found[0]["Status"]["leader"])

    # -- what operators do -----------------------------------------------------------------------

    def enable_auth(self, *hosts: str) -> None:
        """Users and roles for these hosts; ``etcdctl`` here is root's."""

        async def work() -> None:
            client = self.client()
            access = Access(client)
            await access.init(hosts, [("agent", ROOT)])
            await access.enable()
            await client.close()

        asyncio.run(work())

    def backup(self, file: Path) -> None:
        self._ctl(self.endpoints[:1], "snapshot", "save", file)

    def restore(self, file: Path) -> None:
        """Stop all members, and start them with a backup, as etcd's page on disaster recovery has it."""
        self.stop()
        for number, member in enumerate(self.members):
            shutil.rmtree(self.directory / member.name)
            made = ["--data-dir", self.directory / member.name, *self._cluster(number)]
            # That of 3.6 does not restore; Debian 12 has no etcdutl.
            run([shutil.which(_UTL) or _CTL, "snapshot", "restore", file, *made], env=_API)
        self.start()

    def replace_cluster(self) -> None:
        """Lose all data: another cluster at the same addresses."""
        self.stop()
        self._epoch += 1
        for number, member in enumerate(self.members):
            shutil.rmtree(self.directory / member.name)
            member.args = tuple(map(str, self._command(number)))
        self.start()

    @contextmanager
    def cut_off(self, number: int) -> Iterator[None]:
        """Nothing goes between a member and the others, in a sandbox; clients reach it still."""
        own, others = self._peer_ports[number], [*self._peer_ports]
        others.remove(own)
        table = "ip etcd-cut"
        chain = "{ type filter hook output priority 0; }"
        ports = f"{{ {', '.join(map(str, others))} }}"
        # What it dials, and what dials it, with the answers.
        sent = f"meta skgid {_GROUP + number} tcp dport {ports} drop"
        run(["nft", "add", "table", *table.split()])
        try:
            run(["nft", f"add chain {table} out {chain}"])
            for rule in (sent, f"tcp dport {own} drop", f"tcp sport {own} drop"):
                run(["nft", f"add rule {table} out {rule}"])
            yield
        finally:
            run(["nft", "delete", "table", *table.split()])

    @property
    def _peer_ports(self) -> Sequence[int]:
        return self._ports[1::2]

    def _cluster(self, number: int) -> list[str]:
        peers = [f"m{n}=https://127.0.0.1:{port}" for n, port in enumerate(self._peer_ports)]
        return [
            *("--name", f"m{number}", "--initial-cluster", ",".join(peers)),
            *("--initial-advertise-peer-urls", peers[number].partition("=")[2]),
            *("--initial-cluster-token", f"lab-{self._epoch}"),
        ]

    def _command(self, number: int) -> list[str | Path]:
        client, peer = f"https://{self.endpoints[number]}", f"https://127.0.0.1:{self._peer_ports[number]}"
        command: list[str | Path] = ["setpriv", "--regid", str(_GROUP + number), "--clear-groups"]
        command += ["--pdeathsig", "KILL", _ETCD, "--data-dir", self.directory / f"m{number}"]
        command += [*self._cluster(number), "--initial-cluster-state", "new", "--listen-peer-urls", peer]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--logger", "zap", "--log-outputs", "stderr"]
        for side in ("", "peer-"):
            command += [f"--{side}client-cert-auth", f"--{side}trusted-ca-file", self.pki.ca]
            command += [f"--{side}cert-file", self.pki.agent, f"--{side}key-file", self.pki.agent_key]
        for name, value in self._options.items():
            command += [f"--{name}={value}"]
        return command


def release() -> str:
    """Such as 3.4.23."""
    return run([_ETCD, "--version"]).split("\n")[0].split()[-1]


def _free_ports(number: int) -> Sequence[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
