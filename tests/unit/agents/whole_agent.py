"""The whole agent but its API on one thread: calls, workers, store and host move when a test says so.

The host is in memory. A write to it is done, refused, lost, answered with a request to try again, or
reported as timed out; then it lands later, after whatever the agent has done about it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from agents.service import Service
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin import options
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    HostError,
    NetpluginError,
    OperationTimeout,
    TryAgain,
)
from netplugin.api.models import Features, NetworkSpec, PortSpec
from netplugin.backend import Applied, Change, Claim, Intent, Observation, Overlay, Plan
from netplugin.host.shared import Host
from netplugin.host.usability import Usability, Wake
from tests.unit.agent import view_of
from tests.unit.agents.test_reconciler_crash import Clock, Crash
from tests.unit.fakes import FakeBackend, FakeHost, Seen, Write, WriteNetwork
from tests.unit.tuning.machines import Tree, load
from tests.unit.tuning.trees import tree

T = TypeVar("T")
SOFT, CARD = "soft", "card"
#: Fewer than ports ask for.
VFS = 3
#: The turns of the event loop until all calls wait for a worker again: no call takes half as many.
_TURNS = 60
#: The work of a worker until it is idle: no number of calls here needs a tenth.
_MOST_WORK = 500


class Fate(Enum):
    """What becomes of a write to the host."""

    REFUSED = "refused"
    LOST = "lost"
    BUSY = "busy"
    LATE = "late"
    #: It is done, and the port does not work until it is removed.
    FAULTY = "faulty"


@dataclass
class LateHost(FakeHost):
    """``fates`` are those of the next writes to each port, in order; ``seen_fates`` those that came true."""

    vfs: dict[str, tuple[Claim, ...]] = field(default_factory=dict)
    fates: dict[str, list[Fate]] = field(default_factory=dict)
    seen_fates: Counter[Fate] = field(default_factory=Counter)
    #: Writes that were sent and not done in time, with what does them.
    under_way: list[tuple[Change, Callable[[], None]]] = field(default_factory=list)
    #: Ports that landed late: they may hold what the agent has given to another port since.
    landed: set[str] = field(default_factory=set)

    def land(self) -> None:
        """All that is under way lands, in order, and the agent hears of it."""
        under_way, self.under_way = self.under_way, []
        for change, do in under_way:
            with suppress(HostError):
                do()
            self.landed |= set(change.ports)
            self.wake(Wake("changed", frozenset(change.ports)))

    def goes_down(self) -> None:
        def unreadable(_: Any) -> None:
            raise BackendUnavailable("not connected", step="observe")

        self.on_observe, self.usability = unreadable, Usability(False, "not connected")

    def comes_back(self) -> None:
        self.on_observe, self.usability = lambda _: None, Usability(True)
        self.wake(Wake("connected"))


@dataclass(frozen=True)
class Take(Write):
    """A port becomes ``spec`` with these claims, or (None) goes and gives them back."""

    claims: tuple[Claim, ...] = ()


class Soft(FakeBackend):
    """The fake backend with a boundary around each read and each write, which may have another fate."""

    features: ClassVar[Features] = Features(
        networks=("flat", "vlan", "vxlan"), port_security=("mac", "ip"), max_queues=8
    )

    def __init__(self, name: str, host: LateHost, clock: Clock) -> None:
        super().__init__(name, host)
        self.there = host
        self._clock = clock

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        self._clock.tick()
        return super().observe(ports, deadline)

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        for change in changes:
            self._clock.tick()
            self.there.land()  # on one connection: in the order in which they were sent
            try:
                self._do(change)
            except NetpluginError as error:
                failed.update({port_id: error.for_port(port_id) for port_id in change.ports})
            self._clock.tick()
        return Applied(failed)

    def _do(self, change: Change) -> None:
        assert isinstance(change, Write | WriteNetwork)
        fate = self._fate(change)
        if fate is Fate.REFUSED:
            raise HostError("the host refuses", step="apply")
        if fate is Fate.BUSY:
            raise TryAgain("the device is being reset", step="apply")
        if fate is Fate.LATE:
            self.there.under_way.append((change, lambda: self._write(change)))
            raise OperationTimeout("no answer in time", step="apply")
        if fate is not Fate.LOST:
            self._write(change)
        if fate is Fate.FAULTY and isinstance(change, Write) and change.spec is not None:
            self.there.faults.update(dict.fromkeys(change.ports, "no memory"))

    def _fate(self, change: Change) -> Fate | None:
        for port_id in change.ports:
            if fates := self.there.fates.get(port_id):
                self.there.seen_fates[fates[0]] += 1
                return fates.pop(0)
        return None

    def _write(self, change: Write | WriteNetwork) -> None:
        super()._write(change)
        self.host.written.clear()
        for port_id in change.ports:
            if isinstance(change, Write) and change.spec is None:
                self.there.faults.pop(port_id, None)
                self.there.landed.discard(port_id)


class Card(Soft):
    """Each port needs a VF, and may have a standby."""

    features: ClassVar[Features] = Features(
        networks=("vlan",), max_queues=8, virtual_functions=True, teaming=True
    )

    def claims(self, intent: Intent, observed: Observation, taken: Mapping[Claim, str]) -> tuple[Claim, ...]:
        """Nothing that another port has, in the store or still on the host."""
        self._clock.tick()
        used = {c: i for i, claims in self.there.vfs.items() for c in claims} | dict(taken)
        pool = [*intent.claims, *(Claim("vf", str(n)) for n in range(VFS))]
        usable = [c for c in pool if used.get(c, intent.port_id) == intent.port_id]
        if not usable:
            raise CapacityExhausted("no VF is free", step="claim")
        return (usable[0],)

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        changes = [
            Take((i.port_id,), i.spec, i.stamp, claims=i.claims if i.spec else ())
            for i in intents
            if observed.specs.get(i.port_id) != i.spec
            or (i.spec is not None and self.there.vfs.get(i.port_id, ()) != i.claims)
            or (i.spec is not None and self.there.stamps.get(i.port_id, "") != i.stamp)
        ]
        return Plan(tuple(sorted(changes, key=lambda change: (len(change.claims), change.ports))))

    def _write(self, change: Write | WriteNetwork) -> None:
        assert isinstance(change, Take)
        [port_id] = change.ports
        for other, claims in self.there.vfs.items():
            if other != port_id and set(claims) & set(change.claims):
                assert self.there.landed & {other, port_id}, f"{other} and {port_id} have the same VF"
                raise HostError(f"the VF is that of {other}", step="apply")
        super()._write(change)
        self.there.vfs[port_id] = change.claims
        if change.spec is None:
            del self.there.vfs[port_id]


class TickingStore(Store):
    """A boundary before and after each commit (within one, SQLite sees to it: see test_store)."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self._clock = clock
        self.database.in_thread = self._at_once  # type: ignore[method-assign]

    async def _at_once(self, work: Callable[..., T], *args: Any, **fields: Any) -> T:
        """On this thread, and as there not before other calls had their turn."""
        await asyncio.sleep(0)
        return work(*args, **fields)

    def save(self, records: Any, forget: Collection[str] = ()) -> None:
        self._clock.tick()
        super().save(records, forget)
        self._clock.tick()

    def save_network(
        self, network_id: str, spec: NetworkSpec, held: Mapping[int, str] | None = None
    ) -> Overlay:
        self._clock.tick()
        network = super().save_network(network_id, spec, held)
        self._clock.tick()
        return network

    def forget_network(self, network_id: str) -> None:
        self._clock.tick()
        super().forget_network(network_id)
        self._clock.tick()


class WholeAgent:
    """The host, the file of the store, and the process, which may end at any boundary."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "agent.db"
        self.clock = Clock()
        self.hosts = {SOFT: LateHost(), CARD: LateHost()}
        self._conf = options.load([])
        self._conf.set_override("teaming_backend", SOFT, group="agent")
        self._view = view_of(Tree(tree(load("small")).files), directory)
        self._wrong: list[Exception] = []
        self._start()

    def _start(self) -> None:
        self.ended = False
        self.now = time.monotonic()
        self.store = TickingStore(self.path, self.clock)
        backends: dict[str, FakeBackend] = {
            SOFT: Soft(SOFT, self.hosts[SOFT], self.clock),
            CARD: Card(CARD, self.hosts[CARD], self.clock),
        }
        self._shared = Host(self._conf)
        metrics = Metrics(self.store)
        self.service = Service(self._conf, self.store, metrics, self._shared, dict(backends), {}, self._view)
        self.workers = self.service._workers
        for name, worker in self.workers.items():
            worker._clock = lambda: self.now
            backends[name].watch(worker.wake)
        self._loop = asyncio.new_event_loop()

    # -- what moves it -----------------------------------------------------------------------

    def call(
        self,
        call: Coroutine[Any, Any, T],
        answered: Callable[[T | NetpluginError], None],
        crash_at: int | None = None,
    ) -> asyncio.Task[None]:
        """Make a call, as far as it comes without a worker. ``answered`` gets its answer, if there is one."""
        self.clock.wind_up(crash_at)
        task = self._loop.create_task(self._answer(call, answered))
        self._pump()
        self.clock.wind_up(None)
        return task

    async def _answer(self, call: Awaitable[T], answered: Callable[[T | NetpluginError], None]) -> None:
        try:
            try:
                found: T | NetpluginError = await call
            except NetpluginError as error:
                found = error
            if not self.ended:
                answered(found)
        except Crash:
            self.ended = True
        except Exception as error:
            self._wrong.append(error)

    def work(self, backend: str, crash_at: int | None = None) -> bool:
        """Let a worker do what is due next. Whether there was any."""
        self.clock.wind_up(crash_at)
        did = False
        try:
            did = self.workers[backend].turn()
        except Crash:
            self.ended = True
        self._pump()
        self.clock.wind_up(None)
        return did

    def is_idle(self) -> bool:
        """Work until nothing is due in any worker."""
        for _ in range(_MOST_WORK):
            did = [self.work(backend) for backend in self.workers]
            if not any(did):
                return True
        return False

    def passes(self, seconds: float) -> None:
        """Time passes for the workers: retries and looks become due."""
        self.now += seconds

    def expire(self) -> None:
        """The deadlines of all calls that wait pass."""
        for worker in self.workers.values():
            for call in (*worker._schedule.waiting, *worker._schedule.retried()):
                call.deadline = 0.0

    def stops(self) -> None:
        """As by SIGTERM: what waits is refused, what was begun is brought to its end."""
        self.service.refuse_waiting()
        for worker in self.workers.values():
            worker._run()
        self._pump()

    def restart(self) -> None:
        """The process is gone, in whatever state, and another starts."""
        self.ended = True
        self.clock.wind_up(0)  # nothing that it still would do reaches the store or the host
        for _ in range(5):
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._pump()
        self._loop.close()
        self.clock.wind_up(None)
        self.service.off_loop.close()
        self.store.close()
        self._start()

    def close(self) -> None:
        self.restart()
        self.service.off_loop.close()
        self._loop.close()
        self.store.close()

    def _pump(self) -> None:
        async def turns() -> None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)

        self._loop.run_until_complete(turns())
        if self._wrong:
            raise self._wrong[0]

    def failures(self) -> dict[str, int]:
        """Errors that nobody expects, by the part of the agent in which they came up."""
        return self._shared.supervisor.failures()

    # -- what it is --------------------------------------------------------------------------

    def is_retried(self, port_id: str) -> bool:
        return any(
            call.port_id == port_id for worker in self.workers.values() for call in worker._schedule.retried()
        )

    def ports(self) -> dict[str, PortSpec]:
        """Those on the host, of both backends."""
        return {**self.hosts[SOFT].ports, **self.hosts[CARD].ports}
