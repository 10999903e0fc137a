"""Options of the vdpa backend. Its NICs are those of ``[sriov] devices``: both share one pool.

In mode ``vduse`` it needs none: its networks are those of ``[ovs] bridge_mappings``.
"""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

GROUP = "vdpa"
OPTIONS = [
    cfg.StrOpt(
        "mode",
        default="auto",
        choices=[
            (
                "auto",
                "native if this OVS has the interface type dpdkvdpa, else vduse where OVS and the kernel "
                "have it, else relay; facts of GET /v1/backends say which",
            ),
            ("relay", "two flows join the VF and the vhost-user port; works with any OVS-DPDK"),
            ("native", "one port of type dpdkvdpa, which only the OVS of some NIC vendors has"),
            (
                "vduse",
                "OVS 3.5 or newer serves a vDPA device of the kernel, which QEMU opens; needs no VF and no "
                "[sriov] devices",
            ),
        ],
        help="The mode of new ports. A port keeps the mode that it was created with.",
    ),
    cfg.BoolOpt(
        "guest_hugepages",
        default=True,
        help="Require hugepages for the memory of a VM (recommended: small pages cost TLB misses on every "
        "packet). False requires shared memory only.",
    ),
]


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, OPTIONS)]
