"""The options of the vdpa backend. Its NICs are those of ``[sriov] devices``: there is one pool."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

GROUP = "vdpa"
OPTIONS = [
    cfg.StrOpt(
        "mode",
        default="auto",
        choices=[
            ("auto", "native if this OVS has the interface type dpdkvdpa, else relay"),
            ("relay", "an ordinary OVS-DPDK joins the VF and the vhost-user port by two flows"),
            ("native", "one port of type dpdkvdpa, which only some vendors' OVS has"),
        ],
        help="How a new port is made. A port keeps the mode it was made in.",
    ),
    cfg.BoolOpt(
        "guest_hugepages",
        default=True,
        help="Whether a VM's memory must be hugepages (as it should: with small pages every packet "
        "costs TLB misses). False asks for shared memory only.",
    ),
]


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
