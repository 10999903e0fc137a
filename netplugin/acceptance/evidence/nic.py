"""The component ``nic``: driver counters of a NIC, as ``ethtool -S`` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from netplugin.acceptance.evidence.contract import EvidenceError, Found, Place, Reading

#: Names of driver counters that may count lost frames; which of them overlap is vendor-specific.
_TELLING = re.compile(r"drop|discard|miss|err|fail|no_?buf|out_of|overrun|full|pause|fifo")


class Nic(Place):
    """``devices``: kernel names, each with its counters that count lost frames (often none).

    Names and meanings are driver-specific. Other matching counters are reported if they grew, but do
    not count as lost frames.
    """

    def __init__(self, devices: Mapping[str, Iterable[str]]) -> None:
        self._devices = {device: tuple(lost) for device, lost in devices.items()}

    @property
    def name(self) -> str:
        return "nic"

    def read(self) -> Reading:
        lost: dict[str, int] = {}
        counters: dict[str, float] = {}
        for device, names in self._devices.items():
            counts = _statistics(device)
            for name in names:
                if name not in counts:
                    raise EvidenceError(
                        f"nic: {device} has no counter {name} (ethtool -S {device})"
                    )
                lost[f"{device}.{name}"] = counts[name]
            telling = {n: c for n, c in counts.items() if _TELLING.search(n) and n not in names}
            counters |= {f"{device}.{name}": count for name, count in telling.items()}
        return Reading(lost, counters)

    def between(self, before: Reading, after: Reading, elapsed_s: float) -> Found:
        found = super().between(before, after, elapsed_s)
        return Found(found.lost, {n: value for n, value in found.readings.items() if value})


def _statistics(device: str) -> dict[str, int]:
    from pyroute2.ethtool.ioctl import IoctlEthtool  # slow to import

    asking = IoctlEthtool()
    try:
        asking.change_ifname(device)
        return {str(name): int(count) for name, count in asking.get_statistics()}
    except Exception as error:  # pyroute2 has one type per errno
        raise EvidenceError(f"nic: {device} tells no statistics: {error!r}") from error
    finally:
        asking.close()
