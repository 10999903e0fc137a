"""A fleet's writer and operator on a real etcd, with hosts of the lab (``FleetHost``) and a real agent."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from netplugin.api.errors import Conflict, InvalidRequest, NotFound, OperationTimeout, PreconditionFailed
from netplugin.cli.main import main
from netplugin.fleet import values
from netplugin.fleet.access import ROLE, Access
from netplugin.fleet.errors import Compacted, EtcdForbidden, EtcdFull, HostRefuses, NotAsDesired
from netplugin.fleet.etcd import Etcd
from netplugin.fleet.messages import M
from netplugin.fleet.names import Ref
from netplugin.fleet.operate import Roller, accept
from netplugin.fleet.writer import BlockingWriter, Writer
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.etcd import PrivateEtcd, release
from tests.lab.fleet_host import FleetHost, FleetHosts
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

T = TypeVar("T")
DEADLINE_S = 90.0
NIC, NETWORK = Ref.of("port/nic1"), Ref.of("physical-network/physnet1")
SPEC = make_spec(1)
OTHER = SPEC | {"qos": {"egress_kbps": 10_000}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEtcd]:
    with PrivateEtcd(tmp_path_factory.mktemp("etcd") / "one") as private:
        yield private


@pytest.fixture
def etcd(running: PrivateEtcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateEtcd]:
    """With nothing of a fleet in it; the commands use it as root."""
    credentials = running.credentials()
    monkeypatch.setenv("NETPLUGIN_FLEET_ENDPOINTS", ",".join(running.endpoints))
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"NETPLUGIN_FLEET_{name.upper()}", str(getattr(credentials, name)))
    yield running
    running.ctl("del", "/netplugin/", "--prefix")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@asynccontextmanager
async def client(etcd: PrivateEtcd, user: str = "root") -> AsyncIterator[Etcd]:
    made = etcd.client(user)
    try:
        yield made
    finally:
        await made.close()


class Commands:
    """``netplugin fleet``: the exit status, and what it prints as JSON and as text."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        status = main(["fleet", *words])
        printed = self._capsys.readouterr()
        return status, printed.out + printed.err

    def json(self, *words: str) -> Any:
        status = main(["fleet", *words, "-f", "json"])
        return status, json.loads(self._capsys.readouterr().out)


@pytest.fixture
def fleet(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


# -- the writer ----------------------------------------------------------------------------------


def test_a_port_is_written_verified_and_removed(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            host, writer = FleetHost(made, "h1"), Writer(made)
            async with FleetHosts(host):
                written = await writer.put("h1", NIC, SPEC)
                assert await writer.verified(written) == written
                # A call whose answer was lost is sent again: nothing is written.
                assert await writer.put("h1", NIC, SPEC) == written
                assert (
                    json.loads((await made.read(values.desired_key("h1", NIC))).items[0].value)["spec"]
                    == SPEC
                )
                second = await writer.put("h1", NIC, OTHER, after=written.generation)
                assert second.generation > written.generation
                gone = await writer.delete("h1", NIC)
                # Killed here, a writer leaves the tombstone, and whoever deletes again goes on.
                assert await Writer(made).delete("h1", NIC) == gone
                await writer.verified(gone)
                assert await writer.get("h1", NIC) is None
                assert await writer.verified(gone) == gone
                again = await writer.put("h1", NIC, SPEC)
                assert again.generation > gone.generation  # the host has seen all of those before

    run(work())


def test_no_writer_overwrites_what_it_has_not_seen(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as one, client(etcd) as two:
            first, second = Writer(one), Writer(two)
            results = await asyncio.gather(
                first.put("h1", NIC, SPEC), second.put("h1", NIC, OTHER), return_exceptions=True
            )
            won = next(each for each in results if not isinstance(each, BaseException))
            lost = next(each for each in results if isinstance(each, BaseException))
            assert isinstance(lost, PreconditionFailed) and f"after={won.generation}" in (lost.fix or "")
            spec = make_spec(3)
            third = await first.put("h1", NIC, spec, after=won.generation)
            with pytest.raises(PreconditionFailed):
                await second.delete("h1", NIC, after=won.generation)
            with pytest.raises(PreconditionFailed, match="by another"):
                await second.verified(won)
            assert (await second.get("h1", NIC)) == third
            with pytest.raises(PreconditionFailed, match="not there"):
                await first.put("h1", Ref.of("port/none"), SPEC, after=7)
            with pytest.raises(InvalidRequest, match=r"spec\.mac"):
                await first.put("h1", NIC, SPEC | {"mac": "none"}, after=third.generation)
            with pytest.raises(InvalidRequest, match="host"):
                await first.put("../h2", NIC, SPEC)
            # Nonsense of a careless writer is nobody's.
            await one.change({values.desired_key("h1", NIC): b"{"})
            assert (await first.put("h1", NIC, SPEC)).spec is not None

    run(work())


def test_what_a_host_cannot_do_is_raised_and_a_silent_one_has_a_deadline(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            writer = Writer(made)
            written = await writer.put("h1", NIC, SPEC)
            with pytest.raises(OperationTimeout, match="h1: port/nic1 is not verified"):
                await writer.verified(written, within_s=0.5)
            host = FleetHost(made, "h1", fails=[NIC])
            async with FleetHosts(host):
                with pytest.raises(NotAsDesired, match="no such device") as found:
                    await writer.verified(written)
                assert found.value.state == "failed" and found.value.fix == "plug the cable"
                # Written again it is tried again, although it is the same.
                again = await writer.put("h1", NIC, SPEC)
                assert again.generation > written.generation
                written = again
            host.refused = Conflict("an older copy", step="fleet").problem()
            await host.report()
            with pytest.raises(HostRefuses, match="older copy"):
                await writer.verified(written)
            # A restored etcd has the report of a time that it knows nothing of.
            host.refused, host.cluster, host.states = None, "another", {}
            await host.report()
            with pytest.raises(OperationTimeout):
                await writer.verified(written, within_s=0.5)

    run(work())


def test_a_writer_goes_on_when_etcd_is_back(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            writer = Writer(made, write_s=60)
            etcd.kill()
            writing = asyncio.create_task(writer.put("h1", NIC, SPEC))
            await asyncio.sleep(1)
            etcd.start()  # in this thread, with which it would end
            written = await writing
            waiting = asyncio.create_task(writer.verified(written, within_s=60))
            await asyncio.sleep(1)
            etcd.kill()
            etcd.start()
            async with client(etcd) as other:
                await FleetHost(other, "h1").report()
            assert await waiting == written

    run(work())


_WRITES = """
import sys
from pathlib import Path
from netplugin.fleet.etcd import Credentials
from netplugin.fleet.names import Ref
from netplugin.fleet.writer import BlockingWriter
endpoint, ca, cert, key, spec = sys.argv[1:]
ref = Ref.of("port/nic1")
with BlockingWriter([endpoint], Credentials(Path(ca), Path(cert), Path(key))) as fleet:
    print("begun", flush=True)
    while True:
        gone = fleet.run(fleet.writer.delete("h1", ref))
        fleet.run(fleet.writer.verified(gone))
        fleet.run(fleet.writer.put("h1", ref, __import__("json").loads(spec)))
"""


def test_a_writer_that_is_killed_leaves_what_another_goes_on_with(etcd: PrivateEtcd) -> None:
    files = etcd.credentials()
    words = [sys.executable, "-c", _WRITES, *etcd.endpoints, *map(str, (files.ca, files.cert, files.key))]

    async def work() -> None:
        async with client(etcd) as made:
            writer, generation = Writer(made), 0
            async with FleetHosts(FleetHost(made, "h1")):
                for attempt in range(3):
                    pipe = asyncio.subprocess.PIPE
                    process = await asyncio.create_subprocess_exec(*words, json.dumps(SPEC), stdout=pipe)
                    assert process.stdout is not None and await process.stdout.readline() == b"begun\n"
                    await asyncio.sleep(0.3 + 0.17 * attempt)
                    process.kill()
                    await process.wait()
                    there = await writer.get("h1", NIC)
                    assert there is None or there.desired is not None
                    gone = await writer.delete("h1", NIC)
                    await writer.verified(gone)
                    assert await writer.get("h1", NIC) is None and gone.generation > generation
                    generation = gone.generation

    run(work())


def test_a_platform_without_an_event_loop(etcd: PrivateEtcd) -> None:
    with BlockingWriter(etcd.endpoints, etcd.credentials()) as fleet:
        written = fleet.run(fleet.writer.put("h1", NIC, SPEC))
        found = fleet.run(fleet.writer.get("h1", NIC))
        assert found == written and found.spec is not None


# -- the operator --------------------------------------------------------------------------------


def test_status_names_each_host_that_is_off_and_the_next_command(etcd: PrivateEtcd, fleet: Commands) -> None:
    status, text = fleet("status")
    assert status == 0 and "0 of 0 hosts" in text

    async def work() -> None:
        async with client(etcd) as made:
            writer, hosts = (
                Writer(made),
                {name: FleetHost(made, name) for name in ("good", "dead", "off", "old")},
            )
            for name, host in hosts.items():
                await writer.put(name, NIC, SPEC)
                if name != "dead":
                    await host.arrive()
            await writer.put("never", NIC, SPEC)
            hosts["off"].states = {NIC: "degraded", Ref.of("port/left"): "unlisted"}
            hosts["old"].refused = Conflict(
                "an older copy", step="fleet", fix="netplugin fleet accept"
            ).problem()
            hosts["old"].cluster = "abc"
            for host in hosts.values():
                await host.report()
            await writer.put("good", Ref.of("port/nic2"), make_spec(2))
            await made.change(
                {values.alive_key("strange"): b"\x00", f"{values.reported_prefix('strange')}x": b"{"}
            )

    run(work())
    status, findings = fleet.json("status")
    found = {each["id"]: each for each in findings}
    assert status == 1
    assert sorted(found) == [
        "behind-good", "dead-dead", "dead-never", "degraded-off", "refused-old", "unlisted-off",
        "unreadable-strange",
    ]  # fmt: skip
    assert "no agent has reported" in found["dead-never"]["found"]
    assert "drain off --port left" in found["unlisted-off"]["fix"]
    assert f"--revision {etcd.revision()} --host old" in found["refused-old"]["fix"]
    rows = {row["host"]: row for row in fleet.json("hosts")[1]}
    assert rows["good"]["connected"] and not rows["dead"]["connected"] and not rows["old"]["follows"]
    assert rows["off"]["not_as_desired"] == 2
    states = {(row["host"], row["object"]): row["state"] for row in fleet.json("ports")[1]}
    assert states["good", "port/nic1"] == "verified" and states["good", "port/nic2"] == "open"
    assert states["never", "port/nic1"] == "unreachable" and states["off", "port/left"] == "unlisted"
    assert len(fleet.json("ports", "--host", "off", "--off")[1]) == 2
    status, explained = fleet.json("explain", "nic1")
    assert status == 1 and {row["host"]: row["state"] for row in explained} == {
        "good": "verified", "dead": "verified", "off": "degraded", "old": "refused", "never": "unreachable",
    }  # fmt: skip
    assert "no such device" in explained[[row["host"] for row in explained].index("off")]["why"]
    assert fleet("explain", "nowhere")[0] == 1


def test_an_acceptance_is_above_all_before_and_names_the_cluster_that_it_replaces(
    etcd: PrivateEtcd, fleet: Commands
) -> None:
    async def work(*clusters: str) -> None:
        async with client(etcd) as made:
            for number, cluster in enumerate(clusters):
                host = FleetHost(made, f"h{number}")
                host.cluster = cluster
                await host.report()

    run(work("", "abc"))
    here = etcd.revision()
    status, first = fleet.json("accept", "--revision", str(here))
    assert status == 0 and first["replaces"] == "abc" and first["revision"] == here
    second = fleet.json("accept", "--revision", "1", "--host", "h1")[1]
    assert second["number"] > first["number"] and etcd.get("/netplugin/v1/accepted/h1") == second
    assert "etcd is at" in fleet("accept", "--revision", str(here + 100))[1]
    run(work("", "abc", "def"))
    assert "several clusters" in fleet("accept", "--revision", "1")[1]

    async def evil() -> None:
        async with client(etcd) as made:
            host = FleetHost(made, "h1")
            await host.report()
            key = values.summary_key("h1")
            last = json.loads((await made.read(key)).items[0].value) | {"accepted": (1 << 63) - 2}
            await made.change({key: json.dumps(last).encode()}, delete=[values.summary_key("h2")])

    run(evil())  # a host that is taken over leaves the numbers of the others alone
    assert fleet.json("accept", "--revision", "1")[1]["number"] < 1 << 40


def test_a_drain_takes_all_ports_and_their_tombstones_and_leaves_networks(
    etcd: PrivateEtcd, fleet: Commands
) -> None:
    stuck, left = Ref.of("port/stuck"), Ref.of("port/left")

    async def work() -> list[dict[str, Any]]:
        async with client(etcd) as made:
            writer, host = Writer(made), FleetHost(made, "h1", fails=[stuck])
            await writer.put("h1", NETWORK, {"linuxbridge": {}})
            for ref in (NIC, stuck):
                await writer.put("h1", ref, SPEC)
            host.states[left] = "unlisted"
            async with FleetHosts(host):
                assert (await asyncio.to_thread(fleet, "drain", "h1", "--port", "none"))[0] == 1
                del host.states[left]  # it is gone as soon as it is desired
                status, rows = await asyncio.to_thread(fleet.json, "drain", "h1")
                assert status == 1
                return list(rows)

    rows = {row["object"]: row for row in run(work())}
    assert rows["port/nic1"]["state"] == "removed" and rows["port/stuck"]["state"] == "left"
    assert rows["port/stuck"]["error"]["code"] == "not_as_desired"
    assert etcd.get(values.desired_key("h1", stuck))["drained"] is True
    assert sorted(etcd.keys(values.desired_prefix("h1"))) == [
        values.desired_key("h1", NETWORK), values.desired_key("h1", stuck),
    ]  # fmt: skip


HOSTS = ("h1", "h2", "h3", "h4")


async def networks(writer: Writer) -> None:
    for number, host in enumerate(HOSTS):
        await writer.put(host, NETWORK, {"linuxbridge": {"interface": f"eth{number}"}})


def mtus(etcd: PrivateEtcd) -> list[int | None]:
    return [etcd.get(values.desired_key(host, NETWORK))["spec"].get("mtu") for host in HOSTS]


def test_a_roll_changes_a_field_host_by_host_and_stops_at_the_first_that_fails(
    etcd: PrivateEtcd, fleet: Commands
) -> None:
    words = ("roll", str(NETWORK), "--stop-on-error", "--timeout", "20")
    change = ("--change", '{"mtu": 9000}')

    async def work() -> None:
        async with client(etcd) as made:
            hosts = [FleetHost(made, host) for host in HOSTS]
            hosts[1].states = {NETWORK: "failed"}
            await networks(Writer(made))
            async with FleetHosts(*hosts):
                wrong = await asyncio.to_thread(fleet, *words, "--change", '{"mtu": "none"}')
                assert wrong[0] == 1 and "mtu" in wrong[1] and not etcd.keys(values.root("roll"))
                status, text = await asyncio.to_thread(fleet, *words, *change)
                assert status == 1 and "h1: verified" in text and "no such device" in text
                assert await asyncio.to_thread(mtus, etcd) == [9000, 9000, None, None]
                assert "another change" in (await asyncio.to_thread(fleet, *words, "--change", "{}"))[1]
                found = (await asyncio.to_thread(fleet.json, "status"))[1]
                assert [each["fix"] for each in found if each["id"].startswith("roll")] == [
                    f"netplugin fleet roll {NETWORK}"
                ]
                # Repaired, it goes on where it was, and the host that failed is verified first.
                hosts[1].states = {}
                await hosts[1].report()
                status, text = await asyncio.to_thread(fleet, *words)
                assert status == 0 and text.index("h2: verified") < text.index("h3: verified")
            assert await asyncio.to_thread(mtus, etcd) == [9000] * 4
            # What differs from host to host stayed.
            assert etcd.get(values.desired_key("h3", NETWORK))["spec"]["linuxbridge"]["interface"] == "eth2"

    run(work())
    assert not etcd.keys(values.root("roll")) and fleet("roll", str(NETWORK))[0] == 1


def test_a_roll_that_is_interrupted_goes_on_elsewhere_and_never_in_two_places(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made, client(etcd) as other:
            await networks(Writer(made))
            silent = [FleetHost(made, host) for host in HOSTS]
            for host in silent:
                await host.arrive()
                await host.report()
            first = Roller(Writer(made), NETWORK, 60, lambda line: None)
            rolling = asyncio.create_task(first.run({"mtu": 9000}, (), 2, False))
            while len([mtu for mtu in await asyncio.to_thread(mtus, etcd) if mtu]) < 2:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert await asyncio.to_thread(mtus, etcd) == [9000, 9000, None, None]  # two are unavailable
            lines: list[str] = []
            second = Roller(Writer(other), NETWORK, 60, lines.append)
            async with FleetHosts(*silent):
                result = await second.run(None, (), 2, False)
                with pytest.raises(Conflict, match="another machine"):
                    await rolling
            assert result == 0 and sorted(lines) == [f"{host}: verified" for host in HOSTS]
            with pytest.raises(NotFound):
                await second.run(None, (), 2, False)

    run(work())


def test_failed_hosts_count_as_unavailable(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            await networks(Writer(made))
            hosts = [FleetHost(made, host) for host in HOSTS]
            hosts[2].states = {Ref.of("port/old"): "unlisted"}  # not as desired before, and so no reason
            async with FleetHosts(*hosts[1:]):
                await asyncio.sleep(0.5)
                roller = Roller(Writer(made), NETWORK, 20, lambda line: None)
                assert await roller.run({"mtu": 9000}, (), 1, False) == 3
                assert "not connected" in roller.failed["h1"]
                roller = Roller(Writer(made), NETWORK, 20, lambda line: None)
                assert await roller.run(None, (), 2, False) == 0 and list(roller.failed) == ["h1"]
                await roller.abandon()

    run(work())


# -- who may do what -----------------------------------------------------------------------------


def test_a_host_that_is_taken_over_has_its_own_keys_and_no_others(
    tmp_path: Path, fleet: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrivateEtcd(tmp_path / "roles") as etcd:
        root = etcd.credentials()
        monkeypatch.setenv("NETPLUGIN_FLEET_ENDPOINTS", ",".join(etcd.endpoints))
        for name in ("ca", "cert", "key"):
            monkeypatch.setenv(f"NETPLUGIN_FLEET_{name.upper()}", str(getattr(root, name)))
        etcd.ctl("user", "add", "agent", "--no-password")  # whose certificate the lab's etcdctl has
        words = ("init", "--writer", "w", "--reader", "r", "--operator", "o", "--host", "h1")
        status, text = fleet(*words)
        assert status == 0 and "host = h1" in text and "CN=h1" in text and "made: user h1" in text
        assert "made" not in fleet(*words)[1]  # there is nothing left to do
        assert "made: user h2" in fleet("init", "--host", "h2")[1]  # another, later
        assert "another role" in fleet("init", "--host", "root")[1]
        # Whoever has the certificate of a host has no more than a host.
        for name in (("--host", "o"), ("--operator", "h1"), ("--operator", "x", "--host", "x")):
            assert "rights of its own" in fleet("init", *name)[1], name
        assert fleet("init", "--remove", "w")[0] == 0  # which is no host

        async def work() -> None:
            one, two = values.desired_prefix("h1"), values.desired_prefix("h2")
            mine, others = values.reported_prefix("h1"), values.reported_prefix("h2")
            async with client(etcd, "w") as made:
                writer = Writer(made)
                await writer.put("h1", NIC, SPEC)
                await writer.put("h2", NIC, SPEC)
                for key in (
                    values.summary_key("h1"),
                    "/netplugin/v1/accepted",
                    values.roll_key(NETWORK),
                    "/else",
                ):
                    with pytest.raises(EtcdForbidden):
                        await made.change({key: b"{}"})
            async with client(etcd, "r") as made:
                assert len((await made.read(values.root("desired"))).items) == 2
                with pytest.raises(EtcdForbidden):
                    await Writer(made).put("h1", Ref.of("port/nic2"), SPEC)
            async with client(etcd, "o") as made:
                await accept(Writer(made), 1, "h1")
            async with client(etcd, "h1") as made:
                host = FleetHost(made, "h1")
                await host.arrive()
                revision = await host.report()
                assert (await made.read(values.acceptance_keys("h1")[1])).items
                for prefix in (
                    two,
                    others,
                    values.root(),
                    values.root("desired"),
                    values.alive_key("h2"),
                    "/",
                ):
                    with pytest.raises(EtcdForbidden):
                        await made.read(prefix)
                    with pytest.raises(EtcdForbidden):
                        async for _ in made.watch(prefix, revision):
                            pass
                foreign = (f"{two}port/nic1", f"{others}summary", values.alive_key("h2"), f"{mine[:-1]}0")
                for key in (*foreign, f"{one}port/nic1", *values.acceptance_keys("h1")):
                    with pytest.raises(EtcdForbidden):
                        await made.change({key: b"{}"})
                    with pytest.raises(EtcdForbidden):
                        await made.change({}, delete=[key])
                for key in foreign:
                    with pytest.raises(EtcdForbidden):  # nor learn of it by a condition
                        await made.change({f"{mine}x": b""}, unchanged={key: 1})
            async with client(etcd, "stranger") as made:
                with pytest.raises(EtcdForbidden):
                    await made.read(one)
            async with client(etcd, "h1") as made:
                with pytest.raises(EtcdForbidden):
                    await Access(made).init(["h3"], [("h1", ROLE["operator"])])
                await asyncio.to_thread(fleet, "init", "--remove", "h1")
                with pytest.raises(EtcdForbidden):
                    await made.read(one)

        run(work())


def test_what_etcd_itself_does_not_refuse_a_host(tmp_path: Path) -> None:
    """As docs/security.md has it: with another answer here, that page is to be changed."""
    is_open = release().startswith("3.4.")
    with PrivateEtcd(tmp_path / "open") as etcd:

        async def work() -> None:
            async with client(etcd, "h1") as evil, client(etcd) as mine:
                root = Access(mine)
                await root.init(["h1", "h2"], [("w", ROLE["writer"])])
                await root.enable()
                async with client(etcd, "h2") as other, client(etcd, "w") as made:
                    lease = await other.grant(60)
                    await other.change({values.alive_key("h2"): b"{}"}, lease=lease)
                    with pytest.raises(EtcdForbidden):
                        await evil.revoke(lease)
                    keeping = asyncio.create_task(evil.keep(lease, 60))
                    await asyncio.sleep(1)
                    assert keeping.cancel() == is_open  # False: it has ended
                    if not is_open:
                        with pytest.raises(EtcdForbidden):
                            await keeping
                    # A watch that is open outlives its user.
                    revision = (await other.read(values.desired_prefix("h2"))).revision
                    watching = aiter(other.watch(values.desired_prefix("h2"), revision + 1))
                    first = asyncio.create_task(anext(watching))
                    await asyncio.sleep(1)
                    await root.remove("h2")
                    await Writer(made).put("h2", NIC, SPEC)
                    assert (await first)[0].key == values.desired_key("h2", NIC)
                    # ``CompactionRequest.revision``; ``AlarmRequest.action`` ACTIVATE, ``alarm`` NOSPACE.
                    compaction, alarm = M.LeaseRequest(ID=2), M.KeyValue(mod_revision=1)
                    alarm.MergeFromString(b"\x08\x01")
                    if not is_open:
                        for method, request in (("KV/Compact", compaction), ("Maintenance/Alarm", alarm)):
                            with pytest.raises(EtcdForbidden):
                                await evil.ask(method, request, M.Nothing)
                        return
                    await evil.ask("KV/Compact", compaction, M.Nothing)
                    with pytest.raises(Compacted):
                        async for _ in made.watch(values.root(), 1):
                            pass
                    await evil.ask("Maintenance/Alarm", alarm, M.Nothing)
                    with pytest.raises(EtcdFull):
                        await Writer(made).put("h1", NIC, SPEC)

        run(work())


def test_the_writer_on_a_real_agent(ovs: PrivateOvs, etcd: PrivateEtcd, fleet: Commands) -> None:
    credentials = etcd.credentials("h1")
    files = {name: str(getattr(credentials, name)) for name in ("ca", "cert", "key")}
    options = {"fleet": {"endpoints": ",".join(etcd.endpoints), "host": "h1", **files}}
    with (
        PrivateAgent(BASE / "agent", ovs, options) as agent,
        BlockingWriter(etcd.endpoints, etcd.credentials()) as mine,
    ):
        for number in (1, 2):
            written = mine.run(mine.writer.put("h1", Ref.of(f"port/nic{number}"), make_spec(number)))
            mine.run(mine.writer.verified(written))
            assert agent.get(f"/v1/ports/nic{number}")[1]["state"] == "active"
        broken = mine.run(
            mine.writer.put("h1", Ref.of("port/nic3"), make_spec(3) | {"port_security": {"enabled": False}})
        )
        with pytest.raises(NotAsDesired, match="role operate"):
            mine.run(mine.writer.verified(broken))
        status, rows = fleet.json("explain", "nic3")
        assert status == 1 and rows[0]["state"] == "failed" and "[fleet] role" in rows[0]["next"]
        assert fleet.json("explain", "nic1")[1][0]["state"] == "verified"
        status, rows = fleet.json("drain", "h1")
        assert status == 0 and [row["state"] for row in rows] == ["removed"] * 3, rows
        assert agent.get("/v1/ports")[1] == [] and not etcd.keys(values.desired_prefix("h1"))
        wait_for(lambda: fleet("status")[0] == 0, 30, "nothing is wrong")
    shutil.rmtree(BASE / "agent")
