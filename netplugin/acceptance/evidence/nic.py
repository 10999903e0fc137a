"""The place ``nic``: the counters of a NIC's own driver, as ``ethtool -S`` has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from netplugin.acceptance.evidence.contract import EvidenceError, Found, Place, Reading

#: What may tell of lost frames in a driver's names; which of them overlap only the vendor knows.
_TELLING = re.compile(r"drop|discard|miss|err|fail|no_?buf|out_of|overrun|full|pause|fifo")


class Nic(Place):
    """``devices``: kernel names, each with those of its counters that are lost frames (often none).

    Names and meanings are the driver's. So what is not named as lost is shown where it has grown,
    and does not count as found.
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
    from pyroute2.ethtool.ioctl import IoctlEthtool  # it is large

    asking = IoctlEthtool()
    try:
        asking.change_ifname(device)
        return {str(name): int(count) for name, count in asking.get_statistics()}
    except Exception as error:  # it has types of its own for each refusal
        raise EvidenceError(f"nic: {device} tells no statistics: {error!r}") from error
    finally:
        asking.close()
