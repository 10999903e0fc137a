"""QoS by OVS-DPDK policers: compute them from rates, and verify what vswitchd has applied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QOS_TYPE = "egress-policer"

# vswitch.xml, ingress_policing_burst: a burst "numerically at least as large as 80% of" the rate
# "helps TCP come closer to achieving the full rate", and "should be at least the size of the MTU".
_BURST_TENTHS = 8
_LEAST_FRAMES = 4
# A policer counts a segment before segmentation (netdev_dpdk_srtcm_policer_pkt_handle): a segment
# larger than the burst would never pass.
_LARGEST_SEGMENT = 65535


@dataclass(frozen=True)
class Policer:
    """A token bucket: rate in kbit/s (1000 bit/s) and burst in kbit."""

    kbps: int
    burst_kbit: int

    @staticmethod
    def of(kbps: int | None, mtu: int, tso: bool) -> Policer | None:
        """The policer for a rate in kbit/s; None for no limit."""
        if kbps is None:
            return None
        least = max(_LEAST_FRAMES * mtu, _LARGEST_SEGMENT if tso else 0)
        return Policer(kbps, max(-(-kbps * _BURST_TENTHS // 10), -(-least * 8 // 1000)))

    def qos_columns(self) -> dict[str, Any]:
        """The columns of a QoS row, in bytes (vswitch.xml, egress-policer)."""
        return {"type": QOS_TYPE, "other_config": {"cir": str(self.cir), "cbs": str(self.cbs)}}

    @property
    def cir(self) -> int:
        """The committed information rate in bytes/s."""
        return self.kbps * 1000 // 8

    @property
    def cbs(self) -> int:
        """The committed burst size in bytes."""
        return self.burst_kbit * 1000 // 8


_SHOWN = re.compile(r"^(cir|cbs): (\d+)$", re.MULTILINE)


def refused(shown: str, wanted: Policer | None) -> str | None:
    """Compare with ``ovs-appctl qos/show <interface>``: the difference, or None if it is as requested.

    vswitchd reports a refused policer only in its log, so this output is the only way to detect it.
    """
    found: Mapping[str, str] = dict(_SHOWN.findall(shown))
    expected = {"cir": str(wanted.cir), "cbs": str(wanted.cbs)} if wanted else {}
    if found == expected:
        return None
    return f"vswitchd did not take the policer {expected or 'away'}, it has {found or 'none'}"
