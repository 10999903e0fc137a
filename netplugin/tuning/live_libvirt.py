"""Query libvirt for its version, QEMU's version, and the pinning of running domains."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from netplugin.errors import NetpluginError, OperationTimeout
from netplugin.host.cpus import parse_list
from netplugin.host.processes import run
from netplugin.tuning.facts import Cpus
from netplugin.tuning.live import DomainLive
from netplugin.tuning.root import Fact, Unknown

URI = "qemu:///system"
_WAIT_S = 5.0
#: Sockets of the monolithic libvirtd and of virtqemud.
_SOCKETS = (Path("/run/libvirt/libvirt-sock-ro"), Path("/run/libvirt/virtqemud-sock-ro"))
#: QEMU on Debian and on Red Hat.
_EMULATORS = ("qemu-system-x86_64", "/usr/libexec/qemu-kvm")


class _Domain(BaseModel):
    name: str
    vcpus: tuple[Cpus, ...]
    emulator: Cpus
    iothreads: tuple[Cpus, ...]
    memory_nodes: tuple[str, ...]


class _Answer(BaseModel):
    """Output of ``ask_libvirt``; ``refused`` is the reason if it has no answer, ``fix`` the remedy."""

    versions: dict[str, str] = {}
    domains: tuple[_Domain, ...] = ()
    refused: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class LibvirtLive:
    """``versions`` has ``libvirt`` and ``qemu``, where known."""

    domains: Fact[tuple[DomainLive, ...]]
    versions: Mapping[str, str] = field(default_factory=dict)


def read_libvirt(uri: str = URI) -> LibvirtLive:
    """Query libvirt; ``domains`` is an ``Unknown`` if it does not run or does not answer within seconds."""
    answer = _ask(uri)
    if isinstance(answer, Unknown):
        return LibvirtLive(answer, _emulator_version())
    try:
        domains = tuple(_live(domain) for domain in answer.domains)
    except ValueError as odd:
        return LibvirtLive(Unknown(uri, f"numatune: {odd}"), answer.versions)
    return LibvirtLive(domains, {**_emulator_version(), **answer.versions})


def _ask(uri: str) -> Fact[_Answer]:
    # -P: do not import a libvirt.py from the current directory.
    fix = None
    program = [sys.executable, "-P", "-m", "netplugin.tuning.ask_libvirt", uri]
    try:
        printed = run(program, step="libvirt", deadline=time.monotonic() + _WAIT_S)
        answer = _Answer.model_validate_json(printed)
        reason, fix = answer.refused, answer.fix
    except OperationTimeout:
        reason = f"did not answer within {_WAIT_S:g} s"
    except (NetpluginError, ValueError) as broken:
        reason = str(broken)
    if reason is not None:
        return Unknown(uri, reason, missing=not any(map(os.path.exists, _SOCKETS)), fix=fix)
    return answer


def _live(domain: _Domain) -> DomainLive:
    nodes = frozenset(n for nodeset in domain.memory_nodes for n in parse_list(nodeset))
    return DomainLive(domain.name, domain.vcpus, domain.emulator, nodes, domain.iothreads)


def _emulator_version() -> dict[str, str]:
    """Version of the installed QEMU, from ``QEMU emulator version 7.2.22 (Debian ...)``."""
    for program in _EMULATORS:
        try:
            said = run([program, "--version"], step="qemu", deadline=time.monotonic() + _WAIT_S)
        except NetpluginError:
            continue
        if found := re.search(r"version (\S+)", said):
            return {"qemu": found[1]}
    return {}
