"""The ``[sriov] devices`` option: the NICs whose VFs may be given to VMs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from oslo_config import cfg

#: The group of the backend sriov. The backend vdpa reads it too, because both share one pool of VFs.
GROUP = "sriov"
DEVICES = cfg.ListOpt(
    "devices",
    default=[],
    help="The NICs (physical functions) whose virtual functions may be given to VMs, and the physical "
    "network behind each, like physnet1:eth1,physnet1:0000:03:00.1,physnet2:8086:10c9. A device is "
    "an interface name, a PCI address, or vendor:device for all NICs of a model. A network may have "
    "several devices. To use only some virtual functions, append # and their numbers to the device, "
    "like eth1#8-63 or eth1#0-63+^8 (all of these but 8); the agent does not touch the others. If "
    "several entries name the same NIC, their numbers add up, and a number excluded by one entry stays "
    "excluded. The operator sets the number of virtual functions (sriov_numvfs in sysfs) and the MTU "
    "of each NIC, and brings it up. Delete the ports of a NIC before you remove it from the list.",
)

_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")
_KIND = re.compile(r"[0-9a-f]{4}:[0-9a-f]{4}\Z")
_INTERFACE = re.compile(r"[^/\s:#]{1,15}\Z")
_NUMBERS = re.compile(r"(\^?)(\d{1,5})(?:-(\d{1,5}))?\Z")


class By(Enum):
    """How an entry names a device."""

    ADDRESS = "PCI address"
    KIND = "vendor and device"
    INTERFACE = "interface"


@dataclass(frozen=True, slots=True)
class VfNumbers:
    """A set of VF numbers: those in ``included`` (all, if empty) that are not in ``excluded``.

    Each pair is the first and the last number of a range."""

    included: tuple[tuple[int, int], ...] = ()
    excluded: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: int) -> bool:
        if any(first <= number <= last for first, last in self.excluded):
            return False
        return not self.included or any(first <= number <= last for first, last in self.included)

    def __add__(self, other: VfNumbers) -> VfNumbers:
        """Combine two entries for one NIC. An entry without included numbers does not widen the other: an
        operator who lists numbers excludes the rest."""
        return VfNumbers((*self.included, *other.included), (*self.excluded, *other.excluded))


ALL_VFS = VfNumbers()


@dataclass(frozen=True, slots=True)
class PoolDevice:
    """One entry of ``[sriov] devices``."""

    network: str
    name: str
    by: By
    numbers: VfNumbers = ALL_VFS


def read_devices(conf: Any) -> tuple[PoolDevice, ...]:
    """Read the option. Raises: ValueError naming the entry that cannot be parsed."""
    conf.register_opts([DEVICES], group=GROUP)
    return parse_devices(conf[GROUP].devices)


def parse_devices(entries: Sequence[str]) -> tuple[PoolDevice, ...]:
    """Parse the entries. Raises: ValueError naming the entry that cannot be parsed."""
    return tuple(dict.fromkeys(_parse(entry) for entry in entries))


def _parse(entry: str) -> PoolDevice:
    network, _, device = entry.strip().partition(":")
    if not _NETWORK.match(network):
        raise ValueError(f"[sriov] devices: {entry!r} does not begin with a physical network")
    device, sign, text = device.partition("#")
    numbers = _parse_numbers(entry, text) if sign else ALL_VFS
    lower = device.lower()
    if _PCI.match(lower):
        return PoolDevice(network, lower, By.ADDRESS, numbers)
    if _KIND.match(lower):
        return PoolDevice(network, lower, By.KIND, numbers)
    if _INTERFACE.match(device):
        return PoolDevice(network, device, By.INTERFACE, numbers)
    raise ValueError(
        f"[sriov] devices: {device!r} in {entry!r} is neither an interface name, nor a PCI address "
        "such as 0000:03:00.0, nor vendor:device such as 8086:10c9"
    )


def _parse_numbers(entry: str, text: str) -> VfNumbers:
    """Parse ranges joined by ``+``; ``^`` excludes a range, as in libvirt's ``cpuset``."""
    included: list[tuple[int, int]] = []
    excluded: list[tuple[int, int]] = []
    for part in text.split("+"):
        match = _NUMBERS.match(part)
        first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
        if match is None or last < first:
            raise ValueError(
                f"[sriov] devices: {part!r} in {entry!r} is no number of a virtual function, nor a "
                "range such as 8-63, nor ^8 for all but 8"
            )
        (excluded if match[1] else included).append((first, last))
    return VfNumbers(tuple(included), tuple(excluded))
