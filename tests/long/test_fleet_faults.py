"""Members of etcd are cut off from the others, or have slow disks: no host loses a change or repeats one.

A member is cut off by nftables, between the ports by which members speak to each other: clients reach all of
them. A disk is slow by strace(1), which delays each fdatasync of a member as a busy disk does. One that hangs
is a member that is stopped (SIGSTOP): it does not answer either, as etcd waits for its log before it does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from agents.fleet import runner
from netplugin.api.errors import OperationTimeout
from netplugin.api.models import PortSpec
from netplugin.fleet import values
from netplugin.fleet.errors import EtcdUnavailable
from netplugin.fleet.etcd import Etcd
from netplugin.fleet.names import Kind, Ref
from netplugin.fleet.reports import Written
from netplugin.fleet.writer import Writer, encoded
from tests.lab import in_memory
from tests.lab.etcd import PrivateEtcd
from tests.lab.memory_hosts import NETWORK, MemoryHost, history, network_spec, port_spec, removals
from tests.lab.processes import Daemon, wait_for
from tests.unit.fakes import Write

pytestmark = pytest.mark.long

DEADLINE_S, HANGS_S = 120.0, 10.0
KEPT, GOES, DISPUTED = (Ref.of(f"port/{name}") for name in ("kept", "goes", "disputed"))


class Hosts:
    """Three hosts that know all members, and for each member one that knows it alone."""

    def __init__(self, etcd: PrivateEtcd, stack: AsyncExitStack) -> None:
        self.etcd = etcd
        self.client = etcd.client()
        stack.push_async_callback(self.client.close)
        self.writer = Writer(self.client, write_s=DEADLINE_S)
        user, one = etcd.credentials(), [[endpoint] for endpoint in etcd.endpoints]
        self.all = [
            MemoryHost(f"h{number}", etcd.directory / f"h{number}", endpoints, user)
            for number, endpoints in enumerate([*one, *([etcd.endpoints] * 3)])
        ]
        for host in self.all:
            stack.callback(host.close)
            stack.callback(asyncio.create_task(host.fleet.keep()).cancel)

    async def begin(self) -> None:
        await self.verified([await self.writer.put(each.name, NETWORK, network_spec(1)) for each in self.all])
        for ref in (KEPT, GOES, DISPUTED):
            await self.verified([await self.write(each, ref, 1) for each in self.all])

    async def write(self, host: MemoryHost, ref: Ref, kbps: int, writer: Writer | None = None) -> Written:
        writer = writer or self.writer
        there = await writer.get(host.name, ref)
        spec = port_spec(len(ref.id), qos={"egress_kbps": kbps})
        return await writer.put(host.name, ref, spec, after=there.generation if there else None)

    async def verified(self, there: list[Written], writer: Writer | None = None) -> None:
        waits = [(writer or self.writer).verified(each, within_s=DEADLINE_S) for each in there]
        await asyncio.gather(*waits)

    async def check(self) -> None:
        """Each host has what etcd has, and has made no change more often than it was written."""
        ever = await history(self.client)
        for host in self.all:
            made = Counter(
                port for each in host.kernel.written if isinstance(each, Write) for port in each.ports
            )
            desired: dict[str, int | None] = {}
            for (name, ref), there in ever.items():
                if name == host.name and ref.kind is Kind.PORT:
                    assert made[ref.id] <= len(there), (host.name, ref)
                    assert host.removed[ref.id] <= removals(there)
                    if isinstance(there[-1].spec, PortSpec):
                        desired[ref.id] = there[-1].spec.qos.egress_kbps
            assert host.ports() == desired and not host.state["failures"]


def on_three(work: Callable[[Hosts], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The work on hosts that follow three members; what follows from it holds in the end."""
    monkeypatch.setattr(runner, "_MOST_S", 2.0)

    async def run(etcd: PrivateEtcd) -> None:
        async with AsyncExitStack() as stack:
            hosts = Hosts(etcd, stack)
            await hosts.begin()
            await work(hosts)
            await hosts.check()

    with in_memory.directory() as place, PrivateEtcd(Path(place) / "etcd", members=3) as etcd:
        asyncio.run(run(etcd))


# -- a partition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_the_smaller_side_of_a_partition_refuses_and_joins_the_larger(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(hosts: Hosts) -> None:
        etcd, user = hosts.etcd, hosts.etcd.credentials()
        number = (etcd.leader() + (role == "follower")) % 3
        cut = [etcd.endpoints[number]]
        smaller = Etcd(cut, user)
        larger = Etcd([each for each in etcd.endpoints if each != etcd.endpoints[number]], user)
        alone, others = hosts.all[number], [host for host in hosts.all if host is not hosts.all[number]]
        before = alone.ports()
        assert set(before) == {KEPT.id, GOES.id, DISPUTED.id}
        with etcd.cut_off(number):
            writing = [asyncio.create_task(_disputed(Etcd(cut, user), host.name)) for host in hosts.all]
            writer = Writer(larger, write_s=DEADLINE_S)
            for kbps in (20, 30):
                wrote = [await hosts.write(host, KEPT, kbps, writer) for host in others]
                wrote += [await hosts.write(host, DISPUTED, kbps, writer) for host in others]
                await hosts.verified(wrote, writer)
            await hosts.verified([await writer.delete(host.name, GOES) for host in others], writer)
            missed = [await hosts.write(alone, ref, 40, writer) for ref in (KEPT, DISPUTED)]
            missed.append(await writer.delete(alone.name, GOES))
            await asyncio.gather(*writing)
            async with asyncio.timeout(DEADLINE_S):
                while alone.fleet.connected:
                    await asyncio.sleep(0.1)
            with pytest.raises(EtcdUnavailable):
                await smaller.read(values.desired_prefix(alone.name))
            with pytest.raises(OperationTimeout):
                await Writer(smaller, write_s=8).put(alone.name, DISPUTED, port_spec(8), after=1)
            assert alone.ports() == before and not alone.removed
        await hosts.verified(missed)
        await hosts.verified([await hosts.write(host, KEPT, 60) for host in hosts.all])
        # What the smaller side was told is nowhere.
        for (_, ref), there in (await history(hosts.client)).items():
            assert not any(each.generation >= _HIGH for each in there), ref
        await smaller.close()
        await larger.close()

    on_three(work, monkeypatch)


_HIGH = 1_000_000


async def _disputed(etcd: Etcd, host: str) -> None:
    """Change a port and remove another by a member without the others, again and again: it refuses each."""
    bodies: Mapping[Ref, Mapping[str, object]] = {
        DISPUTED: {"spec": port_spec(len(DISPUTED.id), qos={"egress_kbps": 99})},
        KEPT: {"deleted": True},
    }
    for attempt in range(3):
        for ref, body in bodies.items():
            value = encoded(ref, body, _HIGH + attempt)[1]
            with pytest.raises(EtcdUnavailable):
                await etcd.change({values.desired_key(host, ref): value})
    await etcd.close()


# -- slow disks ----------------------------------------------------------------------------------


@contextmanager
def slow_disk(member: Daemon, seconds: float) -> Iterator[None]:
    """Each fdatasync of a member begins so much later."""
    delay = f"inject=fdatasync:delay_enter={round(seconds * 1e6)}"
    words = ["strace", "-f", "-qq", "-p", str(member.pid), "-e", "trace=fdatasync", "-e", delay]
    with Daemon("strace", [*words, "-o", "/dev/null"], member.log.with_suffix(".strace")) as tracer:
        status = Path(f"/proc/{member.pid}/status")
        wait_for(lambda: "TracerPid:\t0\n" not in status.read_text(), 10, "it is traced", tracer.tail)
        yield


def slow_words(etcd: PrivateEtcd) -> int:
    """How often members have found their disks too slow, in their own words (etcd: ``wal.go``)."""
    return sum(member.log.read_text().count('"slow fdatasync"') for member in etcd.members)


async def writes(hosts: Hosts, seconds: float, write_s: float, rates: Iterator[int]) -> list[float]:
    """Write one port after the other for some time. Returns how long each took that was written."""
    took, until = [], time.monotonic() + seconds
    writer = Writer(hosts.client, write_s=write_s)
    while time.monotonic() < until:
        begun = time.monotonic()
        with suppress(OperationTimeout, EtcdUnavailable):  # it may have taken place
            await hosts.write(random.choice(hosts.all), KEPT, next(rates), writer)
            took.append(time.monotonic() - begun)
    return took


@pytest.mark.parametrize(("seconds", "what"), [(0.3, "slow"), (3.0, "unusable")])
def test_hosts_follow_an_etcd_whose_disks_are_slow(
    seconds: float, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(hosts: Hosts) -> None:
        rates = iter(range(100, 100_000))
        with ExitStack() as slow:
            for member in hosts.etcd.members:
                slow.enter_context(slow_disk(member, seconds))
            took = await writes(hosts, 30, 20, rates)
        assert slow_words(hosts.etcd) or seconds < 1
        print(f"{what} disks: {len(took)} writes in 30 s, at most {max(took, default=0):.1f} s")
        assert not any(host.removed for host in hosts.all)
        await hosts.verified([await hosts.write(host, KEPT, next(rates)) for host in hosts.all])

    on_three(work, monkeypatch)


def test_members_whose_disks_hang_in_turn_cost_no_host_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(hosts: Hosts) -> None:
        rates = iter(range(100, 100_000))
        for number in (leader := hosts.etcd.leader(), (leader + 1) % 3, (leader + 2) % 3):
            hosts.etcd.members[number].pause()
            took = await writes(hosts, HANGS_S, 20, rates)
            hosts.etcd.members[number].resume()
            print(f"one hangs: {len(took)} writes in {HANGS_S:g} s, at most {max(took):.1f} s")
            assert took
        for member in hosts.etcd.members:
            member.pause()
        assert not await writes(hosts, HANGS_S, 8, rates)
        for member in hosts.etcd.members:
            member.resume()
        assert not any(host.removed for host in hosts.all)
        await hosts.verified([await hosts.write(host, KEPT, next(rates)) for host in hosts.all])

    on_three(work, monkeypatch)
