"""QoS by the policers of OVS-DPDK: what rates become, and what vswitchd says that it made of them."""

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
# A policer counts a segment before it is cut up (netdev_dpdk_srtcm_policer_pkt_handle): one that is
# larger than the burst would never pass.
_LARGEST_SEGMENT = 65535


@dataclass(frozen=True)
class Policer:
    """A token bucket: its rate in kbit/s (1000 bit/s) and its size in kbit."""

    kbps: int
    burst_kbit: int

    @staticmethod
    def of(kbps: int | None, mtu: int, tso: bool) -> Policer | None:
        """The policer for a rate; None for no limit."""
        if kbps is None:
            return None
        least = max(_LEAST_FRAMES * mtu, _LARGEST_SEGMENT if tso else 0)
        return Policer(kbps, max(-(-kbps * _BURST_TENTHS // 10), -(-least * 8 // 1000)))

    def qos_columns(self) -> dict[str, Any]:
        """Of a row of QoS, which counts in bytes (vswitch.xml, egress-policer)."""
        return {"type": QOS_TYPE, "other_config": {"cir": str(self.cir), "cbs": str(self.cbs)}}

    @property
    def cir(self) -> int:
        return self.kbps * 1000 // 8

    @property
    def cbs(self) -> int:
        return self.burst_kbit * 1000 // 8


_SHOWN = re.compile(r"^(cir|cbs): (\d+)$", re.MULTILINE)


def refused(shown: str, wanted: Policer | None) -> str | None:
    """What is wrong by ``ovs-appctl qos/show <interface>``; None if it is as wanted.

    vswitchd says of a policer that it refused in its log alone; this is where one can see it.
    """
    found: Mapping[str, str] = dict(_SHOWN.findall(shown))
    expected = {"cir": str(wanted.cir), "cbs": str(wanted.cbs)} if wanted else {}
    if found == expected:
        return None
    return f"vswitchd did not take the policer {expected or 'away'}, it has {found or 'none'}"
