"""A machine in memory that is written to as a real one is, and that can die at any moment of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from netplugin.api.errors import HostError
from netplugin.host.cpus import from_mask
from netplugin.tuning.applying.apply import Result, StepOutcome, TunedMachine, apply, undo
from netplugin.tuning.applying.journal import ApplyJournal
from netplugin.tuning.facts import Live, OvsLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.steps import Target
from tests.unit.tuning.fake_kernel import (
    IFACE,
    KSM,
    NIC,
    NUMVFS,
    PROFILE,
    SWAPS,
    Kernel,
    no_crash,
)
from tests.unit.tuning.machines import Machine as Description
from tests.unit.tuning.machines import Tree, load
from tests.unit.tuning.trees import tree

LATERS = frozenset((StepOutcome.NEEDS_OVS_RESTART, StepOutcome.NEEDS_REBOOT))


class Killed(BaseException):
    """What a SIGKILL is to the program: nothing of it runs after."""


@dataclass
class FakeOvs:
    """vswitchd with a port, so that PMD threads run where the mask says."""

    config: dict[str, str] = field(
        default_factory=lambda: {
            "dpdk-init": "true",
            "pmd-cpu-mask": "03",
            "pmd-rxq-assign": "cycles",
        }
    )
    down: bool = False
    point: Callable[[str], None] = no_crash

    def other_config(self) -> Mapping[str, str]:
        if self.down:
            raise HostError("no connection", step="ovsdb-connect")
        return dict(self.config)

    def set(self, key: str, value: str | None) -> None:
        self.other_config()
        self.point(f"before other_config:{key}")
        self.config.pop(key, None)
        if value is not None:
            self.config[key] = value
        self.point(f"after other_config:{key}")

    def pmd_cpus(self) -> frozenset[int]:
        return frozenset(from_mask(self.config.get("pmd-cpu-mask", "1")))


class FakeMachine:
    """Its files, its OVS, the agent's ports, and programs that do to the files what real ones do."""

    def __init__(self, description: Description | None = None, vfs: int = 0) -> None:
        self.kernel = Kernel(tree(description) if description else deepcopy(_made()))
        self.kernel.change(
            {
                "/proc/sys/kernel/random/boot_id": "first\n",
                KSM: "1\n",
                "/etc/tuned/profile_mode": "auto\n",
            }
        )
        if vfs:
            self.kernel.write(NUMVFS, str(vfs))
        self.ovs = FakeOvs()
        self.ports: dict[str, str] = {}
        self.machine = TunedMachine(self.kernel, self.ovs, lambda: self.ports, self.run, self.set_scheduler)

    def crash_at(self, point: Callable[[str], None]) -> None:
        self.kernel.point = self.ovs.point = point

    def state(self) -> Any:
        return deepcopy((self.kernel.tree.files, self.kernel.tree.links, self.ovs.config))

    def plan(self, **intent: Any) -> TuningPlan:
        config = None if self.ovs.down else OvsLive("3.1.0", "DPDK 22.11.7", True, self.ovs.config)
        desired = {
            "pmd_cores": 1,
            "realtime": True,
            "mtus": (1400,),
            "vfs": (f"{IFACE}=4",),
        } | intent
        live = Live(ovs=config) if config else Live()
        return make_plan(read_facts(self.kernel), HostIntent(**desired), live)

    def apply(self, journal: Path, **intent: Any) -> list[Result]:
        with ApplyJournal(journal, self.boot) as held:
            return list(apply(self.plan(**intent), self.machine, held))

    def undo(self, journal: Path, force: bool = False) -> list[Result]:
        with ApplyJournal(journal, self.boot) as held:
            return list(undo(self.machine, held, force))

    @property
    def boot(self) -> str:
        return self.kernel.tree.files["/proc/sys/kernel/random/boot_id"].strip()

    # -- programs ----------------------------------------------------------------------------------

    def run(self, args: Sequence[str], seconds: float) -> str:
        """swapoff, swapon and tuned-adm, as far as the files of a machine tell of them."""
        self.kernel.point(f"before {args[0]}")
        match list(args):
            case ["swapoff", name]:
                self._swaps(row for row in self._rows() if row.split()[0] != name)
            case ["swapon", *options, name]:
                own = [row for row in self._rows() if int(row.split()[-1]) < 0]
                priority = options[0].partition("=")[2] if options else str(-2 - len(own))
                self._swaps([*self._rows(), f"{name:40}partition\t1048572\t\t0\t\t{priority}"])
            case ["tuned-adm", "profile", *names]:
                self.kernel.change({PROFILE: f"{' '.join(names)}\n", "/etc/tuned/profile_mode": "manual\n"})
            case ["tuned-adm", "auto_profile"]:
                self.kernel.change({PROFILE: "balanced\n", "/etc/tuned/profile_mode": "auto\n"})
            case ["systemctl", "try-restart", "irqbalance.service"]:
                pass
            case ["irqbalance", "--version"]:
                raise HostError("irqbalance: irqbalance version 1.9.2", step="apply")
            case _:
                raise AssertionError(args)
        self.kernel.point(f"after {args[0]}")
        return ""

    def set_scheduler(self, pid: int, policy: int, priority: int) -> None:
        path = f"/proc/{pid}/stat"
        self.kernel.point(f"before {path}")
        head, _, rest = self.kernel.tree.files[path].rpartition(") ")
        words = rest.split()
        words[37:39] = str(priority), str(policy)
        self.kernel.change({path: f"{head}) {' '.join(words)}\n"})
        self.kernel.point(f"after {path}")

    def _rows(self) -> list[str]:
        return self.kernel.tree.files[SWAPS].splitlines()[1:]

    def _swaps(self, rows: Iterable[str]) -> None:
        head = self.kernel.tree.files[SWAPS].splitlines()[0]
        self.kernel.change({SWAPS: "\n".join([head, *rows]) + "\n"})


@cache
def _made() -> Tree:
    return tree(described())


def described() -> Description:
    """The small machine with one of everything that can be set while it runs."""
    small = load("small")
    nic = {
        "address": NIC,
        "node": -1,
        "driver": "igb",
        "id": "8086:10C9",
        "interface": IFACE,
        "mtu": 1500,
        "speed": 1000,
        "queues": 1,
        "total_vfs": 7,
        "vfs": 0,
    }
    return replace(
        small,
        nics=[*small.nics, nic],
        irqs=small.irqs | {26: ["nvme0q1", "0-1", "1"]},
        cpufreq={"driver": "acpi-cpufreq", "governor": "ondemand"},
        swaps=["/dev/dm-1"],
        irqbalance={"/etc/default/irqbalance": "# irqbalance\n#IRQBALANCE_BANNED_CPULIST=\n"},
        tuned={"profile": "balanced", "variables": {"cpu-partitioning": "# isolated_cores=2-4\n"}},
        sysctls={"kernel.nmi_watchdog": 1, "kernel.numa_balancing": 1},
    )


def of(results: list[Result], target: Target) -> Result:
    [found] = [result for result in results if result.target == target]
    return found


def outcomes(results: list[Result]) -> set[StepOutcome]:
    """Without what is left to do later."""
    return {result.outcome for result in results} - LATERS
