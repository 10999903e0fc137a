"""Random machines and intents for hypothesis, most of which fit each other."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from netplugin.api.errors import InvalidRequest
from netplugin.host.cpus import format_list
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from tests.unit.tuning.machines import Machine

_MTUS = st.sampled_from([78, 1400, 1500, 1800, 2030, 2031, 9000, 9702])
_GB = 1 << 20
#: Cores, GB and pages of 2 MB of a node; one without cores or without memory is rare.
_GBS = st.sampled_from([2, 5, 16, 17, 64, 128] * 2 + [0, 1])
_NODE = st.tuples(st.integers(1, 8) | st.integers(0, 1), _GBS, st.sampled_from([0, 0, 3]))
_NODES = st.lists(_NODE, min_size=1, max_size=4).filter(lambda nodes: any(cores for cores, _, _ in nodes))
_NIC = st.tuples(st.integers(-1, 3), st.sampled_from([-1, 1000, 25000]), st.sampled_from(["ice", "vfio-pci"]))
_NICS = st.lists(_NIC, max_size=2)
_OFFLINE = st.sets(st.integers(1, 40), max_size=3)
_REST = st.fixed_dictionaries(
    {
        "threads": st.sampled_from([1, 2]),
        "vendor": st.sampled_from(["GenuineIntel", "AuthenticAMD"]),
        "release": st.sampled_from(["3.10.0-957.el7.x86_64", "5.14.0", "6.1.0-28-amd64", "odd"]),
        "tuned": st.sampled_from([None, {"profile": "balanced", "variables": {}}]),
    }
)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Up to 4 nodes of up to 8 cores, with SMT or not, some CPUs off line, and NICs somewhere. Some machines
    have sparse node numbers, or cores of two kinds."""
    nodes, nics, rest = draw(_NODES), draw(_NICS), draw(_REST)
    counts = [cores for cores, _, _ in nodes]
    total = sum(counts)
    # As Linux numbers them: the first threads of all cores, then the second ones.
    homes = [range(sum(counts[:n]), sum(counts[: n + 1])) for n in range(len(nodes))]
    cpus = [[core + total * t for t in range(rest["threads"]) for core in home] for home in homes]
    every = format_list(cpu for node in cpus for cpu in node)
    step = draw(st.sampled_from([1, 1, 1, 3, 20]))
    slow = draw(st.sampled_from([0, 0, 0, total // 2, total]))
    # A node that lost all its CPUs is memory alone; the machine has its CPU 0.
    return Machine(
        nodes=[
            {
                "number": number * step,
                "cpus": format_list(home),
                "memory_kb": gb * _GB,
                "hugepages": {2048: pages, 1048576: 0} if gb else {},
            }
            for number, (home, (_, gb, pages)) in enumerate(zip(cpus, nodes, strict=True))
        ],
        capacities=dict.fromkeys(range(total - slow, total), 400) if slow else {},
        offline=format_list(draw(_OFFLINE) & {cpu for node in cpus for cpu in node}),
        nics=[_nic(number, nic, len(nodes), step) for number, nic in enumerate(nics)],
        irqs={7: ["x", every, "0"], 8: ["y", "0", "0"]},
        cpufreq={"driver": "acpi-cpufreq", "governor": "ondemand"},
        # Of some firmware all other nodes are as far away as each other.
        distances=draw(st.sampled_from([[], _distances(len(nodes))])),
        caches=draw(st.sampled_from([[], [[3, "Unified", "32768K", 3]]])),
        **rest,
    )


def _distances(count: int) -> list[list[int]]:
    return [[10 + 2 * abs(a - b) for b in range(count)] for a in range(count)]


def _nic(number: int, nic: tuple[int, int, str], nodes: int, step: int) -> dict[str, Any]:
    node, speed, driver = nic
    return {
        "address": f"0000:0{number}:00.0",
        "id": "8086:159B",
        "interface": f"e{number}",
        "mtu": 1500,
        "node": min(node, nodes - 1) * (step if node > 0 else 1),
        "speed": speed,
        "driver": driver,
        "queues": 1,
    }


def intents() -> st.SearchStrategy[HostIntent]:
    return st.builds(
        HostIntent,
        pmd_cores=st.sampled_from([0, 1, 1, 2, 3]),
        vm_cores=st.sampled_from([None, 0, 1, 2, 6]),
        emulator_cores=st.sampled_from([0, 1, 2]),
        housekeeping_cores=st.sampled_from([1, 1, 2]),
        idle_siblings=st.booleans(),
        mtus=st.lists(_MTUS, min_size=1, max_size=3).map(tuple),
        vm_pmd_cores=st.sampled_from([1, 1, 0, 2]),
        vm_size_mb=st.sampled_from([0, 512, 1536]),
        vm_memory_mb=st.sampled_from([0, 512, 512, 4096, 65536]),
        hugepage_kb=st.sampled_from([None, None, 2048, 1048576]),
        realtime=st.booleans(),
    )


def mend(facts: Facts, intent: HostIntent) -> tuple[HostIntent, list[str]]:
    """Follow the fixes of errors until there is a plan; also gives the fields that they named."""
    seen = list[str]()
    while True:
        try:
            make_plan(facts, intent)
        except InvalidRequest as refused:
            [wrong] = refused.errors
            assert wrong.field not in seen, (seen, str(refused), refused.fix)
            seen.append(wrong.field)
            assert refused.fix
            intent = fixed(intent, wrong.field, refused.fix)
        else:
            return intent, seen


def fixed(intent: HostIntent, field: str, fix: str) -> HostIntent:
    """The intent with what a person would read in the fix."""
    if field == "hugepage_kb" and fix.startswith("choose another one, or none"):
        return intent.model_copy(update={field: None})
    found = re.search(r"(?:at most|at least|fewer:|cores:|the MTU|pages of) (\d+)|\((0)\)", fix)
    assert found, fix
    value = int(found[1] or found[2])
    return intent.model_copy(update={field: (value,) if field == "mtus" else value})
