"""How much of each workload a run does: the full form, and a quick one with the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    form: str
    #: Turns of the ways, by the number of ports that are there already.
    turns: Mapping[int, int]
    #: Addresses in the filters of the agent's ports.
    addresses: tuple[int, ...]
    #: Turns with vswitchd's default log.
    default_log_turns: int
    #: How often 64 ports are made.
    together: int
    #: How often all ports are made from nothing, and how many they are.
    from_nothing: int
    many: int
    starts: int
    #: How often vswitchd is killed with all ports.
    recoveries: int
    #: Seconds of open loop by the rate of plugs, and the ports that are there already: with all that are
    #: plugged no more than OVS takes.
    open_loop_s: Mapping[float, float]
    open_loop_ports: int
    #: Turns on Linux bridges, by the number of ports that are there already.
    bridge_turns: Mapping[int, int]
    idle_s: float


FULL = Sizes(
    form="full",
    turns={0: 100, 100: 100, 500: 100, 1000: 100},
    addresses=(1, 16, 64),
    default_log_turns=50,
    together=5,
    from_nothing=3,
    many=1000,
    starts=5,
    recoveries=3,
    open_loop_s={1: 20, 10: 20, 25: 20, 50: 10, 100: 5},
    open_loop_ports=500,
    bridge_turns={0: 100, 100: 50},
    idle_s=10,
)
QUICK = Sizes(
    form="quick",
    turns={0: 20, 100: 20, 1000: 20},
    addresses=(1, 16, 64),
    default_log_turns=20,
    together=2,
    from_nothing=1,
    many=1000,
    starts=2,
    recoveries=1,
    open_loop_s={10: 5, 50: 8},
    open_loop_ports=500,
    bridge_turns={0: 20},
    idle_s=2,
)
#: To see that it works; its figures say nothing.
SMOKE = Sizes(
    form="smoke",
    turns={0: 2, 5: 2, 40: 2},
    addresses=(1, 64),
    default_log_turns=2,
    together=1,
    from_nothing=1,
    many=40,
    starts=1,
    recoveries=1,
    open_loop_s={10: 2},
    open_loop_ports=5,
    bridge_turns={0: 2},
    idle_s=0.5,
)
FORMS = {sizes.form: sizes for sizes in (FULL, QUICK, SMOKE)}
