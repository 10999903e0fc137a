"""Creates a machine from its description."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from netplugin_zeroloss.machines.console import Console
from netplugin_zeroloss.machines.contract import ConsoleMachine, LocalMachine, Machine, SshMachine
from netplugin_zeroloss.machines.ssh import Local, Ssh

Description = Annotated[LocalMachine | SshMachine | ConsoleMachine, Field(discriminator="type")]


def make(description: LocalMachine | SshMachine | ConsoleMachine, deadline: float) -> Machine:
    """Connect to a machine. Raises: MachineError if it is unreachable at the deadline."""
    match description:
        case SshMachine():
            return Ssh(description, deadline)
        case ConsoleMachine():
            return Console(description, deadline)
        case LocalMachine():
            return Local()
