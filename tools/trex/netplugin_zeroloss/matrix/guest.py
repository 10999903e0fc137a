"""Whether the VM of the VNF has what the VNF needs, read before anything is sent."""

from __future__ import annotations

import time
from collections.abc import Iterator

from netplugin_zeroloss.machines.contract import MachineError, SshMachine
from netplugin_zeroloss.machines.ssh import Ssh, ssh_fix
from netplugin_zeroloss.matrix.findings import Finding
from netplugin_zeroloss.vnf.contract import PlacedDescription
from netplugin_zeroloss.vnf.guest import lacks, read_guest, where

#: Seconds to log in once the VM answers.
_LOG_IN_S = 10.0


def look_into(vnf: PlacedDescription, machine: SshMachine) -> Iterator[Finding]:
    """Yield the findings about a running VM."""
    try:
        there = Ssh(machine, time.monotonic() + _LOG_IN_S)
    except MachineError as error:
        found = f"{machine.user}@{machine.host} cannot be used: {error}"
        yield Finding("ssh", found, ssh_fix(machine, str(error)))
        return
    try:
        facts = read_guest(there, vnf)
    except MachineError as error:
        yield Finding(machine.type, str(error), f"try it by hand: {where(machine)} true")
        return
    finally:
        there.close()
    yield from (Finding("guest", lack.found, lack.fix) for lack in lacks(vnf, facts))
