"""The commands by their modules: to find one, no metadata of installed distributions are read."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Final

GROUP: Final = "netplugin.cli"
#: Its class is named like the command. setup.cfg has the same, for programs that list entry points.
_COMMANDS: Final = {
    "lists": "port list, port show, service-port list, network list, vf list, physical-network list, "
    "physical-network show, backend list, backend check",
    "ports": "port put, port delete, port retag, network put, network delete, vf release, reconcile",
    "counters": "port counters",
    "migrations": "port migrate, port migrate-check",
    "service_ports": "service-port put, service-port delete",
    "physical_networks": "physical-network put, physical-network delete",
    "events": "events",
    "pmd": "pmd show, pmd set",
    "store": "store backup, store check, store restore",
    "domain": "domain render, domain check, guest plan",
    "host_tuning": "host facts, host check, host plan",
    "host_apply": "host apply",
    "host_verify": "host verify, host verify compare",
    "host_verify_effect": "host verify effect",
    "fleet": "fleet status, fleet hosts, fleet ports, fleet explain, fleet drain, fleet roll, fleet accept, "
    "fleet init",
    "init": "init",
}


def own() -> Iterator[tuple[str, EntryPoint]]:
    """The commands of this distribution."""
    for module, names in _COMMANDS.items():
        for name in names.split(", "):
            kind = name.replace("-", " ").title().replace(" ", "")
            yield name, EntryPoint(name.replace(" ", "_"), f"netplugin.cli.{module}:{kind}", GROUP)
