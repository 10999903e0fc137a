"""The targets that plans write to, and the values that these can have had (pure).

A journal is a file, and an undo writes what is in it as root: a line that no apply writes is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from netplugin.tuning import steps
from netplugin.tuning.applying.accessor import Raw
from netplugin.tuning.planning.kernel_work import KSM, PRIORITIES, THP
from netplugin.tuning.read.cpus import CPU, DEFAULT_AFFINITY, IRQBALANCE, NODE, WORKQUEUES, WRITEBACK
from netplugin.tuning.read.kernel import HALT_POLL, PROFILES, SYSCTLS

_LINE = r"[^\n]*"
_WORD = r"\w[\w.+-]*"


def _any(*texts: str) -> str:
    return "|".join(map(re.escape, texts))


#: By kind of target: the pattern of its fields, joined by a space, and that of its raw values.
_PATTERNS: Mapping[type, tuple[str, str]] = {
    steps.File: (
        rf"{_any(DEFAULT_AFFINITY, WORKQUEUES, WRITEBACK, KSM, THP, HALT_POLL)}"
        rf"|/proc/irq/\d+/smp_affinity_list|{CPU}/cpufreq/{_WORD}/scaling_governor"
        rf"|({NODE}/node\d+|/sys/kernel/mm)/hugepages/hugepages-\d+kB/nr_hugepages",
        _LINE,
    ),
    steps.Sysctl: (_any(*SYSCTLS), _LINE),
    steps.OtherConfig: (r"pmd-cpu-mask|pmd-rxq-assign", _LINE),
    steps.TunedProfile: ("", rf"(auto )?{_WORD}( {_WORD})*"),
    steps.TunedVariable: (rf"({_any(*PROFILES)}) isolated_cores", rf"(isolated_cores[ \t]*={_LINE})?"),
    steps.ThreadPriority: (_any(*(name for name, *_ in PRIORITIES)), r"[\w/]+=\d+:\d+(,[\w/]+=\d+:\d+)*"),
    steps.Swap: ("", r"/\S* -?\d+(\n/\S* -?\d+)*"),
    steps.BannedCpus: (_any(*IRQBALANCE), rf"(IRQBALANCE_BANNED_CPULIST[ \t]*={_LINE})?"),
    steps.VfCount: (r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", r"\d+"),
}


def check(target: steps.Target, raw: Raw) -> None:
    """Raises: ValueError if no plan writes to the target, or it cannot have had the value."""
    fields, values = _PATTERNS[type(target)]
    named = " ".join(str(value) for name, value in vars(target).items() if name != "lasting")
    if not re.fullmatch(fields, named):
        raise ValueError(f"no plan sets {target.kind} {named[:60]!r}")
    if raw is not None and not re.fullmatch(values, raw):
        raise ValueError(f"{target} cannot have been {raw[:60]!r}")
