"""A host of a fleet that has only its side of etcd: what an agent would report, it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from netplugin.api.errors import HostError
from netplugin.api.problem import Problem
from netplugin.fleet import values
from netplugin.fleet.etcd import Etcd
from netplugin.fleet.names import Ref
from netplugin.fleet.reports import refs
from netplugin.fleet.values import Alive, Fault, Summary

BROKEN = HostError("no such device", step="apply", fix="plug the cable").problem()


class FleetHost:
    """Stands for an agent (agents/fleet): follows its range, and reports all of it as done, by the models.

    ``fails``: objects that it cannot make. For one event loop.
    """

    def __init__(self, etcd: Etcd, host: str, fails: Collection[Ref] = ()) -> None:
        self._etcd = etcd
        self.host = host
        self.fails = set(fails)
        self.states = dict.fromkeys(self.fails, "failed")
        self.refused: Problem | None = None
        self.cluster = ""

    async def arrive(self, ttl_s: int = 60) -> None:
        lease = await self._etcd.grant(ttl_s)
        alive = Alive(identity=self.host, version="1")
        await self._etcd.change({values.alive_key(self.host): alive.model_dump_json().encode()}, lease=lease)

    async def report(self) -> int:
        """Report what etcd has now as carried out. Returns the revision of etcd."""
        snapshot = await self._etcd.read(values.desired_prefix(self.host))
        there = {ref: kv for _, ref, kv in refs(snapshot.items)}
        faults = {ref: Fault(state=state, error=BROKEN) for ref, state in self.states.items()}
        faults = {ref: fault for ref, fault in faults.items() if ref in there or fault.state == "unlisted"}
        states = [fault.state for fault in faults.values()]
        summary = Summary(
            identity=self.host,
            version="1",
            cluster=self.cluster or values.cluster_name(snapshot.cluster_id),
            highest=snapshot.revision,
            accepted=0,
            revision=max((kv.mod_revision for kv in there.values()), default=0),
            digest="",
            counts={"owned": len(there), "open": 0, **{state: states.count(state) for state in states}},
            refused=self.refused,
        )
        put = {f"{values.reported_prefix(self.host)}{ref}": fault for ref, fault in faults.items()}
        before = (await self._etcd.read(values.reported_prefix(self.host))).items
        mine = {**{key: fault.model_dump_json() for key, fault in put.items()}}
        mine[values.summary_key(self.host)] = summary.model_dump_json()
        gone = [kv.key for kv in before if kv.key not in mine]
        await self._etcd.change({key: value.encode() for key, value in mine.items()}, delete=gone)
        return snapshot.revision

    async def follow(self) -> None:
        """Report after each change, until cancelled."""
        await self.arrive()
        while True:
            revision = await self.report()
            async for changes in self._etcd.watch(values.desired_prefix(self.host), revision + 1):
                if changes:
                    break


class FleetHosts:
    """Several of them, while the context lasts."""

    def __init__(self, *hosts: FleetHost) -> None:
        self._hosts = hosts
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(host.follow()) for host in self._hosts]

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
