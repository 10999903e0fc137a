"""Parser for libvirt CPU sets: ``0-3,^2,8``."""

from __future__ import annotations

from netplugin.host.cpus import parse_list


def parse_cpuset(text: str) -> frozenset[int]:
    """Parse a CPU set. Source: libvirt's formatdomain, "CPU Allocation". Raises: ValueError."""
    cpus: frozenset[int] = frozenset()
    for part in (part.strip() for part in text.split(",")):
        if part.startswith("^"):
            cpus -= {int(part[1:])}
        else:
            cpus |= set(parse_list(part))
    return cpus
