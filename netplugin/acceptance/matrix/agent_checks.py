"""Checks before a run: the agent is ready, its backends support the cells, and the VNF programs exist."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.matrix.cells import Task
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.ports import taken
from netplugin.acceptance.matrix.records import Cell, Part
from netplugin.acceptance.vnf import description as vnfs
from netplugin.client import Client
from netplugin.errors import NetpluginError
from netplugin.models import BackendInfo


def client(description: Description) -> Client:
    """Create the agent's client from the description, with the environment as default.

    Raises: UnusableInput.
    """
    agent = description.agent
    assert agent is not None
    given = {
        "NETPLUGIN_URL": agent.url, "NETPLUGIN_TOKEN_FILE": agent.token_file,
        "NETPLUGIN_CA": agent.ca, "NETPLUGIN_CERT": agent.cert, "NETPLUGIN_KEY": agent.key,
    }  # fmt: skip
    told = {name: str(value) for name, value in given.items() if value is not None}
    try:
        return Client.from_environment({**os.environ, **told}, description.timeouts.agent)
    except NetpluginError as error:
        raise UnusableInput("agent", str(error)) from error


def check(
    agent: Client, description: Description, searched: Sequence[Cell], vm_id: str
) -> Mapping[str, Any]:
    """Check agent, backends and ports; returns facts for the journal.

    Raises: UnusableInput, NetpluginError.
    """
    readiness = agent.ready()
    if not readiness.ready:
        raise UnusableInput("agent", f"it is not ready: {'; '.join(readiness.reasons)}")
    backends = {info.name: info for info in agent.backends()}
    problems = list(_about_backends(description, searched, backends))
    mine = {end.port_id for end in description.ends or ()}
    problems += [
        taken(port)
        for port in agent.list_ports()
        if port.port_id in mine and port.spec.vm_id != vm_id
    ]
    if problems:
        raise UnusableInput("agent", "\n".join(problems))
    used = {cell.backend for cell in searched}
    return {
        "agent": agent.url,
        "backends": {name: dict(backends[name].facts) for name in sorted(used)},
    }


def _about_backends(
    description: Description, searched: Sequence[Cell], backends: Mapping[str, BackendInfo]
) -> Iterator[str]:
    for name in dict.fromkeys(cell.backend for cell in searched):
        info = backends.get(name)
        if info is None:
            yield f"it has no backend {name!r}; it has {', '.join(sorted(backends)) or 'none'}"
            continue
        if not info.usable:
            fix = f" (fix: {info.fix})" if info.fix else ""
            yield f"backend {name} is not usable there: {info.reason}{fix}"
            continue
        # With several NICs this is the maximum over them: a port on another NIC may still be
        # refused.
        queues = max(cell.queues for cell in searched if cell.backend == name)
        if queues > info.features.max_queues:
            yield f"backend {name} has {info.features.max_queues} queues at most, not {queues}"
        for end in description.ends or ():
            kind = end.network_of(name).type
            if kind not in info.features.networks:
                yield f"backend {name} has no {kind} networks (end {end.port_id})"


def check_vnfs(description: Description, tasks: Sequence[Task]) -> None:
    """Check that the VNF programs that run on this host are installed. Raises: UnusableInput."""
    control = description.controls.vnf
    chosen = [description.vnf_of(task.cell) for task in tasks if task.part is Part.SEARCH]
    if control is not None and any(task.part is Part.VNF for task in tasks):
        chosen.append(control.vnf or description.vnf)
    for vnf in chosen:
        if isinstance(vnf, vnfs.TestpmdDescription) or (
            isinstance(vnf, vnfs.VppDescription) and isinstance(vnf.machine, vnfs.LocalMachine)
        ):
            if shutil.which(vnf.binary) is None:
                raise UnusableInput("vnf", f"{vnf.binary} is not installed here, or not in PATH")
