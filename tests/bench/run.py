"""One run of the benchmark: the workloads in an order in which ports are added and not removed."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.bench import machine, names
from tests.bench.lab import OvsLab, on_bridges, on_ovs
from tests.bench.recorder import Recorder
from tests.bench.sizes import Sizes
from tests.bench.values import Machine, Run
from tests.bench.workloads import (
    from_nothing,
    linuxbridge,
    one_port,
    open_loop,
    recovery,
    resources,
    start,
    together,
)


@dataclass
class Bench:
    """``only``: the workloads. ``paths`` have os-vif, ``bridge_paths`` one that knows Linux bridges."""

    sizes: Sizes
    only: Collection[str]
    paths: Sequence[Path]
    bridge_paths: Sequence[Path]
    record: Recorder = field(default_factory=Recorder)
    _machine: Machine | None = None
    _load: float = field(default_factory=machine.load)
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> Run:
        started = datetime.now(UTC)
        if not self.paths:
            self.record.note("os-vif and ovsdbapp are left out: --peers names no directory that has them")
        self._growing()
        self._full()
        self._bridges()
        if self._machine is None:
            with on_ovs() as lab:
                self._describe(lab)
        assert self._machine is not None
        return Run(
            started=started.isoformat(timespec="seconds"),
            took_s=round(time.monotonic() - self._began, 1),
            form=self.sizes.form,
            revision=machine.revision(),
            machine=self._machine,
            series=self.record.series(),
            notes=tuple(self.record.notes),
        )

    def _growing(self) -> None:
        """What is measured on an OVS to which ports are added."""
        sizes = self.sizes
        here = {names.RESOURCES, names.ONE_PORT, names.DEFAULT_LOG, names.TOGETHER, names.OPEN_LOOP}
        if not here & set(self.only):
            return
        with on_ovs() as lab:
            self._describe(lab)
            lab.keep(True)
            if names.RESOURCES in self.only:
                with self._step("resources of an agent without ports"):
                    resources.measure(lab, self.record, sizes.idle_s)
            for ports in sorted({0, sizes.open_loop_ports, *sizes.turns} - {sizes.many}):
                self._at(lab, ports)

    def _at(self, lab: OvsLab, ports: int) -> None:
        sizes = self.sizes
        if names.ONE_PORT in self.only and ports in sizes.turns:
            with self._step(f"one port beside {ports}"):
                one_port.measure(lab, self.record, sizes, ports, self.paths)
        if names.DEFAULT_LOG in self.only and ports == 0:
            with self._step("one port with vswitchd's default log"):
                one_port.measure_default_log(lab, self.record, sizes)
        if names.TOGETHER in self.only and ports == 0:
            with self._step("64 ports at once and in turn"):
                together.measure(lab, self.record, sizes, self.paths)
        if names.OPEN_LOOP in self.only and ports == sizes.open_loop_ports:
            with self._step(f"open loop beside {ports}"):
                open_loop.measure(lab, self.record, sizes)

    def _full(self) -> None:
        """What is measured with all ports, each time on a new OVS: removing them would take longer."""
        sizes = self.sizes
        there = {names.FROM_NOTHING, names.START, names.RESOURCES, names.RECOVERY}
        one_more = names.ONE_PORT in self.only and sizes.many in sizes.turns
        if not (there & set(self.only) or one_more):
            return
        rounds = sizes.from_nothing if names.FROM_NOTHING in self.only else 1
        for number in range(1, rounds + 1):
            with on_ovs() as lab:
                self._describe(lab)
                with self._step(f"{sizes.many} ports from nothing, round {number} of {rounds}"):
                    from_nothing.measure(lab, self.record, sizes.many)
                if number < rounds:
                    continue
                if names.START in self.only:
                    with self._step(f"{sizes.starts} starts with {sizes.many} ports"):
                        start.measure(lab, self.record, sizes.starts)
                if names.RESOURCES in self.only:
                    with self._step("resources of an agent with all ports"):
                        resources.measure(lab, self.record, sizes.idle_s)
                if one_more:
                    with self._step(f"one port beside {sizes.many}"):
                        one_port.measure(lab, self.record, sizes, sizes.many, self.paths)
                if names.RECOVERY in self.only:
                    with self._step(f"{sizes.recoveries} kills of vswitchd with {sizes.many} ports"):
                        recovery.measure(lab, self.record, sizes.recoveries)

    def _bridges(self) -> None:
        if names.LINUXBRIDGE in self.only:
            with on_bridges() as lab, self._step("one port on a Linux bridge"):
                linuxbridge.measure(lab, self.record, self.sizes, self.bridge_paths)

    def _describe(self, lab: OvsLab) -> None:
        if self._machine is None:
            self._machine = machine.describe(lab.ovs, self.paths, self._load)

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        now = time.monotonic()
        print(f"{now - self._began:6.0f} s: {what}, {now - start:.1f} s", file=sys.stderr, flush=True)
