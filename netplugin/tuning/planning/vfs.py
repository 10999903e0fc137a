"""Plan the number of VFs of each NIC in the intent (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import Intent
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.nics import named
from netplugin.tuning.planning.refused import impossible, needed
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import Effect, Group, Step, VfCount


def vf_steps(facts: Facts, intent: Intent) -> Iterator[Step]:
    """One step per named NIC; other NICs keep their VFs.

    Raises: InvalidRequest for a NIC that does not exist, supports no or fewer VFs, or is named twice;
    HostError for a missing fact.
    """
    seen = set()
    for entry in intent.vfs:
        name, _, number = entry.rpartition("=")
        nic = named(needed(facts.network.nics), name, "vfs")
        most = needed(nic.total_vfs)
        if nic.address in seen:
            raise impossible("vfs", f"{nic.address} is named twice", "name each NIC once")
        if not most:
            raise impossible("vfs", f"{name} has no virtual functions", "name another NIC, or switch "
                             "SR-IOV on in the firmware of NIC and board")  # fmt: skip
        if int(number) > most:
            raise impossible("vfs", f"{name} can have {most} virtual functions and not {int(number)}",
                             f"ask for at most {most}")  # fmt: skip
        seen.add(nic.address)
        yield Step(
            Group.VFS, VfCount(nic.address), nic.vfs if isinstance(nic.vfs, Unknown) else str(nic.vfs or 0),
            str(int(number)), Effect.LIVE, "virtual functions for VMs; a boot takes them away",
            sources.SRIOV,
        )  # fmt: skip
