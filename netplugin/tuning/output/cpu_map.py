"""CPU partition as a text map: one column per core, one row per thread of a core."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.facts import Core
from netplugin.tuning.planning.partition import NodeShare, Partition

LEGEND = "H housekeeping  P PMD  V VM  E emulator  - idle sibling"
_COLUMNS = 16


def cpu_map(partition: Partition) -> Iterator[str]:
    """Yield the lines, ``H0 P1 P2 V3`` above ``H32 P33 P34 V35``; cores are ordered by their first CPU."""
    yield LEGEND
    for share in partition.nodes:
        yield f"node {share.node}"
        letters = _letters(share)
        cores = sorted(letters, key=lambda core: core.first)
        for begin in range(0, len(cores), _COLUMNS):
            yield from _rows(cores[begin : begin + _COLUMNS], letters, partition)


def _letters(share: NodeShare) -> dict[Core, str]:
    roles = {"H": share.housekeeping, "P": share.pmd, "E": share.emulator, "V": share.vm}
    return {core: letter for letter, cores in roles.items() for core in cores}


def _rows(cores: list[Core], letters: dict[Core, str], partition: Partition) -> Iterator[str]:
    for thread in range(max(len(core.cpus) for core in cores)):
        cells = [_cell(core, thread, letters[core], partition) for core in cores]
        yield "  " + " ".join(f"{cell:<4}" for cell in cells).rstrip()


def _cell(core: Core, thread: int, letter: str, partition: Partition) -> str:
    cpus = sorted(core.cpus)
    if thread >= len(cpus):
        return ""
    idle = letter in "PV" and cpus[thread] not in partition.polling | partition.vcpus
    return f"{'-' if idle else letter}{cpus[thread]}"
