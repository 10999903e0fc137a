"""The worker: calls in order and in batches, looks in between, and an answer for everyone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import service as service_module
from agents.ports.call import NEXT_TRY_S, Call
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from agents.worker import BackendWorker
from netplugin.api.batch_models import Batch, PortFilter
from netplugin.api.errors import (
    BackendUnavailable,
    HostError,
    NetpluginError,
    OperationTimeout,
    Overloaded,
)
from netplugin.api.models import PortSpec, ReconcileReport
from netplugin.backend import Intent
from netplugin.host.locks import Locks
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Wake
from tests.unit.agent import SPEC, Agent, agent, served_agent
from tests.unit.fakes import FakeBackend, FakeHost

DEADLINE_S = 90.0
MAKE_SPEC = PortSpec.model_validate(SPEC)


def put(port_id: str = "p1", deadline_s: float = 30.0) -> Call:
    return Call(Record(port_id, MAKE_SPEC), time.monotonic() + deadline_s)


def delete(port_id: str = "p1", deadline_s: float = 30.0) -> Call:
    return Call(Intent(port_id, None), time.monotonic() + deadline_s)


def in_time() -> float:
    return time.monotonic() + DEADLINE_S


class Scripted:
    """Stands in for the reconciler: keeps what it is asked to do, and does what a test says."""

    def __init__(self) -> None:
        backend = SimpleNamespace(watch=lambda wake: None)
        self.ports = SimpleNamespace(name="scripted", backend=backend)
        self.guests = SimpleNamespace(later=None)
        self.plug = self
        self.batches: list[list[Call]] = []
        self.looks: list[Any] = []
        self.events: list[str] = []
        self.is_unsettled = False
        #: Operations that are not done now.
        self.busy: list[Call] = []
        self.resumed: list[list[str]] = []
        self.on_serve: Callable[[], None] = lambda: None
        self.on_check: Callable[[], None] = lambda: None
        self.looked = threading.Semaphore(0)

    def serve(self, batch: list[Call]) -> list[Call]:
        self.batches.append(batch)
        self.events.append("serve")
        self.on_serve()
        for op in batch:
            if op.future.set_running_or_notify_cancel() and op not in self.busy:
                op.future.set_result(op.port_id)  # type: ignore[arg-type]
        return [op for op in batch if op in self.busy]

    def resume(self, batch: list[Call], *, last: bool = False) -> list[Call]:
        self.resumed.append([op.port_id for op in batch])
        again = [op for op in batch if op in self.busy and not last]
        for op in batch:
            if op not in again:
                op.future.set_result(op.port_id)  # type: ignore[arg-type]
        return again

    def check(self, ports: Any = None, **_: Any) -> ReconcileReport:
        self.looks.append(ports)
        self.events.append("look")
        self.looked.release()
        self.on_check()
        return ReconcileReport(dry_run=False, ports=0, changes=[])

    def unsettled(self) -> bool:
        return self.is_unsettled

    def order(self) -> list[str]:
        return [op.port_id for batch in self.batches for op in batch]


def make(reconciler: Any, **options: Any) -> BackendWorker:
    settings = {
        "batch_size": 64,
        "interval_s": 3600.0,
        "max_waiting": 100,
        "max_jobs": 4,
    } | options
    return BackendWorker(reconciler, Supervisor(), **settings)


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def held(scripted: Scripted) -> Iterator[tuple[BackendWorker, threading.Event]]:
    """A running worker that is busy with one operation until the event is set."""
    worker, busy, go_on = (
        make(scripted, batch_size=4, max_waiting=8),
        threading.Event(),
        threading.Event(),
    )

    def hold() -> None:
        busy.set()
        assert go_on.wait(DEADLINE_S)

    scripted.on_serve = hold
    worker.start()
    worker.submit(put("first"))
    assert busy.wait(DEADLINE_S)
    yield worker, go_on
    go_on.set()
    worker.stop(in_time())


def result(op: Call) -> Any:
    return op.future.result(DEADLINE_S)


# -- the queue -----------------------------------------------------------------------------------


def test_what_comes_meanwhile_shares_the_next_batch(
    scripted: Scripted, held: tuple[BackendWorker, threading.Event]
) -> None:
    worker, go_on = held
    ops = [put(f"p{n}") for n in range(5)]
    for op in ops:
        worker.submit(op)
    go_on.set()
    assert [result(op) for op in ops] == [op.port_id for op in ops]
    assert [len(batch) for batch in scripted.batches] == [1, 4, 1]  # as large as it may be


def test_operations_of_one_port_keep_their_order(
    scripted: Scripted, held: tuple[BackendWorker, threading.Event]
) -> None:
    worker, go_on = held
    ops: list[Call] = [put("a"), delete("a"), put("b"), put("a"), delete("b")]
    worker.submit(*ops)
    go_on.set()
    for op in ops:
        result(op)
    put_a, delete_a, put_b, again, delete_b = ops
    assert scripted.batches[1:] == [[put_a, put_b], [delete_a, delete_b], [again]]


def test_one_too_many_is_refused_and_with_it_none_is_taken(
    scripted: Scripted, held: tuple[BackendWorker, threading.Event]
) -> None:
    worker, go_on = held
    waiting = [put(f"p{n}") for n in range(7)]
    worker.submit(*waiting)
    refused = [put("x"), put("y")]
    with pytest.raises(Overloaded) as full:
        worker.submit(*refused)
    assert full.value.retryable and "7 operations" in full.value.detail
    worker.submit(put("last"))  # one still fits
    go_on.set()
    for op in waiting:
        result(op)
    wait_until(lambda: len(scripted.order()) == 9)
    assert not {"x", "y"} & set(scripted.order())


def test_an_unexpected_failure_is_answered_and_the_worker_goes_on(scripted: Scripted) -> None:
    worker = make(scripted)
    scripted.on_serve = lambda: (_ for _ in ()).throw(RuntimeError("unexpected"))
    worker.start()
    broken = put("p1")
    worker.submit(broken)
    with pytest.raises(HostError) as error:
        result(broken)
    assert error.value.port_id == "p1" and "unexpected" in error.value.detail
    scripted.on_serve = lambda: None
    fine = put("p2")
    worker.submit(fine)
    assert result(fine) == "p2"
    worker.stop(in_time())


# -- what the host asks to try again -------------------------------------------------------------


def test_what_is_to_be_tried_again_holds_up_no_other_port(scripted: Scripted, clock: Clock) -> None:
    worker, first, behind, other = make(scripted, clock=clock), put("p1"), delete("p1"), put("p2")
    settle(worker, clock)
    scripted.busy = [first]
    worker.submit(first)
    assert turn(worker)
    worker.submit(behind, other)
    assert turn(worker) and not turn(worker)
    assert scripted.order() == ["p1", "p2"] and other.future.done()
    pauses = []
    for tries in range(1, 7):
        pauses.append(worker.idle_s())
        clock.passes(pauses[-1])
        assert turn(worker) and scripted.resumed == [["p1"]] * tries
    assert pauses == sorted(pauses) and pauses[0] < 0.1 and pauses[-1] == NEXT_TRY_S
    assert worker.is_at("p1") and not first.future.done() and not behind.future.done()
    scripted.busy = []
    clock.passes(NEXT_TRY_S)
    assert turn(worker) and first.future.done() and not behind.future.done()
    assert turn(worker) and behind.future.done()
    assert not worker.is_at("p1") and not turn(worker)


def test_who_is_answered_may_go_to_another_backend_at_once(scripted: Scripted, clock: Clock) -> None:
    """What follows a DELETE is not refused as if the port were still on this one."""
    worker, gone, at = make(scripted, clock=clock), delete("p1"), list[bool]()
    settle(worker, clock)
    gone.future.add_done_callback(lambda _: at.append(worker.is_at("p1")))
    worker.submit(gone)
    assert worker.is_at("p1") and turn(worker) and at == [False]


def test_what_waited_already_stays_behind_what_is_tried_again(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock, batch_size=1)
    settle(worker, clock)
    calls = [put("p1"), delete("p1"), put("p1"), put("p2")]
    scripted.busy = calls[:1]
    worker.submit(*calls)
    while turn(worker):
        pass
    assert scripted.order() == ["p1", "p2"]
    scripted.busy = []
    clock.passes(NEXT_TRY_S)
    while turn(worker):
        pass
    served = [op for batch in scripted.batches for op in batch]
    assert served == [calls[0], calls[3], calls[1], calls[2]]
    assert all(op.future.done() for op in calls)


def test_new_calls_and_those_that_are_tried_again_take_turns(scripted: Scripted, clock: Clock) -> None:
    """Also where each try takes longer than the pause between two."""
    worker = make(scripted, clock=clock, batch_size=1)
    settle(worker, clock)
    scripted.busy = [put(f"sick{number}") for number in range(6)]
    worker.submit(*scripted.busy)
    while turn(worker):
        pass
    for number in range(3):
        worker.submit(put(f"p{number}"))
        for _ in range(2):
            clock.passes(10 * NEXT_TRY_S)
            assert turn(worker)
        assert scripted.order()[-1] == f"p{number}" and len(scripted.resumed) == number + 1
    tried = scripted.resumed[0] + scripted.resumed[1]
    assert set(tried) == {op.port_id for op in scripted.busy}, "none is left out"


def test_a_stop_tries_once_more_and_answers(scripted: Scripted) -> None:
    worker, first, behind = make(scripted), put("p1"), delete("p1")
    scripted.busy = [first]
    worker.start()
    worker.submit(first, behind)
    wait_until(lambda: bool(scripted.resumed))
    assert worker.stop(in_time())
    assert result(first) == "p1", "the last try"
    with pytest.raises(BackendUnavailable):
        result(behind)


def test_a_try_that_fails_unexpectedly_is_answered_once(scripted: Scripted, clock: Clock) -> None:
    worker, first, behind = make(scripted, clock=clock), put("p1"), delete("p1")
    settle(worker, clock)
    scripted.busy = [first]
    worker.submit(first, behind)
    assert turn(worker)
    scripted.resume = lambda batch, last=False: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    clock.passes(NEXT_TRY_S)
    assert turn(worker)
    assert isinstance(first.future.exception(), NetpluginError)
    assert turn(worker) and behind.future.done() and not worker.is_at("p1")


# -- the size of a batch -------------------------------------------------------------------------


class Clock:
    """Time that passes when a test lets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sizes(worker: BackendWorker, scripted: Scripted, number: int) -> list[int]:
    """Of so many batches, all of them full."""
    served = len(scripted.batches)
    worker.submit(*(put(f"p{n}") for n in range(1024 * number)))
    for _ in range(number):
        assert turn(worker)
    return [len(batch) for batch in scripted.batches[served:]]


def test_a_batch_grows_while_it_is_quick_and_full(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock, batch_size=32, max_waiting=100_000)
    settle(worker, clock)
    scripted.on_serve = lambda: clock.passes(0.1)
    worker.submit(*(put(f"p{n}") for n in range(31)))
    assert turn(worker) and not turn(worker)
    # The first was not full: its time says nothing about a larger one.
    assert sizes(worker, scripted, 6) == [32, 64, 128, 256, 256, 256]
    scripted.on_serve = lambda: clock.passes(0.4)
    assert sizes(worker, scripted, 2) == [256, 256], "neither quick nor slow"


def test_a_batch_shrinks_while_it_is_slow(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock, batch_size=32, max_waiting=100_000)
    settle(worker, clock)
    scripted.on_serve = lambda: clock.passes(2.0)
    worker.submit(*(put(f"p{n}") for n in range(3)))
    assert turn(worker), "whether it was full or not"
    assert sizes(worker, scripted, 4) == [16, 8, 4, 4]


def test_a_larger_batch_that_the_operator_set_does_not_shrink_by_being_quick(
    scripted: Scripted, clock: Clock
) -> None:
    worker = make(scripted, clock=clock, batch_size=1024, max_waiting=100_000)
    settle(worker, clock)
    assert sizes(worker, scripted, 2) == [1024, 1024]


# -- deadlines and callers that are gone, with the real reconciler -------------------------------


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "agent.db")) as made:
        yield made


@pytest.fixture
def idle(store: Store, host: FakeHost) -> BackendWorker:
    """A worker with the real reconciler, before its first look and without a thread."""
    backend: Any = FakeBackend("fake", host)
    return make(Reconciler(backend, store, Metrics(store)), clock=Clock())


def test_past_its_deadline_it_is_answered_without_touching_the_host(
    idle: BackendWorker, store: Store, host: FakeHost
) -> None:
    host.on_observe = lambda _: pytest.fail("the host was read")
    late: list[Call] = [put("p1", deadline_s=-1.0), delete("p2", deadline_s=-1.0)]
    idle.submit(*late)
    assert idle.turn()
    for op in late:
        with pytest.raises(OperationTimeout) as error:
            result(op)
        assert (error.value.port_id, error.value.step) == (op.port_id, "queue")
    assert host.written == [] and store.records() == []


def test_an_operation_whose_caller_is_gone_is_not_done(idle: BackendWorker, host: FakeHost) -> None:
    gone, other = put("p1"), put("p2")
    gone.future.cancel()
    idle.submit(gone, other)
    assert idle.turn()
    assert result(other).port_id == "p2"
    assert list(host.ports) == ["p2"]


def test_a_caller_that_gave_up_on_a_late_operation_hurts_no_neighbour(
    idle: BackendWorker, host: FakeHost
) -> None:
    """It waited for its deadline and the grace, and cancelled: there is nobody left to answer."""
    gone, other = put("p1", deadline_s=-1.0), put("p2")
    gone.future.cancel()
    idle.submit(gone, other)
    assert idle.turn()
    assert result(other).port_id == "p2"
    assert list(host.ports) == ["p2"]


def test_a_delete_goes_behind_a_put_that_still_waits(tmp_path: Path) -> None:
    """A platform that gave up on its PUT and deletes must not find the port there later."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        busy.set()
        assert go_on.wait(DEADLINE_S)

    async def scenario(running: Agent) -> None:
        running.host.on_observe = hold
        first = asyncio.create_task(running.service.ports.put("first", MAKE_SPEC))
        await asyncio.to_thread(busy.wait, DEADLINE_S)
        plug = asyncio.create_task(running.service.ports.put("p1", MAKE_SPEC))
        await asyncio.sleep(0)
        calls = [first, plug, asyncio.create_task(running.service.ports.delete("p1"))]
        batch = Batch.model_validate({"delete": ["first", "never-there"]})
        answer = asyncio.create_task(running.service.ports.batch(batch))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*calls)
        assert [result.status for result in (await answer).results] == [204, 204]
        assert list(running.service.ports.find(PortFilter())) == [] and running.host.ports == {}
        await running.service.ports.delete("p1")  # nothing is under way any more: nothing to wait for

    with agent(tmp_path) as running:
        asyncio.run(asyncio.wait_for(scenario(running), DEADLINE_S))


# -- looks ---------------------------------------------------------------------------------------


def turn(worker: BackendWorker) -> bool:
    """What the worker's thread would do next, if anything."""
    due = worker.idle_s() == 0
    assert worker.turn() == due
    return due


def settle(worker: BackendWorker, clock: Clock) -> None:
    """Past the first look."""
    clock.passes(worker.idle_s())
    assert turn(worker)
    assert not turn(worker)


def test_the_first_look_comes_with_the_backends_word_or_without(scripted: Scripted, clock: Clock) -> None:
    woken, quiet = make(scripted, clock=clock), make(scripted, clock=clock)
    woken.wake(Wake("connected"))
    assert turn(woken) and woken.looked_once.is_set()
    assert not turn(quiet) and not quiet.looked_once.is_set()
    settle(quiet, clock)
    assert quiet.looked_once.is_set()
    assert scripted.looks == [None, None]


def test_a_look_at_everything_comes_every_interval(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock, interval_s=60.0)
    settle(worker, clock)
    clock.passes(59.0)
    assert not turn(worker)
    clock.passes(1.0)
    assert turn(worker) and not turn(worker)
    assert scripted.looks == [None, None]


def test_ports_that_moved_are_looked_at_together(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock)
    settle(worker, clock)
    worker.wake(Wake("row changed", frozenset({"a"})))
    worker.wake(Wake("row changed", frozenset({"b", "a"})))
    assert turn(worker) and not turn(worker)
    assert scripted.looks[1:] == [frozenset({"a", "b"})]
    worker.wake(Wake("row changed", frozenset({"a"})))
    worker.wake(Wake("vswitchd is back"))  # all of them are among all
    assert turn(worker) and not turn(worker)
    assert scripted.looks[2:] == [None]


def test_calls_jobs_and_looks_take_turns(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock)
    settle(worker, clock)
    for number in range(3):
        worker.wake(Wake("row changed", frozenset({"a"})))
        worker.job(lambda: scripted.events.append("job"), clock.now + 30)
        worker.submit(put(f"p{number}"))
        for _ in range(3):
            assert turn(worker)
    assert not turn(worker)
    assert scripted.events[1:] == ["serve", "job", "look"] * 3


@given(st.lists(st.sampled_from(["call", "job", "wake"]), min_size=1, max_size=40))
def test_nothing_waits_for_more_than_one_turn_of_each_other(asked: list[str]) -> None:
    """However much comes of the others: they may take one turn each before it."""
    scripted = Scripted()
    worker = make(scripted, clock=Clock(), batch_size=1, max_jobs=100)
    left = Counter(asked)
    left["wake"] = min(left["wake"], 1)  # one look is made for all that wakes
    for number, what in enumerate(asked):
        if what == "call":
            worker.submit(put(f"p{number}"))
        elif what == "job":
            worker.job(lambda: scripted.events.append("job"), 3600.0)
        else:
            worker.wake(Wake("row changed", frozenset({"a"})))
    waited: Counter[str] = Counter()
    while +left:
        assert turn(worker)
        done = {"serve": "call", "job": "job", "look": "wake"}[scripted.events[-1]]
        waited.update(what for what in left if left[what])
        waited[done] = 0
        left[done] -= len(scripted.batches[-1]) if done == "call" else 1
        waited = Counter({what: turns for what, turns in waited.items() if left[what]})
        assert all(turns < 3 for turns in waited.values())
    assert not turn(worker)


def test_a_look_that_wakes_looks_leaves_most_of_the_time(scripted: Scripted, clock: Clock) -> None:
    """What changes because it is looked at is looked at with pauses."""
    worker = make(scripted, clock=clock)
    settle(worker, clock)

    def look() -> None:
        clock.passes(0.1)
        worker.wake(Wake("qdisc changed"))

    scripted.on_check = look
    worker.wake(Wake("qdisc changed"))
    for _ in range(3):
        assert turn(worker), "the first is at once"
        assert not turn(worker)
        assert worker.idle_s() == pytest.approx(0.4)
        clock.passes(worker.idle_s())
    scripted.on_check = lambda: clock.passes(60.0)
    assert turn(worker)
    worker.wake(Wake("vswitchd is back"))
    assert worker.idle_s() == 5.0


# -- jobs -----------------------------------------------------------------------------------------


def test_one_job_too_many_is_refused(held: tuple[BackendWorker, threading.Event]) -> None:
    worker, go_on = held
    waiting = [worker.job(lambda: 1, in_time()) for _ in range(4)]
    with pytest.raises(Overloaded) as full:
        worker.job(lambda: 1, in_time())
    assert full.value.retryable and "max_waiting_reads" in str(full.value.fix)
    go_on.set()
    assert [future.result(DEADLINE_S) for future in waiting] == [1] * 4


def test_a_job_is_not_done_late_nor_for_nobody(
    held: tuple[BackendWorker, threading.Event],
) -> None:
    worker, go_on = held
    done: list[str] = []
    late = worker.job(lambda: done.append("late"), time.monotonic() - 1)
    gone = worker.job(lambda: done.append("gone"), in_time())
    last = worker.job(lambda: done.append("last"), in_time())
    assert gone.cancel()
    go_on.set()
    last.result(DEADLINE_S)
    assert done == ["last"]
    with pytest.raises(OperationTimeout):
        late.result(DEADLINE_S)


def test_what_is_not_settled_is_tried_again_less_and_less_often(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock)
    scripted.is_unsettled = True
    clock.passes(worker.idle_s())
    waits = []
    assert turn(worker)
    for _ in range(9):
        waits.append(worker.idle_s())
        clock.passes(waits[-1])
        assert turn(worker)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    scripted.is_unsettled = False
    clock.passes(30.0)
    assert turn(worker) and worker.idle_s() > 60.0, "the next is that of the interval"
    scripted.is_unsettled = True
    worker.submit(put())
    assert turn(worker)
    assert worker.idle_s() == 0.5, "once all was well, it begins again"


def test_a_host_that_is_back_is_tried_at_once(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock)
    scripted.is_unsettled = True
    clock.passes(2.0)
    for _ in range(6):
        turn(worker)
        clock.passes(worker.idle_s())
    worker.wake(Wake("vswitchd is back"))
    assert turn(worker)
    assert worker.idle_s() == 0.5


def test_calls_that_go_on_do_not_put_off_the_next_try(scripted: Scripted, clock: Clock) -> None:
    """One port that hangs must not wait for the others to be quiet."""
    worker = make(scripted, clock=clock)
    settle(worker, clock)
    scripted.is_unsettled = True
    for _ in range(100):
        worker.submit(put("p"))
        while turn(worker):
            pass
        clock.passes(0.4)
    # 40 s in tries after 0.5, 1, 2, 4, 8, 16, 30 s
    assert len(scripted.looks) - 1 >= 5


def test_calls_that_never_end_delay_a_look_within_a_bound(scripted: Scripted, clock: Clock) -> None:
    worker = make(scripted, clock=clock, interval_s=60.0)
    settle(worker, clock)
    for _ in range(200):
        worker.submit(put("p"))
        assert turn(worker)  # one is always waiting
        worker.submit(put("q"))
        clock.passes(1.0)
    assert len(scripted.looks) - 1 == 3


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("failure", [HostError("no", step="observe"), RuntimeError("unexpected")])
def test_a_look_that_fails_is_tried_again(scripted: Scripted, clock: Clock, failure: Exception) -> None:
    def fail() -> None:
        raise failure

    scripted.on_check = fail
    worker = make(scripted, clock=clock)
    for wait_s in (2.0, 0.5, 1.0):
        assert worker.idle_s() == wait_s
        clock.passes(wait_s)
        assert turn(worker) and not turn(worker)
    assert not worker.looked_once.is_set()
    scripted.on_check = lambda: None
    clock.passes(worker.idle_s())
    assert turn(worker) and worker.looked_once.is_set()


# -- the end -------------------------------------------------------------------------------------


def test_a_stop_ends_after_the_current_batch_and_answers_the_rest(
    scripted: Scripted, held: tuple[BackendWorker, threading.Event]
) -> None:
    worker, go_on = held
    waiting: list[Call] = [put("p1"), delete("p1")]
    worker.submit(*waiting)
    worker.refuse()
    with pytest.raises(BackendUnavailable):
        worker.submit(put("late"))
    go_on.set()
    assert worker.stop(in_time())
    for op in waiting:
        with pytest.raises(BackendUnavailable) as error:
            result(op)
        assert error.value.port_id == "p1" and error.value.retryable
    assert scripted.order() == ["first"]


def test_a_stop_tells_whether_the_thread_has_ended(
    held: tuple[BackendWorker, threading.Event],
) -> None:
    worker, go_on = held
    assert not worker.stop(time.monotonic()), "it is at a batch"
    go_on.set()
    assert worker.stop(in_time())


@pytest.mark.parametrize("hangs", [False, True])
def test_locks_are_given_back_once_nothing_is_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Another agent that waits for them would work while these are in progress."""
    monkeypatch.setattr(service_module, "_STOP_S", 0.0 if hangs else DEADLINE_S)
    begun, go_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        go_on.wait(DEADLINE_S)

    name = f"test-{uuid.uuid4()}"
    with agent(tmp_path) as running, closing(Locks()) as other:
        assert running.shared.locks.take(name) is None
        if hangs:
            running.host.on_observe = hang
            running.host.wake(Wake("look"))
            assert begun.wait(DEADLINE_S)
        running.service.stop()
        assert (other.take(name) is None, running.host.closed) == (not hangs, not hangs)
        monkeypatch.setattr(service_module, "_STOP_S", DEADLINE_S)
        go_on.set()


def test_a_stop_answers_who_waits_for_a_look(held: tuple[BackendWorker, threading.Event]) -> None:
    worker, go_on = held
    looks = [worker.reconcile(in_time(), dry_run=True, remove_orphans=False)]
    worker.refuse()
    with pytest.raises(BackendUnavailable):
        worker.reconcile(in_time(), dry_run=True, remove_orphans=False)
    go_on.set()
    assert worker.stop(in_time())
    for look in looks:
        with pytest.raises(BackendUnavailable):
            look.result(DEADLINE_S)


def test_a_stop_is_not_held_up_by_callers_that_are_gone(
    held: tuple[BackendWorker, threading.Event],
) -> None:
    """The server cancels what it does not want to wait for, and then stops the workers."""
    worker, go_on = held
    gone, there = put("p1"), put("p2")
    worker.submit(gone, there)
    gone.future.cancel()
    worker.refuse()
    go_on.set()
    assert worker.stop(in_time())
    with pytest.raises(BackendUnavailable):
        result(there)


def test_a_look_is_made_for_who_asks_and_its_failure_is_theirs(scripted: Scripted) -> None:
    worker = make(scripted)
    worker.start()
    assert worker.reconcile(in_time(), dry_run=True, remove_orphans=False).result(DEADLINE_S).ports == 0
    refusal = HostError("no", step="observe")

    def fail() -> None:
        raise refusal

    scripted.on_check = fail
    with pytest.raises(HostError):
        worker.reconcile(in_time(), dry_run=True, remove_orphans=False).result(DEADLINE_S)
    worker.stop(in_time())


def test_what_nobody_waits_for_any_more_is_not_looked_at(tmp_path: Path) -> None:
    """The caller of a read closes its connection while others have their turns."""
    busy, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        busy.set()
        assert go_on.wait(DEADLINE_S)

    with agent(tmp_path) as running, served_agent(running) as url:
        worker = running.service._workers["fake"]
        running.host.on_observe = hold
        calls = threading.Thread(target=lambda: httpx.post(f"{url}/v1/reconcile", timeout=DEADLINE_S))
        calls.start()
        assert busy.wait(DEADLINE_S)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(b"POST /v1/reconcile HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n")
            wait_until(lambda: bool(worker._schedule.jobs))
        wait_until(lambda: worker._schedule.jobs[0].future.cancelled())
        go_on.set()
        calls.join(DEADLINE_S)


def test_a_thread_that_makes_no_progress_is_reported(
    scripted: Scripted, held: tuple[BackendWorker, threading.Event]
) -> None:
    worker, go_on = held
    first = worker.stuck_s()
    wait_until(lambda: worker.stuck_s() > first)
    go_on.set()
    wait_until(lambda: worker.stuck_s() == 0.0)
    assert make(scripted).stuck_s() == float("inf"), "there is no thread"
