"""The store: whole transactions or none, claims that belong to one port, and what a restart finds."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.store import database
from agents.store.fleet import Known, Memory
from agents.store.port_table import ClaimMoves, Record
from agents.store.store import Store
from agents.store.task_journal import JournalledTask
from netplugin import store_file
from netplugin.api.errors import Conflict, HostError
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.api.physical_models import OvsUplinkSpec, PhysicalNetworkSpec
from netplugin.api.task_models import TaskState
from netplugin.backend import NOBODY, Claim
from netplugin.fleet.names import Kind, Ref
from tests.unit.agent import SPEC

DEADLINE_S = 90.0


def make_spec(**fields: Any) -> PortSpec:
    return PortSpec.model_validate({**SPEC, **fields})


def record(port_id: str = "p1", *claims: Claim, **fields: Any) -> Record:
    return Record(port_id, make_spec(), state=PortState.PENDING, claims=claims, **fields)


def vf(number: int) -> Claim:
    return Claim("vf", f"0000:03:10.{number}")


def task(taskuuid: str = "t1", **fields: Any) -> JournalledTask:
    made = JournalledTask(
        taskuuid, "f", "PUT", "/v1/ports/p1", b"\x00\xff{}", "http://h/cb", TaskState.ACCEPTED
    )
    return replace(made, **fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = Store(path)
    yield made
    made.close()


def reopened(path: Path) -> list[Record]:
    """What a new process would find, while the old one may still be there."""
    other = Store(path)
    try:
        return other.records()
    finally:
        other.close()


def claims_in(path: Path) -> set[tuple[str, str]]:
    """The claims as the file has them: (key, port)."""
    db = sqlite3.connect(path)
    try:
        return set(db.execute("SELECT key, port_id FROM claims"))
    finally:
        db.close()


# -- what a restart finds ------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_saved(store: Store, path: Path) -> None:
    problem = HostError("no", step="apply", port_id="p1", fix="try").problem()
    whole = Record(
        "p1",
        make_spec(queues=4),
        state=PortState.FAILED,
        previous=make_spec(),
        error=problem,
        claims=(Claim("tag", "7"), vf(1)),
        timings_ms={"apply": 1.5},
    )
    bare = replace(record("p0"), timings_ms={})
    store.save([whole, bare])
    assert store.get("p1") == whole
    assert reopened(path) == [bare, whole]


def test_what_is_forgotten_is_gone_with_its_claims(store: Store, path: Path) -> None:
    store.save([record("p1", vf(1)), record("p2", vf(2))])
    store.save([], forget=["p1", "never-there"])
    assert store.get("p1") is None
    assert [r.port_id for r in reopened(path)] == ["p2"]
    assert claims_in(path) == {(vf(2).key, "p2")}
    store.save([record("p3", vf(1))])
    assert store.claims() == {vf(1): "p3", vf(2): "p2"}


def test_a_list_is_by_backend_and_vm(store: Store) -> None:
    store.save(
        [
            Record("b", make_spec(backend="x"), state=PortState.ACTIVE),
            Record("a", make_spec(vm_id="vm-2"), state=PortState.FAILED),
        ]
    )
    assert [r.port_id for r in store.records()] == ["a", "b"]
    assert [r.port_id for r in store.records(backend="x")] == ["b"]
    assert [r.port_id for r in store.records(vm_id="vm-2")] == ["a"]
    assert store.records(backend="x", vm_id="vm-2") == []


def test_the_file_and_its_directory_are_ours_alone(store: Store, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():  # the write-ahead log holds the same
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    store = Store(path)
    store.save([record()])
    store.close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={database._VERSION + 1}")
    db.execute("CREATE TABLE of_the_future (x)")
    db.close()
    with pytest.raises(ValueError, match="newer netplugin"):
        Store(path)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (database._VERSION + 1,)
    assert db.execute("SELECT count(*) FROM of_the_future").fetchone() == (0,)
    db.close()


def test_a_file_that_is_no_database_is_moved_aside(path: Path) -> None:
    path.parent.mkdir(parents=True)
    notes = b"these are somebody's notes, and no database" * 100
    path.write_bytes(notes)
    store = Store(path)
    assert store.records() == []
    store.close()
    [aside] = store_file.damaged(path.parent)
    assert aside.read_bytes() == notes


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("ports", "spec = '{'"),
        ("ports", "state = 'perhaps'"),
        ("ports", "spec = CAST(x'ff7b' AS TEXT)"),
        ("ports", "timings = 'often'"),
        ("claims", "memory = '['"),
    ],
)
def test_a_row_that_cannot_be_read_is_set_aside_with_what_it_claims(
    store: Store, path: Path, table: str, change: str
) -> None:
    store.save([record("p1", vf(1)), record("p2", vf(2))])
    stamp = store.stamp("p1")
    store.database.sql.execute(f"UPDATE {table} SET {change} WHERE port_id = 'p1'")
    store.close()
    for _ in range(2):  # by the process that finds it, and by the next
        other = Store(path)
        assert [r.port_id for r in other.records()] == ["p2"]
        assert other.claims() == {vf(1): "p1", vf(2): "p2"}
        assert [a.key for a in other.set_aside.all()] == ["p1"]
        assert not other.has_forgotten("p1", stamp)
        other.close()
    again = Store(path)
    again.save([record("p1", *again.claims_before("p1"))])
    assert again.set_aside.all() == [] and again.claims() == {vf(1): "p1", vf(2): "p2"}
    again.close()
    assert [r.port_id for r in reopened(path)] == ["p1", "p2"]


def test_a_row_that_cannot_be_read_on_a_full_disk_hurts_no_other(store: Store, path: Path) -> None:
    store.save([record("p1"), record("p2")])
    store.database.sql.execute("UPDATE ports SET spec = '{' WHERE port_id = 'p1'")
    store.database.sql.execute("PRAGMA query_only = ON")
    read = store.set_aside.sift("ports", lambda row: PortSpec.model_validate_json(row["spec"]))
    assert len(read) == 1
    assert [a.key for a in store.set_aside.all()] == ["p1"], "for this run"


def test_the_number_of_a_network_that_cannot_be_read_is_no_other_networks(store: Store, path: Path) -> None:
    blue = store.save_network("blue", NetworkSpec(type="vxlan", vni=5001, mtu=1400))
    store.database.sql.execute("UPDATE networks SET spec = '?'")
    store.close()
    other = Store(path)
    assert other.network("blue") is None
    taken = other.save_network("green", NetworkSpec(type="vxlan", vni=5002, mtu=1400)).local_vlan
    assert taken != blue.local_vlan
    assert other.save_network("blue", blue.spec).local_vlan == blue.local_vlan
    other.close()


def start_agents(path: Path, *numbers: int) -> None:
    """Each start copies what the one before has saved."""
    for number in numbers:
        made = Store(path)
        made.save([record(f"p{number}")])
        made.close()


def test_the_last_few_copies_are_kept(path: Path) -> None:
    start_agents(path, *range(8))
    kept = store_file.backups(path.parent)
    assert len(kept) == 5
    assert [store_file.check(copy) for copy in kept] == [[]] * 5
    shutil.copy(kept[-1], path.with_name("copy.db"))
    assert [r.port_id for r in reopened(path.with_name("copy.db"))] == [f"p{n}" for n in range(7)]


@pytest.mark.parametrize("name", ["agent-2024-old.db", "agent-9.db", "agent-x.db"])
def test_a_file_that_is_no_copy_of_the_agent_is_left_alone(path: Path, name: str) -> None:
    start_agents(path, 0, 1)
    other = path.parent / store_file.BACKUPS / name
    other.write_text("of the operator")
    start_agents(path, *range(2, 9))
    names = [copy.name for copy in store_file.backups(path.parent)]
    assert names == [f"agent-{n:06d}.db" for n in range(4, 9)]
    assert other.read_text() == "of the operator"


def test_the_copies_are_in_the_order_of_their_numbers(path: Path) -> None:
    start_agents(path, 0, 1)
    [first] = store_file.backups(path.parent)
    first.rename(first.with_name("agent-999998.db"))
    start_agents(path, *range(2, 5))
    names = [copy.name for copy in store_file.backups(path.parent)]
    assert names == [f"agent-{n}.db" for n in range(999998, 1000002)]


# -- all or nothing ------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


def crash_at_write(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    write, count = store._write, iter(range(100))

    def crashing(saved: Record, commit: int) -> None:
        if next(count) == number:
            raise Crash
        write(saved, commit)

    monkeypatch.setattr(store, "_write", crashing)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_crash_amid_a_transaction_leaves_all_as_it_was(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = [replace(record(f"p{n}", vf(n)), timings_ms={}) for n in range(3)]
    store.save([*before, record("gone")])
    crash_at_write(store, monkeypatch, number)
    changed = [replace(r, state=PortState.ACTIVE, claims=()) for r in before]
    with pytest.raises(Crash):
        store.save(changed, forget=["gone"])
    assert store.records() == [replace(record("gone")), *before]  # in memory
    assert [r.port_id for r in reopened(path)] == ["gone", "p0", "p1", "p2"]  # and in the file
    assert reopened(path)[1:] == before
    monkeypatch.undo()
    store.save(changed, forget=["gone"])  # and it goes on
    assert reopened(path) == changed


# Claims, commits once, then is in the middle of a transaction for as long as it takes.
_DIES = """
import sys, time
from pathlib import Path
from tests.unit.agents.test_store import Store, record, vf
store = Store(Path(sys.argv[1]))
store.save([record("whole", vf(1))])
with store.database.transaction():
    store._write(record("half", vf(2)), 9)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_process_that_is_killed_amid_a_transaction(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _DIES, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [r.port_id for r in reopened(path)] == ["whole"]
    assert claims_in(path) == {(vf(1).key, "whole")}


# -- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second",
    [
        [record("p2", vf(1))],
        [record("p2", vf(2)), record("p3", vf(1))],
        [record("p2", vf(2)), record("p3", vf(2))],
    ],
)
def test_what_one_port_has_no_other_gets(store: Store, path: Path, second: list[Record]) -> None:
    store.save([record("p1", vf(1))])
    with pytest.raises(Conflict, match=r"0000:03:10.* belongs to another port"):
        store.save(second)
    assert [r.port_id for r in store.records()] == ["p1"]
    assert store.claims() == {vf(1): "p1"}
    assert claims_in(path) == {(vf(1).key, "p1")}


def test_a_port_that_cannot_be_committed_does_not_keep_its_neighbours(store: Store, path: Path) -> None:
    """Each place of it in the batch; what is forgotten with them is gone."""
    store.save([record("holder", vf(1))])
    for place in range(5):
        batch = [record(f"p{place}{n}", vf(10 * place + n + 2)) for n in range(4)]
        batch.insert(place, record("late", vf(1)))
        store.save([record("old")])
        failed = store.save_each(batch, forget=["old"])
        assert [(i, type(e)) for i, e in failed.items()] == [("late", Conflict)]
        assert store.get("old") is None and store.get("late") is None
        assert {r.port_id for r in batch[:place] + batch[place + 1 :]} < set(store.claims().values())
    assert {r.port_id for r in reopened(path)} == {r.port_id for r in store.records()}


# SHA-256 of both begins with 4ee0db8bd01.
_NAMESAKES = ("vm-3073211", "vm-6140880")


@pytest.mark.parametrize("first", [[], [record(_NAMESAKES[0])]], ids=["together", "later"])
def test_a_port_whose_devices_would_have_the_names_of_anothers_is_refused(
    store: Store, path: Path, first: list[Record]
) -> None:
    store.save(first)
    batch = [record("x"), *(record(i) for i in _NAMESAKES), record("y")]
    failed = store.save_each(batch)
    assert list(failed) == [_NAMESAKES[1]] and "another port id" in str(failed[_NAMESAKES[1]])
    assert {r.port_id for r in reopened(path)} == {"x", "y", _NAMESAKES[0]}
    again = Store(path)
    assert list(again.save_each([record(_NAMESAKES[1])])) == [_NAMESAKES[1]], "after a restart too"
    again.save([], forget=[_NAMESAKES[0]])
    assert again.save_each([record(_NAMESAKES[1])]) == {}
    again.close()


def test_a_file_that_cannot_be_written_is_tried_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(records: object, forget: object = ()) -> None:
        tried.append(records)
        raise HostError("the store cannot be written", step="store")

    monkeypatch.setattr(store, "save", refuse)
    assert len(store.save_each([record(f"p{n}") for n in range(32)])) == 32 and len(tried) == 1


def test_a_claim_of_another_kind_is_another(store: Store) -> None:
    store.save([record("p1", Claim("vf", "7")), record("p2", Claim("tag", "7"))])
    assert len(store.claims()) == 2


def test_claims_that_change_are_given_back(store: Store, path: Path) -> None:
    store.save([record("p1", vf(1), vf(2))])
    store.save([record("p1", vf(2), vf(3))])
    assert claims_in(path) == {(vf(2).key, "p1"), (vf(3).key, "p1")}
    store.save([record("p2", vf(1))])
    store.save([record("p1")])
    assert claims_in(path) == {(vf(1).key, "p2")}


def test_in_one_transaction_a_claim_goes_from_a_port_that_goes(store: Store) -> None:
    store.save([record("p1", vf(1))])
    store.save([record("p2", vf(1))], forget=["p1"])
    assert store.claims() == {vf(1): "p2"}


def test_many_threads_race_for_the_same_claims(store: Store, path: Path) -> None:
    def take(number: int) -> bool:
        try:
            store.save([record(f"p{number}", vf(number % 4))])
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(take, range(32)))
    assert won.count(True) == 4
    assert {key for key, _ in claims_in(path)} == {vf(n).key for n in range(4)}
    assert {r.port_id for r in reopened(path)} == set(store.claims().values())


def test_what_a_claim_remembers_comes_back_and_is_no_part_of_what_it_is(store: Store, path: Path) -> None:
    memory = {"mac": "52:54:00:00:00:01", "original": {"vlan": 7, "driver": None}}
    store.save([record("p1", Claim("vf", vf(1).key, memory))])
    [found] = reopened(path)
    assert found.claims[0].memory == memory
    assert found.claims == (vf(1),) and store.claims() == {vf(1): "p1"}


def header(path: Path, *change: str) -> tuple[int, ...]:
    """Change the header of the file, and return its application ID and the version of its schema."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        for each in change:
            db.execute(f"PRAGMA {each}")
        return tuple(db.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version"))


@pytest.mark.parametrize("change", ["application_id=7", "application_id=0"])
def test_the_database_of_another_program_is_refused_and_left_as_it_is(path: Path, change: str) -> None:
    Store(path).close()
    before = header(path, change)
    with pytest.raises(ValueError, match=r"another program.*state_path"):
        Store(path)
    assert header(path) == before


def test_an_older_released_schema_is_migrated_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Store(path)
    old.save([record("p1")])
    old.close()
    before, released = database._VERSION, database._MIGRATIONS
    assert header(path) == (int.from_bytes(b"nplg", "big"), before)
    monkeypatch.setattr(database, "_VERSION", before + 2)
    fails = (*released, "CREATE TABLE second (x);", "CREATE TABLE meta (x);")
    monkeypatch.setattr(database, "_MIGRATIONS", fails)
    with pytest.raises(sqlite3.OperationalError, match="meta already exists"):
        Store(path)
    assert header(path)[1] == before
    works = (*released, "CREATE TABLE second (x);", "DROP TABLE second;")
    monkeypatch.setattr(database, "_MIGRATIONS", works)
    store = Store(path)
    assert [r.port_id for r in store.records()] == ["p1"]
    store.close()
    assert header(path)[1] == before + 2
    assert [header(copy)[1] for copy in store_file.backups(path.parent)] == [before], "it was copied before"


def test_a_store_of_before_the_fleet_becomes_one_of_this_version(path: Path) -> None:
    old = Store(path)
    old.save([record("p1")])
    schema = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    expected = [(name, "".join(sql.split())) for name, sql in old.database.sql.execute(schema)]
    old.database.sql.execute("DROP TABLE fleet")
    old.close()
    header(path, "user_version=1")
    store = Store(path)
    assert [r.port_id for r in store.records()] == ["p1"] and store.fleet.known == {}
    assert [(name, "".join(sql.split())) for name, sql in store.database.sql.execute(schema)] == expected
    store.close()


def test_what_a_fleet_has_made_is_remembered_and_an_unreadable_row_is_set_aside(path: Path) -> None:
    good, bad = Ref(Kind.PORT, "good"), Ref(Kind.NETWORK, "bad")
    store = Store(path)
    memory = Memory("c0ffee", 7, accepted=2, accepted_revision=5)
    store.fleet.save(memory, {good: Known(3, "value", "tag"), bad: Known(4, "value")})
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE fleet SET generation = 'none' WHERE id = 'bad'")
        db.commit()
    store = Store(path)
    assert store.fleet.memory == memory and store.fleet.known == {good: Known(3, "value", "tag")}
    assert [aside.key for aside in store.set_aside.all()] == ["bad"]
    store.fleet.save(known={bad: Known(5, "")})
    store.fleet.save(gone=frozenset({good}))
    store.close()
    store = Store(path)
    assert store.fleet.known == {bad: Known(5, "")} and store.set_aside.all() == []
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE meta SET value = '{' WHERE key = 'fleet'")
        db.commit()
    store = Store(path)  # no etcd is of that name: an operator has to accept one
    assert store.fleet.memory.cluster == "unreadable" and store.fleet.known
    store.close()


def test_a_physical_network_that_cannot_be_read_is_set_aside_until_it_is_put_again(path: Path) -> None:
    network = PhysicalNetworkSpec(ovs=OvsUplinkSpec())
    store = Store(path)
    for name in ("bad", "good"):
        store.physical_networks.save(name, network)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE physical_networks SET spec = '{' WHERE name = 'bad'")
        db.commit()
    store = Store(path)
    assert store.physical_networks.all() == {"good": network}
    assert [aside.key for aside in store.set_aside.all()] == ["bad"]
    store.physical_networks.save("bad", network)
    assert store.set_aside.all() == []
    store.close()


def test_a_port_cannot_join_a_physical_network_that_was_deleted_meanwhile(store: Store) -> None:
    name = record("p1").spec.network.physical_network
    assert name is not None
    network = PhysicalNetworkSpec(ovs=OvsUplinkSpec())
    store.physical_networks.save(name, network)
    store.save([record("p1")])
    store.physical_networks.forget(name)
    store.save([record("p1")])  # it was there before
    with pytest.raises(Conflict, match=f"physical network {name} was deleted meanwhile"):
        store.save([record("p2")])
    store.physical_networks.save(name, network)
    store.save([record("p2")])
    store.physical_networks.forget(name, stays=True)
    store.save([record("p3")])  # the configuration has it


def test_what_is_in_quarantine_is_nobodys_and_stays_so(store: Store, path: Path) -> None:
    store.save([record("p1", vf(1))])
    store.quarantine({vf(1): "first", vf(2): "second"})
    store.quarantine({vf(1): "third"})
    assert store.claims() == {vf(1): "p1", vf(2): NOBODY}
    other = Store(path)
    assert other.unfit() == {vf(1): "first", vf(2): "second"}, "the first reason stays"
    other.close()
    store.release([vf(1), vf(3)])
    store.save([], forget=["p1"])
    assert store.unfit() == {vf(2): "second"} and store.claims() == {vf(2): NOBODY}


def test_what_changed_hands_since_it_was_looked_at_is_not_to_be_taken(store: Store) -> None:
    store.save([record("p1", vf(1)), record("p2", vf(2))])
    looked_at = store.commit_sequence()
    store.save([record("p3", vf(3))])
    store.save([replace(record("p2", vf(2)), state=PortState.ACTIVE)], forget=["p1", "p3"])
    with store.claiming(looked_at) as taken:
        assert taken == {vf(1): NOBODY, vf(2): "p2", vf(3): NOBODY}
    with store.claiming(store.commit_sequence()) as taken:
        assert taken == {vf(2): "p2"}


def test_who_chooses_and_saves_within_claiming_is_never_refused(store: Store, path: Path) -> None:
    def take(number: int) -> bool:
        looked_at = store.commit_sequence()
        with store.claiming(looked_at) as taken:
            free = [vf(n) for n in range(8) if vf(n) not in taken]
            if not free:
                return False
            store.save([record(f"p{number}", free[0])])
        return True

    with ThreadPoolExecutor(64) as threads:
        won = list(threads.map(take, range(64)))
    assert won.count(True) == 8
    assert {key for key, _ in claims_in(path)} == {vf(n).key for n in range(8)}


# -- when it cannot be written -------------------------------------------------------------------


def test_a_locked_file_is_not_writable_and_later_is(path: Path) -> None:
    store = Store(path)
    store.database.sql.execute("PRAGMA busy_timeout=10")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(HostError, match="cannot be written"):
        store.save([record()])
    assert "locked" in store.database.failure
    assert store.get("p1") is None, "what is not in the file is not in memory"
    other.execute("ROLLBACK")
    other.close()
    store.save([record()])
    assert store.database.failure == ""
    store.close()


def test_a_file_that_could_not_be_opened_for_writing_is_opened_again(path: Path) -> None:
    """SQLite falls back to reading if the disk refuses for a moment; the agent does not stay with that."""
    store = Store(path)
    store.database.sql.close()
    store.database.sql = sqlite3.connect(
        f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    with pytest.raises(HostError, match="readonly database"):
        store.save([record()])
    assert store.database.failure
    store.database.try_to_write()
    assert not store.database.failure
    store.save([record()])
    assert store.get("p1") is not None
    store.close()


def test_shared_memory_that_could_not_be_opened_for_writing_is_opened_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections of a process have the same -shm, and it stays as it was opened by the first of them."""
    before = Store(path)
    killed = tmp_path / "killed"
    killed.mkdir()
    for end in ("", "-wal", "-shm"):
        shutil.copy(f"{path}{end}", killed / f"{path.name}{end}")
    before.close()
    real = sqlite3.connect
    with monkeypatch.context() as refusing:

        def connect(where: Path, **options: Any) -> sqlite3.Connection:
            return real(f"file:{where}?readonly_shm=1", uri=True, **options)  # as if open(2) gave EACCES

        refusing.setattr(sqlite3, "connect", connect)
        store = Store(killed / path.name)
        assert "readonly" in store.database.failure
        store.database.try_to_write()
        assert "readonly" in store.database.failure
    store.database.try_to_write()
    assert not store.database.failure
    store.save([record()])
    assert store.get("p1") is not None
    store.close()


def test_a_file_that_cannot_be_opened_again_is_opened_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two attempts of which the first was for reading only."""
    store = Store(path)
    real, opened = sqlite3.connect, 0

    def connect(where: Path, **options: Any) -> sqlite3.Connection:
        nonlocal opened
        opened += 1
        if opened > 1:
            raise sqlite3.OperationalError("unable to open database file")
        return real(f"file:{where}?mode=ro", uri=True, **options)

    store.database.sql.close()
    store.database.sql = real(f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
    with monkeypatch.context() as refusing:
        refusing.setattr(sqlite3, "connect", connect)
        for _ in range(2):
            store.database.try_to_write()
            assert store.database.failure
            with pytest.raises(HostError, match="the store cannot be written"):
                store.save([record()])
    store.database.try_to_write()
    assert not store.database.failure
    store.save([record()])
    assert store.get("p1") is not None
    store.close()


# -- tasks ---------------------------------------------------------------------------------------


def test_a_task_is_journalled_once(store: Store) -> None:
    first, is_new = store.tasks.write(task())
    again = store.tasks.write(task(fingerprint="other", body=b"other"))
    assert is_new and again == (first, False)
    assert (first.body, first.fingerprint, first.attempts) == (b"\x00\xff{}", "f", 0)


def test_open_tasks_are_those_to_do_and_to_deliver_in_order(store: Store, path: Path) -> None:
    for name in ("z", "a", "m", "b"):
        store.tasks.write(task(name))
    store.tasks.update(task("a", state=TaskState.DONE, attempts=3, result={"success": True}))
    store.tasks.update(task("m", state=TaskState.DELIVERED))
    other = Store(path)
    assert [(t.taskuuid, t.state) for t in other.tasks.open()] == [
        ("z", TaskState.ACCEPTED),
        ("a", TaskState.DONE),
        ("b", TaskState.ACCEPTED),
    ]
    done = other.tasks.get("a")
    assert done is not None
    assert done.public().model_dump() == {
        "taskuuid": "a",
        "state": "done",
        "attempts": 3,
        "result": {"success": True},
    }
    other.close()


def test_only_what_is_over_and_old_is_forgotten(store: Store) -> None:
    for name, state in (
        ("t1", TaskState.ACCEPTED),
        ("t2", TaskState.DONE),
        ("t3", TaskState.DELIVERED),
        ("t4", TaskState.EXPIRED),
    ):
        store.tasks.update(replace(store.tasks.write(task(name))[0], state=state))
    store.tasks.forget(0.0)
    assert store.tasks.get("t3") is not None
    store.tasks.forget(2e10)
    assert [name for name in ("t1", "t2", "t3", "t4") if store.tasks.get(name)] == ["t1", "t2"]


def test_ports_share_the_parts_that_they_have_alike(tmp_path: Path) -> None:
    """Also in a process that has read them, where each was text of its own."""
    path = tmp_path / "agent.db"
    with contextlib.closing(Store(path)) as store:
        specs = [
            PortSpec.model_validate({**SPEC, "vm_id": f"vm{n}", "qos": {"ingress_kbps": 5}}) for n in range(9)
        ]
        store.save([Record(f"p{n}", spec, state=PortState.ACTIVE) for n, spec in enumerate(specs)])
    with contextlib.closing(Store(path)) as again:
        read = [record.spec for record in again.records()]
    assert read == specs
    for part in ("network", "vf", "qos", "port_security"):
        assert len({id(getattr(spec, part)) for spec in read}) == 1, part


def test_what_a_plug_looks_up_does_not_grow_with_the_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in what each claim that is touched costs: its hash."""
    counted = 0
    hash_of = Claim.__hash__

    def counting(claim: Claim) -> int:
        nonlocal counted
        counted += 1
        return hash_of(claim)

    monkeypatch.setattr(Claim, "__hash__", counting)
    costs = []
    for ports in (10, 1_000):
        with contextlib.closing(Store(tmp_path / f"{ports}.db")) as store:
            store.save([record(f"p{n}", vf(n)) for n in range(ports)])
            counted = 0
            with store.claiming(store.commit_sequence()) as taken:
                assert len(taken) == ports
                store.save([record("new", vf(ports))])
            assert store.claims()[vf(ports)] == "new"
            assert not store.any_in("sriov", PortState.FAILED)
            store.save([], forget=["new"])
            assert vf(ports) not in store.claims()
            costs.append(counted)
    assert costs[0] == costs[1], costs


def test_moves_of_claims_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no observation can be older than: a host plugs for months."""
    now = 0.0
    moves = ClaimMoves(lambda: now)
    for number in range(50):
        now += 60
        before = moves.count
        moves.note({f"p{number}": None}, lambda port_id: record(port_id, vf(int(port_id[1:]))))
        assert moves.since(before) == [vf(number)] and moves.since(moves.count) == []
    assert moves.since(0) == [vf(number) for number in range(49, 39, -1)]


@pytest.mark.parametrize("damage", [b"CRE\xc1TE", b"CREATF"])
def test_a_schema_that_is_damaged_is_moved_aside(path: Path, damage: bytes) -> None:
    """SQLite quotes the damaged bytes, which need not be text."""
    with contextlib.closing(Store(path)) as store:
        store.save([record("p1")])
    content = path.read_bytes()
    at = content.rindex(b"CREATE TABLE")
    path.write_bytes(content[:at] + damage + content[at + len(damage) :])
    assert store_file.check(path)
    with contextlib.closing(Store(path)) as store:
        assert store.records() == []
    assert len(store_file.damaged(path.parent)) == 1
