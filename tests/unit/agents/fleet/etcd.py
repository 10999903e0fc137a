"""An etcd in memory with what the client of a fleet has of it: revisions, conditions, watches, leases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from netplugin.fleet.errors import EtcdUnavailable, LeaseLost
from netplugin.fleet.etcd import KeyValue, Snapshot


class MemoryEtcd:
    """What all clients see; ``down``: none of them gets an answer."""

    def __init__(self) -> None:
        self.cluster_id = 0xC0FFEE
        self.keys: dict[str, KeyValue] = {}
        self.history: list[KeyValue] = []
        self.revision = 1
        self.down = False
        self.leases: dict[int, set[str]] = {}
        self._moved = asyncio.Condition()

    async def write(self, changes: Sequence[tuple[str, bytes | None]], lease: int = 0) -> int:
        async with self._moved:
            self.revision += 1
            for key, value in changes:
                if value is None and key not in self.keys:
                    continue
                made = KeyValue(key, value or b"", self.revision, value is None)
                self.history.append(made)
                if value is None:
                    del self.keys[key]
                else:
                    self.keys[key] = made
                if lease:
                    self.leases[lease].add(key)
            self._moved.notify_all()
        return self.revision

    async def put(self, key: str, value: Any) -> int:
        return await self.write([(key, json.dumps(value).encode())])

    def value(self, key: str) -> Any:
        return json.loads(self.keys[key].value) if key in self.keys else None

    def under(self, prefix: str) -> list[str]:
        return sorted(key for key in self.keys if key.startswith(prefix))

    async def fall(self, down: bool = True) -> None:
        async with self._moved:
            self.down = down
            self._moved.notify_all()

    async def moved(self) -> None:
        async with self._moved:
            await self._moved.wait()

    def require(self) -> None:
        if self.down:
            raise EtcdUnavailable("nobody listens", step="test")


class Client:
    """In place of ``Etcd``."""

    def __init__(self, etcd: MemoryEtcd) -> None:
        self._etcd = etcd

    async def close(self) -> None:
        pass

    async def read(self, prefix: str) -> Snapshot:
        self._etcd.require()
        found = self._etcd.under(prefix) if prefix.endswith("/") else [prefix] * (prefix in self._etcd.keys)
        items = tuple(self._etcd.keys[key] for key in found)
        return Snapshot(self._etcd.cluster_id, self._etcd.revision, items)

    async def change(
        self,
        put: Mapping[str, bytes],
        *,
        delete: Sequence[str] = (),
        unchanged: Mapping[str, int] | None = None,
        lease: int = 0,
    ) -> int | None:
        self._etcd.require()
        assert len(put) + len(delete) <= 128
        for key, known in (unchanged or {}).items():
            there = self._etcd.keys.get(key)
            if (there.mod_revision if there else 0) != known:
                return None
        if lease and lease not in self._etcd.leases:
            raise LeaseLost("no such lease", step="test")
        return await self._etcd.write([*put.items(), *((key, None) for key in delete)], lease)

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[tuple[KeyValue, ...]]:
        while True:
            self._etcd.require()
            news = [
                kv for kv in self._etcd.history if kv.mod_revision >= revision and kv.key.startswith(prefix)
            ]
            if news:
                revision = news[-1].mod_revision + 1
                yield tuple(news)
            else:
                await self._etcd.moved()

    async def grant(self, ttl_s: int) -> int:
        self._etcd.require()
        self._etcd.leases[len(self._etcd.leases) + 1] = set()
        return len(self._etcd.leases)

    async def keep(self, lease: int, ttl_s: int) -> None:
        while True:
            self._etcd.require()
            if lease not in self._etcd.leases:
                raise LeaseLost("no such lease", step="test")
            await self._etcd.moved()
