"""Operation x step x fault: each case ends with the host as its intents say, or it is a finding."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.lab.processes import LabError, wait_for
from tests.lab.steps.agent import SteppedAgent
from tests.lab.steps.faults import KINDS, Fault, faults_of
from tests.lab.steps.host_state import State, differences
from tests.lab.steps.naming import Step

#: Seconds in which the agent has put the host right, once it can.
SETTLED_S = 20.0
#: The agent's deadline for an operation, in seconds: what is late is later than that. The other if nothing
#: is late: a busy machine may take longer without a fault.
OPERATION_S, PATIENT_S = 4, 15
_IDLE_S = 0.15
#: How many cases of an operation follow each other, on average.
_TOGETHER = 3
#: In how many of the cases that leave the agent alive it is killed afterwards: the store tells the same.
_RESTARTED = 0.25
_LISTS = ("ports", "service-ports", "networks", "physical-networks")

Answer = tuple[int, Any]
Call = Callable[[], Answer]
#: The operation's name, and what happens in it.
Case = tuple[str, Fault]
#: What is asked for, by the kind and the id.
Intents = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """``do`` is what faults happen in; ``undo`` leads back to what was before it."""

    name: str
    do: Sequence[Call]
    undo: Sequence[Call]
    prepare: Sequence[Call] = ()
    tidy: Sequence[Call] = ()
    #: Whether a sample may have it.
    sampled: bool = True


@dataclass(frozen=True)
class Scene:
    """A host with one backend. ``state`` reads the host, ``reset`` makes it as it was at the start."""

    name: str
    agent: SteppedAgent
    operations: Sequence[Operation]
    state: Callable[[], State]
    reset: Callable[[], None]


@dataclass(frozen=True)
class Ends:
    """The host before and after an operation, without a fault; and what was asked for then."""

    before: State
    asked_before: Intents
    after: State
    asked_after: Intents


@dataclass
class Report:
    """What was done, and what was found."""

    scene: str
    seed: int
    cases: int = 0
    done: Counter[str] = field(default_factory=Counter)
    not_reached: list[str] = field(default_factory=list)
    not_visited: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0

    def text(self) -> str:
        """The counts in a table; then what was found."""
        lines = [
            f"{self.scene}, seed {self.seed}: {sum(self.done.values())} of {self.cases} faults injected in "
            f"{self.took_s:.0f} s, {len(self.findings)} findings. {len(self.not_reached)} steps did not come "
            f"again, {sum(self.not_visited.values())} cases were not visited.",
            "",
            f"| operation | steps | {' | '.join(KINDS)} | not visited |",
            f"| --- | ---: |{' ---: |' * (len(KINDS) + 1)}",
        ]
        for name, count in sorted(self.steps.items()):
            done = [self.done[f"{name}: {kind}"] for kind in KINDS]
            left = sum(self.not_visited[f"{name}: {kind}"] for kind in KINDS)
            lines.append(f"| {name} | {count} | {' | '.join(map(str, done))} | {left} |")
        totals = [sum(self.done[f"{name}: {kind}"] for name in self.steps) for kind in KINDS]
        left = sum(self.not_visited.values())
        lines.append(f"| all | {sum(self.steps.values())} | {' | '.join(map(str, totals))} | {left} |")
        return "\n".join(lines + [f"FINDING {found}" for found in self.findings])


class Wrong(Exception):
    """A case did not end as it should."""


class Matrix:
    """The cases of one scene."""

    def __init__(self, scene: Scene, seed: int, only: Sequence[str] = ()) -> None:
        """``only``: the operations by name; all if there is none."""
        self.scene, self.agent, self.seed = scene, scene.agent, seed
        self._ends: dict[str, Ends] = {}
        self._operations = {op.name: op for op in scene.operations if not only or op.name in only}
        self.report = Report(scene.name, seed)
        self._dice = random.Random(seed)

    # -- which cases there are -------------------------------------------------------------------

    def record(self) -> list[Case]:
        """Do each operation twice without a fault: its steps, and the host before and after it."""
        cases = []
        for op in self._operations.values():
            steps = self._recorded(op)
            self.report.steps[op.name] = len(steps)
            for (_, nth), step in steps.items():
                cases += [(op.name, Fault(step.name, nth, what)) for what in faults_of(step)]
        self.report.cases = len(cases)
        return self._in_order(cases)

    def _recorded(self, op: Operation) -> dict[tuple[str, int], Step]:
        found: dict[tuple[str, int], Step] = {}
        self._succeed(op.prepare)
        self._settle()
        before, asked_before = self.scene.state(), self._asked()
        for _ in range(2):
            self.agent.watch.arm()
            self._succeed(op.do)
            self._idle()
            found |= {(step.name, nth): step for step, nth in self.agent.watch.steps()}
            self._settle()
            ends = Ends(before, asked_before, self.scene.state(), self._asked())
            self._ends[op.name] = ends
            self._succeed(op.undo)
            self._settle()
            if wrong := differences(before, self.scene.state()):
                raise Wrong(f"{op.name}: without any fault the host is not as before:\n{wrong}")
        self._succeed(op.tidy)
        return found

    def _in_order(self, cases: list[Case]) -> list[Case]:
        """By the seed; first one of each (operation, name of the step, fault), then the repetitions.

        Those of an operation are together, a few at a time: what it needs is prepared once for them. The
        operations take turns in an order by the seed, each time in another: no run ends before the same.
        """
        order = random.Random(self.seed)
        order.shuffle(cases)
        seen: Counter[tuple[str, str, str]] = Counter()
        ranked = []
        for name, fault in cases:
            key = (name, fault.step, fault.what)
            ranked.append((seen[key], (name, fault)))
            seen[key] += 1
        mixed = [case for _, case in sorted(ranked, key=lambda entry: entry[0])]
        block = _TOGETHER * len(self._operations)
        parts = [mixed[start : start + block] for start in range(0, len(mixed), block)]
        turns = [order.sample(list(self._operations), len(self._operations)) for _ in parts]
        return [
            case
            for part, turn in zip(parts, turns, strict=True)
            for case in sorted(part, key=lambda case: turn.index(case[0]))
        ]

    # -- the cases -------------------------------------------------------------------------------

    def run(self, cases: Sequence[Case], seconds: float, say: Callable[[str], None]) -> Report:
        """As many as fit into the time, and until one was reached; the others are counted as not visited."""
        start = time.monotonic()
        prepared = ""
        for index, (name, fault) in enumerate(cases):
            if time.monotonic() - start > seconds and self.report.done:
                for left, other in cases[index:]:
                    self.report.not_visited[f"{left}: {other.kind}"] += 1
                break
            op = self._operations[name]
            try:
                if prepared != name:
                    if prepared:
                        self._succeed(self._operations[prepared].tidy)
                    self._succeed(op.prepare)
                    self._settle()
                    prepared = name
                reached = self._case(op, fault)
            except Exception as wrong:  # whatever it is, the next case has to begin anew
                found = f"{self.scene.name} {name}: {fault}: {wrong}"
                self.report.findings.append(found)
                say(f"FINDING {found}")
                self.scene.reset()
                prepared = ""
                continue
            if reached:
                self.report.done[f"{name}: {fault.kind}"] += 1
            else:
                self.report.not_reached.append(f"{name}: {fault}")
        if prepared:
            self._succeed(self._operations[prepared].tidy)
        self.report.took_s = time.monotonic() - start
        return self.report

    def _case(self, op: Operation, fault: Fault) -> bool:
        watch, ends = self.agent.watch, self._ends[op.name]
        watch.arm(fault)
        for call in op.do:
            answered(call(), dead=True)
        self._idle()
        reached = watch.fired
        watch.arm()
        self._revive(reached and fault.kills)
        wait_for(lambda: not watch.delayed, SETTLED_S, "what was late has landed")
        self._settle()
        if not fault.kills and self._dice.random() < _RESTARTED:
            self.agent.kill()
            self.agent.start(ready=False)
            self._settle()
        self._compare(ends)
        self._succeed(op.do)
        self._settle()
        self._equal(ends.after, "after the operation was repeated")
        self._succeed(op.undo)
        self._settle()
        self._equal(ends.before, "after it was undone")
        return reached

    def _revive(self, killed: bool) -> None:
        daemon = self.agent.daemon
        if killed:
            wait_for(lambda: not daemon.running, SETTLED_S, "the agent is dead")
        if not daemon.running:
            daemon.kill()
            self.agent.start(ready=False)

    def _compare(self, ends: Ends) -> None:
        """The host is as what is asked for says: as before, or as after; or between, if that is."""
        asked = self._asked()
        mixed = {**dict.fromkeys(ends.asked_before), **dict.fromkeys(ends.asked_after)}
        for key in mixed.keys() | asked.keys():
            known = (ends.asked_before.get(key), ends.asked_after.get(key))
            if asked.get(key) not in known:
                raise Wrong(f"{key} is asked for as {asked.get(key)}, and neither of {known}")
        if asked == ends.asked_after:
            self._equal(ends.after, "asked for as after the operation")
        elif asked == ends.asked_before:
            self._equal(ends.before, "asked for as before the operation")

    def _equal(self, expected: State, when: str) -> None:
        if wrong := differences(expected, self.scene.state()):
            raise Wrong(f"{when}, the host is not as expected:\n{wrong}")

    # -- the agent -------------------------------------------------------------------------------

    def _succeed(self, calls: Sequence[Call]) -> None:
        for call in calls:
            status, body = call()
            inner = [each["status"] for each in body.get("results", ())] if isinstance(body, dict) else []
            if any(one not in (200, 204) for one in (status, *inner)):
                raise Wrong(f"refused without a fault: {status} {body}")

    def _idle(self) -> None:
        """What follows an answer is over too."""
        wait_for(lambda: self.agent.watch.idle_s > _IDLE_S, SETTLED_S, "no more steps")

    def _settle(self) -> None:
        """Reconciled: the agent itself finds nothing to do and nothing wrong."""
        answer: Any = None

        def settled() -> bool:
            nonlocal answer
            answer = self.agent.call("POST", "/v1/reconcile", {})
            if answer[0] != 200 or answer[1]["errors"]:
                return False
            answer = self.agent.call("POST", "/v1/reconcile", {"dry_run": True})
            if answer[0] != 200 or answer[1]["errors"] or answer[1]["changes"]:
                return False
            answer = self.agent.get("/readyz")
            states = {entry.get("state", "active") for entry in self._asked_now()}
            return bool(answer[0] == 200 and states <= {"active"})

        try:
            wait_for(settled, SETTLED_S, "the host is as its intents say")
        except LabError as late:
            raise Wrong(f"{late}; last: {answer}; {self._asked_now()}") from late

    def _asked_now(self) -> list[dict[str, Any]]:
        return [entry for kind in _LISTS for entry in self.agent.get(f"/v1/{kind}")[1] or ()]

    def _asked(self) -> Intents:
        found: dict[str, Any] = {}
        for kind in _LISTS:
            for entry in self.agent.get(f"/v1/{kind}")[1]:
                identity = entry.get("port_id") or entry.get("network_id") or entry.get("name")
                spec = entry.get("spec") or {
                    key: value for key, value in entry.items() if key not in ("findings", "errors", "ports")
                }
                found[f"{kind} {identity}"] = (spec, (entry.get("migration") or {}).get("phase"))
        return found


#: The statuses of the errors that the API documents.
_DOCUMENTED = {
    "invalid_request": 422, "unauthorized": 401, "forbidden": 403, "not_found": 404, "conflict": 409,
    "unsupported": 409, "backend_unavailable": 503, "overloaded": 503, "capacity_exhausted": 507,
    "host_error": 502, "timeout": 504,
}  # fmt: skip


def answered(answer: Answer, dead: bool = False) -> None:
    """Carried out, or refused by an error as documented; ``dead``: or nobody answered.

    Raises: Wrong.
    """
    status, body = answer
    if status == 0 and dead:
        return
    results = body.get("results") if isinstance(body, dict) else None
    for one, problem in [(each["status"], each.get("error")) for each in results or ()] or [(status, body)]:
        if one in (200, 204):
            continue
        if not isinstance(problem, dict) or _DOCUMENTED.get(problem.get("code", "")) != one:
            raise Wrong(f"answered {one} {problem}")
        if not problem.get("step") or not problem.get("detail"):
            raise Wrong(f"an error without step or detail: {problem}")
