"""Figures of a fleet: many agents over hosts in memory, each with its own connection and user, on one etcd.

    python -m tests.lab.sandbox -- python -W ignore -m tests.bench.fleet [--hosts 1000] [--real 20]

Among them are real agents on Linux bridges, in namespaces. In the sandbox nothing else uses the loopback
device, whose bytes are those of the others. All runs on this machine: where its CPUs are busy with a thousand
agents, that is in the figures. Exit status 1 if a port was removed that nobody has requested to remove, or a
change was applied twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agents.fleet.runner import LEASE_S
from netplugin.fleet import values
from netplugin.fleet.access import Access
from netplugin.fleet.errors import EtcdError
from netplugin.fleet.etcd import Etcd
from netplugin.fleet.names import Ref
from netplugin.fleet.operate import accept
from netplugin.fleet.values import Summary
from netplugin.fleet.writer import Writer
from tests.bench import machine
from tests.bench.process import taken
from tests.lab import in_memory
from tests.lab.agent import PrivateAgent
from tests.lab.bridge_hosts import bridge_hosts, network
from tests.lab.etcd import PrivateEtcd, release
from tests.lab.memory_hosts import NETWORK, HostProcess, network_spec, port_spec
from tests.lab.processes import run

#: Keys of one transaction, ports of a host, how often one port is changed, and dead hosts.
_KEYS, _PORTS, _CHANGES, _DEAD = 100, 5, 20, 5
_BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {text}", flush=True)


class Reports:
    """What the hosts have reported, as it comes to one who watches all of them."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self.summaries: dict[str, tuple[Summary, float]] = {}
        self.faults: dict[str, str] = {}
        self.alive: dict[str, float] = {}
        self.dead: dict[str, float] = {}

    async def keep(self) -> None:
        await asyncio.gather(self._follow("reported", self._reported), self._follow("alive", self._lives))

    async def _follow(self, part: str, take: Callable[[str, bytes | None], None]) -> None:
        prefix = values.root(part)
        while True:
            with suppress(EtcdError):
                snapshot = await self._etcd.read(prefix)
                if part == "reported":
                    self.summaries, self.faults = {}, {}
                for kv in snapshot.items:
                    take(kv.key.removeprefix(prefix), kv.value)
                async for changes in self._etcd.watch(prefix, snapshot.revision + 1):
                    for kv in changes:
                        take(kv.key.removeprefix(prefix), None if kv.is_deleted else kv.value)
            await asyncio.sleep(0.1)

    def _reported(self, path: str, value: bytes | None) -> None:
        host, _, name = path.partition("/")
        if name != "summary" and value is None:
            self.faults.pop(path, None)
        elif name != "summary":
            self.faults[path] = (value or b"").decode()
        elif value is not None:
            self.summaries[host] = Summary.model_validate_json(value), time.monotonic()

    def _lives(self, host: str, value: bytes | None) -> None:
        (self.dead if value is None else self.alive)[host] = time.monotonic()

    async def verified(self, revisions: Mapping[str, int], within_s: float = 300) -> float:
        """When the last host has reported its revision as carried out, and no host a fault."""
        open_hosts, last, next_s = set(revisions), 0.0, time.monotonic() + 10
        async with asyncio.timeout(within_s):
            while open_hosts or self.faults:
                for host in [*open_hosts]:
                    summary, at = self.summaries.get(host, (None, 0.0))
                    if summary and summary.refused is None and summary.revision >= revisions[host]:
                        open_hosts.remove(host)
                        last = max(last, at)
                if not open_hosts and self.faults:
                    last = time.monotonic()
                if time.monotonic() > next_s:
                    next_s = time.monotonic() + 10
                    first = "".join(f", {path} {why}" for path, why in [*self.faults.items()][:1])
                    say(f"... {len(open_hosts)} hosts to go, {len(self.faults)} faults{first}")
                await asyncio.sleep(0.005 if len(open_hosts) <= 1 else 0.05)
        return last


class Bench:
    def __init__(self, etcd: PrivateEtcd, options: argparse.Namespace) -> None:
        self.etcd = etcd
        self.hosts = [f"h{number}" for number in range(options.hosts)]
        shares = [self.hosts[n :: options.processes] for n in range(options.processes)]
        self.processes = [HostProcess(etcd.directory, etcd.endpoints, share) for share in shares]
        dead = [f"dead{number}" for number in range(_DEAD)]
        self.real_names = [f"r{number}" for number in range(options.real)]
        #: The real agents, once they run.
        self.real: dict[str, PrivateAgent] = {}
        self.victims = HostProcess(etcd.directory, etcd.endpoints, dead)
        self.idle_s: float = options.idle
        self.rounds: int = options.rounds
        self.user = etcd.credentials()
        self.root, other = (Etcd(etcd.endpoints, self.user) for _ in range(2))
        self.reports = Reports(other)
        self.rows: list[tuple[str, str, str, str]] = []
        self.faults: list[str] = []
        self._number = 0
        #: The revision of the last change of each host's range.
        self.newest: dict[str, int] = {}

    def row(self, what: str, figure: str, goal: str, met: bool | None) -> None:
        self.rows.append((what, figure, goal, "" if met is None else "yes" if met else "no"))
        say(f"{what}: {figure}")

    @property
    def everyone(self) -> list[str]:
        return [*self.hosts, *self.real]

    async def run(self) -> None:
        following: asyncio.Task[None] | None = None
        real = ExitStack()
        try:
            await self.prepare()
            raw_one_s, raw_all_s, answered_s, bare = await self.raw()
            await self.all("make")
            following = asyncio.create_task(self.reports.keep())
            self.real = real.enter_context(bridge_hosts(self.etcd, self.real_names))
            say(f"{len(self.real)} real agents follow etcd")
            await self.desire(list(self.real))
            await self.hold(bare)
            own = [took for found in await self.all("own", 5) for took in found]
            await self.one_port("one port", self.hosts, own, raw_one_s)
            if self.real:
                await self.one_port("one port of a real agent", list(self.real), self.own(), raw_one_s)
            await self.network(raw_all_s, answered_s)
            await self.dead_and_idle()
            await self.killed()
            await self.older_copy()
        finally:
            for process in [*self.processes, self.victims]:
                await process.kill()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await self.root.close()
            real.close()

    async def all(self, name: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(each.call(name, *arguments) for each in self.processes)))

    async def states(self) -> dict[str, dict[str, Any]]:
        return {host: state for found in await self.all("state") for host, state in found.items()}

    async def ports(self) -> dict[str, set[str]]:
        """Of each host, what it has."""
        found = {host: set(ports) for each in await self.all("ports") for host, ports in each.items()}
        return found | {name: real_ports(agent) for name, agent in self.real.items()}

    def own(self) -> list[float]:
        """Seconds of a PUT of another port to each real agent, as a caller of its API has it."""
        took = []
        for agent in self.real.values():
            begun = time.monotonic()
            status, answer = agent.call("PUT", "/v1/ports/own", on_bridge(port_spec(200, vm_id="own")))
            took.append(time.monotonic() - begun)
            assert status in (200, 201), answer
        return took

    # -- writes ----------------------------------------------------------------------------------

    async def write(self, ref: Ref, spec: Mapping[str, Any], hosts: Sequence[str] = ()) -> int:
        """Desire this on each of these hosts, or all. Returns the last revision."""
        self._number += 1
        revision = 0
        value, real = (
            json.dumps({"generation": 1_000_000 * self._number, "spec": each}).encode()
            for each in (spec, on_bridge(spec))
        )
        hosts = hosts or self.everyone
        for first in range(0, len(hosts), _KEYS):
            some = hosts[first : first + _KEYS]
            put = {values.desired_key(host, ref): real if host in self.real else value for host in some}
            revision = await self.root.change(put) or 0
            self.newest |= dict.fromkeys(some, revision)
        return revision

    async def desire(self, hosts: Sequence[str] = ()) -> None:
        await self.write(NETWORK, network_spec(1), hosts)
        for number in range(_PORTS):
            await self.write(Ref.of(f"port/p{number}"), port_spec(number), hosts)

    async def in_sync(self, within_s: float = 300) -> float:
        """When the last host has carried out what etcd has for it."""
        return await self.reports.verified({host: self.newest[host] for host in self.everyone}, within_s)

    # -- parts -----------------------------------------------------------------------------------

    async def prepare(self) -> None:
        for process in [*self.processes, self.victims]:
            await process.start()
        await asyncio.gather(*(each.call("state") for each in [*self.processes, self.victims]))
        say(f"{len(self.hosts)} certificates made")
        clients = [Etcd(self.etcd.endpoints, self.user) for _ in range(8)]
        makers = [Access(each) for each in clients]
        names = [*self.hosts, *self.real_names, *self.victims.names]
        await makers[0].init([], [("agent", "root")])
        await asyncio.gather(*(each.init(names[n :: len(makers)], []) for n, each in enumerate(makers)))
        await makers[0].enable()
        for each in clients:
            await each.close()
        say("users and roles made, access control is on")
        await self.desire()
        say(f"{_PORTS} ports and a network desired for each host")

    def rss_kb(self) -> float:
        return taken(self.etcd.members[0].pid).rss_mb * 1024

    async def raw(self) -> tuple[float, float, float, float]:
        """The same writes to as many watches, with nothing behind them; and the memory of etcd before.

        Seconds of one, of all, and of all if each of them answers with a key.
        """
        bare = self.rss_kb()
        await self.all("watch")
        await asyncio.sleep(3)
        say(f"{len(self.hosts)} raw watches; RSS of etcd {bare / 1024:.0f} -> {self.rss_kb() / 1024:.0f} MB")
        one, every, answered = list[float](), list[float](), list[float]()
        for number in range(_CHANGES):
            host = random.choice(self.hosts)
            spec = port_spec(0, qos={"egress_kbps": 1000 + number})
            begun = time.monotonic()
            revision = await self.write(Ref.of("port/p0"), spec, [host])
            (process,) = [each for each in self.processes if host in each.names]
            one.append(await process.call("seen", revision, [host]) - begun)
            await asyncio.sleep(0.1)
        for answering, took in ((False, every), (True, answered)):
            if answering:
                await self.all("answer")
            for number in range(self.rounds):
                begun = time.monotonic()
                await self.write(NETWORK, network_spec(10 + number))
                revision = min(self.newest[host] for host in self.hosts)
                took.append(max(await self.all("seen", revision)) - begun)
                await asyncio.sleep(1)
        await self.all("stop")
        self.etcd.ctl("del", values.root("reported"), "--prefix")
        say(f"raw put-to-watch: {figure(one)}; to all: {figure(every)}, with an answer {figure(answered)}")
        return statistics.median(one), statistics.median(every), statistics.median(answered), bare

    async def hold(self, bare_kb: float) -> None:
        begun = time.monotonic()
        await self.all("follow")
        at = await self.in_sync(600)
        states = await self.states()
        held = sum(state["connected"] for state in states.values())
        self.row("hosts at once", f"{held} of {len(states)}", "1,000", held >= 1000)
        took = f"{at - begun:.0f} s until all are in sync ({_PORTS} ports each)"
        say(f"memory of the machine: {free_mb()} MB are left")
        self.row("all hosts start at once", took, "", None)
        await asyncio.sleep(10)
        each_kb = (self.rss_kb() - bare_kb) / len(self.hosts)
        more = f"RSS {bare_kb / 1024:.0f} MB without, {self.rss_kb() / 1024:.0f} MB with them"
        self.row("memory of etcd for a host", f"{each_kb:.0f} kB ({more})", "<= 60 kB", each_kb <= 60)

    async def one_port(self, what: str, hosts: Sequence[str], own: Sequence[float], raw_s: float) -> None:
        took = []
        for number in range(_CHANGES):
            host = random.choice(hosts)
            spec = port_spec(1, qos={"egress_kbps": 1000 + number})
            begun = time.monotonic()
            revision = await self.write(Ref.of("port/p1"), spec, [host])
            took.append(await self.reports.verified({host: revision}) - begun)
            await asyncio.sleep(0.3)
        together = raw_s + statistics.median(own)
        ratio = statistics.median(took) / together
        compared = f"raw {raw_s * 1e3:.1f} ms + own {figure(own)}"
        self.row(f"{what}, written to verified", f"{figure(took)} ({compared})", "", None)
        self.row("its ratio to their sum", f"{ratio:.2f}", "<= 3", ratio <= 3)

    async def network(self, raw_s: float, answered_s: float) -> None:
        took, cpu = [], []
        for number in range(self.rounds):
            used, begun = sum(await self.all("cpu")), time.monotonic()
            await self.write(NETWORK, network_spec(100 + number))
            took.append(await self.in_sync() - begun)
            cpu.append(sum(await self.all("cpu")) - used)
        ratio, of_answered = (statistics.median(took) / raw for raw in (raw_s, answered_s))
        each_ms = statistics.median(cpu) / len(self.hosts) * 1e3
        compared = f"raw {figure([raw_s])}; {each_ms:.1f} ms of CPU for a host"
        self.row("a network of all hosts, written to verified", f"{figure(took)} ({compared})", "", None)
        self.row("its ratio to the raw fan-out", f"{ratio:.1f}", "<= 3", ratio <= 3)
        compared = f"{of_answered:.1f} (raw {figure([answered_s])})"
        self.row("its ratio to a raw fan-out with an answer of each", compared, "", None)

    async def dead_and_idle(self) -> None:
        victims = self.victims
        for host in victims.names:
            await self.write(NETWORK, network_spec(1), [host])
        await victims.call("make")
        await victims.call("follow")
        await until(lambda: done(set(victims.names) <= set(self.reports.summaries)), 60)
        killed = time.monotonic()
        await victims.kill()
        grpc = await self.grpc_bytes()  # a page as long as hundreds of idle seconds of a host
        before, begun = lo_bytes(), time.monotonic()
        await asyncio.sleep(self.idle_s)
        idle_s = time.monotonic() - begun
        wire, payload = lo_bytes() - before, await self.grpc_bytes() - grpc
        on_wire, in_calls = (n / idle_s / len(self.hosts) for n in (wire, payload))
        text = f"{on_wire:.0f} B/s on the wire, {in_calls:.0f} B/s of gRPC"
        self.row("idle traffic of a host", text, "<= 100 B/s", on_wire <= 100)
        await until(lambda: done(set(victims.names) <= set(self.reports.dead)), 2 * LEASE_S)
        leases = [(self.reports.dead[host] - killed) / LEASE_S for host in victims.names]
        text = f"{statistics.median(leases):.2f} leases, at most {max(leases):.2f}, of {len(leases)}"
        self.row("a dead host is noticed", text, "<= 1.5", max(leases) <= 1.5)

    async def killed(self) -> None:
        """Killed for 5 s; meanwhile nothing is lost, and each host gets one change when it is back."""
        before = await self.states()
        self.etcd.kill()
        await asyncio.sleep(5)
        begun = time.monotonic()
        self.etcd.start()
        up_s = time.monotonic() - begun
        await self.write(Ref.of(f"port/p{_PORTS}"), port_spec(_PORTS))
        sync_s = await self.in_sync(600) - begun
        applied = [s["applied"] - before[host]["applied"] for host, s in (await self.states()).items()]
        text = f"all in sync {sync_s:.0f} s after its start, which took {up_s:.0f} s"
        self.row("etcd killed and back", text, "printed", None)
        twice = sum(n > 1 for n in applied)
        text = f"{twice} (applied once: {applied.count(1)} of {len(applied)})"
        self.row("hosts that applied a change twice", text, "0", twice == 0)
        if applied.count(1) != len(applied):
            self.faults.append("a change was lost or applied twice")

    async def older_copy(self) -> None:
        copy = self.etcd.directory / "copy.db"
        self.etcd.backup(copy)
        await self.write(Ref.of("port/late"), port_spec(150))
        await self.in_sync()
        had = await self.ports()
        self.etcd.restore(copy)
        begun = time.monotonic()

        async def refuses() -> bool:
            return all("older copy" in state["refused"] for state in (await self.states()).values())

        await until(refuses, 600)
        say(f"an older copy is refused by all hosts after {time.monotonic() - begun:.0f} s")
        await self._kept("an older copy restored", had, await self.states())
        # Accepted, what it does not have stays too.
        await accept(Writer(self.root), (await self.root.read(values.alive_key("h0"))).revision)
        begun = time.monotonic()
        await until(lambda: self._unlisted(1), 600)
        say(f"accepted, and {time.monotonic() - begun:.0f} s later all hosts follow it")
        await self._kept("and accepted", had, await self.states())
        self.etcd.ctl("del", values.root("desired"), "--prefix")
        await until(lambda: self._unlisted(_PORTS + 3), 600)
        await self._kept("the prefix deleted", had, await self.states())

    async def _unlisted(self, number: int) -> bool:
        found = [self.reports.summaries.get(host) for host in self.everyone]
        return all(s is not None and s[0].counts.get("unlisted") == number for s in found)

    async def _kept(self, what: str, had: Mapping[str, set[str]], states: Mapping[str, Any]) -> None:
        have = await self.ports()
        gone = sum(len(ports - have[host]) for host, ports in had.items())
        gone = max(gone, sum(sum(state["removed"].values()) for state in states.values()))
        everything = sum(map(len, had.values()))
        self.row(f"{what}: ports removed", f"{gone} of {everything}", "0", gone == 0)
        if gone:
            self.faults.append(f"{what}: {gone} ports were removed")

    async def grpc_bytes(self) -> int:
        """Of etcd's own counters: without HTTP/2, TLS and TCP."""
        pki, url = self.etcd.pki, f"https://{self.etcd.endpoints[0]}/metrics"
        files: list[str | Path] = ["--cacert", pki.ca, "--cert", pki.agent, "--key", pki.agent_key]
        printed = await asyncio.to_thread(run, ["curl", "-sf", *files, url])
        lines = [line for line in printed.splitlines() if line.startswith("etcd_network_client_grpc_")]
        return sum(int(float(line.split()[-1])) for line in lines)


def on_bridge(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same object for a real agent."""
    return {**spec, **({"backend": "linuxbridge"} if "backend" in spec else {})}


def real_ports(agent: PrivateAgent) -> set[str]:
    """Those that are active: a port that somebody has removed is not."""
    return {port["port_id"] for port in agent.get("/v1/ports")[1] if port["state"] == "active"}


def free_mb() -> int:
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) >> 10


def lo_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def figure(seconds: Sequence[float]) -> str:
    least, most = min(seconds), max(seconds)
    return f"{statistics.median(seconds) * 1e3:.1f} ms" + (
        f" ({least * 1e3:.1f} to {most * 1e3:.1f})" if len(seconds) > 1 else ""
    )


async def done(holds: bool) -> bool:
    return holds


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleet")
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--real", type=int, default=20, help="real agents among them")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idle traffic")
    parser.add_argument("--rounds", type=int, default=3, help="changes of the network of all hosts")
    options = parser.parse_args()
    load = machine.load()
    with (
        in_memory.directory() as directory,
        network() as address,
        PrivateEtcd(Path(directory) / "etcd", address=address) as etcd,
    ):
        bench = Bench(etcd, options)
        try:
            asyncio.run(bench.run())
        except BaseException:
            log = etcd.directory / "hosts.log"
            shutil.copy(log, "/tmp/netplugin-fleet-hosts.log")
            say("stopped; the log of the hosts is /tmp/netplugin-fleet-hosts.log")
            raise
        finally:
            hosts = f"{options.hosts} hosts in {options.processes} processes and {options.real} real agents"
            report(bench, f"etcd {release()}, {hosts}", load)
    return 1 if bench.faults else 0


def report(bench: Bench, what: str, load: float) -> None:
    today = datetime.now(UTC).isoformat(timespec="minutes")
    print(f"\n{today}, {machine.revision()}, {what}; load {load} before, {machine.load()} after\n")
    print("| figure | measured | goal | met |\n| --- | --- | --- | --- |")
    for row in bench.rows:
        print(f"| {' | '.join(row)} |")
    print(*bench.faults, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
