"""Many hosts of a fleet in one process: real agents (store, converge, agents/fleet) over hosts in memory.

``HostProcess`` starts this module as a program and calls the methods of ``_Program`` by lines of JSON. Each
host has its own certificate, user and connection. What a host has outlives its agent: it is in a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from agents.api.audit import AuditLog
from agents.api.roles import BodyRules, Role
from agents.fleet.runner import Fleet
from agents.fleet.settings import FleetSettings
from agents.host.view import HostView
from agents.service import Service
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin import options
from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortSpec
from netplugin.backend import Change
from netplugin.fleet import values
from netplugin.fleet.etcd import Credentials, Etcd
from netplugin.fleet.names import Ref
from netplugin.fleet.reports import Written, refs, written
from netplugin.fleet.writer import Writer
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.shared import Host
from tests.lab.processes import run
from tests.unit.fakes import FakeBackend, FakeHost, Write

NETWORK = Ref.of("network/net")
#: The longest line of an answer.
_LONGEST = 64 << 20


def port_spec(number: int, **fields: Any) -> dict[str, Any]:
    """On the network of all, so that a change of that concerns it."""
    on = {"type": "vxlan", "network_id": NETWORK.id}
    mac = f"52:54:00:00:{number >> 8:02x}:{number & 255:02x}"
    return {"vm_id": "vm", "mac": mac, "backend": "fake", "network": on, **fields}


def network_spec(number: int) -> dict[str, Any]:
    return {"type": "vxlan", "vni": 5001, "peers": [f"10.1.{number >> 8}.{number & 255}"]}


async def history(etcd: Etcd) -> dict[tuple[str, Ref], list[Written]]:
    """All values that an object ever had, of each host, if nothing has compacted them."""
    prefix = values.root("desired")
    last = await etcd.change({f"{prefix}end": b""})
    found: dict[tuple[str, Ref], list[Written]] = {}
    async for changes in etcd.watch(prefix, 1):
        for host, ref, kv in refs(kv for kv in changes if not kv.is_deleted):
            found.setdefault((host, ref), []).append(written(host, ref, kv.mod_revision, kv.value))
        if changes and changes[-1].mod_revision == last:
            break
    return found


def removals(there: Sequence[Written]) -> int:
    """Of these values, how many request that the object goes."""
    return sum(each.is_removal for each in there)


@cache
def _options() -> Any:
    conf = options.load([])
    conf.set_override("teaming_backend", "", group="agent")
    return conf


class MemoryHost:
    """A host with its agent, for one event loop. Made again on the same directory it has its ports still."""

    def __init__(self, name: str, directory: Path, endpoints: Sequence[str], user: Credentials) -> None:
        self.name = name
        self.kernel = FakeHost()
        #: How often each port was removed from the host, whichever agent did it.
        self.removed: Counter[str] = Counter()
        directory.mkdir(parents=True, exist_ok=True)
        self._journal = (directory / "host.log").open("a+")
        self._replay()
        self.kernel.on_apply = self._note
        conf, shared = _options(), Host(_options())
        self.store = Store(directory / "agent.db")
        view = HostView(None, OvsSockets.below(directory), "")
        backends: Any = {"fake": FakeBackend("fake", self.kernel)}
        self.service = Service(conf, self.store, Metrics(self.store), shared, backends, {}, view)
        self._audit = AuditLog(None)
        settings = FleetSettings(tuple(endpoints), name, user, Role.PLUG)
        rules = BodyRules((), self.service.ports.moved_by)
        self.fleet = Fleet(settings, self.service, self.store, rules, self._audit, shared.supervisor)
        self._supervisor = shared.supervisor
        self.service.start()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "connected": self.fleet.connected,
            "refused": self.fleet.refused.detail if self.fleet.refused else "",
            "applied": len(self.kernel.written),
            "removed": dict(self.removed),
            "failures": self._supervisor.failures(),
        }

    def ports(self) -> dict[str, int | None]:
        """Of each port that the host has, ``qos.egress_kbps``."""
        return {port_id: spec.qos.egress_kbps for port_id, spec in self.kernel.ports.items()}

    def close(self) -> None:
        self.service.stop()
        self.store.close()
        self._audit.close()
        self._journal.close()

    def _note(self, change: Change) -> None:
        """Before the host is changed: if the agent is killed then, the change has taken place."""
        if isinstance(change, Write):
            self._count(change)
            spec = change.spec.model_dump(mode="json", exclude_unset=True) if change.spec else None
            print(json.dumps([change.ports, spec, change.stamp]), file=self._journal, flush=True)

    def _count(self, change: Write) -> None:
        if change.spec is None:
            self.removed.update(port for port in change.ports if port in self.kernel.ports)

    def _replay(self) -> None:
        self._journal.seek(0)
        for line in self._journal:
            ports, spec, stamp = json.loads(line)
            change = Write(tuple(ports), PortSpec.model_validate(spec) if spec else None, stamp)
            self._count(change)
            FakeBackend("fake", self.kernel)._write(change)
        self.kernel.written.clear()


class _Program:
    """What a ``HostProcess`` calls. Each method returns what JSON has."""

    def __init__(self, directory: Path, endpoints: Sequence[str], names: Sequence[str]) -> None:
        self._directory = directory
        self._endpoints = list(endpoints)
        self._names = list(names)
        self._hosts: dict[str, MemoryHost] = {}
        self._tasks: list[asyncio.Task[None]] = []
        #: Of the raw watches: the last revision, and when it came.
        self._seen: dict[str, tuple[int, float]] = {}
        self._answers = False

    def _user(self, name: str) -> Credentials:
        """Its certificate has the key of the agent's, which saves half of the time."""
        pki, cert = self._directory, self._directory / f"{name}.pem"
        if not cert.exists():
            keys = ["-CA", pki / "ca.pem", "-CAkey", pki / "ca.key", "-key", pki / "agent.key"]
            run(["openssl", "req", "-x509", *keys, "-subj", f"/CN={name}", "-days", "2", "-out", cert])
        return Credentials(pki / "ca.pem", cert, pki / "agent.key")

    async def certify(self) -> None:
        with ThreadPoolExecutor(2) as threads:
            await asyncio.gather(
                *(asyncio.get_running_loop().run_in_executor(threads, self._user, n) for n in self._names)
            )

    # -- raw etcd --------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Watch each host's range with the client alone, until ``stop``."""
        turns = asyncio.Semaphore(10)
        self._tasks = [asyncio.create_task(self._watch(name, turns)) for name in self._names]
        while len(self._seen) < len(self._names):
            await asyncio.sleep(0.05)

    async def _watch(self, name: str, turns: asyncio.Semaphore) -> None:
        etcd, prefix = Etcd(self._endpoints, self._user(name)), values.desired_prefix(name)
        try:
            async with turns:
                revision = (await etcd.read(prefix)).revision
            self._seen[name] = revision, 0.0
            async for changes in etcd.watch(prefix, revision + 1):
                if changes and self._answers:
                    await etcd.change({f"{values.reported_prefix(name)}raw": b"{}"})
                if changes:
                    self._seen[name] = changes[-1].mod_revision, time.monotonic()
        finally:
            await etcd.close()

    async def answer(self) -> None:
        """From now on write a key for each change, before it counts as seen."""
        self._answers = True

    async def seen(self, revision: int, names: Sequence[str] = ()) -> float:
        """When the last of these watches (or all) has had this revision or a later one."""
        names = names or self._names
        while any(self._seen[name][0] < revision for name in names):
            await asyncio.sleep(0.01)
        return max(self._seen[name][1] for name in names)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # -- hosts -----------------------------------------------------------------------------------

    async def make(self) -> None:
        """Make the hosts and their agents, which do not follow etcd yet."""
        for name in self._names:
            where = self._directory / "hosts" / name
            self._hosts[name] = MemoryHost(name, where, self._endpoints, self._user(name))
            await asyncio.sleep(0)

    async def follow(self) -> None:
        self._tasks = [asyncio.create_task(host.fleet.keep()) for host in self._hosts.values()]

    async def state(self) -> dict[str, Any]:
        ended = [str(task) for task in self._tasks if task.done()]
        assert not ended, ended
        return {name: host.state for name, host in self._hosts.items()}

    async def ports(self) -> dict[str, Any]:
        return {name: host.ports() for name, host in self._hosts.items()}

    async def own(self, number: int) -> list[float]:
        """Seconds of a PUT of another port to one host after the other, as a caller of its API has it."""
        took = []
        for name in self._names[:number]:
            spec = PortSpec.model_validate(port_spec(200, vm_id="own"))
            begun = time.monotonic()
            await self._hosts[name].service.ports.put("own", spec)
            took.append(time.monotonic() - begun)
        return took

    async def cpu(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    # -- a writer --------------------------------------------------------------------------------

    async def write(self, hosts: Sequence[str], ports: int, seed: int) -> None:
        """Put and delete ports of these hosts until killed."""
        self._tasks.append(asyncio.create_task(self._write(hosts, ports, random.Random(seed))))

    async def _write(self, hosts: Sequence[str], ports: int, order: random.Random) -> None:
        pki = self._directory
        root = Credentials(pki / "ca.pem", pki / "agent.pem", pki / "agent.key")
        writer = Writer(Etcd(self._endpoints, root))
        while True:
            host, number = order.choice(hosts), order.randrange(ports)
            ref = Ref.of(f"port/p{number}")
            spec = port_spec(number, qos={"egress_kbps": order.randrange(1, 99)})
            with suppress(NetpluginError):  # another writer was there, or etcd is away for long
                there = await writer.get(host, ref)
                after = there.generation if there else None
                if there is not None and there.spec is not None and order.random() < 0.3:
                    mine = await writer.delete(host, ref, after=after)
                else:
                    mine = await writer.put(host, ref, spec, after=after)
                if order.random() < 0.3:
                    await writer.verified(mine, within_s=10)
            await asyncio.sleep(0.02)


async def _serve(program: _Program) -> None:
    loop = asyncio.get_running_loop()
    await program.certify()
    with ThreadPoolExecutor(1) as reading:
        while line := await loop.run_in_executor(reading, sys.stdin.readline):
            name, *arguments = json.loads(line)
            print(json.dumps(await getattr(program, name)(*arguments)), flush=True)
    os._exit(0)  # its caller has ended; nothing has to be put in order


class HostProcess:
    """Such a program, for one event loop. ``directory``: where ``Pki`` has its files, and hosts theirs."""

    def __init__(self, directory: Path, endpoints: Sequence[str], names: Sequence[str]) -> None:
        self.names = list(names)
        self._words = [str(directory), ",".join(endpoints), ",".join(names)]
        self._log = directory / "hosts.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            words = [sys.executable, "-W", "ignore", "-m", "tests.lab.memory_hosts", *self._words]
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=log, limit=_LONGEST
            )

    async def call(self, name: str, *arguments: Any) -> Any:
        """One after the other."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        line = await process.stdout.readline()
        assert line, f"{name}: the process has ended, see {self._log}"
        return json.loads(line)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


if __name__ == "__main__":
    where, addresses, hosts = sys.argv[1:]
    asyncio.run(_serve(_Program(Path(where), addresses.split(","), [n for n in hosts.split(",") if n])))
