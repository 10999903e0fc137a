"""An hour of ports that come, change and go while vswitchd is killed every minute: nothing may grow.

NETPLUGIN_SOAK_S sets the seconds (180 to try it). The samples and a picture are kept in build/soak.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from netplugin import store_file
from tests.bench.lab import OvsLab, on_ovs
from tests.bench.machine import revision
from tests.functional.conftest import BASE
from tests.functional.test_plug_ovs import planned
from tests.lab.processes import wait_for
from tests.long.soak_load import Load, Sampler, make_old, rows
from tests.long.soak_picture import draw
from tests.long.soak_record import Soak

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("NETPLUGIN_SOAK_S", "3600"))
FOLDER = Path(__file__).resolve().parents[2] / "build/soak"
#: Ports that stay, whose flows are written again after each kill.
STAYING = 50
#: A short soak has as many kills as a block of samples has, or they would be its trend.
KILL_EVERY_S = min(60.0, SECONDS / 18)
SAMPLE_EVERY_S = min(5.0, SECONDS / 90)
#: The oldest events are deleted: so few that they are at their limit when the warm-up is over.
EVENTS = 200
OPTIONS = {"agent": {"max_events": str(EVENTS)}}
DEADLINE_S = 60


def test_nothing_grows() -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with on_ovs(OPTIONS) as lab:
        memory = lab.agent.directory / "memory.json"
        lab.agent.stop()
        make_old(database(lab))
        lab.agent.run_by("tests.lab.memory_watch", memory)
        lab.agent.start()
        lab.fill(STAYING)
        before = lab.agent.get("/v1/ports")[1]
        with Load(lab.agent) as load:
            sampler = Sampler(lab.agent, load, memory)
            kills = soak(lab, sampler)
        soaked = Soak(
            started=started,
            seconds=SECONDS,
            revision=revision(),
            done={**load.done, "kill": kills},
            refused=load.refused,
            times_s=tuple(sampler.times_s),
            samples={name: tuple(values) for name, values in sampler.samples.items()},
        )
        kept = FOLDER / f"{started[:19].replace(':', '')}.json"
        soaked.write(kept)
        draw(soaked, kept.with_suffix(".svg"))
        show(soaked, kept)
        assert load.wrong == []
        check_nothing_is_left(lab, [port["port_id"] for port in before])
    grown = {name: str(trend) for name, trend in soaked.trends().items() if not trend.steady}
    assert grown == {}
    assert not (BASE / "ovs").exists() and not (BASE / "agent").exists()


def soak(lab: OvsLab, sampler: Sampler) -> int:
    """Kill and look until the time is over; returns the kills."""
    start = time.monotonic()
    kills, next_kill, next_look = 0, KILL_EVERY_S / 2, SAMPLE_EVERY_S
    while (now := time.monotonic() - start) < SECONDS:
        if now >= next_kill:
            lab.ovs.kill_vswitchd()
            lab.ovs.start_vswitchd()
            lab.log_queues(False)
            wait_for(lambda: lab.agent.get("/readyz")[0] == 200, DEADLINE_S, "the agent is ready again")
            kills, next_kill = kills + 1, next_kill + KILL_EVERY_S
        if now >= next_look:
            sampler.look()
            next_look += SAMPLE_EVERY_S
        time.sleep(max(0.0, min(next_kill, next_look) - (time.monotonic() - start)))
    return kills


def show(soaked: Soak, kept: Path) -> None:
    print(f"\n{kept}\ndone {dict(soaked.done)}, refused {dict(soaked.refused)}")
    for name, trend in soaked.trends().items():
        values = soaked.samples[name]
        print(f"{name:14} {values[0]:10.2f} first, {values[-1]:10.2f} last: {trend}")


def check_nothing_is_left(lab: OvsLab, staying: list[str]) -> None:
    """What the callers plugged is gone, what stays is whole, and then that can go too."""
    wait_for(lambda: planned(lab.agent) == [], DEADLINE_S, "nothing is left to do")
    assert sorted(port["port_id"] for port in lab.agent.get("/v1/ports")[1]) == sorted(staying)
    assert {port["state"] for port in lab.agent.get("/v1/ports")[1]} == {"active"}
    ports = lab.ovs.vsctl("list-ports", "br-physnet1").split()
    assert len(ports) == STAYING + 1, "and the uplink"
    lab.fill(0)
    assert lab.ovs.vsctl("list-br").split() == ["br-bench"]
    assert rows(database(lab)) <= 2 * EVENTS, "events alone"


def database(lab: OvsLab) -> Path:
    return lab.agent.directory / "state" / store_file.DATABASE
