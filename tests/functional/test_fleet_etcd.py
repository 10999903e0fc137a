"""The client of etcd on real members: TLS, pages, conditions, watches that end, leases, a full database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agents.fleet import runner
from netplugin.fleet.access import Access
from netplugin.fleet.errors import (
    Compacted,
    EtcdError,
    EtcdForbidden,
    EtcdFull,
    EtcdUnavailable,
    LeaseLost,
    explained,
)
from netplugin.fleet.etcd import Credentials, Etcd, KeyValue
from netplugin.fleet.names import Ref
from netplugin.fleet.writer import Writer
from tests.lab.etcd import PrivateEtcd
from tests.lab.memory_hosts import NETWORK, MemoryHost, network_spec, port_spec

T = TypeVar("T")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEtcd]:
    with PrivateEtcd(tmp_path_factory.mktemp("etcd") / "one") as private:
        yield private


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@asynccontextmanager
async def client(etcd: PrivateEtcd, **more: Any) -> AsyncIterator[Etcd]:
    made = etcd.client(**more)
    try:
        yield made
    finally:
        await made.close()


def refused(endpoints: list[str], credentials: Credentials) -> EtcdError:
    async def ask() -> None:
        made = Etcd(endpoints, credentials)
        try:
            await made.read("/a/")
        finally:
            await made.close()

    with pytest.raises(EtcdError) as found:
        run(ask())
    return found.value


def test_a_prefix_is_read_in_pages_as_of_one_revision(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            names = [f"/pages/{n:03}" for n in range(25)]
            for name in names:
                await made.change({name: name.encode()})
            await made.change({"/pagez": b"another prefix"})
            whole = await made.read("/pages/", page=7)
            assert [item.key for item in whole.items] == names
            assert [item.value.decode() for item in whole.items] == names
            assert whole.revision > whole.items[-1].mod_revision > whole.items[0].mod_revision
            assert whole.cluster_id

    run(work())


def test_pages_that_are_too_large_for_one_answer_are_made_smaller(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            for number in range(12):
                await made.change({f"/large/{number:02}": bytes(1 << 20)})
            assert len((await made.read("/large/")).items) == 12
            for number in range(12):
                await made.change({}, delete=[f"/large/{number:02}"])

    run(work())


def test_a_change_is_made_only_on_what_was_read(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            first = await made.change({"/cas/a": b"1"}, unchanged={"/cas/a": 0})
            assert first is not None
            assert await made.change({"/cas/a": b"2"}, unchanged={"/cas/a": 0}) is None
            second = await made.change({"/cas/a": b"2"}, delete=["/cas/b"], unchanged={"/cas/a": first})
            assert second is not None and second > first
            assert await made.change({"/cas/a": b"3"}, unchanged={"/cas/a": first}) is None
            assert [item.value for item in (await made.read("/cas/")).items] == [b"2"]

    run(work())


def test_nobody_is_let_in_without_tls_and_a_certificate_that_etcd_trusts(
    etcd: PrivateEtcd, tmp_path: Path
) -> None:
    good = etcd.credentials("someone")
    wrong_ca = refused(etcd.endpoints, Credentials(etcd.pki.other_ca, good.cert, good.key))
    assert isinstance(wrong_ca, EtcdUnavailable) and "[fleet] ca" in (wrong_ca.fix or ""), wrong_ca
    outsider = refused(etcd.endpoints, etcd.credentials("outsider", "other"))
    assert isinstance(outsider, EtcdUnavailable), outsider
    missing = refused(etcd.endpoints, Credentials(good.ca, tmp_path / "none.pem", good.key))
    assert isinstance(missing, EtcdForbidden) and "none.pem" in missing.detail
    with pytest.raises(Exception, match="TLS"):
        Etcd(["http://127.0.0.1:2379"], good)


def test_a_watch_has_every_change_in_order_from_its_revision_on(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            start = (await made.read("/watch/")).revision + 1
            for number in range(5):
                await made.change({"/watch/a": b"%d" % number})
            await made.change({}, delete=["/watch/a"])
            await made.change({"/other": b""})
            seen: list[tuple[bytes, bool]] = []
            async for watched in made.watch("/watch/", start):
                seen += [(item.value, item.is_deleted) for item in watched]
                if len(seen) == 6:
                    break
            assert seen == [*((b"%d" % number, False) for number in range(5)), (b"", True)]

    run(work())


def test_a_watch_after_a_compaction_ends_with_the_reason(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            start = await made.change({"/compacted/a": b"1"})
            last = await made.change({"/compacted/a": b"2"})
            assert start is not None and last is not None
            etcd.ctl("compaction", str(last))
            with pytest.raises(Compacted, match=str(last)):
                async for _ in made.watch("/compacted/", start):
                    pass
            # One that is ahead of it goes on through it.
            watching = aiter(made.watch("/compacted/", last))
            assert (await anext(watching))[0].value == b"2"
            now = await made.change({"/compacted/a": b"3"})
            assert now is not None
            etcd.ctl("compaction", str(now))
            assert (await anext(watching))[0].value == b"3"

    run(work())


def test_a_silent_connection_is_noticed(etcd: PrivateEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Etcd, "timeout_s", 2.0)

    async def work() -> None:
        async with client(etcd, quiet_s=0.3) as made:
            watching = aiter(made.watch("/silent/", (await made.read("/silent/")).revision))
            for _ in range(3):
                assert await anext(watching) == ()  # it answers that there is nothing
            etcd.members[0].pause()
            begun = time.monotonic()
            with pytest.raises(EtcdUnavailable, match="silent"):
                while True:
                    await anext(watching)
            assert time.monotonic() - begun < 20

    try:
        run(work())
    finally:
        etcd.members[0].resume()


def test_a_watch_of_what_is_to_come_is_kept_while_nobody_writes(
    etcd: PrivateEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Etcd, "timeout_s", 1.0)

    async def work() -> None:
        async with client(etcd, quiet_s=0.2) as made:
            watching = aiter(made.watch("/calm/", (await made.read("/calm/")).revision + 1))
            following = asyncio.ensure_future(next_with_changes(watching))
            await asyncio.sleep(2.5)  # one that is late is late after 2.2 s
            assert not following.done()
            # Others come to its revision, and then itself.
            for key in ("/other", "/other", "/calm/a"):
                await made.change({key: b"1"})
                await asyncio.sleep(0.1)
            assert [kv.key for kv in await following] == ["/calm/a"]

    run(work())


def test_what_goes_on_when_a_connection_is_closed_ends_with_an_error(etcd: PrivateEtcd) -> None:
    """Not as cancelled, as gRPC has it: the task would end with that, and nobody follow etcd any more."""

    async def work() -> None:
        async with client(etcd) as made:
            watching = aiter(made.watch("/closed/", (await made.read("/closed/")).revision))
            keeping = asyncio.ensure_future(made.keep(await made.grant(60), 1))
            following = asyncio.ensure_future(next_of(watching))
            await asyncio.sleep(1)
            await made.close()
            for task in (keeping, following):
                with pytest.raises(EtcdUnavailable):
                    await task
            await made.read("/closed/")  # by a new one

    run(work())


async def next_with_changes(watching: AsyncIterator[tuple[KeyValue, ...]]) -> tuple[KeyValue, ...]:
    async for changes in watching:
        if changes:
            return changes
    raise AssertionError("the watch has ended")


async def next_of(watching: AsyncIterator[tuple[KeyValue, ...]]) -> tuple[KeyValue, ...]:
    return await anext(watching)


def test_a_lease_takes_its_keys_with_it(etcd: PrivateEtcd) -> None:
    async def work() -> None:
        async with client(etcd) as made:
            lease = await made.grant(60)
            await made.change({"/leased": b"x"}, lease=lease)
            keeping = asyncio.ensure_future(made.keep(lease, 1))
            await asyncio.sleep(1)
            assert not keeping.done()
            await made.revoke(lease)
            assert not (await made.read("/leased")).items
            with pytest.raises(LeaseLost):
                await keeping
            with pytest.raises(LeaseLost):
                await made.change({"/leased": b"x"}, lease=lease)

    run(work())


def test_a_host_that_is_taken_over_has_its_own_keys_alone(tmp_path: Path) -> None:
    root = "/netplugin/v1"
    with PrivateEtcd(tmp_path / "roles") as etcd:
        etcd.enable_auth("h1", "h2")
        etcd.put(f"{root}/desired/h2/port/p1", {})

        async def work() -> None:
            async with client(etcd, user="h1") as made:
                revision = (await made.read(f"{root}/desired/h1/")).revision
                await made.read(f"{root}/accepted")
                await made.change({f"{root}/reported/h1/summary": b"{}"})
                lease = await made.grant(60)
                await made.change({f"{root}/alive/h1": b"{}"}, lease=lease)
                await made.revoke(lease)
                for asked in (
                    made.read(f"{root}/desired/h2/"),
                    made.read(f"{root}/desired/"),
                    made.read(f"{root}/reported/h2/"),
                    made.change({f"{root}/desired/h1/port/p1": b"{}"}),
                    made.change({f"{root}/reported/h2/summary": b"{}"}),
                    made.change({f"{root}/reported/h10/summary": b"{}"}),
                    made.change({f"{root}/alive/h2": b"{}"}),
                    made.change({f"{root}/accepted": b"{}"}),
                    made.change({}, delete=[f"{root}/desired/h2/port/p1"]),
                ):
                    with pytest.raises(EtcdForbidden):
                        await asked
                with pytest.raises(EtcdForbidden):
                    async for _ in made.watch(f"{root}/desired/h2/", revision):
                        pass
            async with client(etcd, user="nobody") as made:
                with pytest.raises(EtcdForbidden):
                    await made.read(f"{root}/desired/h1/")

        run(work())


def test_a_user_with_a_password_needs_no_certificate_and_its_host_goes_on_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MOST_S", 0.5)
    monkeypatch.setattr(runner, "_ACCEPT_S", 0.5)
    file = tmp_path / "password"
    file.touch(0o600)
    file.write_text("wrong\n")
    # No certificate is asked for, and none is a user.
    options = {"client-cert-auth": "false", "trusted-ca-file": ""}
    with PrivateEtcd(tmp_path / "passwords", options=options) as etcd:
        user = Credentials(etcd.pki.ca, user="h1", password_file=file)
        root = with_passwords(etcd, tmp_path / "root", "h1")
        wrong = refused(etcd.endpoints, user)
        assert isinstance(wrong, EtcdForbidden) and str(file) in wrong.detail and "h1" in wrong.detail
        nobody = refused(etcd.endpoints, Credentials(etcd.pki.ca))
        assert isinstance(nobody, EtcdForbidden), nobody

        async def work() -> None:
            client = Etcd(etcd.endpoints, root)
            host = MemoryHost("h1", tmp_path / "h1", etcd.endpoints, user)
            following = asyncio.create_task(host.fleet.keep())
            writer = Writer(client)

            async def passes(number: int) -> None:
                written = await writer.put("h1", Ref.of(f"port/p{number}"), port_spec(number))
                await writer.verified(written, within_s=20)

            try:
                await until(lambda: host.fleet.refused is not None)
                assert str(file) in host.fleet.findings()[0].found and not host.fleet.connected
                file.write_text("secret-h1\n")
                await writer.put("h1", NETWORK, network_spec(1))
                await passes(1)
                await asyncio.to_thread(password, etcd, "h1", "another")
                # An idle host notices it, and says what is wrong; what it has stays.
                await until(lambda: not host.fleet.connected)
                await until(lambda: "authentication failed" in host.state["refused"])
                assert list(host.kernel.ports) == ["p1"]
                file.write_text("another")
                await passes(2)
                assert host.fleet.connected and not host.fleet.findings()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await client.close()
                host.close()

        run(work())


def with_passwords(etcd: PrivateEtcd, file: Path, host: str) -> Credentials:
    """Turn access control on; the passwords are ``secret-<user>``. Returns root's, which the file has."""
    etcd.ctl("user", "add", f"{host}:secret-{host}")
    file.touch(0o600)
    file.write_text("secret-root")
    root = Credentials(etcd.pki.ca, user="root", password_file=file)

    async def work() -> None:
        made = Etcd(etcd.endpoints, root)
        await Access(made).init([host], [])
        await Access(made).enable()
        assert not await Access(made).init([host], [])  # as root, who has the password now
        await made.close()

    run(work())
    return root


def password(etcd: PrivateEtcd, user: str, new: str) -> None:
    etcd.ctl("--user", "root:secret-root", "user", "passwd", user, "--interactive=false", stdin=new)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S / 2):
        while not holds():
            await asyncio.sleep(0.05)


def test_a_full_database_is_reported_and_read(tmp_path: Path) -> None:
    with PrivateEtcd(tmp_path / "full", options={"quota-backend-bytes": str(4 << 20)}) as etcd:

        async def work() -> None:
            async with client(etcd) as made:
                with pytest.raises(EtcdFull, match="space"):
                    for number in range(100):
                        await made.change({f"/full/{number}": bytes(1 << 20)})
                assert (await made.read("/full/")).items

        run(work())


def test_a_member_that_gives_up_a_call_is_one_that_cannot_be_reached() -> None:
    """In the words of 3.4.23, when it gives up before its client does: whether it was done is not known."""
    error = explained("UNKNOWN", "context deadline exceeded", "KV/Txn", "127.0.0.1:1")
    assert isinstance(error, EtcdUnavailable) and error.retryable


def test_a_client_goes_on_with_the_members_that_are_left(tmp_path: Path) -> None:
    with PrivateEtcd(tmp_path / "three", members=3) as etcd:

        async def work() -> None:
            async with client(etcd, quiet_s=0.5) as made:
                revision = (await made.read("/a/")).revision
                watching = aiter(made.watch("/a/", revision))
                await made.change({"/a/b": b""})
                while not await next_of(watching):
                    pass
                etcd.members[0].kill()
                with pytest.raises(EtcdUnavailable):
                    while True:
                        await next_of(watching)
                await made.read("/a/")  # by another, which may have to elect a leader before
                etcd.members[1].kill()
                with pytest.raises(EtcdUnavailable):
                    await made.read("/a/")
                # One of three: it ends a watch by itself, as it has no leader.
                with pytest.raises(EtcdUnavailable):
                    async for _ in made.watch("/a/", revision):
                        pass
                etcd.members[2].kill()
                with pytest.raises(EtcdUnavailable) as found:
                    await made.read("/a/")
                assert "endpoint health" in (found.value.fix or "")
                await asyncio.to_thread(etcd.start)
                assert (await made.read("/a/")).revision >= revision

        run(work())
