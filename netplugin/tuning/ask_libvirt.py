"""Helper program that queries libvirt and prints JSON: ``python3 -I ask_libvirt.py URI``.

It is a separate process because libvirt calls have no timeout: a hanging daemon blocks them forever, and
a process can be killed while a thread cannot. Where the agent's Python has no libvirt module, the platform's
runs it: the standard library alone, in the syntax of Python 3.6, which evaluates annotations: strings here.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

#: Directory of the PID files of libvirt's QEMU domains.
_PIDS = Path("/run/libvirt/qemu")


def main() -> None:
    json.dump(_asked(sys.argv[1]), sys.stdout)


def _asked(uri: str) -> "dict[str, Any]":
    """The fields of ``live_libvirt._Answer``."""
    try:
        import libvirt
    except ImportError:
        fix = "install python3-libvirt, or where the agent is installed: pip install 'netplugin[libvirt]'"
        return {"refused": "libvirt-python is not installed", "fix": fix}
    libvirt.registerErrorHandler(lambda *_: None, None)  # libvirt also prints every error it raises
    try:
        connection = libvirt.openReadOnly(uri)
        versions = {"libvirt": _dotted(connection.getLibVersion())}
        with suppress(libvirt.libvirtError):  # no QEMU found
            versions["qemu"] = _dotted(connection.getVersion())
        return {"versions": versions, "domains": list(_domains(libvirt, connection))}
    except libvirt.libvirtError as wrong:
        return {"refused": str(wrong)}


def _domains(libvirt: Any, connection: Any) -> "Iterator[dict[str, Any]]":
    for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        try:
            yield _domain(domain)
        except libvirt.libvirtError:
            if _runs(libvirt, domain):
                raise


def _domain(domain: Any) -> "dict[str, Any]":
    """The effective affinity of the threads; isolcpus and cpusets may narrow the configured one."""
    name = domain.name()
    xml = ElementTree.fromstring(domain.XMLDesc(0))
    nodes = [xml.find("numatune/memory"), *xml.iterfind("numatune/memnode")]
    return {
        "name": name,
        "vcpus": [_cpus(cpus) for cpus in domain.vcpus()[1]],
        "emulator": _emulator(name) or _cpus(domain.emulatorPinInfo()),
        "iothreads": [_cpus(cpus) for _, cpus in domain.ioThreadInfo(0)],
        "memory_nodes": [n.get("nodeset") for n in nodes if n is not None and n.get("nodeset")],
    }


def _emulator(name: str) -> "list[int]":
    """Affinity of QEMU's main thread, as libvirt only has the configured one; empty if unreadable."""
    with suppress(OSError, ValueError):
        return sorted(os.sched_getaffinity(int((_PIDS / f"{name}.pid").read_text())))
    return []


def _runs(libvirt: Any, domain: Any) -> bool:
    with suppress(libvirt.libvirtError):  # a transient domain that has ended
        return bool(domain.isActive())
    return False


def _cpus(cpus: "Iterable[bool]") -> "list[int]":
    return [cpu for cpu, there in enumerate(cpus) if there]


def _dotted(version: int) -> str:
    """Format a libvirt version number: 1000000 * major + 1000 * minor + release."""
    return f"{version // 1000000}.{version // 1000 % 1000}.{version % 1000}"


if __name__ == "__main__":
    main()
