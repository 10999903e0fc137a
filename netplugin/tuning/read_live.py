"""Query running daemons, libvirt and OVS, read-only and side by side."""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel

from netplugin.api.errors import NetpluginError, OperationTimeout
from netplugin.api.pmd_models import PmdState
from netplugin.host.cpus import parse_list
from netplugin.host.ovs_rows import OvsInterface
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.ovs_view import OvsView
from netplugin.host.ovsdb import Ovsdb
from netplugin.host.processes import run
from netplugin.pmd.read import read
from netplugin.tuning.facts import Cpus, DomainLive, Live, OvsLive, OvsPortLive
from netplugin.tuning.root import Fact, Unknown, known

URI = "qemu:///system"
_ASK = Path(__file__).with_name("ask_libvirt.py")
#: Of the packages python3-libvirt of Debian, EL and openEuler.
_PLATFORM_PYTHON = "/usr/bin/python3"
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


def read_libvirt(uri: str = URI) -> Live:
    """Query libvirt; ``domains`` is an ``Unknown`` if it does not run or does not answer within seconds."""
    answer = _ask(uri)
    if isinstance(answer, Unknown):
        return Live(domains=answer, versions=_emulator_version())
    try:
        domains = tuple(_live(domain) for domain in answer.domains)
    except ValueError as odd:
        return Live(domains=Unknown(uri, f"numatune: {odd}"), versions=answer.versions)
    return Live(domains=domains, versions={**_emulator_version(), **answer.versions})


def _ask(uri: str) -> Fact[_Answer]:
    # -I: do not import a libvirt.py from the current directory.
    fix = None
    program = [_python(), "-I", str(_ASK), uri]
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


def _python() -> str:
    """The interpreter that can import libvirt: our own if it has the module, or else the platform's."""
    return sys.executable if find_spec("libvirt") else _PLATFORM_PYTHON


def _live(domain: _Domain) -> DomainLive:
    nodes = frozenset(n for nodeset in domain.memory_nodes for n in parse_list(nodeset))
    return DomainLive(domain.name, domain.vcpus, domain.emulator, nodes, domain.iothreads)


def _emulator_version() -> dict[str, str]:
    """Version of the installed QEMU, from ``QEMU emulator version 7.2.22 (Debian ...)``."""
    for program in _EMULATORS:
        try:
            output = run([program, "--version"], step="qemu", deadline=time.monotonic() + _WAIT_S)
        except NetpluginError:
            continue
        if found := re.search(r"version (\S+)", output):
            return {"qemu": found[1]}
    return {}


#: Types of devices of the kernel, and of ends of patches.
_NOT_POLLED = ("", "system", "patch")
#: Bytes that a tunnel adds to a frame's payload over IPv4, Ethernet's 14 of the inner frame among them: lib/
#: netdev-native-tnl.c. IPv6 takes 20 more.
_HEADERS = {"vxlan": 50, "geneve": 50, "gre": 38, "ip6gre": 58, "erspan": 50, "ip6erspan": 70}
_NO_THREADS = PmdState(cpus="", cores=())


def read_ovs(sockets: OvsSockets) -> Fact[OvsLive]:
    """Query OVS; an ``Unknown`` if it does not run or does not answer in time."""
    socket = sockets.database
    where = str(socket or sockets.connection)
    if socket is not None:
        try:
            socket.stat()
        except FileNotFoundError:
            return Unknown(where, "there is no such file", missing=True)
        except OSError as refused:
            return Unknown(where, str(refused.strerror).lower())
        if not os.access(socket, os.W_OK):  # connect(2) needs write permission
            return Unknown(where, "permission denied")
    database = Ovsdb(sockets.connection).start()
    try:
        database.require_online(_WAIT_S)
        root = database.view.root
        pmd = _pmd(database.view, sockets) if root.dpdk_initialized else _NO_THREADS
        threads = known(pmd, _NO_THREADS)
        own = (root.ovs_version, root.dpdk_version, root.dpdk_initialized, dict(root.other_config))
        silent = pmd if isinstance(pmd, Unknown) else None
        return OvsLive(*own, _ports(database.view), threads.cores, threads.unpolled, silent)
    except NetpluginError as refused:
        return Unknown(where, refused.detail)
    finally:
        database.close()


def _ports(view: OvsView) -> tuple[OvsPortLive, ...]:
    """By name: the database sends rows in an order of its own each time. Of tunnels those that OVS ends by
    itself: on the kernel's datapath the kernel does."""
    own = {bridge.name for bridge in view.bridges() if bridge.datapath_type == "netdev"}
    ports = (
        OvsPortLive(
            name=i.name,
            port=port.name,
            type="representor" if "representor=" in i.options.get("dpdk-devargs", "") else i.type,
            mtu=i.mtu,
            bond_mode=port.bond_mode,
            bridge=port.bridge,
            peer=i.options.get("peer"),
            header=_header(i) if i.type in _HEADERS else None,
            link={"up": True, "down": False}.get(i.link_state or ""),
        )
        for port in view.ports()
        for i in port.interfaces
        if i.type.startswith("dpdk") or i.type in _NOT_POLLED or (i.type in _HEADERS and port.bridge in own)
    )
    return tuple(sorted(ports, key=lambda port: port.name))


def _header(tunnel: OvsInterface) -> int:
    ends = (tunnel.options.get(key, "") for key in ("remote_ip", "local_ip"))
    is_6 = any(":" in end for end in ends) and not tunnel.type.startswith("ip6")
    return _HEADERS[tunnel.type] + (20 if is_6 else 0)


def _pmd(view: OvsView, sockets: OvsSockets) -> Fact[PmdState]:
    try:
        return read(view, sockets, time.monotonic() + _WAIT_S).state
    except NetpluginError as refused:
        return Unknown("ovs-vswitchd", refused.detail)


def read_live(ovs_sockets: OvsSockets, libvirt_uri: str) -> Live:
    """Query OVS and libvirt in parallel: a hanging one costs only its own timeout. Raises nothing."""
    with ThreadPoolExecutor(2) as asking:
        ovs = asking.submit(read_ovs, ovs_sockets)
        return replace(read_libvirt(libvirt_uri), ovs=ovs.result())
