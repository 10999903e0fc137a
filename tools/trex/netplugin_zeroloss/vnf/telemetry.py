"""DPDK's telemetry of a program on a machine, asked by a program that runs there.

Its socket exchanges packets (SOCK_SEQPACKET), which neither SSH nor a serial console forwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from netplugin.programs import bounded
from netplugin_zeroloss.machines.contract import Machine
from netplugin_zeroloss.vnf.contract import VnfError

_CHILD = Path(__file__).with_name("telemetry_child.py")


class _Printed(BaseModel):
    version: str
    answers: list[dict[str, Any]]


class RemoteTelemetry:
    """One run of the program on the machine for all ports of a command. It needs python3 there."""

    def __init__(self, machine: Machine, socket: str) -> None:
        self._machine, self._socket = machine, socket
        self._program: str | None = None
        #: DPDK version such as ``DPDK 22.11.11``, known from the first answer.
        self.version = "unknown"

    def each(self, command: str, ports: Iterable[int]) -> list[Any]:
        """Send a command for each port and return the results.

        Raises: MachineError; VnfError if what is printed there is not what the program prints.
        """
        questions = [f"{command},{port}" for port in ports]
        printed = self._machine.run(["python3", "-IS", self._there(), self._socket, *questions])
        try:
            found = _Printed.model_validate(bounded.parse(printed.strip().rpartition("\n")[2]))
            results = [answer[command] for answer in found.answers]
        except (ValueError, ValidationError, KeyError) as error:
            raise VnfError(
                f"the VM printed {printed[:200]!r} in place of DPDK's answer to {command}"
            ) from error
        if len(results) != len(questions):
            raise VnfError(f"the VM printed {len(results)} answers to {len(questions)} times {command}")
        self.version = found.version
        return results

    def close(self) -> None:
        """Do nothing: each command has a connection of its own."""

    def _there(self) -> str:
        """Return the path of the program on the machine, written there at the first use."""
        if self._program is None:
            path = f"{self._machine.directory}/telemetry.py"
            self._machine.write(path, _CHILD.read_text(encoding="utf-8"))
            self._program = path
        return self._program
