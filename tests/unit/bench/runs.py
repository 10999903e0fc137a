"""Runs of the benchmark that nobody has measured."""

from __future__ import annotations

from tests.bench.recorder import Recorder
from tests.bench.values import Machine, Run

MACHINE = Machine(
    cpu="a CPU",
    cpus=2,
    memory_gb=8,
    kernel="6.1",
    open_vswitch="3.1.0",
    dpdk="DPDK 22.11",
    python="3.11",
    ovsdbapp="3.0",
    os_vif="5.0",
    libvirt="9.0",
    load=0.1,
)


def run_of(record: Recorder, revision: str = "old", form: str = "full", machine: Machine = MACHINE) -> Run:
    return Run(
        started="2026-01-01T00:00:00+00:00",
        took_s=60,
        form=form,
        revision=revision,
        machine=machine,
        series=record.series(),
        notes=tuple(record.notes),
    )
