"""Members of etcd, agents and a writer are killed at random; in the end each host is as etcd has it.

For ``NETPLUGIN_FLEET_KILLS_S`` seconds (1800), in an order that ``NETPLUGIN_FAULTS_SEED`` gives.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from netplugin.api.models import PortSpec
from netplugin.fleet import values
from netplugin.fleet.names import Kind, Ref
from netplugin.fleet.reports import Report, refs, reports, written
from netplugin.fleet.writer import Writer
from tests.lab import in_memory
from tests.lab.etcd import PrivateEtcd
from tests.lab.memory_hosts import NETWORK, HostProcess, history, network_spec, removals

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("NETPLUGIN_FLEET_KILLS_S") or 1800)
PROCESSES, HOSTS, PORTS, SYNC_S = 3, 12, 8, 180.0


def test_killed_at_random_all_are_in_sync_and_nothing_is_removed_unrequested() -> None:
    seed = int(os.environ.get("NETPLUGIN_FAULTS_SEED") or random.randrange(1 << 32))
    print(f"\nNETPLUGIN_FAULTS_SEED={seed}")
    with in_memory.directory() as place, PrivateEtcd(Path(place) / "etcd", members=3) as etcd:
        asyncio.run(_Kills(etcd, random.Random(seed)).run())


class _Kills:
    def __init__(self, etcd: PrivateEtcd, order: random.Random) -> None:
        self._etcd = etcd
        self._order = order
        self._root = etcd.client()
        self._hosts = [f"h{n}" for n in range(HOSTS)]
        where, at = etcd.directory, etcd.endpoints
        self._agents = [HostProcess(where, at, self._hosts[n::PROCESSES]) for n in range(PROCESSES)]
        self._writer = HostProcess(where, at, [])
        self._killed: Counter[str] = Counter()

    async def run(self) -> None:
        try:
            for host in self._hosts:
                await Writer(self._root).put(host, NETWORK, network_spec(1))
            await asyncio.gather(*map(self._start, [*self._agents, self._writer]))
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                await asyncio.sleep(self._order.uniform(0.5, 5))
                await self._one()
            await self._writer.kill()
            self._etcd.start()
            begun = time.monotonic()
            await self._in_sync()
            print(f"in sync {time.monotonic() - begun:.0f} s after the last of {dict(self._killed)}")
            await self._compare()
        finally:
            for process in [*self._agents, self._writer]:
                await process.kill()
            await self._root.close()

    async def _start(self, process: HostProcess) -> None:
        await process.start()
        if process is self._writer:
            await process.call("write", self._hosts, PORTS, self._order.randrange(1 << 32))
            return
        for step in ("make", "follow"):
            await process.call(step)

    async def _one(self) -> None:
        """A member is killed or comes back; an agent or the writer is killed and starts again."""
        what = self._order.choice(("member", "member", "agents", "writer"))
        if what == "member":
            member = self._order.choice(self._etcd.members)
            if not member.running:
                member.start()
                return
            member.kill()
        else:
            process = self._writer if what == "writer" else self._order.choice(self._agents)
            await process.kill()
            await self._start(process)
        self._killed[what] += 1

    async def _in_sync(self) -> None:
        """Each host has reported its last change, and no object that is not as desired."""
        async with asyncio.timeout(SYNC_S):
            while True:
                await asyncio.sleep(1)
                newest: Counter[str] = Counter()
                for host, _, kv in refs((await self._root.read(values.root("desired"))).items):
                    newest[host] = max(newest[host], kv.mod_revision)
                reported = await self._root.read(values.root("reported"))
                found = reports(reported, await self._root.read(values.root("alive")))
                if all(_is_in_sync(found.get(host), newest[host]) for host in self._hosts):
                    return

    async def _compare(self) -> None:
        """The ports of the hosts with the keys, and what was removed with all that was ever requested."""
        desired: dict[str, dict[str, int | None]] = {host: {} for host in self._hosts}
        for host, ref, kv in refs((await self._root.read(values.root("desired"))).items):
            spec = written(host, ref, kv.mod_revision, kv.value).spec
            if isinstance(spec, PortSpec):
                desired[host][ref.id] = spec.qos.egress_kbps
        requested = Counter({key: removals(there) for key, there in (await history(self._root)).items()})
        have: dict[str, dict[str, int | None]] = {}
        removed: Counter[tuple[str, Ref]] = Counter()
        for process in self._agents:
            have |= await process.call("ports")
            for host, state in (await process.call("state")).items():
                assert not state["failures"], (host, state["failures"])
                removed.update({(host, Ref(Kind.PORT, id)): n for id, n in state["removed"].items()})
        print(
            f"{sum(map(len, have.values()))} ports, {removed.total()} removed, {requested.total()} requested"
        )
        assert have == desired
        assert removed, "a port was removed now and then"
        assert not removed - requested


def _is_in_sync(report: Report | None, revision: int) -> bool:
    if report is None or report.summary is None or not report.is_alive or report.off or report.unreadable:
        return False
    return report.summary.refused is None and report.summary.revision >= revision
