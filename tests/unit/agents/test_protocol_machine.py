"""A model check of the agent: any order of concurrent calls, crashes, and writes that land too late.

The real service, teams, networks, workers, reconcilers and store run on one thread. What must hold: the
answers can be explained by some order of the calls; a request that was refused left nothing; nobody goes
without an answer; and once the host is well and all is done, it has what was requested and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agents.ports.teams import standby_id, standby_spec
from netplugin.api.batch_models import Batch, BatchPut, BatchResults, Retag
from netplugin.api.conditions import Condition
from netplugin.api.errors import Conflict, NetpluginError, from_problem
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.host.usability import Wake
from tests.lab import in_memory
from tests.unit.agent import SPEC
from tests.unit.agents.histories import Call, History, Outcome
from tests.unit.agents.whole_agent import CARD, SOFT, Fate, WholeAgent

LONG = settings.get_current_profile_name() == "long"


def _vlan(vlan_id: int) -> dict[str, Any]:
    return {"type": "vlan", "physical_network": "physnet1", "vlan_id": vlan_id}


def _spec(backend: str, network: Mapping[str, Any], **fields: Any) -> PortSpec:
    return PortSpec.model_validate({**SPEC, "backend": backend, "network": network, **fields})


def _overlay(network_id: str) -> dict[str, Any]:
    return {"type": "vxlan", "network_id": network_id, "mtu": 1450}


NETWORKS = ["n1", "n2"]
#: By short names, which the steps of an example are printed with.
SPECS = {
    "soft 100": _spec(SOFT, _vlan(100)),
    "soft 200": _spec(SOFT, _vlan(200)),
    "soft n1": _spec(SOFT, _overlay("n1")),
    "soft n2": _spec(SOFT, _overlay("n2")),
    "card 100": _spec(CARD, _vlan(100)),
    "card 200": _spec(CARD, _vlan(200)),
    "team 100": _spec(CARD, _vlan(100), vf={"teaming": True}),
    "team 200": _spec(CARD, _vlan(200), vf={"teaming": True}),
}
PORTS = ["a", "b", "c", "d"]
_PORT = st.sampled_from(PORTS)
_SPEC = st.sampled_from(list(SPECS))
_NETWORK = st.sampled_from(NETWORKS)
_CRASH = st.none() | st.integers(0, 12)
_ASKED = st.dictionaries(_PORT, st.just("") | _SPEC, min_size=1, max_size=3)
_PEERS = ["10.0.0.2", "10.0.0.3"]
_FATES = st.lists(st.sampled_from(Fate), max_size=3)
_WORKER = st.sampled_from([SOFT, CARD])


class Machine(RuleBasedStateMachine):
    """``histories`` are those of the ports and the networks, by their ids."""

    #: What all examples came by: calls and their answers, fates of writes, states of ports, crashes.
    visited: ClassVar[Counter[str]] = Counter()

    @initialize()
    def begin(self) -> None:
        self._directory = in_memory.directory()
        self.agent = WholeAgent(Path(self._directory.name))
        self.histories: defaultdict[str, History] = defaultdict(History)
        self.numbers = itertools.count()
        #: By number: the objects that a call without an answer is about.
        self.open: dict[int, list[str]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        #: Of these, ports that were on the host without having been plugged: kept if their PUT fails.
        self.adopting: set[tuple[int, str]] = set()
        assert self.agent.is_idle()

    # -- calls -------------------------------------------------------------------------------

    @rule(port_id=_PORT, spec=_SPEC, is_new=st.booleans(), fates=_FATES)
    def put(self, port_id: str, spec: str, is_new: bool, fates: list[Fate]) -> None:
        self._go_wrong(port_id, fates)
        condition = Condition(none_match=("*",)) if is_new else Condition()
        self._call(
            {port_id: f"PUT {port_id} {spec}{' if it is new' if is_new else ''}"},
            {port_id: lambda _: SPECS[spec]},
            self.agent.service.ports.put(port_id, SPECS[spec], condition),
            meets=(lambda value: value is None) if is_new else (lambda value: True),
        )

    @rule(port_id=_PORT, fates=_FATES)
    def delete(self, port_id: str, fates: list[Fate]) -> None:
        self._go_wrong(port_id, fates)
        call = self.agent.service.ports.delete(port_id)
        self._call({port_id: f"DELETE {port_id}"}, {port_id: _gone}, call)

    @rule(asked=_ASKED)
    def batch(self, asked: Mapping[str, str]) -> None:
        """Of each port, the name of the spec that it is to have, or an empty one."""
        puts = tuple(BatchPut(port_id=i, spec=SPECS[name]) for i, name in asked.items() if name)
        batch = Batch(put=puts, delete=tuple(i for i, name in asked.items() if not name))
        effects = {i: partial(_becomes, SPECS.get(name)) for i, name in asked.items()}
        what = {i: f"batch: {'PUT' if name else 'DELETE'} {i} {name}" for i, name in asked.items()}
        self._call(what, effects, self.agent.service.ports.batch(batch))

    @precondition(lambda self: self.agent.store.records())
    @rule(ports=st.lists(_PORT, unique=True, min_size=1, max_size=3))
    def retag(self, ports: list[str]) -> None:
        desired = Retag(to_vlan=300, ports=tuple(ports))

        def moved(value: PortSpec) -> PortSpec:
            return desired.amended(value)

        self._call(
            {i: f"retag {i}" for i in ports},
            dict.fromkeys(ports, moved),
            self.agent.service.ports.retag(desired),
            meets=lambda value: value is not None and desired.is_of(value),
        )

    @rule(network_id=_NETWORK, vni=st.integers(1, 2), peer=st.sampled_from(_PEERS), crash_at=_CRASH)
    def put_network(self, network_id: str, vni: int, peer: str, crash_at: int | None) -> None:
        spec = NetworkSpec(type="vxlan", vni=vni, peers=(peer,))
        call = self.agent.service.networks.put(network_id, spec)
        what = f"PUT {network_id} VNI {vni} {peer}"
        self._call({network_id: what}, {network_id: lambda _: spec}, call, crash_at=crash_at)

    @rule(network_id=_NETWORK, crash_at=_CRASH)
    def delete_network(self, network_id: str, crash_at: int | None) -> None:
        call = self.agent.service.networks.delete(network_id)
        self._call({network_id: f"DELETE {network_id}"}, {network_id: _gone}, call, crash_at=crash_at)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def caller_disconnects(self, data: st.DataObject) -> None:
        """Its call may be carried out or not."""
        number = data.draw(st.sampled_from(sorted(self.tasks)))
        self.tasks.pop(number).cancel()
        self._after_call()

    def _call(
        self,
        what: Mapping[str, str],
        effects: Mapping[str, Callable[[Any], Any]],
        call: Any,
        *,
        meets: Callable[[Any], bool] = lambda value: True,
        crash_at: int | None = None,
    ) -> None:
        if any(self.histories[name].is_full for name in effects):
            self.visited["too many open calls for one more"] += 1
            call.close()
            return
        number = next(self.numbers)
        for name, effect in effects.items():
            self.histories[name].begins(Call(number, what[name], effect, meets))
        self.open[number] = list(effects)
        self._note_adoptions()

        def answered(found: Any) -> None:
            results: dict[str, NetpluginError | None] = {}
            if isinstance(found, BatchResults):
                results = {r.port_id: from_problem(r.error) if r.error else None for r in found.results}
                assert set(results) == set(effects)
            else:
                results = {name: found if isinstance(found, NetpluginError) else None for name in effects}
            for name, error in results.items():
                kind = what[name].split(f" {name}")[0]
                self.visited[f"answer to {kind}: {error.code if error else 'done'}"] += 1
                outcome = self._outcome(number, name, kind, error)
                self.histories[name].ends(number, outcome)
            del self.open[number]
            self.tasks.pop(number, None)

        task = self.agent.call(call, answered, crash_at)
        if number in self.open:
            self.tasks[number] = task
        self._after_call()

    def _outcome(self, number: int, name: str, kind: str, error: NetpluginError | None) -> Outcome:
        if error is None:
            return Outcome.DONE
        if error.code == "precondition_failed":
            return Outcome.UNMET
        if kind == "retag" and error.step in ("validate", "lookup"):
            return Outcome.UNMET
        refused = error.step in ("queue", "validate") or isinstance(error, Conflict)
        if "DELETE" in kind and not (refused and not self._is_team(name)):
            return Outcome.PERHAPS  # a port is being removed until the host lets it go
        if (number, name) in self.adopting:
            return Outcome.PERHAPS
        return Outcome.NOT_DONE

    def _is_team(self, name: str) -> bool:
        return any(isinstance(v, PortSpec) and v.vf.teaming for v in self.histories[name].may_be())

    def _after_call(self) -> None:
        if self.agent.ended:
            self.visited["crash in a call"] += 1
            self._starts_again()
        self._note_adoptions()

    def _note_adoptions(self) -> None:
        there = self.agent.ports()
        for number, names in self.open.items():
            for name in names:
                record = self.agent.store.get(name)
                is_begun = record is not None and (record.state is not PortState.PENDING or record.previous)
                if name in there and not is_begun and not self.agent.is_retried(name):
                    self.adopting.add((number, name))

    # -- the agent ---------------------------------------------------------------------------

    @rule(worker=_WORKER, turns=st.integers(1, 3), crash_at=_CRASH)
    def work(self, worker: str, turns: int, crash_at: int | None) -> None:
        """A worker's turns; in the last of them the process may be killed."""
        for left in reversed(range(turns)):
            self.agent.work(worker, None if left else crash_at)
        if self.agent.ended:
            self.visited["crash in a worker"] += 1
            self._starts_again()
        self._note_adoptions()

    @rule()
    def work_until_idle(self) -> None:
        assert self.agent.is_idle(), "the workers find no end"
        self._note_adoptions()

    @rule(seconds=st.sampled_from([0.1, 2.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.agent.passes(seconds)

    @rule()
    def deadlines_pass(self) -> None:
        self.agent.expire()

    @rule()
    def compare_teams(self) -> None:
        self.agent.call(self.agent.service.ports.teams.settle(), lambda _: None)
        self._note_adoptions()

    @rule(is_asked=st.booleans(), rests=st.booleans())
    def restart(self, is_asked: bool, rests: bool) -> None:
        if rests:
            self.all_comes_to_rest()
        if is_asked:
            self.agent.stops()
        self.visited["restart after a signal" if is_asked else "restart after a kill"] += 1
        self._starts_again()

    def _starts_again(self) -> None:
        self.visited["calls without an answer"] += len(self.open)
        self.agent.restart()
        for history in self.histories.values():
            history.is_cut_off()
        self.open.clear()
        self.tasks.clear()
        self.adopting.clear()

    # -- the host ----------------------------------------------------------------------------

    @rule(port_id=_PORT, fates=_FATES)
    def standby_goes_wrong(self, port_id: str, fates: list[Fate]) -> None:
        self._go_wrong(standby_id(port_id), fates)

    def _go_wrong(self, port_id: str, fates: list[Fate]) -> None:
        """These are the fates of the next writes to this port."""
        for host in self.agent.hosts.values():
            host.fates[port_id] = list(fates)

    @rule(worker=_WORKER)
    def late_writes_land(self, worker: str) -> None:
        host = self.agent.hosts[worker]
        self.visited["late writes"] += len(host.under_way)
        host.land()
        self._note_adoptions()

    @rule(port_id=_PORT, worker=_WORKER)
    def port_is_removed(self, port_id: str, worker: str) -> None:
        """By somebody with root."""
        self._lose(worker, port_id)
        self.agent.hosts[worker].wake(Wake("changed", frozenset([port_id])))

    @rule(worker=_WORKER)
    def host_loses_all(self, worker: str) -> None:
        """As ovs-vswitchd's database does in a reboot."""
        for port_id in list(self.agent.hosts[worker].ports):
            self._lose(worker, port_id)
        self.agent.hosts[worker].networks.clear()
        self.agent.hosts[worker].wake(Wake("connected"))

    def _lose(self, worker: str, port_id: str) -> None:
        host = self.agent.hosts[worker]
        for of_ports in (host.ports, host.stamps, host.vfs, host.faults):
            of_ports.pop(port_id, None)  # type: ignore[attr-defined]
        host.landed.discard(port_id)

    @rule(worker=_WORKER)
    def host_goes_down_or_comes_back(self, worker: str) -> None:
        host = self.agent.hosts[worker]
        if host.usability.usable:
            host.goes_down()
        else:
            host.comes_back()

    # -- what holds --------------------------------------------------------------------------

    @invariant()
    def answers_have_an_order(self) -> None:
        """What the store has of each object is what it may be by the answers so far."""
        for port_id in PORTS:
            record = self.agent.store.get(port_id)
            values: set[Any] = {None}
            if record is not None:
                self.visited[f"port is {record.state.value}"] += 1
                unsure = record.state in (PortState.PENDING, PortState.REMOVING)
                values = {record.spec, record.previous} if unsure else {record.spec}
                values |= {None} if unsure and record.previous is None else set()
            assert values & self.histories[port_id].may_be(), "\n".join(self.histories[port_id].happened)

    @invariant()
    def claims_are_unique(self) -> None:
        with sqlite3.connect(self.agent.path) as db:
            rows = db.execute("SELECT kind, key, port_id FROM claims").fetchall()
            ports = {port_id for (port_id,) in db.execute("SELECT port_id FROM ports")}
        db.close()
        assert len({(kind, key) for kind, key, _ in rows}) == len(rows)
        assert {port_id for *_, port_id in rows} <= ports

    def all_comes_to_rest(self) -> None:
        """The host is well, and everything that was begun comes to its end."""
        agent = self.agent
        for host in agent.hosts.values():
            host.fates.clear()
            host.faults.clear()
            host.land()
            host.comes_back()
        for _ in range(6):
            assert agent.is_idle(), "the workers find no end"
            agent.passes(40.0)
            agent.call(agent.service.ports.teams.settle(), lambda _: None)
            for host in agent.hosts.values():
                host.faults.clear()
        assert agent.is_idle(), "the workers find no end"
        assert not set(self.open) & set(self.tasks), f"without an answer: {self.open}"
        self.visited["came to rest"] += 1
        self._is_as_requested()
        for history in self.histories.values():
            history.is_cut_off()  # of callers who did not wait for their answers
        self.open.clear()
        self.adopting.clear()

    def _is_as_requested(self) -> None:
        agent = self.agent
        records = {r.port_id: r for r in agent.store.records()}
        assert {r.state for r in records.values()} <= {PortState.ACTIVE}, records
        assert all(r.previous is None and r.error is None for r in records.values())
        for worker, host in agent.hosts.items():
            assert host.ports == {i: r.spec for i, r in records.items() if r.spec.backend == worker}
            assert agent.workers[worker].reconciler.ports.kept() == {}
            assert agent.workers[worker].reconciler.check(dry_run=True).changes == []
        assert agent.hosts[CARD].vfs == {i: r.claims for i, r in records.items() if r.spec.backend == CARD}
        for port_id in PORTS:
            record = records.get(port_id)
            self.histories[port_id].is_seen_as(record.spec if record else None)
        teams = {i: r.spec for i, r in records.items() if r.spec.vf.teaming}
        standbys = {standby_id(i): standby_spec(spec, SOFT) for i, spec in teams.items()}
        assert {i: r.spec for i, r in records.items() if i not in PORTS} == standbys
        networks = {n.network_id: n for n in agent.store.networks()}
        for network_id in NETWORKS:
            network = networks.get(network_id)
            self.histories[network_id].is_seen_as(network.spec if network else None)
        used = {r.spec.overlay_id for r in records.values()}
        assert agent.hosts[SOFT].networks == {i: n for i, n in networks.items() if i in used}
        assert len({n.local_vlan for n in networks.values()}) == len(networks)
        assert agent.failures() == {}, "errors that nobody expects"

    def teardown(self) -> None:
        if not hasattr(self, "agent"):
            return
        try:
            self.all_comes_to_rest()
            self.restart(is_asked=False, rests=False)
            self.all_comes_to_rest()
            for host in self.agent.hosts.values():
                self.visited.update({f"a write was {f.value}": n for f, n in host.seen_fates.items()})
        finally:
            self.agent.close()
            self._directory.cleanup()


def _becomes(value: Any, before: Any) -> Any:
    return value


_gone = partial(_becomes, None)


TestProtocol = Machine.TestCase
TestProtocol.settings = settings(
    max_examples=3000 if LONG else 40,
    stateful_step_count=60 if LONG else 30,
    # So few steps, drawn anew in each run, would miss a port that is active now and then.
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_much_of_it_was_visited() -> None:
    """Runs after the machine. Its long form comes by everything; it prints how often."""
    visited = Machine.visited
    for what, times in sorted(visited.items()):
        print(f"{times:9d}  {what}")
    assert visited["came to rest"] and visited["port is active"] and visited["answer to PUT: done"]
    if LONG:
        assert {f"a write was {fate.value}" for fate in Fate} <= set(visited)
        assert {f"port is {state.value}" for state in PortState} <= set(visited)
        assert visited["crash in a call"] and visited["crash in a worker"] and visited["late writes"]
