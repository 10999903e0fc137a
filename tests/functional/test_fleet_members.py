"""Three members of etcd, two hosts in memory: a member is killed, then the leader, then the majority."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agents.fleet import runner
from netplugin.api.errors import OperationTimeout
from netplugin.fleet.names import Ref
from netplugin.fleet.writer import Writer
from tests.lab.etcd import PrivateEtcd
from tests.lab.memory_hosts import NETWORK, MemoryHost, network_spec, port_spec

DEADLINE_S = 60.0


def test_writers_and_hosts_go_on_while_a_majority_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MOST_S", 1.0)
    with PrivateEtcd(tmp_path / "three", members=3) as etcd:
        asyncio.run(asyncio.wait_for(_members_come_and_go(etcd), 3 * DEADLINE_S))


async def _members_come_and_go(etcd: PrivateEtcd) -> None:
    user = etcd.credentials()
    made = [MemoryHost(f"h{n}", etcd.directory / f"h{n}", etcd.endpoints, user) for n in range(2)]
    async with AsyncExitStack() as stack:
        client = etcd.client()
        stack.push_async_callback(client.close)
        following = [asyncio.create_task(host.fleet.keep()) for host in made]
        for host, task in zip(made, following, strict=True):
            stack.callback(host.close)
            stack.callback(task.cancel)
        writer = Writer(client, write_s=20)

        async def all_have(number: int) -> None:
            ref = Ref.of(f"port/p{number}")
            there = [await writer.put(host.name, ref, port_spec(number)) for host in made]
            for written in there:
                await writer.verified(written, within_s=DEADLINE_S)
            assert all(ref.id in host.kernel.ports for host in made)

        for host in made:
            await writer.put(host.name, NETWORK, network_spec(1))
        await all_have(0)
        leader = etcd.leader()
        other = (leader + 1) % 3
        etcd.members[other].kill()
        await all_have(1)
        etcd.members[other].start()
        etcd.members[leader].kill()
        await all_have(2)
        away = [etcd.members[(leader + 1) % 3], etcd.members[(leader + 2) % 3]]
        for member in away:
            member.kill()
        with pytest.raises(OperationTimeout):
            await Writer(client, write_s=3).put("h0", Ref.of("port/p3"), port_spec(3))
        await _until(lambda: not any(host.fleet.connected for host in made))
        assert all(len(host.kernel.ports) == 3 and not host.removed for host in made)
        etcd.start()
        await all_have(4)
        assert not any(host.removed or host.state["failures"] for host in made)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.05)
